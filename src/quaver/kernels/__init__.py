"""The Triton kernels: functions of pointers and numbers for any framework; they import triton alone.

Every kernel takes tensors first, then numbers, then compile-time constants. It loads, converts to float32 and computes;
scales and rounding work on integers wherever a compiler could choose otherwise, so that a kernel gives the same bits
compiled and interpreted. `quaver.torch.backends.gpu` launches them.
"""
