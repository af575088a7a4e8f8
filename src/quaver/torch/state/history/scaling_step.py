"""Steps of delayed scaling: which layers each of them ran, and when it is over, so that their histories roll.

A step lasts, in its thread, from one outermost `autocast` that is entered with gradients to the next. The layers that
ran in it roll together: where the next step begins if no backward is owed to any of them, else when the first of them
runs in a later step. So a model between its forward and its backward is left alone whatever other models do meanwhile,
and micro-batches whose backwards come later roll before each forward. A converted model that runs outside of any
autocast rolls its own layers at each forward of its root. Where neither comes by, since a wrapper calls a part of the
model or `model.forward` itself, a step is over once a backward has run in it: the first layer that then runs forward
with gradients begins the next, as an autocast there would.

With several ranks a layer's maxima are reduced over its own process group: the one of the autocast that it ran in last,
or that those ran in which were converted with it. Where none was given, outside of every autocast too, it is that of
the ranks which hold the same layers (`alike`): stages of a pipeline share nothing. A step of one group leaves the
layers of others alone: they roll when they run. So ranks must run alike what belongs to a group, and nothing else;
threads that train at once have a group each, as DistributedDataParallel asks of them too. Ranks of one pipeline run its
stages at different times: they wait for each other only where they enter an autocast.

Compiled layers belong to no step, since a compiler does not come by here: they roll where any thread begins one.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.state.history import amax, roll, sync
from quaver.torch.state.layer_state import recomputing, state_of

_numbers = itertools.count()
#: Held while layers change steps and while they roll; no rank waits for another one meanwhile.
_lock = threading.RLock()
#: Whether the backward that runs was asked to retain its graph; False where torch does not tell.
graph_is_retained: Callable[[], bool] = getattr(
    getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", lambda: False
)


class ScalingStep:
    """One step of one thread."""

    __slots__ = ("group", "inside", "number", "of_root", "pending", "reduced_in", "rolled_in", "settled", "thread")

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
        self.pending: set[weakref.ref[PendingBackward]] = set()
        #: Whether a backward of its layers has run.
        self.settled = False
        #: The number of the step in which its layers rolled last.
        self.rolled_in = -1
        #: The number of the step in which their maxima were reduced last, unless a backward has noted others since.
        self.reduced_in = -1


class _ScalingThreadState(threading.local):
    def __init__(self) -> None:
        self.me = object()
        #: None inside an outermost autocast that begins no step: no layer rolls there.
        self.now: ScalingStep | None = ScalingStep(self.me)
        #: The latest step of each group.
        self.latest: dict[Any, ScalingStep] = {None: self.now}

    def of(self, group: Any) -> ScalingStep:
        """The latest step of a group, as `rolling.own` gives it."""
        step = self.latest.get(group)
        if step is None:
            step = self.latest[group] = ScalingStep(self.me, group)
        return step


_thread = _ScalingThreadState()


class LayerGroup:
    """Layers that were converted together, of which a rank may run others than another rank does; a copy of them is
    another family."""

    __slots__ = ("recorded_apart", "step")

    def __init__(self, step: ScalingStep | None = None) -> None:
        #: The one that a layer of it joined last.
        self.step = step
        #: Whether compiled code has run one.
        self.recorded_apart = False

    def __reduce__(self) -> Any:
        return LayerGroup, ()


class PendingBackward:
    """A forward that owes its backward, and lives as long as its graph."""

    __slots__ = ("__weakref__", "entry", "step")

    step: ScalingStep
    #: In what the step is owed. Where this object goes the entry goes, without a call of Python.
    entry: "weakref.ref[PendingBackward]"

    def settle(self) -> None:
        """Its backward runs now, and not again unless the graph is retained."""
        step = self.step
        step.settled, step.reduced_in = True, -1
        if not graph_is_retained():
            step.pending.discard(self.entry)


def enter(rolls: bool, group: Any, recipe: Recipe | None) -> ScalingStep | None:
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


def _begin(group: Any = None, recipe: Recipe | None = None) -> ScalingStep:
    """A step of a group begins in this thread, and the earlier ones that are over end."""
    step = ScalingStep(_thread.me, roll.own(group))
    # No list of layers is held here: what else is gone must be collected.
    _reduce(step.group, step, recipe)
    _end_earlier(amax.layers(), step, recipe)
    _thread.now = _thread.latest[step.group] = step
    return step


def _reduce(group: Any, step: ScalingStep, recipe: Recipe | None = None) -> None:
    """Reduce the maxima of a group's layers, which roll in a step that has begun.

    Args:
        recipe: the step's own; other ranks of the default group may have layers of it though this one has none.
    """
    if not roll.has_ranks(group):
        return
    # They may hold layers that have run or have their recipe by construction, and tell of them.
    waits = group is None and recipe is not None and recipe.delayed is not None
    agreed = sync.agreed_layers(partial(_reduced, group), group, waits)
    layers = _reduced(group)
    for old in (state_of(layer).step for layer in layers):
        if old is not None:
            old.reduced_in = step.number
    if agreed is not None:
        roll.reduce_agreed(agreed, layers)


def _reduce_alike(layers: Sequence[nn.Module], group: Any, where: str) -> None:
    """Reduce maxima of layers that no rank has collected over the group that was given, else over the ranks that have
    them."""
    if roll.has_ranks(group):
        group = sync.group_of(layers, group, where)
        if group is not sync.ALONE:
            roll.reduce(sync.sort_by_key(layers), group)


def _reduced(group: Any) -> list[nn.Module]:
    """The layers of this rank whose maxima are reduced over a group."""
    return [
        layer
        for layer in amax.layers()
        if _reduced_over(layer, group) and not layer._buffers["history"].is_meta  # type: ignore[union-attr]
    ]


def _end_earlier(layers: Sequence[nn.Module], step: ScalingStep, recipe: Recipe | None) -> None:
    """Roll the group's layers whose steps in this thread are over, now that another begins."""
    thread, group = step.thread, step.group
    with _lock:
        due = []
        for layer in layers:
            # `state_of` without a call.
            state: Any = layer._state
            old: ScalingStep | None = state.step
            if old is None:
                known = _last(layer)
                if (known is None or known.group is group) and not _is_unseen(layer):
                    due.append(layer)
            elif old.thread is thread and old.group is group and not old.pending:
                old.rolled_in = step.number
                due.append(layer)
        roll.roll(due, recipe)


def agree(layers: Sequence[nn.Module]) -> None:
    """Row 0 of each history becomes the maximum over the ranks of its layer, as where the next step begins.

    A checkpoint that is written now holds what a run that goes on rolls by.

    All ranks come here alike, one without a history too. A maximum that is reduced twice stays what it is.
    """
    if not roll.has_ranks(None):
        return
    asked = set(layers)
    own: list[Any] = [layer for layer in amax.layers() if layer in asked and not layer.history.is_meta]
    # Others may have layers of the default group though this one has none.
    groups: dict[Any, list[nn.Module]] = {None: []}
    for layer in own:
        known = _last(layer)
        groups.setdefault(None if known is None else known.group, []).append(layer)
    # Ranks whose layers come in another order reduce the same group at the same time, or they wait for one another.
    for group in sorted(groups, key=lambda group: "" if group is None else str(group.group_name)):
        _reduce_alike(groups[group], group, sync.AGREES)
    for layer in own:
        state_of(layer).agreed = amax.newest_row(layer.history).flatten().tolist()


def is_agreed(layer: nn.Module) -> bool:
    """Whether row 0 of a layer's history is that of all its ranks: nothing, or what `agree` has left there."""
    history = layer._buffers["history"]
    if history is None or history.is_meta or not roll.has_ranks(None):
        return True
    newest = amax.newest_row(history).flatten().tolist()
    return not any(newest) or newest == state_of(layer).agreed


def leave(before: ScalingStep | None) -> None:
    """Leave an outermost autocast. Its step lasts on, for layers that run between autocasts."""
    if _thread.now is None:
        _thread.now = before
    else:
        _thread.now.inside = False


def _last(layer: nn.Module) -> ScalingStep | None:
    """The step that a layer ran in last, or one that was converted with it."""
    state = state_of(layer)
    step: ScalingStep | None = state.step
    if step is None and state.family is not None:
        step = state.family.step
    return step


def _reduced_over(layer: nn.Module, group: Any) -> bool:
    """Whether a group is the layer's own, as far as is known: the same answer on all ranks that run the group's alike,
    whatever else they run or hold.

    It is asked of all layers, those that are not over included, since reducing a maximum twice does no harm, and which
    layers ran may differ from rank to rank.
    """
    state, step = state_of(layer), _last(layer)
    if state.copied:
        # One rank alone may hold it, such as an average of weights.
        return False
    if step is not None:
        return step.group is group
    # Of what never ran in a step, one rank may hold more than another.
    family: LayerGroup | None = state.family
    if state.recorded_apart or (family is not None and family.recorded_apart):
        return True
    # What has a recipe of its own by construction has a history from there on, and a rank may have run others of it.
    return family is None and layer.recipe is not None


def together(layers: Sequence[nn.Module]) -> None:
    """Note that layers are of one model, all of which its ranks hold."""
    family = LayerGroup(_latest(layers))
    for layer in layers:
        state_of(layer).family = family


def _latest(layers: Sequence[nn.Module]) -> ScalingStep | None:
    known = [step for step in map(_last, layers) if step is not None]
    return max(known, key=lambda step: step.number, default=None)


def group_of(layers: Sequence[nn.Module]) -> Any:
    """The process group that the maxima of a model's layers were given: None where `alike` finds theirs."""
    known = _latest(layers) if roll.has_ranks(None) else None
    return None if known is None else known.group


def _is_unseen(layer: nn.Module) -> bool:
    """Whether this is a copy that has not run, of which other ranks may have none: one rank may evaluate it alone."""
    return state_of(layer).copied and roll.has_ranks(None)


def _copied_with(layer: nn.Module) -> list[nn.Module]:
    """A copy that has not run yet, and the layers that were converted and copied with it."""
    family = state_of(layer).family
    if family is None:
        return [layer]
    return [other for other in amax.layers() if state_of(other).copied and state_of(other).family is family]


def _put(layer: nn.Module, step: ScalingStep) -> None:
    state = state_of(layer)
    state.step = step
    if state.family is not None:
        state.family.step = step


def factors(layer: nn.Module, record: bool) -> Tensor | list[float]:
    """`amax.saved_factors` of a layer that runs now and joins the step of its thread.

    Args:
        record: whether its amaxes will be noted.
    """
    if not is_tracing():
        join(layer, record)
    return amax.saved_factors(layer)


def join(layer: nn.Module, record: bool) -> None:
    """The layer runs in this thread's step; what it ran in an earlier one rolls first."""
    state: Any = layer._state
    step, old = _thread.now, state.step
    if step is None or (old is step and (step.inside or not step.settled)):
        return
    # A forward without gradients rolls only inside an autocast that was entered with them, as reentrant checkpoints do.
    if not (record or step.inside) or recomputing() or _is_elsewhere(old, step):
        return
    if roll.has_ranks(None):
        roll.refuse_join()
    copied: Sequence[nn.Module] = ()
    if state.copied:
        if _is_unseen(layer):
            if not record:
                return
            copied = _copied_with(layer)
        elif record:
            state.copied = False
    # Ranks wait for each other here, and this thread for no other one.
    if not step.inside:
        step = _outside(layer, old)
        if step is None:
            return
    rolls = old is not None and old.rolled_in != step.number
    if rolls and old.reduced_in != step.number:
        _reduce(old.group, step)
    if copied:
        roll.reduce(sync.sort_by_key(copied), step.group)
    with _lock:
        if _is_elsewhere(state.step, step):
            return
        if copied:
            _roll_copied(copied)
        if rolls:
            old.rolled_in = step.number
            roll.roll([other for other in amax.layers() if state_of(other).step is old])
        _put(layer, step)


def _outside(layer: nn.Module, old: ScalingStep | None) -> ScalingStep | None:
    """The step that a layer joins outside of every autocast, which begins here where neither one nor the root has come
    by since a backward; None where it stays in the one that it is in."""
    if old is not None and old.of_root and not old.settled:
        return None
    refuse_stage(layer)
    known = _last(layer)
    step = _thread.of(None if known is None else known.group)
    if step.settled or (old is not None and old.of_root):
        return _begin(step.group)
    return None if old is step else step


def refuse_stage(layer: nn.Module) -> None:
    """Refuse a pipeline's stage outside of every autocast.

    Raises:
        ValueError: with what to do. Micro-batches of different stages meet no common end of a step.
    """
    stage = state_of(layer).stage
    if stage is not None:
        raise ValueError(
            f"stage {stage} of a pipeline ran under delayed scaling outside of autocast: nothing tells its "
            "micro-batches from steps; enter quaver.torch.autocast(recipe) around schedule.step(...) on all ranks"
        )


def _roll_copied(layers: Sequence[nn.Module]) -> None:
    roll.roll(layers)
    for layer in layers:
        state_of(layer).copied = False


def _is_elsewhere(old: ScalingStep | None, step: ScalingStep) -> bool:
    """Whether a layer that two threads share is in the other's step yet."""
    return old is not None and old.inside and old.thread is not step.thread


def pending(layer: nn.Module) -> PendingBackward | None:
    """What the forward of a layer that has joined keeps until its backward."""
    step: ScalingStep | None = layer._state.step  # type: ignore[union-attr, assignment]
    if step is None:
        return None
    forward = PendingBackward()
    forward.step, pending = step, step.pending
    entry = forward.entry = weakref.ref(forward, pending.discard)
    pending.add(entry)
    return forward


def roll_root(layers: Sequence[nn.Module]) -> None:
    """End the step of a converted model, all of whose layers with a history these are."""
    if is_tracing():
        roll.reduce(layers)
        roll.roll(layers)
        return
    step = ScalingStep(_thread.me, group_of(layers), of_root=True)
    for layer in layers:
        refuse_stage(layer)
    if roll.has_ranks(None):
        roll.refuse_join()
    _reduce_alike(layers, step.group, sync.FORWARD)
    with _lock:
        _roll_copied(layers)
        for layer in layers:
            _put(layer, step)
