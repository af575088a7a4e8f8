"""Errors of quantized GEMMs and operands: `inspect` in sampled steps, `count` in a block."""
