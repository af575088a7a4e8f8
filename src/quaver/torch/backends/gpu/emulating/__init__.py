"""What a GPU runs in place of a GEMM that it lacks: operands as bf16 values, and products rounded; no GEMM itself."""
