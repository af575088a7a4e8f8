"""Descriptions of buffers that launches write: shape, strides and dtype, and how a kernel receives them.

Also synchronizes tensors and cached weights that one CUDA stream writes and others read.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.torch.backends.gpu import capture
from quaver.torch.numerics.quantized import Quantized

# ---- buffer specs ----

#: dtype of four-bit codes as GEMMs take them, two to a byte.
PACKED4 = torch.float4_e2m1fn_x2


class BufferSpec(NamedTuple):
    """Shape, strides and dtype of a tensor that a launch writes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    #: Converts the tensor to the kernel's argument; the interpreter looks at more than the address.
    kernel_args: Callable[[Tensor], Tensor] = torch.Tensor.detach
    #: True if launches expect zeros.
    zeros: bool = False


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> BufferSpec:
    """Return the spec of a contiguous tensor."""
    return BufferSpec(shape, torch.empty(shape, dtype=dtype, device="meta").stride(), dtype)


def row_major(shape: tuple[int, int], dtype: torch.dtype, transposed: bool = False) -> BufferSpec:
    """Return the spec of a row-major matrix, or of its transposed view if `transposed`."""
    if transposed:
        return BufferSpec(shape[::-1], (1, shape[1]), dtype, torch.Tensor.t)
    return BufferSpec(shape, (shape[1], 1), dtype)


def in_words(buffer: BufferSpec) -> BufferSpec:
    """Return the spec with the kernel argument viewed as int32, four codes each."""
    return buffer._replace(kernel_args=_words)


def _words(codes: Tensor) -> Tensor:
    """View row-major codes, or the transpose of column-major ones, as int32, four codes each."""
    return (codes if codes.is_contiguous() else codes.t()).view(torch.int32)


def empty(buffer: BufferSpec, device: torch.device) -> Tensor:
    if buffer.zeros:
        return torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    if buffer.dtype is PACKED4:
        # torch cannot fill packed4 tensors, which it does in deterministic mode.
        return torch.empty_strided(buffer.shape, buffer.strides, dtype=torch.uint8, device=device).view(PACKED4)
    return torch.empty_strided(buffer.shape, buffer.strides, dtype=buffer.dtype, device=device)


def pattern(buffer: BufferSpec, device: torch.device) -> Tensor:
    """Return a tensor without memory for `torch.empty_like`, which is a third faster than shape and dtype."""
    with torch.inference_mode(False):
        tensor = empty(buffer, device)
    tensor.untyped_storage().resize_(0)
    return tensor


def example_argument(buffer: BufferSpec, device: torch.device) -> Tensor:
    """Return the kernel argument of a spec without memory, to compile a launch for it."""
    kernel_args = buffer.kernel_args(empty(buffer, device))
    kernel_args.untyped_storage().resize_(0)
    return kernel_args


# ---- tensors shared between CUDA streams ----


class CrossStream:
    """Tensors that the current stream has just written, on which other streams can wait.

    Does nothing on a CPU, or while a CUDA graph is captured, because a capture begins when the device is idle.

    Args:
        tensors: all on `device`.
    """

    __slots__ = ("_event", "_streams", "_tensors", "device")

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self.device, self._tensors = device, list(tensors)
        self._event: Any = None
        if device.type == "cuda" and not capture.capturing(device):
            self._event = torch.cuda.current_stream(device).record_event()
            #: Handles of the streams that wrote the tensors or have waited for them.
            self._streams = {capture.stream_of(device)}

    def wait(self) -> None:
        """Make the current stream wait until the tensors are written; call this before the stream reads them.

        The allocator reuses their memory only after the work that is queued on this stream when they are freed.
        """
        if self._event is None or capture.stream_of(self.device) in self._streams or capture.capturing(self.device):
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._event)
        for tensor in self._tensors:
            tensor.record_stream(stream)
        self._streams.add(capture.stream_of(self.device))


class EntryByStream:
    """Cached quantized weight (`weight_cache.CachedWeight`) of the current stream, with an entry for each other stream.

    Entries share codes and scales; a stream waits once until these are written. Tensors derived later, such as a
    transpose, are cached in the entry of the stream that made them.

    Args:
        entry: entry that the current stream has just written.
    """

    __slots__ = ("_entries", "_memory", "_quantized", "_stream", "device")

    def __init__(self, entry: Any, device: torch.device) -> None:
        self.device = device
        self._stream = capture.stream_of(device)
        # Copied before this stream derives anything from it.
        self._quantized = _shallow_copy(entry.quantized)
        self._memory = CrossStream(_tensors_of(self._quantized), device)
        #: Entries by stream handle.
        self._entries: dict[int, Any] = {}

    def on_current_stream(self, entry: Any) -> Any:
        """Return the entry of the current stream, which waits for the tensors at the first call.

        Args:
            entry: entry of the stream that wrote it.
        """
        stream = capture.stream_of(self.device)
        if stream == self._stream:
            return entry
        own = self._entries.get(stream)
        if own is None:
            self._memory.wait()
            own = type(entry)(_shallow_copy(self._quantized), entry.parameter_version, entry.spec, entry.factor)
            self._entries[stream] = own
        return own

    def free(self) -> None:
        """Free the entries of all other streams."""
        for entry in self._entries.values():
            entry.free()


def _shallow_copy(q: Any) -> Any:
    """Copy a `Quantized` with its transpose, sharing tensors; changes to the copy do not affect `q`."""
    copied = copy.copy(q)
    if q.cached_transpose is not None:
        copied.cached_transpose = copy.copy(q.cached_transpose)
    return copied


def _tensors_of(q: Quantized | None) -> list[Tensor]:
    """Return the tensors of an operand and of its transpose; [] for None."""
    if q is None:
        return []
    operands = [q] if q.cached_transpose is None else [q, q.cached_transpose]
    fields = [t for each in operands for t in (each.data, each.scale, each.tensor_factor, each.amax)]
    return [t for t in fields if isinstance(t, Tensor)]
