"""Tests of an optimizer's functions inside kernels, and what launches them there; no kernel of the library."""
