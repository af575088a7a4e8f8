"""What makes the input of linear layers in one pass with its quantization, and sums; no GEMM."""
