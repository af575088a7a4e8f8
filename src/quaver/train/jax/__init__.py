"""The trainer's JAX implementation."""
