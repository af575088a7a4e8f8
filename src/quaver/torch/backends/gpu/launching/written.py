"""What is written on one stream of a GPU and read on others."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from quaver.torch.backends.gpu.launching import capture
from quaver.torch.numerics.groups import Stack
from quaver.torch.numerics.quantized import Quantized


class CrossStream:
    """Tensors that the current stream of a GPU has just written, to be read on any of its streams.

    Off a GPU nothing is asked of streams. Nor while a CUDA graph is captured, which begins when the device is idle.

    Args:
        tensors: all of one device.
    """

    __slots__ = ("_event", "_streams", "_tensors", "device")

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self.device, self._tensors = device, list(tensors)
        self._event: Any = None
        if device.type == "cuda" and not capture.capturing(device):
            self._event = torch.cuda.current_stream(device).record_event()
            #: Handles of the streams that need not wait.
            self._streams = {capture.stream_of(device)}

    def ready(self) -> None:
        """Have the current stream wait for the writing; freed memory waits for what this stream has queued by then."""
        if self._event is None or capture.stream_of(self.device) in self._streams or capture.capturing(self.device):
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._event)
        for tensor in self._tensors:
            tensor.record_stream(stream)
        self._streams.add(capture.stream_of(self.device))


class Written:
    """An entry of `quaver.torch.state.kept_weights` as the current stream has just written it.

    Another stream waits for that moment, once, and has an entry of its own on the same codes and scales: what an
    implementation makes of them later, such as a transpose, belongs to the stream that makes it.
    """

    __slots__ = ("device", "memory", "quantized", "readers", "stream")

    def __init__(self, entry: Any, device: torch.device) -> None:
        self.device = device
        self.stream = capture.stream_of(device)
        self.quantized = _copied(entry.quantized)
        whole = self.quantized.whole if isinstance(self.quantized, Stack) else self.quantized
        self.memory = CrossStream(_tensors(whole), device)
        #: Entries of other streams, by handle.
        self.readers: dict[int, Any] = {}

    def read(self, entry: Any) -> Any:
        """The entry for the current stream."""
        stream = capture.stream_of(self.device)
        if stream == self.stream:
            return entry
        reader = self.readers.get(stream)
        if reader is None:
            reader = self.readers[stream] = self._reader(entry)
        return reader

    def _reader(self, entry: Any) -> Any:
        self.memory.ready()
        return type(entry)(_copied(self.quantized), entry.window, entry.spec, entry.factor)

    def free(self) -> None:
        """Let go of the codes, on all streams."""
        for reader in self.readers.values():
            reader.free()


def _copied(q: Any) -> Any:
    """An operand, or those of groups, on the same memory, as it lies now."""
    if isinstance(q, Stack):
        stack = Stack(q.parts, None if q.whole is None else _copied(q.whole))
        stack.amax = q.amax
        return stack
    copied = copy.copy(q)
    if q.twin is not None:
        copied.twin = copy.copy(q.twin)
    return copied


def _tensors(q: Quantized | None) -> list[Tensor]:
    if q is None:
        return []
    operands = [q] if q.twin is None else [q, q.twin]
    given = [t for each in operands for t in (each.data, each.scale, each.tensor_factor, each.amax)]
    return [t for t in given if isinstance(t, Tensor)]
