"""Triton kernels as functions of pointers and numbers, usable from any framework; they import only triton.

Every kernel takes tensors first, then numbers, then compile-time constants. It loads, converts to float32 and computes.
Scales and rounding use integers wherever a compiler could choose otherwise, so that a kernel gives the same bits
compiled and interpreted. `quaver.torch.backends.gpu` launches them.
"""
