"""What goes between ranks, counted where torch dispatches its collectives."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: torch's names of collectives, and the names used here.
KINDS = {"allgather": "gather", "reduce_scatter": "scatter", "allreduce": "reduce", "alltoall": "exchange"}


class Traffic(TorchDispatchMode):
    """Count calls and bytes of each kind of collective and dtype while entered: the results of all-gathers, and the
    inputs of reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, torch.dtype]] = Counter()
        self.bytes: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__ if hasattr(function, "__name__") else str(function)
        if str(function).startswith("c10d."):
            kind = next((kind for word, kind in KINDS.items() if word in name), None)
            if kind is not None:
                tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
                size = max(t.numel() * t.element_size() for t in tensors)
                self.calls[kind, tensors[0].dtype] += 1
                self.bytes[kind, tensors[0].dtype] += size
        return function(*args, **(kwargs or {}))

    def total(self, kind: str) -> int:
        """Total bytes over all dtypes."""
        return sum(size for (of, _), size in self.bytes.items() if of == kind)
