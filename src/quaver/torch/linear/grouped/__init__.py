"""One GEMM per expert over rows sorted by group: operands, GEMMs and gradients. Routing is in `quaver.torch.nn`."""
