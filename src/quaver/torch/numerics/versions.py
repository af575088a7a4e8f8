"""Whether `Tensor._version` changes with every write, so that results made from a tensor may be cached by it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from quaver.torch.numerics.rounding import is_tracing

# ---- versions --------------------------------------------------------------------------------------------

_C: Any = torch._C


#: Whether torch's CUDA graphs return this very tensor at each replay, which writes to it and leaves its version.
#: Private to torch; always False where a release lacks it.
is_replayed: Callable[[Tensor], bool] = getattr(_C, "_is_cached_tensor", lambda _: False)


def has_reliable_version(t: Tensor) -> bool:
    """Whether equal versions of a tensor mean equal values.

    False for an inference tensor, which has no version, and for an output of `torch.compile(mode="reduce-overhead")`,
    which is the same object with the same version at each call. A write through `.data` is never seen.
    """
    return not t.is_inference() and (is_tracing() or not is_replayed(t))


# ---- host values -----------------------------------------------------------------------------------------
# Values of small integer tensors on the host, read from a GPU once for each version of the tensor.

#: (version, values) of tensors on a device.
_read: WeakIdKeyDictionary = WeakIdKeyDictionary()


def waits(t: Tensor) -> bool:
    """Whether reading the tensor waits for a device."""
    return not t.is_cpu


def host_values(t: Tensor) -> list[int]:
    """`t.tolist()` of a 1-D tensor of integers.

    The layers of a model that are given one `cu_seqlens` wait for the device once. A write through `.data` does not
    move a tensor's version, so it is not seen.
    """
    if not waits(t) or not has_reliable_version(t):
        values: list[int] = t.tolist()
        return values
    known = _read.get(t)
    if known is None or known[0] != t._version:
        known = _read[t] = t._version, t.tolist()
    return list(known[1])
