"""What travels between ranks quantized: gradients that are summed, tokens that go to experts; no other layer."""
