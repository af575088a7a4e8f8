"""Memory that intermediate results on a CPU are written to again and again.

A fresh tensor of megabytes is made of pages that the system hands out one by one, as a fault each, and takes back when
it goes: that takes several times as long as computing what is written there.
"""

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

#: Bytes from which on it pays, and up to which a thread holds them for good.
SMALLEST, LARGEST = 1 << 16, 1 << 23
#: Bytes of a piece that stays in a core's cache from one operation to the next.
PIECE = 1 << 20


class _Held(threading.local):
    def __init__(self) -> None:
        self.slots: dict[str, Tensor] = {}


_held = _Held()


def room(slot: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of anything, this thread's until it asks for the same slot again; never to be returned."""
    size = math.prod(shape) * dtype.itemsize
    if not SMALLEST <= size <= LARGEST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    held = _held.slots.get(slot)
    if held is None or held.numel() < size:
        with torch.inference_mode(False):
            held = _held.slots[slot] = torch.empty(size, dtype=torch.uint8, device="cpu")
    return held[:size].view(dtype).view(shape)


def rows(x: Tensor) -> int:
    """How many rows of a tensor make a piece of `PIECE` bytes; at least one."""
    return max(1, PIECE * x.shape[0] // max(1, x.numel() * x.itemsize))
