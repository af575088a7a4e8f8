"""Layers whose weights and tokens lie on the ranks of a mesh, by torch's `ParallelStyle`s; no data parallelism."""
