"""State-space layers: Mamba-2, its convolution, its scan and its gated norm."""
