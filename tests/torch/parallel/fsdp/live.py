"""Measure peak bytes of live tensors by dispatching torch operations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Record the peak bytes of live storages while entered, without those of known tensors."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in known}
        self._storages: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves((result, kwargs or {}, args)):
            if type(t) is Tensor and t.device.type == "cpu":
                reference = StorageWeakRef(t.untyped_storage())
                if reference.cdata not in self._known:
                    self._storages.setdefault(reference.cdata, reference)
        self.peak = max(self.peak, self.bytes())
        return result

    def bytes(self) -> int:
        """Bytes of storages that are alive now."""
        total = 0
        for key, reference in [*self._storages.items()]:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total
