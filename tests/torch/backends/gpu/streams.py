"""Simulated GPU streams that record the calls on them, in order."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quaver.torch.backends.gpu import capture

GPU = torch.device("cuda", 0)


class Streams:
    """The current stream, and what was asked of all of them, in order."""

    def __init__(self) -> None:
        self.now = 1
        self.log: list[tuple[Any, ...]] = []

    def handle(self, device: torch.device) -> int:
        return self.now if device == GPU else 0

    def current(self, device: torch.device) -> "Streams":
        assert device == GPU
        return self

    def record_event(self) -> tuple[str, int]:
        self.log.append(("recorded", self.now))
        return "event", self.now

    def wait_event(self, event: tuple[str, int]) -> None:
        self.log.append(("waits", self.now, event[1]))

    def keeps(self, stream: int) -> set[int]:
        """Addresses of tensors whose memory waits for a stream before it is reused."""
        return {entry[2] for entry in self.log if entry[:2] == ("keeps", stream)}


def stand_in(patch: pytest.MonkeyPatch) -> Streams:
    """Have streams where CUDA's would be."""
    streams = Streams()
    patch.setattr(capture, "stream_of", streams.handle)
    patch.setattr(torch.cuda, "current_stream", streams.current)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(Tensor, "record_stream", lambda t, s: streams.log.append(("keeps", s.now, t.data_ptr())))
    return streams
