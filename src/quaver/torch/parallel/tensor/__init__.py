"""Tensor and sequence parallelism by torch `ParallelStyle`s: column, row, head and vocabulary parallel layers."""
