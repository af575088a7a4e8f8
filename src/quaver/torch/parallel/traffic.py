"""What a rank sends to others, counted where it is sent: bytes, calls, and the seconds that it waits, by kind.

Off by default, and then free: a collective looks at one attribute, `active.all`. That is one for the process and not
for the thread, because on a GPU backward runs in another thread than forward.
"""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Kind = Literal["weights", "gradients", "activations", "keys_values", "amaxes", "control"]
#: What travels. "keys_values" is all that attention across ranks sends, "control" what ranks settle between them, such
#: as a mean loss.
KINDS: tuple[Kind, ...] = ("weights", "gradients", "activations", "keys_values", "amaxes", "control")
#: How it travels: an all-gather, a reduce-scatter, an all-reduce, an all-to-all, from one rank to another.
Way = Literal["gather", "scatter", "reduce", "exchange", "send"]


class Sent:
    """What this rank has sent to others while it was among `active.all`.

    Attributes:
        bytes: by kind; see `sent`.
        calls: collectives by kind.
        waiting: what it waits for now: a kind, or "" for nothing.
    """

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.waiting = ""
        self._waited = 0.0
        self._events: list[tuple[Any, Any]] = []

    @property
    def seconds(self) -> float:
        """Of waiting for others and for what they send: the host's, and on a GPU the streams' that stood still."""
        for begin, end in self._events:
            end.synchronize()
            self._waited += begin.elapsed_time(end) / 1e3
        self._events.clear()
        return self._waited


class _Active:
    """Who counts now."""

    all: tuple[Sent, ...] = ()


active = _Active()


def sent(way: Way, size: int, ranks: int) -> int:
    """Bytes that one of the ranks sends to others, by the algorithms that send fewest.

    Args:
        size: bytes of this rank's part for "gather", of what it gives for all else.
    """
    if way == "gather":
        return size * (ranks - 1)
    return size if way == "send" else (1 + (way == "reduce")) * size * (ranks - 1) // ranks


def during(
    kind: Kind, way: Way, x: Tensor, group: Any = None, by: tuple[Sent, ...] | None = None
) -> AbstractContextManager[Any]:
    """Count a collective that is waited for within the block.

    Args:
        x: as `sent` takes its size.
        group: process group; None is the default one.
        by: who counts; None is all who do now.
    """
    by = active.all if by is None else by
    if not by:
        return nullcontext()
    count(kind, way, x, group, by)
    return _Wait(kind, x, by)


def awaited(kind: Kind, way: Way, x: Tensor, group: Any, work: Any) -> Callable[[], object]:
    """Count a collective that has begun; what waits for it is returned.

    Args:
        work: torch's, or several.
    """
    works = work if isinstance(work, list) else [work]

    def wait() -> None:
        for each in works:
            each.wait()

    by = active.all
    if not by:
        return wait
    count(kind, way, x, group, by)

    def timed() -> None:
        with _Wait(kind, x, by):
            wait()

    return timed


def waiting(kind: Kind, x: Tensor) -> AbstractContextManager[Any]:
    """Note that this rank waits within the block for what others send, x."""
    return _Wait(kind, x, active.all) if active.all else nullcontext()


def count(kind: Kind, way: Way, x: Tensor, group: Any, by: tuple[Sent, ...]) -> None:
    """Count a collective, and not how long it is waited for."""
    size = sent(way, x.numel() * x.element_size(), dist.get_world_size(group))
    for each in by:
        each.bytes[kind] += size
        each.calls[kind] += 1


class _Wait:
    """While entered, this rank waits."""

    __slots__ = ("begun", "by", "event", "kind", "x")

    def __init__(self, kind: str, x: Tensor, by: tuple[Sent, ...]) -> None:
        self.kind, self.x, self.by = kind, x, by

    def __enter__(self) -> None:
        for each in self.by:
            each.waiting = self.kind
        self.event = _event() if self.x.is_cuda else None
        self.begun = time.perf_counter()

    def __exit__(self, failure: object, *_: object) -> None:
        seconds, end = time.perf_counter() - self.begun, _event() if self.x.is_cuda else None
        for each in self.by:
            if end is None:
                each._waited += seconds
            else:
                each._events.append((self.event, end))
            if failure is None:  # else it waits in vain, and is asked for what
                each.waiting = ""


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
