"""An optimizer's step inside a kernel: codes of states, weights, formulas, where parameters lie; no GEMM, no launch."""
