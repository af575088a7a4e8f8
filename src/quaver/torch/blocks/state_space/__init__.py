"""State-space blocks: convolution, scan, gated norm, Mamba-2 and its layer, what they keep; no mesh and no kernel."""
