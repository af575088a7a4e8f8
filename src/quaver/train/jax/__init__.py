"""Training under JAX."""
