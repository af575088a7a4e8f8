"""What a quantized operand is, in JAX arrays, and what a user's input must be; no operation on it."""
