"""Check if `Tensor._version` changes with every write, so that results computed from a tensor may be cached by it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from quaver.torch.numerics.rounding import is_tracing

# ---- versions ----

_C: Any = torch._C


#: Returns True if torch's CUDA graphs return this very tensor at each replay, which writes to it without changing its
#: version. Private to torch; always False if a release lacks it.
is_replayed: Callable[[Tensor], bool] = getattr(_C, "_is_cached_tensor", lambda _: False)


def has_reliable_version(t: Tensor) -> bool:
    """Return True if equal versions of a tensor imply equal values.

    False for an inference tensor, which has no version, and for an output of `torch.compile(mode="reduce-overhead")`,
    which is the same object with the same version at each call. A write through `.data` is never noticed.
    """
    return not t.is_inference() and (is_tracing() or not is_replayed(t))


# ---- host values of small integer tensors, read from a GPU once per version ----

#: (version, values) of device tensors.
_read: WeakIdKeyDictionary = WeakIdKeyDictionary()


def waits(t: Tensor) -> bool:
    """Return True if reading the tensor synchronizes with a device."""
    return not t.is_cpu


def host_values(t: Tensor) -> list[int]:
    """Return `t.tolist()` of a 1-D integer tensor, cached by its version.

    Layers that share one `cu_seqlens` synchronize once. A write through `.data` does not change the version and is not
    noticed.
    """
    if not waits(t) or not has_reliable_version(t):
        values: list[int] = t.tolist()
        return values
    known = _read.get(t)
    if known is None or known[0] != t._version:
        known = _read[t] = t._version, t.tolist()
    return list(known[1])
