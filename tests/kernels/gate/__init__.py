"""The static gate: every kernel compiled for every architecture, without a GPU, and its machine code read.

`python -m tests.kernels.gate` runs it; --measure writes what changed kernels compile to in measured.json, which
`make test` reads instead of compiling; --update writes the ceilings in ceilings.toml; --only 'cast*' takes some rows.
It needs a process in which Triton compiles, that is, one without TRITON_INTERPRET.
"""
