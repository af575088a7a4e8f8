"""Which ranks hold the same layers: over those a layer's maxima are reduced where no process group is given.

Ranks of a pipeline hold different layers, and maxima of one stage say nothing of another's. So ranks tell each other
once, where a step begins, which layers they would reduce; those that name the same ones are a group. With replicas
alone that is the default group.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from quaver.torch.state.history import amax
from quaver.torch.state.layer import state_of

#: What stands for a group of this rank alone: nothing is reduced.
ALONE = object()
#: A layer as other ranks know it: its stage, name, class and features.
Name = tuple[Any, ...]


class _Known:
    """What ranks of one default group have told each other."""

    def __init__(self, world: Any) -> None:
        self.world = world
        #: Of layers by their numbers, the group to which they belong.
        self.groups: dict[tuple[int, ...], Any] = {}
        #: Process groups by their ranks: the same layers in another order make no new one.
        self.of_ranks: dict[tuple[int, ...], Any] = {}


_lock = threading.RLock()
_known: _Known | None = None


def group_of(layers: Sequence[nn.Module], told: Any) -> Any:
    """The group over which layers are reduced: the one that was told, else that of the ranks with the same layers.

    Where none was told, all ranks of the default group come here with their own layers, which may be none. They
    communicate once for each set of layers.

    Args:
        layers: in order of construction.
        told: a process group, or None.
    Returns:
        A process group, None for the default one, or `ALONE`.
    """
    global _known
    if told is not None:
        return told
    with _lock:
        world = dist.group.WORLD
        if _known is None or _known.world is not world:
            _known = _Known(world)
        numbers = tuple(amax.number_of(layer) for layer in layers)
        if numbers not in _known.groups:
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, [_name(layer) for layer in layers])
            if not any(every):
                # One may have layers the next time, and tells of them.
                return ALONE
            _known.groups[numbers] = _group_among(_known, every)
        return _known.groups[numbers]


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
            known.of_ranks[ranks] = dist.new_group(list(ranks))
        if rank in ranks:
            group = known.of_ranks[ranks]
    return group


def _name(layer: nn.Module) -> Name:
    state = state_of(layer)
    features = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    return state.stage, layer.__dict__.get("qualified_name"), type(layer).__name__, *features
