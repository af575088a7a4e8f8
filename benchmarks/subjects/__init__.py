"""Measured layers: those of torch, torchao, JAX and ours, with the same weights."""
