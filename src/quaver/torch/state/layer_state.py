"""State of a layer besides its parameters and buffers: one `LayerState` object, created with the layer.

Copies, pickles and transfers to other processes preserve `serial`, `delayed` and the set of layers copied together;
everything else is recreated on demand.
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

# ---- layer state ----

#: Value of `LayerState.last` for a layer that has not run.
NEVER: Any = object()


class LayerState:
    """State of a quantizable layer; get it by `state_of`."""

    __slots__ = (
        *("__weakref__", "agreed", "announced", "copied", "delayed", "drawn", "factors", "family", "initial", "last"),
        *(
            "buffers_recipe",
            "members",
            "newest",
            "number",
            "pieces",
            "recorded_unsynchronized",
            "seen",
            "serial",
            "stacked",
            "stage",
        ),
        *("step", "streams", "views", "is_observed"),
        "weights",
    )

    def __init__(
        self, serial: int | None = None, delayed: Recipe | None = None, copied: bool = False, family: Any = None
    ) -> None:
        #: Number of the noise streams of a layer without a name: 0 outside of an autocast, None before first use. See
        #: `quaver.torch.state.noise`.
        self.serial = serial
        #: Recipe that the history belongs to.
        self.delayed = delayed
        #: True for a copy that has not run, which may exist on one rank only.
        self.copied = copied
        #: Recipe of the last forward, reused by its recomputation inside backward; `NEVER` before the first.
        self.last: Recipe | None = NEVER
        #: True if counters, logs or modes observed the last forward. Its recomputation reuses the value, because it
        #: must save the same tensors. None if that forward saved nothing for backward.
        self.is_observed: bool | None = None
        #: Recipe for which the layer's buffers were created.
        self.buffers_recipe: Recipe | None = None
        #: Cached operands of the weight: see `quaver.torch.state.weight_cache`.
        self.weights: Any = None
        #: Delayed scaling (`quaver.torch.state.history`): number by which compiled code finds the layer, buffers as
        #: numpy views, views of the newest amaxes for kernels, (stack, index) of the launch that rolls the history, and
        #: the factors of the last call by a fast plan.
        self.number: Tensor | None = None
        self.views: Any = None
        self.newest: Any = None
        self.stacked: Any = None
        self.factors: Any = None
        #: Step of delayed scaling that the layer ran in: see `quaver.torch.state.history.scaling_step`.
        self.step: Any = None
        #: Layers converted together, and True if the history has amaxes of no step: from compiled code or a checkpoint.
        self.family = family
        self.recorded_unsynchronized = False
        #: Row 0 of the history as all ranks had it when they last synchronized it.
        self.agreed: list[float] | None = None
        #: Pipeline stage of the layer, which distinguishes equal layers of different stages.
        self.stage: int | None = None
        #: Noise streams, with the name or serial they were derived from: see `quaver.torch.state.noise`.
        self.streams: tuple[Any, dict[str, Tensor], dict[str, Any]] | None = None
        #: Noise arguments of a layer with a fast plan on a GPU.
        self.drawn: Any = None
        #: Rows of each matrix by name if the weight concatenates several, such as gate and up.
        self.pieces: dict[str, int] = {}
        #: Names of the members if the weight is a stack of matrices, such as experts. Each member has the history,
        #: counts and noise streams of a layer of that name. Empty for other layers.
        self.members: tuple[str, ...] = ()
        #: Members that the last forward saw, if they are separate parameters on the ranks of a mesh.
        self.seen: Any = None
        #: Initial high-precision value of a weight that is stored as codes, on the CPU.
        self.initial: Tensor | None = None
        #: True once a warning about the layer's features was issued.
        self.announced = False

    def __reduce__(self) -> Any:
        return _copy, (self.serial, self.delayed, self.family, self.pieces, self.members)


def _copy(
    serial: int | None, delayed: Recipe | None, family: Any = None, pieces: Any = None, members: tuple[str, ...] = ()
) -> LayerState:
    # `recipes.get` returns the unique object of a recipe; recipes are compared by identity.
    state = LayerState(serial, None if delayed is None else recipes.get(delayed), copied=True, family=family)
    state.pieces, state.members = dict(pieces or {}), members
    return state


def state_of(layer: nn.Module) -> LayerState:
    """Return the state of a quantizable layer."""
    state: LayerState = layer.__dict__["_state"]
    return state


def device_of(layer: nn.Module) -> torch.device:
    """Return the device of a layer's first parameter, its own or that of a submodule such as a parametrization."""
    first = next((p for p in layer._parameters.values() if p is not None), None)
    return (next(layer.parameters()) if first is None else first).device


# ---- recomputation: log the state that a forward reads, and replay it ----
# While a `ReadLog` is open, reads of changing state (delayed-scaling factors, noise counters) are recorded per layer.
# While it is replayed, layers get the recorded values and write nothing. Logs nest: reads during a replay go to the
# logs that are open.

_C: Any = torch._C
#: Returns the number of the backward that runs in this thread, -1 outside of one. If torch lacks it, recomputation is
#: not detected.
graph_task_id: Callable[[], int] = getattr(_C, "_current_graph_task_id", lambda: -1)

#: (id of the layer, name of the value).
Key = tuple[int, str]


class _State(threading.local):
    """Logs that this thread writes and replays; on a GPU backward has its own thread."""

    writing: "tuple[ReadLog, ...]" = ()
    replay: "Replay | None" = None


state = _State()


def replaying() -> bool:
    """Return True while a logged forward is recomputed: nothing is recorded and no state changes."""
    return not is_tracing() and state.replay is not None


def recomputing() -> bool:
    """Return True while a backward runs; a forward inside it is a recomputation of checkpointing."""
    return not is_tracing() and graph_task_id() != -1


def logged_or_replayed(layer: object, what: str, present: Any) -> Any:
    """Return the value that the first run read, during a replay, else `present`; open logs record it."""
    key = id(layer), what
    if state.replay is not None:
        present = state.replay.next(key, present)
    for log in state.writing:
        log.entries[key].append(present)
    return present


class ReadLog:
    """Context manager that records reads of layer state."""

    def __init__(self) -> None:
        self.entries: defaultdict[Key, list[Any]] = defaultdict(list)

    def __enter__(self) -> None:
        state.writing = (*state.writing, self)

    def __exit__(self, *_: object) -> None:
        state.writing = state.writing[:-1]


class Replay:
    """Context manager in which reads return the values of a log from its start; may be entered again."""

    def __init__(self, log: ReadLog) -> None:
        self.log = log
        self.before: list[tuple[tuple[ReadLog, ...], Replay | None, dict[Key, int]]] = []
        self.done: dict[Key, int] = {}

    def next(self, key: Key, present: Any) -> Any:
        """Return the next recorded value of a key, or `present` if the first run had fewer reads."""
        at = self.done.get(key, 0)
        self.done[key] = at + 1
        values = self.log.entries.get(key, ())
        return values[at] if at < len(values) else present

    def __enter__(self) -> None:
        self.before.append((state.writing, state.replay, self.done))
        state.writing, state.replay, self.done = (), self, {}

    def __exit__(self, *_: object) -> None:
        state.writing, state.replay, self.done = self.before.pop()
