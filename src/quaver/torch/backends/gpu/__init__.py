"""Fast implementations on an NVIDIA GPU: launches of `quaver.kernels`, and torch's scaled GEMMs.

Importing the modules imports Triton, except `device` and `fused_quantize`, which do so when a GPU tensor arrives.
"""
