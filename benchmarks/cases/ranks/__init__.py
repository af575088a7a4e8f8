"""Cases of several ranks over gloo: time of a step and bytes sent; no single process's time."""

from benchmarks.cases.ranks.started import FSDP, GRADIENTS, TENSOR

PARALLEL = (FSDP, GRADIENTS, TENSOR)
