"""Several matrices in one weight, q, k and v for instance: which layers have some, and where they lie; no GEMM."""
