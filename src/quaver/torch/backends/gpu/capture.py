"""CUDA graphs: detect a capture, and rehearse one.

A capture must load no kernel, probe no GEMM and create nothing that later work uses: the driver refuses the first two,
and memory allocated by a graph is filled only at replay. So all that a capture launches must have run before. A capture
also chooses other code than eager work: it neither reads the weight cache nor has fast plans. A rehearsal runs
eagerly but makes the same choices, so that afterwards all kernels, GEMMs and buffers of the capture exist.

Source: CUDA's programming guide, "Prohibited and Unhandled Operations" of stream capture.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_C: Any = torch._C


def _raw_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


#: Returns the address of the current stream of a GPU, by index. CPU builds of torch lack the function and never call
#: it.
raw_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _raw_stream)
#: Streams on which a capture is rehearsed, as (device, handle). Backward runs in an autograd thread, but on the stream
#: of its forward.
rehearsed: set[tuple[torch.device, int]] = set()


def capturing(device: torch.device) -> bool:
    """Return True while a CUDA graph is captured on the current stream; nothing may then be created for later use.

    Args:
        device: as tensors have it.
    """
    # GPU devices have an index; `device.type` is slow because torch builds a new string each time.
    return device.index is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_captured_or_rehearsed(device: torch.device) -> bool:
    """Return True while a CUDA graph is captured on the current stream, or while that is rehearsed.

    Caches between calls are then neither read nor written, and only the general plan runs.
    """
    if rehearsed and (device, stream_of(device)) in rehearsed:
        return True
    return capturing(device)


@contextmanager
def rehearsing(device: torch.device) -> Iterator[None]:
    """Make work on the device's current stream choose the same code as a capture on that stream, while the context is
    open.

    Args:
        device: as tensors have it, or "cuda" for the current GPU.
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
    """Return the handle of a device's current stream; 0 without a GPU."""
    return raw_stream(device.index) if device.type == "cuda" else 0
