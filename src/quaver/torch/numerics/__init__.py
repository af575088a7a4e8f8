"""Quantized operands in torch tensors, their plain reference computation, and whether a thread is tracing."""
