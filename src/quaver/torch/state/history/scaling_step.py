"""Steps of delayed scaling: which layers ran in a step, and when it ends, so that their histories are rolled.

A step lasts, in its thread, from one outermost `autocast` entered with gradients to the next. Layers that ran in a step
roll together: when the next step begins if none of them has a pending backward, else when the first of them runs in a
later step. So a model between forward and backward is left alone whatever other models do, and micro-batches with later
backwards roll before each forward. A converted model outside of any autocast rolls its layers at each forward of its
root. If only a part of the model is called outside of autocast, a step ends once a backward has run in it: the next
forward with gradients begins a new one.

With several ranks the amaxes of a layer are reduced over its process group: that of the last autocast in which it or a
layer converted with it ran, else the default group. Its ranks may have different layers, such as pipeline stages
(`sync.reduce`). A step of one group does not affect the layers of others. So ranks must run the layers of a group in
the same order. Threads that train concurrently need separate groups, as with DistributedDataParallel. Pipeline ranks
run stages at different times and synchronize only when they enter autocast.

Compiled layers belong to no step, because compiled code does not run this module: they roll when any thread begins a
step.
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
#: Locked while layers change steps and while they roll; no rank waits for another one meanwhile.
_lock = threading.RLock()
#: Returns True if the running backward retains its graph; always False if torch does not expose that.
graph_is_retained: Callable[[], bool] = getattr(
    getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", lambda: False
)


class ScalingStep:
    """One step of one thread."""

    __slots__ = ("group", "inside", "number", "of_root", "pending", "reduced_in", "rolled_in", "settled", "thread")

    def __init__(self, thread: object, group: Any = None, of_root: bool = False) -> None:
        self.thread = thread
        #: Process group over which the layers' amaxes are reduced.
        self.group = group
        #: True if its layers roll at each forward of their converted root.
        self.of_root = of_root
        self.number = next(_numbers)
        #: True while its autocast is open.
        self.inside = False
        #: Forwards with a pending backward; adding and discarding is thread-safe.
        self.pending: set[weakref.ref[PendingBackward]] = set()
        #: True once a backward of its layers has run.
        self.settled = False
        #: Number of the step in which its layers last rolled.
        self.rolled_in = -1
        #: Number of the step in which their amaxes were last reduced, or -1 if a backward has recorded new ones since.
        self.reduced_in = -1


class _ScalingThreadState(threading.local):
    def __init__(self) -> None:
        self.me = object()
        #: None inside an outermost autocast that begins no step, where no layer rolls.
        self.now: ScalingStep | None = ScalingStep(self.me)
        #: Latest step of each group.
        self.latest: dict[Any, ScalingStep] = {None: self.now}

    def of(self, group: Any) -> ScalingStep:
        """Return the latest step of a group, in the form that `roll.own` returns."""
        step = self.latest.get(group)
        if step is None:
            step = self.latest[group] = ScalingStep(self.me, group)
        return step


_thread = _ScalingThreadState()


class LayerGroup:
    """Layers that were converted together. Ranks may run different ones of them; a copy gets its own LayerGroup."""

    __slots__ = ("recorded_unsynchronized", "step")

    def __init__(self, step: ScalingStep | None = None) -> None:
        #: Step that a layer of the group joined last.
        self.step = step
        #: True if compiled code has run one of the layers.
        self.recorded_unsynchronized = False

    def __reduce__(self) -> Any:
        return LayerGroup, ()


class PendingBackward:
    """A forward whose backward is pending; lives as long as the autograd graph."""

    __slots__ = ("__weakref__", "entry", "step")

    step: ScalingStep
    #: Entry in `ScalingStep.pending`, removed without Python code when this object is freed.
    entry: "weakref.ref[PendingBackward]"

    def finish(self) -> None:
        """Mark the backward as run; it will not run again unless the graph is retained."""
        step = self.step
        step.settled, step.reduced_in = True, -1
        if not graph_is_retained():
            step.pending.discard(self.entry)


def enter(rolls: bool, group: Any, recipe: Recipe | None) -> ScalingStep | None:
    """Enter an outermost autocast; returns the argument of `leave`.

    Args:
        rolls: True to begin a step: finished steps end and their layers roll, after one all-reduce.
        group: process group of the layers that will run.
        recipe: recipe for layers that got a history from a checkpoint and have not run yet.
    """
    before = _thread.now
    if not rolls:
        _thread.now = None
        return before
    _begin(group, recipe).inside = True
    return before


def _begin(group: Any = None, recipe: Recipe | None = None) -> ScalingStep:
    """Begin a step of a group in this thread, and end its finished steps."""
    step = ScalingStep(_thread.me, roll.own(group))
    # Holds no list of layers, so that dropped layers can be collected.
    _reduce(step.group, step, recipe)
    _end_earlier(amax.layers(), step, recipe)
    _thread.now = _thread.latest[step.group] = step
    return step


def _reduce(group: Any, step: ScalingStep, recipe: Recipe | None = None) -> None:
    """Reduce the amaxes of a group's layers, which will roll in `step`.

    Args:
        recipe: recipe of the step. Other ranks of the default group may have layers of it even if this one has none.
    """
    if not roll.has_ranks(group):
        return
    # Other ranks may have layers of the recipe even if this one has none.
    is_delayed = recipe is not None and recipe.delayed is not None
    sync.reduce(partial(_reduced, group), group, sync.ROLLS, always=is_delayed)
    for old in (state_of(layer).step for layer in _reduced(group)):
        if old is not None:
            old.reduced_in = step.number


def _reduced(group: Any) -> list[nn.Module]:
    """Return this rank's layers whose amaxes are reduced over a group."""
    return [layer for layer in amax.layers() if _reduced_over(layer, group)]


def _end_earlier(layers: Sequence[nn.Module], step: ScalingStep, recipe: Recipe | None) -> None:
    """Roll the group's layers whose steps in this thread are finished."""
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
    """Reduce row 0 of each history over the ranks of its layer, as the next step would.

    A checkpoint saved now then has the values with which an uninterrupted run rolls. All ranks must call this, even
    without a history. Reducing a maximum twice does not change it.
    """
    if not roll.has_ranks(None):
        return
    requested = set(layers)
    own: list[Any] = [layer for layer in amax.layers() if layer in requested and not layer.history.is_meta]
    # Other ranks may have layers of the default group even if this one has none.
    groups: dict[Any, list[nn.Module]] = {None: []}
    for layer in own:
        known = _last(layer)
        groups.setdefault(None if known is None else known.group, []).append(layer)
    # Sorted, because ranks whose layers come in another order must reduce the groups in the same order, or they
    # deadlock.
    for group in sorted(groups, key=lambda group: "" if group is None else str(group.group_name)):
        sync.reduce(partial(list, groups[group]), group, sync.AGREES)
    for layer in own:
        state_of(layer).agreed = amax.newest_row(layer.history).flatten().tolist()


def is_agreed(layer: nn.Module) -> bool:
    """Return True if row 0 of a layer's history is the same on all ranks: empty, or as `agree` has left it."""
    history = layer._buffers["history"]
    if history is None or history.is_meta or not roll.has_ranks(None):
        return True
    newest = amax.newest_row(history).flatten().tolist()
    return not any(newest) or newest == state_of(layer).agreed


def leave(before: ScalingStep | None) -> None:
    """Leave an outermost autocast; its step continues for layers that run between autocasts."""
    if _thread.now is None:
        _thread.now = before
    else:
        _thread.now.inside = False


def _last(layer: nn.Module) -> ScalingStep | None:
    """Return the step in which a layer, or one converted with it, ran last."""
    state = state_of(layer)
    step: ScalingStep | None = state.step
    if step is None and state.family is not None:
        step = state.family.step
    return step


def _reduced_over(layer: nn.Module, group: Any) -> bool:
    """Return True if the group is known to be the layer's own, with the same result on all ranks that run the group's
    layers.

    Asked for all layers, finished or not: reducing a maximum twice is harmless, and the layers that ran may differ by
    rank.
    """
    state, step = state_of(layer), _last(layer)
    if state.copied:
        # A copy, such as a weight average, may exist on one rank only.
        return False
    if step is not None:
        return step.group is group
    # Ranks may hold different layers that never ran in a step.
    family: LayerGroup | None = state.family
    if state.recorded_unsynchronized or (family is not None and family.recorded_unsynchronized):
        return True
    # Layers constructed with a recipe have a history from the start, and a rank may have run others of them.
    return family is None and layer.recipe is not None


def together(layers: Sequence[nn.Module]) -> None:
    """Record that layers belong to one model, which all its ranks hold completely."""
    family = LayerGroup(_latest(layers))
    for layer in layers:
        state_of(layer).family = family


def _latest(layers: Sequence[nn.Module]) -> ScalingStep | None:
    known = [step for step in map(_last, layers) if step is not None]
    return max(known, key=lambda step: step.number, default=None)


def group_of(layers: Sequence[nn.Module]) -> Any:
    """Return the process group given for a model's layers; None if `sync` must find it."""
    known = _latest(layers) if roll.has_ranks(None) else None
    return None if known is None else known.group


def _is_unseen(layer: nn.Module) -> bool:
    """Return True for a copy that has not run and may be missing on other ranks, such as one that a single rank
    evaluates.
    """
    return state_of(layer).copied and roll.has_ranks(None)


def _copied_with(layer: nn.Module) -> list[nn.Module]:
    """Return a copy that has not run yet, with the layers that were converted and copied together with it."""
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
    """Join the layer to its thread's step and return `amax.saved_factors`.

    Args:
        record: True if the forward's amaxes will be recorded.
    """
    if not is_tracing():
        join(layer, record)
    return amax.saved_factors(layer)


def join(layer: nn.Module, record: bool) -> None:
    """Join the layer to this thread's step; layers of its earlier step roll first."""
    state: Any = layer._state
    step, old = _thread.now, state.step
    if step is None or (old is step and (step.inside or not step.settled)):
        return
    # Without gradients it rolls only inside an autocast that was entered with them, as reentrant checkpoints do.
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
    # Ranks wait for each other here; this thread waits for no other thread.
    if not step.inside:
        step = _outside(layer, old)
        if step is None:
            return
    rolls = old is not None and old.rolled_in != step.number
    if rolls and old.reduced_in != step.number:
        _reduce(old.group, step)
    if copied:
        sync.reduce(lambda: copied, step.group, sync.ROLLS)
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
    """Return the step that a layer joins outside of every autocast, or None to stay in its present step.

    A new step begins here if a backward has run since the last one began.
    """
    if old is not None and old.of_root and not old.settled:
        return None
    refuse_stage(layer)
    known = _last(layer)
    step = _thread.of(None if known is None else known.group)
    if step.settled or (old is not None and old.of_root):
        return _begin(step.group)
    return None if old is step else step


def refuse_stage(layer: nn.Module) -> None:
    """Raise if a pipeline stage runs outside of every autocast.

    Raises:
        ValueError: micro-batches of different stages have no common end of a step.
    """
    stage = state_of(layer).stage
    if stage is not None:
        raise ValueError(
            f"stage {stage} of a pipeline ran under delayed scaling outside of autocast, where micro-batches cannot be "
            "distinguished from steps; enter quaver.torch.autocast(recipe) around schedule.step(...) on all ranks"
        )


def _roll_copied(layers: Sequence[nn.Module]) -> None:
    roll.roll(layers)
    for layer in layers:
        state_of(layer).copied = False


def _is_elsewhere(old: ScalingStep | None, step: ScalingStep) -> bool:
    """Return True if a layer shared by two threads is still in the open step of the other thread."""
    return old is not None and old.inside and old.thread is not step.thread


def pending(layer: nn.Module) -> PendingBackward | None:
    """Return the handle that the forward of a joined layer keeps until its backward."""
    step: ScalingStep | None = layer._state.step  # type: ignore[union-attr, assignment]
    if step is None:
        return None
    forward = PendingBackward()
    forward.step, pending = step, step.pending
    entry = forward.entry = weakref.ref(forward, pending.discard)
    pending.add(entry)
    return forward


def roll_root(layers: Sequence[nn.Module]) -> None:
    """End the step of a converted model; `layers` are all its layers with a history."""
    if is_tracing():
        roll.reduce(layers)
        roll.roll(layers)
        return
    step = ScalingStep(_thread.me, group_of(layers), of_root=True)
    for layer in layers:
        refuse_stage(layer)
    if roll.has_ranks(None):
        roll.refuse_join()
    sync.reduce(lambda: layers, step.group, sync.FORWARD)
    with _lock:
        _roll_copied(layers)
        for layer in layers:
            _put(layer, step)
