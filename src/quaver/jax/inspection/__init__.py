"""`inspect`: errors of quantized GEMMs and operands in sampled steps."""
