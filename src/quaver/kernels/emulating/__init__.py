"""What stands for a GEMM that a GPU lacks: bf16 values of codes, and products rounded; no operand of native GEMMs."""
