"""CUDA graphs: whether one is captured, and the rehearsal of a capture.

A capture loads no kernel, tries no GEMM and makes nothing that later work uses: the driver refuses the first, and what
a graph allocates is filled at its replays alone. So whatever a capture launches must have run before, and a capture
decides otherwise than eager work: it neither reads what a layer keeps of its weight nor takes a step that was decided
beforehand. A rehearsal runs eagerly and decides as a capture does: then every kernel, every GEMM and every room that
the capture takes is there.

Source: CUDA's programming guide, "Prohibited and Unhandled Operations" of stream capture.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_C: Any = torch._C


def _raw_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


#: Of a GPU's index: the address of its current stream. Builds of torch for a CPU lack the name, and nothing calls it
#: there.
raw_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _raw_stream)
#: The streams on which a capture is rehearsed: device and handle. Backward runs in a thread of autograd's, but on the
#: stream of its forward.
rehearsed: set[tuple[torch.device, int]] = set()


def capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured on the current stream: nothing may be made for later use.

    Args:
        device: as tensors have it.
    """
    # A GPU's has an index; its type is a string that torch makes at each question.
    return device.index is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def as_captured(device: torch.device) -> bool:
    """True while a CUDA graph is captured on the current stream, and while that is rehearsed: what is kept from one
    call to the next is neither read nor left, and no step decided beforehand runs."""
    if rehearsed and (device, stream_of(device)) in rehearsed:
        return True
    return capturing(device)


@contextmanager
def rehearsing(device: torch.device) -> Iterator[None]:
    """While open, what runs on the device's current stream decides as a capture on that stream will.

    Args:
        device: as tensors have it, or "cuda" for the current one.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    known = device, stream_of(device)
    added = {known} - rehearsed
    rehearsed.update(added)
    try:
        yield
    finally:
        rehearsed.difference_update(added)


def stream_of(device: torch.device) -> int:
    """The handle of a device's current stream; 0 off a GPU."""
    return raw_stream(device.index) if device.type == "cuda" else 0
