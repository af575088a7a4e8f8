"""What travels between ranks quantized: gradients that are summed, rows that are dispatched; no weight, no layer."""
