"""Norms, activations, positions, losses and sums, with the quantization of what they write; no GEMM."""
