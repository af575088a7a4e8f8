"""What goes between ranks, counted where torch dispatches its collectives."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: torch's names of collectives, and the names used here.
KINDS = {
    "allgather": "gather",
    "reduce_scatter": "scatter",
    "allreduce": "reduce",
    "alltoall": "exchange",
    "send": "send",
}


class Traffic(TorchDispatchMode):
    """Count calls and bytes of each kind of collective and dtype while entered: the results of all-gathers, the
    inputs of reductions, and what is sent to single ranks."""

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


class Seen(TorchDispatchMode):
    """Bytes sent to other ranks by dispatched collectives: "gather", "scatter", "reduce", "exchange", "send"."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.ranks = dist.get_world_size(group)
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, others = str(function), self.ranks - 1
        if name.startswith("c10d."):
            sizes = [t.nbytes for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
            if "allgather" in name:
                self.bytes["gather"] += min(sizes) * others
            elif "reduce_scatter" in name:
                self.bytes["scatter"] += max(sizes) * others // self.ranks
            elif "allreduce" in name:
                self.bytes["reduce"] += 2 * sum(sizes) * others // self.ranks
            elif "alltoall" in name:
                self.bytes["exchange"] += sizes[-1] * others // self.ranks
            elif "send" in name:
                self.bytes["send"] += sum(sizes)
            elif "recv" not in name:
                raise AssertionError(f"{name} is not counted")
        return function(*args, **(kwargs or {}))
