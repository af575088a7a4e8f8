"""Bytes that each rank sends to others, counted where torch dispatches its collectives."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Counting(TorchDispatchMode):
    """Count in `bytes` what this rank sends in all-gathers and all-to-alls while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = dist.get_world_size() - 1
        name = str(function)
        if name.startswith("c10d."):
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
            if "allgather" in name:
                self.bytes += min(t.nbytes for t in tensors) * others
            elif "alltoall" in name:
                self.bytes += tensors[-1].nbytes * others // (others + 1)
            elif "send" in name:
                self.bytes += sum(t.nbytes for t in tensors)
            elif "allreduce" in name and tensors[0].dtype is torch.int64:
                # The header that ranks compare before attention.
                assert tensors[0].nbytes == 24
            elif "recv" not in name:
                raise AssertionError(f"{name} is not counted")
        return function(*args, **(kwargs or {}))
