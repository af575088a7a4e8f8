"""What a quantized operand is, in torch tensors on any device; nothing that is only there to be fast."""
