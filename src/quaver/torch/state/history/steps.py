"""Steps of delayed scaling: which layers each of them ran, and when it is over, so that their histories roll.

A step lasts, in its thread, from one outermost `autocast` that is entered with gradients to the next. The layers that
ran in it roll together: where the next step begins if no backward is owed to any of them, else when the first of them
runs in a later step. So a model between its forward and its backward is left alone whatever other models do meanwhile,
and micro-batches whose backwards come later roll before each forward. A converted model that runs outside of any
autocast rolls its own layers at each forward of its root. Where neither comes by, since a wrapper calls a part of the
model or `model.forward` itself, a step is over once a backward has run in it: the first layer that then runs forward
with gradients begins the next, as an autocast there would.

Compiled layers belong to no step, since a compiler does not come by here: they roll where any thread begins one.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quaver.core.spec import Recipe
from quaver.torch.state.history import amax, rolling
from quaver.torch.state.layer import state_of
from quaver.torch.state.recomputation import recomputing

_numbers = itertools.count()
#: Held while layers change steps and while they roll.
_lock = threading.RLock()
#: Whether the backward that runs was asked to retain its graph; False where torch does not tell.
graph_is_retained: Callable[[], bool] = getattr(
    getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", lambda: False
)


class Step:
    """One step of one thread."""

    __slots__ = ("group", "inside", "number", "of_root", "owed", "rolled_in", "settled", "thread")

    def __init__(self, thread: object, group: Any = None, of_root: bool = False) -> None:
        self.thread = thread
        #: The process group that its layers' maxima are reduced over.
        self.group = group
        #: Whether its layers roll at each forward of their converted root.
        self.of_root = of_root
        self.number = next(_numbers)
        #: Whether its autocast is open.
        self.inside = False
        #: Forwards that have not run their backward; adding and discarding is safe in any thread.
        self.owed: set[weakref.ref[Owed]] = set()
        #: Whether a backward of its layers has run.
        self.settled = False
        #: The number of the step in which its layers rolled last.
        self.rolled_in = -1


class _Thread(threading.local):
    def __init__(self) -> None:
        self.me = object()
        #: None inside an outermost autocast that begins no step: no layer rolls there.
        self.now: Step | None = Step(self.me)


_thread = _Thread()


class Owed:
    """A forward that owes its backward, and lives as long as its graph."""

    __slots__ = ("__weakref__", "entry", "step")

    step: Step
    #: In what the step is owed. Where this object goes the entry goes, without a call of Python.
    entry: "weakref.ref[Owed]"

    def settle(self) -> None:
        """Its backward runs now, and not again unless the graph is retained."""
        step = self.step
        step.settled = True
        if not graph_is_retained():
            step.owed.discard(self.entry)


def enter(rolls: bool, group: Any, recipe: Recipe | None) -> Step | None:
    """Enter an outermost autocast. Returns what `leave` takes.

    Args:
        rolls: whether a step begins, and those that are over end: their layers roll, after one all-reduce.
        group: process group of the layers that will run.
        recipe: of layers that were given a history by a checkpoint and have not run under any yet.
    """
    before = _thread.now
    if not rolls:
        _thread.now = None
        return before
    _begin(group, recipe).inside = True
    return before


def _begin(group: Any = None, recipe: Recipe | None = None) -> Step:
    """A step begins in this thread, and the earlier ones that are over end."""
    step = Step(_thread.me, group)
    layers = amax.layers()
    if layers:
        if rolling.has_ranks(group):
            rolling.reduce([layer for layer in layers if _reduced_over(layer, group)], group)
        _end_earlier(layers, step, recipe)
    _thread.now = step
    return step


def _end_earlier(layers: Sequence[nn.Module], step: Step, recipe: Recipe | None) -> None:
    """Roll the layers whose steps in this thread are over, now that another begins."""
    with _lock:
        due = []
        for layer in layers:
            old: Step | None = state_of(layer).step
            if old is None:
                due.append(layer)
            elif old.thread is step.thread and not old.owed:
                old.rolled_in = step.number
                due.append(layer)
        rolling.roll(due, recipe)


def leave(before: Step | None) -> None:
    """Leave an outermost autocast. Its step lasts on, for layers that run between autocasts."""
    if _thread.now is None:
        _thread.now = before
    else:
        _thread.now.inside = False


def _reduced_over(layer: nn.Module, group: Any) -> bool:
    """Whether a group is the layer's own, as far as is known: the same answer on all ranks that run alike.

    It is asked of all layers, those that are not over included, since reducing a maximum twice does no harm, and which
    layers ran may differ from rank to rank.
    """
    step: Step | None = state_of(layer).step
    return step is None or rolling.same_group(step.group, group)


def factors(layer: nn.Module, record: bool) -> Tensor | list[float]:
    """`amax.saved_factors` of a layer that runs now and joins the step of its thread.

    Args:
        record: whether its amaxes will be noted.
    """
    if not torch.compiler.is_compiling():
        join(layer, record)
    return amax.saved_factors(layer)


def join(layer: nn.Module, record: bool) -> None:
    """The layer runs in this thread's step; what it ran in an earlier one rolls first."""
    step, old = _thread.now, layer._state.step  # type: ignore[union-attr]
    if step is None or (old is step and (step.inside or not step.settled)):
        return
    # A forward without gradients rolls only inside an autocast that was entered with them, as reentrant checkpoints do.
    if not (record or step.inside) or recomputing():
        return
    with _lock:
        old = state_of(layer).step
        if old is not None:
            if old.inside and old.thread is not step.thread:
                # A layer that two threads share, in the other's step yet.
                return
            if old.of_root and not step.inside and not old.settled:
                return
        if not step.inside and (step.settled or (old is not None and old.of_root)):
            # Neither an autocast nor the root has come by since a backward.
            step = _begin(step.group)
        if old is not None and old.rolled_in != step.number:
            old.rolled_in = step.number
            rolling.roll([other for other in amax.layers() if state_of(other).step is old])
        state_of(layer).step = step


def owed(layer: nn.Module) -> Owed | None:
    """What the forward of a layer that has joined keeps until its backward."""
    step: Step | None = layer._state.step  # type: ignore[union-attr, assignment]
    if step is None:
        return None
    forward = Owed()
    forward.step, owed = step, step.owed
    entry = forward.entry = weakref.ref(forward, owed.discard)
    owed.add(entry)
    return forward


def roll_root(layers: Sequence[nn.Module]) -> None:
    """End the step of a converted model, all of whose layers with a history these are."""
    rolling.reduce(layers)
    if torch.compiler.is_compiling():
        rolling.roll(layers)
        return
    step = Step(_thread.me, of_root=True)
    with _lock:
        rolling.roll(layers)
        for layer in layers:
            state_of(layer).step = step
