"""Whether a tensor's version tells of every change of it, so that what was made of it may be cached by that."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quaver.torch.numerics.tracing import is_tracing

_C: Any = torch._C


def _never(_: Tensor) -> bool:
    return False


#: Whether torch's CUDA graphs return a tensor again at each replay, which writes to it without a trace.
is_replayed: Callable[[Tensor], bool] = getattr(_C, "_is_cached_tensor", _never)


def has_version(t: Tensor) -> bool:
    """False of a tensor made in inference mode, which has no version, and of an output of
    torch.compile(mode="reduce-overhead"), which is the same object with the same version at each call."""
    return not t.is_inference() and (is_tracing() or not is_replayed(t))
