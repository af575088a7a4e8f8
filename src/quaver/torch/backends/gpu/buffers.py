"""Room for what a launch writes, described before there is any: shape, strides and dtype, and how a kernel is told."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.torch.backends.gpu import capture
from quaver.torch.numerics.grouped import WeightStack
from quaver.torch.numerics.quantized import Quantized

# ---- rooms -----------------------------------------------------------------------------------------------

#: Codes of four bits, as a GEMM takes them: two a byte.
PACKED4 = torch.float4_e2m1fn_x2


class BufferSpec(NamedTuple):
    """What a launch writes, as it is read."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    #: As a kernel is told of it: one that is interpreted looks at more than an address.
    kernel_args: Callable[[Tensor], Tensor] = torch.Tensor.detach
    #: In a `Way`, whether each call makes a new one; else a thread writes to one place on a stream, again and again.
    fresh: bool = False
    #: Whether launches take it for zeros; a place that is written to again they leave so.
    zeros: bool = False


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> BufferSpec:
    """Room for a tensor whose rows lie one after the other."""
    return BufferSpec(shape, torch.empty(shape, dtype=dtype, device="meta").stride(), dtype)


def row_major(shape: tuple[int, int], dtype: torch.dtype, transposed: bool = False, fresh: bool = False) -> BufferSpec:
    """Room for a matrix whose rows lie one after the other; `transposed` gives its transpose, lying so."""
    if transposed:
        return BufferSpec(shape[::-1], (1, shape[1]), dtype, torch.Tensor.t, fresh)
    return BufferSpec(shape, (shape[1], 1), dtype, fresh=fresh)


def in_words(buffer: BufferSpec) -> BufferSpec:
    """The same room, of codes that a kernel writes four to an int32."""
    return buffer._replace(kernel_args=_words)


def _words(codes: Tensor) -> Tensor:
    """Codes that lie row by row, or their transpose, as they lie: four to an int32."""
    return (codes if codes.is_contiguous() else codes.t()).view(torch.int32)


def empty(buffer: BufferSpec, device: torch.device) -> Tensor:
    if buffer.zeros:
        return torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    if buffer.dtype is PACKED4:
        # Of which torch fills none, as it does where algorithms are to be deterministic.
        return torch.empty_strided(buffer.shape, buffer.strides, dtype=torch.uint8, device=device).view(PACKED4)
    return torch.empty_strided(buffer.shape, buffer.strides, dtype=buffer.dtype, device=device)


def pattern(buffer: BufferSpec, device: torch.device) -> Tensor:
    """What `torch.empty_like` makes such rooms of, in two thirds of the time that their shape and dtype take: a tensor
    without memory."""
    with torch.inference_mode(False):
        tensor = empty(buffer, device)
    tensor.untyped_storage().resize_(0)
    return tensor


def told_of(buffer: BufferSpec, device: torch.device) -> Tensor:
    """What a kernel is told of a room, without memory: to compile its launch by."""
    kernel_args = buffer.kernel_args(empty(buffer, device))
    kernel_args.untyped_storage().resize_(0)
    return kernel_args


# ---- written ---------------------------------------------------------------------------------------------
# Tensors, and cached quantized weights, that one CUDA stream writes and others read.


class CrossStream:
    """Tensors that the current stream has just written, so that other streams can wait for them.

    Does nothing on a CPU, or while a CUDA graph is captured: a capture begins when the device is idle.

    Args:
        tensors: all on `device`.
    """

    __slots__ = ("_event", "_streams", "_tensors", "device")

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self.device, self._tensors = device, list(tensors)
        self._event: Any = None
        if device.type == "cuda" and not capture.capturing(device):
            self._event = torch.cuda.current_stream(device).record_event()
            #: Handles of the streams that wrote the tensors or have waited.
            self._streams = {capture.stream_of(device)}

    def wait(self) -> None:
        """Have the current stream wait until the tensors are written; call it before the stream reads them.

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
    """A cached quantized weight (`weight_cache.CachedWeight`) of the current stream, with an entry for each other
    stream.

    Entries share codes and scales; a stream waits once until these are written. What is derived from them later, such
    as a transpose, is kept in the entry of the stream that made it.

    Args:
        entry: as the current stream has just written it.
    """

    __slots__ = ("_entries", "_memory", "_quantized", "_stream", "device")

    def __init__(self, entry: Any, device: torch.device) -> None:
        self.device = device
        self._stream = capture.stream_of(device)
        # A copy from before anything is derived on this stream.
        self._quantized = _shallow_copy(entry.quantized)
        operand = self._quantized.whole if isinstance(self._quantized, WeightStack) else self._quantized
        self._memory = CrossStream(_tensors_of(operand), device)
        #: By the handle of the stream.
        self._entries: dict[int, Any] = {}

    def on_current_stream(self, entry: Any) -> Any:
        """The entry of the current stream, which waits for the tensors at the first call.

        Args:
            entry: that of the stream that wrote it.
        """
        stream = capture.stream_of(self.device)
        if stream == self._stream:
            return entry
        own = self._entries.get(stream)
        if own is None:
            self._memory.wait()
            own = type(entry)(_shallow_copy(self._quantized), entry.window, entry.spec, entry.factor)
            self._entries[stream] = own
        return own

    def free(self) -> None:
        """Free the entries of all other streams."""
        for entry in self._entries.values():
            entry.free()


def _shallow_copy(q: Any) -> Any:
    """A `Quantized` with its transpose, or a `Stack`, on the same tensors; changes to the copy leave `q` as it is."""
    if isinstance(q, WeightStack):
        stack = WeightStack(q.parts, None if q.whole is None else _shallow_copy(q.whole))
        stack.amax = q.amax
        return stack
    copied = copy.copy(q)
    if q.twin is not None:
        copied.twin = copy.copy(q.twin)
    return copied


def _tensors_of(q: Quantized | None) -> list[Tensor]:
    """The tensors of an operand and of its transpose; none for None."""
    if q is None:
        return []
    operands = [q] if q.twin is None else [q, q.twin]
    fields = [t for each in operands for t in (each.data, each.scale, each.tensor_factor, each.amax)]
    return [t for t in fields if isinstance(t, Tensor)]
