"""The trainer's model and its step in JAX; no other framework is imported."""
