"""The parts of a Transformer as functions of arrays, shared by the linen and NNX modules."""
