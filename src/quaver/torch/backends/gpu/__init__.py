"""What runs on an NVIDIA GPU: the kernels of `quaver.kernels`, and torch's scaled GEMMs; no layer.

Importing the rooms imports Triton; `announcing` and `fused_quantize` do so when a tensor on a GPU comes.
"""
