"""The parts of a Transformer as functions of arrays, for linen, NNX and plain pytrees; no module."""
