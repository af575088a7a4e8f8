"""A matrix read once and written as the operands that GEMMs read, a file a kind of block; no GEMM."""
