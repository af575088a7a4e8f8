"""A log of the values that a forward read from its layers' state, and the replay that gives a second run the same.

While a `Log` is written, what layers read from state that moves on (delayed scaling's factors, the counts of the noise)
is noted layer by layer; while it is replayed, they are given that instead and write nothing. Logs nest: what is read
inside the replay of one goes into those that are being written.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from quaver.torch.numerics.tracing import is_tracing

_C: Any = torch._C
#: () to the number of the backward that runs in this thread, -1 outside of one. Without it no recomputation is seen.
graph_task_id: Callable[[], int] = getattr(_C, "_current_graph_task_id", lambda: -1)

#: (the layer, what it read).
Key = tuple[int, str]


class _State(threading.local):
    """The logs that this thread writes and replays; backward has its own thread on a GPU."""

    writing: "tuple[Log, ...]" = ()
    replay: "Replay | None" = None


state = _State()


def replaying() -> bool:
    """True while a forward runs again whose first run was logged: then nothing is noted and no state moves on."""
    return not is_tracing() and state.replay is not None


def recomputing() -> bool:
    """Whether a backward is running: what runs forward inside it is checkpointing's recomputation."""
    return not is_tracing() and graph_task_id() != -1


def noted(layer: object, what: str, present: Any) -> Any:
    """What a layer read, and whether the first run read it; the present value otherwise, which is logged."""
    key = id(layer), what
    if state.replay is not None:
        present = state.replay.next(key, present)
    for log in state.writing:
        log.entries[key].append(present)
    return present


class Log:
    """A context manager in which reads are noted."""

    def __init__(self) -> None:
        self.entries: defaultdict[Key, list[Any]] = defaultdict(list)

    def __enter__(self) -> None:
        state.writing = (*state.writing, self)

    def __exit__(self, *_: object) -> None:
        state.writing = state.writing[:-1]


class Replay:
    """A context manager in which reads give what a log holds, from its start; it may be entered again."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.before: list[tuple[tuple[Log, ...], Replay | None, dict[Key, int]]] = []
        self.done: dict[Key, int] = {}

    def next(self, key: Key, present: Any) -> Any:
        """The next value of this key; the present one for a layer that the first run did not call as often."""
        at = self.done.get(key, 0)
        self.done[key] = at + 1
        values = self.log.entries.get(key, ())
        return values[at] if at < len(values) else present

    def __enter__(self) -> None:
        self.before.append((state.writing, state.replay, self.done))
        state.writing, state.replay, self.done = (), self, {}

    def __exit__(self, *_: object) -> None:
        state.writing, state.replay, self.done = self.before.pop()
