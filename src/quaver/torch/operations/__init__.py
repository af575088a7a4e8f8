"""The operations, which implementation runs each, and what a compiler and autograd see of them; no layer."""
