"""A whole model's weights: kept in few bits, held still, written to state dicts and read from them; no layer's GEMM."""
