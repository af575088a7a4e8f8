"""State-space layers: Mamba-2 with its convolution, scan and gated norm."""
