"""Tests of an optimizer's functions inside kernels, with kernels of their own that launch them."""
