"""Whether `Tensor._version` changes with every write, so that results made from a tensor may be cached by it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quaver.torch.numerics.tracing import is_tracing

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
