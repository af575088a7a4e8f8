"""Attention as functions of arrays: the function, its heads, positions, biases of distances; no module."""
