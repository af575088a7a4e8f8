"""Kernels compiled ahead of time and a C library that launches them, without Python: `quaver kernels`.

The library's sources are in `csrc`. Python records the launches of its own front end, compiles the kernels, and writes
a table that the library searches by what it knows of a call.
"""
