"""Cases of several ranks over gloo: what a step takes and what travels; no single process's time."""

from benchmarks.cases.ranks.started import FSDP, GRADIENTS, TENSOR

PARALLEL = (FSDP, GRADIENTS, TENSOR)
