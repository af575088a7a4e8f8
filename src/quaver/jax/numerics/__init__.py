"""Quantized operands in JAX arrays, and the numerics of rounding, scaling and optimizer states."""
