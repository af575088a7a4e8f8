"""What a quantized operand and a state are in JAX arrays, and what a user's input must be; no operation on it."""
