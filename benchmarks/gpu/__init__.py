"""`python -m benchmarks.gpu`: benchmarks on an NVIDIA GPU, in eight minutes at most.

It needs torch, triton and numpy; torchao is measured where it is importable. Sections (`sections/`) run one after
another in a second process, and each has a budget: what fails, hangs or does not fit is reported, and the rest is still
measured. `--dry-run` walks through everything at toy sizes on a CPU, with the kernels interpreted.
"""
