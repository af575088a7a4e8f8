"""Which ranks hold the same layers: over those a layer's maxima are reduced where no process group is given.

Ranks of a pipeline hold different layers, and maxima of one stage say nothing of another's. So ranks tell each other
once, where a step begins, which layers they would reduce; those that name the same ones are a group. With replicas
alone that is the default group.

What a rank drops is collected when its interpreter comes by, which no two do alike. So the layers of a group stay what
ranks agreed on until one joins, in the place of those that are gone go zeros, and whether one has joined on any rank is
asked of all by the header of `check_agreement` where each step begins.
"""

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from quaver.torch.state.history import amax
from quaver.torch.state.history.agreement import check_agreement
from quaver.torch.state.history.groups import new_group
from quaver.torch.state.layer import state_of

#: The calls, in the error of ranks that come to different ones.
ROLLS, AGREES = "the end of a step of delayed scaling", "agree_histories"
FORWARD = f"{ROLLS} by a forward outside of qt.autocast"
#: What stands for a group of this rank alone: nothing is reduced.
ALONE = object()
#: A layer as other ranks know it: its stage, name, class and features.
Name = tuple[Any, ...]


class Agreed:
    """The layers that a group's ranks reduce."""

    def __init__(self, layers: Sequence[nn.Module], group: Any) -> None:
        #: Their numbers, in `ordered`'s order, and the shape of what each has recorded in a step.
        self.numbers = {amax.number_of(layer): _shape_of(layer) for layer in ordered(layers)}
        #: A process group, None for the default one, or `ALONE`.
        self.group = group
        history = layers[0]._buffers["history"] if layers else None
        #: Of their histories.
        self.device = None if history is None else history.device

    def lacks(self, layers: Sequence[nn.Module]) -> bool:
        """Whether a layer has joined."""
        return any(amax.number_of(layer) not in self.numbers for layer in layers)


class _Known:
    """What ranks of one default group have told each other."""

    def __init__(self, world: Any) -> None:
        self.world = world
        #: Of layers by their numbers, the group to which they belong.
        self.groups: dict[tuple[int, ...], Any] = {}
        #: Process groups by their ranks: the same layers in another order make no new one.
        self.of_ranks: dict[tuple[int, ...], Any] = {}
        #: By the group that was told, or None.
        self.agreed: dict[Any, Agreed] = {}


_lock = threading.RLock()
_known: _Known | None = None


def group_of(layers: Sequence[nn.Module], told: Any, where: str) -> Any:
    """The group over which layers are reduced: the one that was told, else that of the ranks with the same layers.

    Where none was told, all ranks of the default group come here with their own layers, which may be none, and ask one
    another first if one has layers of which it has told nothing: where it has, others may have come here with theirs
    before, as a stage without layers does with each model.

    Args:
        layers: of this rank.
        told: a process group, or None.
        where: the call, for the error of a rank that comes to another one.
    Returns:
        A process group, None for the default one, or `ALONE`.
    """
    if told is not None:
        return told
    with _lock:
        known = _of_world()
        numbers = tuple(amax.number_of(layer) for layer in layers)
        if check_agreement(where, {}, flag=numbers not in known.groups):
            every = _told_by_all(layers)
            if not any(every):
                # One may have layers the next time, and tells of them.
                return ALONE
            known.groups[numbers] = _group_among(known, every)
        return known.groups[numbers]


def agreed(listed: Callable[[], Sequence[nn.Module]], told: Any, waits: bool) -> Agreed | None:
    """The layers that the ranks of a group reduce, and the group as `group_of` finds it; None where there are none.

    Args:
        listed: gives those of this rank that are alive, in order of construction.
        told: a process group, or None.
        waits: whether other ranks may have layers though this one has none.
    """
    with _lock:
        known = _of_world()
        before = known.agreed.get(told)
        layers = listed()
        if _joined(before, layers):
            # One that waits for its collection here may be gone elsewhere.
            del layers
            gc.collect()
            layers = listed()
        joined = _joined(before, layers)
        if told is None and (before is not None or joined or waits):
            joined = check_agreement(ROLLS, {}, flag=joined)
        if joined:
            if told is None:
                # What another rank has dropped this one has, too, but may not have collected.
                del layers
                gc.collect()
                layers = listed()
            group = _group_among(known, _told_by_all(layers)) if told is None else told
            before = known.agreed[told] = Agreed(layers, group)
        return before


def _shape_of(layer: nn.Module) -> torch.Size:
    history = layer._buffers["history"]
    assert history is not None
    return amax.newest_row(history).shape


def _joined(before: Agreed | None, layers: Sequence[nn.Module]) -> bool:
    return bool(layers) if before is None else before.lacks(layers)


def _of_world() -> _Known:
    """What is known of the default group that there is now."""
    global _known
    world = dist.group.WORLD
    if _known is None or _known.world is not world:
        _known = _Known(world)
    return _known


def ordered(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Layers in an order that is the same on ranks which have made or listed them in different ones: by their names.

    Those of one name stay in the order in which they come.
    """
    return sorted(layers, key=lambda layer: tuple(map(str, _name(layer))))


def _told_by_all(layers: Sequence[nn.Module]) -> list[list[Name]]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [_name(layer) for layer in ordered(layers)])
    return every


def _group_among(known: _Known, every: Sequence[list[Name]]) -> Any:
    if all(names == every[0] for names in every):
        return None
    rank, group = dist.get_rank(), ALONE
    # All ranks make all groups, in one order.
    for names in [names for at, names in enumerate(every) if names not in every[:at]]:
        ranks = tuple(at for at, other in enumerate(every) if other == names)
        if len(ranks) == 1 or not names:
            continue
        if ranks not in known.of_ranks:
            known.of_ranks[ranks] = new_group(ranks)
        if rank in ranks:
            group = known.of_ranks[ranks]
    return group


def _name(layer: nn.Module) -> Name:
    state = state_of(layer)
    features = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    return state.stage, layer.__dict__.get("qualified_name"), type(layer).__name__, *features
