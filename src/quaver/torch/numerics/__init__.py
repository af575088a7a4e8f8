"""What a quantized operand is in torch tensors, and whether a thread traces; nothing that is only there to be fast."""
