"""What runs on an NVIDIA GPU: the kernels of `quaver.kernels` launched on torch tensors, and torch's scaled GEMMs.

Importing this package imports Triton; the operations do so when a tensor on a GPU comes.
"""
