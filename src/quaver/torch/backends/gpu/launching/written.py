"""Tensors, and cached quantized weights, that one CUDA stream writes and others read."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from quaver.torch.backends.gpu.launching import capture
from quaver.torch.numerics.groups import Stack
from quaver.torch.numerics.quantized import Quantized


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
    """A cached quantized weight (`kept_weights.Entry`) of the current stream, with an entry for each other stream.

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
        operand = self._quantized.whole if isinstance(self._quantized, Stack) else self._quantized
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
    if isinstance(q, Stack):
        stack = Stack(q.parts, None if q.whole is None else _shallow_copy(q.whole))
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
