"""What a layer holds from one call to the next beside its parameters and buffers: one object, made with the layer.

One rule for all of it: a copy, a pickle and what moves to another process keep `serial`, `delayed` and who else was
copied, and everything else is made again when it is wanted.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.numerics.rounding import is_tracing

# ---- layer -----------------------------------------------------------------------------------------------

#: `LayerState.last` of a layer that has not run.
NEVER: Any = object()


class LayerState:
    """A quantizable layer's, by `state_of`."""

    __slots__ = (
        *("__weakref__", "agreed", "announced", "copied", "delayed", "drawn", "factors", "family", "initial", "last"),
        *("members", "newest", "number", "pieces", "prepared", "recorded_apart", "seen", "serial", "stacked", "stage"),
        *("step", "streams", "views", "watched"),
        "weights",
    )

    def __init__(
        self, serial: int | None = None, delayed: Recipe | None = None, copied: bool = False, family: Any = None
    ) -> None:
        #: The number of the noise of a layer without a name, None before its first use: `quaver.torch.state.noise`.
        self.serial = serial
        #: The recipe that the history is kept for.
        self.delayed = delayed
        #: Whether this is a copy that has not run: only one rank may hold it.
        self.copied = copied
        #: The recipe of the last forward, which its recomputation inside backward follows; `NEVER` before the first.
        self.last: Recipe | None = NEVER
        #: Whether counters, logs or modes watched the last forward, which its recomputation follows too: it must save
        #: what that saved. None where that forward kept nothing for backward.
        self.watched: bool | None = None
        #: The recipe whose buffers the layer has.
        self.prepared: Recipe | None = None
        #: What the layer keeps of its weight: `quaver.torch.state.weight_cache`.
        self.weights: Any = None
        #: Of delayed scaling (`quaver.torch.state.history`): the number by which compiled code finds the layer, its
        #: buffers as the host reads them, views of the places where kernels note an amax, the stack that one launch
        #: rolls with the place in it, and the factors that a decided step was given.
        self.number: Tensor | None = None
        self.views: Any = None
        self.newest: Any = None
        self.stacked: Any = None
        self.factors: Any = None
        #: The step that it ran in: `quaver.torch.state.history.scaling_step`.
        self.step: Any = None
        #: The layers that were converted together, and whether its history has what no step wrote: compiled code's
        #: amaxes, or a checkpoint's.
        self.family = family
        self.recorded_apart = False
        #: Row 0 of its history as all ranks had it when they last agreed on it.
        self.agreed: list[float] | None = None
        #: Of a pipeline the stage that it belongs to, by which ranks tell alike layers of different stages apart.
        self.stage: int | None = None
        #: The streams of its noise, and the name or serial that they are of: `quaver.torch.state.noise`.
        self.streams: tuple[Any, dict[str, Tensor], dict[str, Any]] | None = None
        #: What a decided step on a GPU draws from.
        self.drawn: Any = None
        #: The rows of each matrix, by its name, where several lie one below the other in the weight, as gate and up do.
        self.pieces: dict[str, int] = {}
        #: The names of its members where a weight is a stack of matrices, one for each expert: each has a history, a
        #: count and streams of its own, those of a layer of that name in the place of this one. Empty elsewhere.
        self.members: tuple[str, ...] = ()
        #: Where those are parameters of their own, on the ranks of a mesh: which ones the last forward saw.
        self.seen: Any = None
        #: The value in high precision that a weight of codes began with, on the CPU.
        self.initial: Tensor | None = None
        #: Whether a warning has told of its features.
        self.announced = False

    def __reduce__(self) -> Any:
        return _copy, (self.serial, self.delayed, self.family, self.pieces, self.members)


def _copy(
    serial: int | None, delayed: Recipe | None, family: Any = None, pieces: Any = None, members: tuple[str, ...] = ()
) -> LayerState:
    # The one object of a recipe, by which it is compared.
    state = LayerState(serial, None if delayed is None else recipes.get(delayed), copied=True, family=family)
    state.pieces, state.members = dict(pieces or {}), members
    return state


def state_of(layer: nn.Module) -> LayerState:
    """The state of a quantizable layer."""
    state: LayerState = layer.__dict__["_state"]
    return state


def device_of(layer: nn.Module) -> torch.device:
    """Where a layer's first parameter is, its own or that of a module in it, such as a parametrization."""
    first = next((p for p in layer._parameters.values() if p is not None), None)
    return (next(layer.parameters()) if first is None else first).device


# ---- recomputation ---------------------------------------------------------------------------------------
# A log of the values that a forward read from its layers' state, and the replay that gives a second run the same.
#
# While a `Log` is written, what layers read from state that moves on (delayed scaling's factors, the counts of the
# noise) is noted layer by layer; while it is replayed, they are given that instead and write nothing. Logs nest: what
# is read inside the replay of one goes into those that are being written.

_C: Any = torch._C
#: () to the number of the backward that runs in this thread, -1 outside of one. Without it no recomputation is seen.
graph_task_id: Callable[[], int] = getattr(_C, "_current_graph_task_id", lambda: -1)

#: (the layer, what it read).
Key = tuple[int, str]


class _State(threading.local):
    """The logs that this thread writes and replays; backward has its own thread on a GPU."""

    writing: "tuple[ReadLog, ...]" = ()
    replay: "Replay | None" = None


state = _State()


def replaying() -> bool:
    """True while a forward runs again whose first run was logged: then nothing is noted and no state moves on."""
    return not is_tracing() and state.replay is not None


def recomputing() -> bool:
    """Whether a backward is running: what runs forward inside it is checkpointing's recomputation."""
    return not is_tracing() and graph_task_id() != -1


def recorded_amax(layer: object, what: str, present: Any) -> Any:
    """What a layer read, and whether the first run read it; the present value otherwise, which is logged."""
    key = id(layer), what
    if state.replay is not None:
        present = state.replay.next(key, present)
    for log in state.writing:
        log.entries[key].append(present)
    return present


class ReadLog:
    """A context manager in which reads are noted."""

    def __init__(self) -> None:
        self.entries: defaultdict[Key, list[Any]] = defaultdict(list)

    def __enter__(self) -> None:
        state.writing = (*state.writing, self)

    def __exit__(self, *_: object) -> None:
        state.writing = state.writing[:-1]


class Replay:
    """A context manager in which reads give what a log holds, from its start; it may be entered again."""

    def __init__(self, log: ReadLog) -> None:
        self.log = log
        self.before: list[tuple[tuple[ReadLog, ...], Replay | None, dict[Key, int]]] = []
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
