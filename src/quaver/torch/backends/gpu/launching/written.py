"""What one stream of a GPU has written and keeps, read on others."""

import copy
from typing import Any

import torch
from torch import Tensor

from quaver.torch.backends.gpu.launching import capture
from quaver.torch.numerics.groups import Stack
from quaver.torch.numerics.quantized import Quantized


class Written:
    """An entry of `quaver.torch.state.kept_weights` as the current stream has just written it.

    Another stream waits for that moment, once, and has an entry of its own on the same codes and scales: what an
    implementation makes of them later, such as a transpose, belongs to the stream that makes it.
    """

    __slots__ = ("device", "event", "quantized", "readers", "stream")

    def __init__(self, entry: Any, device: torch.device) -> None:
        self.device = device
        self.stream = capture.stream_of(device)
        self.event = torch.cuda.current_stream(device).record_event()
        self.quantized = _copied(entry.quantized)
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
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self.event)
        for tensor in _tensors(self.quantized.whole if isinstance(self.quantized, Stack) else self.quantized):
            # Else its memory could be given away while this stream still reads it.
            tensor.record_stream(stream)
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
