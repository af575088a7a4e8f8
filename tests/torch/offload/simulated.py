"""A device with streams and pinned memory, simulated on a CPU; and an allocator that counts what is alive.

Copies run as late as they may: when the compute stream waits for their event. Memory that nothing has arrived in is
full of 0xFF bytes, which are NaN in every floating format.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Counted(TorchDispatchMode):
    """Track storages created by operations while the mode is on, with the last operation that used each."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.last_use: dict[int, int] = {}
        self.ignored: set[int] = set()
        self.peak = 0
        self.measures_peak = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        known = set()
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and not is_traceable_wrapper_subclass(x):
                self.last_use[x.untyped_storage()._cdata] = self.operations
                known.add(x.untyped_storage()._cdata)
        for x in tree_leaves(result):
            if type(x) is Tensor:
                key = x.untyped_storage()._cdata
                self.last_use[key] = self.operations
                if key not in self.alive and key not in known and key not in self.ignored:
                    self.alive[key] = StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()
        if self.measures_peak:
            self.peak = max(self.peak, self.bytes())
        return result

    def bytes(self) -> int:
        self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
        return sum(size for _, size in self.alive.values())

    def ignore(self, *tensors: Tensor) -> None:
        """Exclude these tensors from the count: they existed before or belong to another memory."""
        for x in tensors:
            key = x.untyped_storage()._cdata
            self.ignored.add(key)
            self.alive.pop(key, None)


class Simulated:
    """`Transfers` on the CPU that fails where a GPU's stream would read wrong memory.

    Args:
        counted: the mode that records operations of the compute stream.
        pinned: available bytes of pinned memory.
    """

    device_type = "cpu"

    def __init__(self, counted: Counted | None = None, pinned: float = float("inf")) -> None:
        self.counted = counted
        self.pinned = pinned
        #: Queued copies in order: (target, source) and their live storages; None after a copy has run.
        self.queue: list[list[tuple[_Weak, _Weak]] | None] = []
        self.host: list[Tensor] = []
        self.log: list[tuple[str, int]] = []

    def allocate_host(self, size: int) -> Tensor:
        if sum(x.numel() for x in self.host) + size > self.pinned:
            raise RuntimeError("CUDA error: out of memory\nsimulated")
        buffer = torch.full((size,), 0xFF, dtype=torch.uint8, device="cpu")
        self.host.append(buffer)
        if self.counted is not None:
            self.counted.ignore(buffer)
        return buffer

    def pin(self, x: Tensor) -> Tensor:
        if self.counted is not None:
            self.counted.ignore(x)
        return x

    def allocate(self, size: int, device: torch.device) -> Tensor:
        return torch.full((size,), 0xFF, dtype=torch.uint8, device=device)

    def record(self, device: torch.device) -> int:
        return 0 if self.counted is None else self.counted.operations

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, after: int) -> int:
        with _disable_current_modes():
            for target, source in pairs:
                assert target.numel() == source.numel()
                for x in (target, source) if self.counted is not None else ():
                    used = self.counted.last_use.get(x.untyped_storage()._cdata, 0)
                    assert used <= after, "the copy does not wait for the last use of its memory"
            self.queue.append([(_Weak(target), _Weak(source)) for target, source in pairs])
        outward = any(pairs[0][0].untyped_storage()._cdata == x.untyped_storage()._cdata for x in self.host)
        self.log.append(("out" if outward else "back", sum(source.numel() for _, source in pairs)))
        return len(self.queue) - 1

    def synchronize(self, event: int, device: torch.device) -> None:
        self.wait(event, device)

    def wait(self, event: int, device: torch.device) -> None:
        with _disable_current_modes():
            for number in range(event + 1):
                for target, source in self.queue[number] or ():
                    target.tensor().copy_(source.tensor())
                self.queue[number] = None


class _Weak:
    """A tensor without a reference that keeps its memory alive."""

    def __init__(self, x: Tensor) -> None:
        self.storage = StorageWeakRef(x.untyped_storage())
        self.dtype, self.layout = x.dtype, (x.storage_offset(), x.shape, x.stride())

    def tensor(self) -> Tensor:
        assert not self.storage.expired(), "memory was freed before its copy was done"
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, *self.layout)
