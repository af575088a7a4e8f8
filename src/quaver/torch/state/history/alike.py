"""Find the ranks that have the same layers: delayed scaling reduces amaxes over them if it is given no process group.

Ranks of a pipeline have different layers, and amaxes of one stage must not be reduced with those of another. So ranks
gather the names of their layers once, when a step begins; ranks with the same names form a group. If all ranks have the
same layers, that is the default group.

Python frees dropped layers when its garbage collector runs, at different times on different ranks, so lists of live
layers may differ between ranks. Hence ranks reduce the layers that they agreed on, with zeros for freed ones, until a
rank has a new layer. They vote on that when each step begins, by the flag of `check_agreement`.
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

#: The names of the calls in error messages.
ROLLS, AGREES = "the end of a step of delayed scaling", "agree_histories"
FORWARD = f"{ROLLS} by a forward outside of qt.autocast"
#: In place of a process group: no other rank has these layers, and nothing is reduced.
ALONE = object()
#: (pipeline stage, qualified name, class name, in_features, out_features), which identify a layer on all ranks.
LayerKey = tuple[Any, ...]


class AgreedLayers:
    """The layers that the ranks of a group reduce."""

    def __init__(self, layers: Sequence[nn.Module], group: Any) -> None:
        #: The shape of the newest row of each history, by `amax.number_of` the layer, in the order of `sort_by_key`.
        self.shapes = {amax.number_of(layer): _shape_of(layer) for layer in sort_by_key(layers)}
        #: A process group, None for the default one, or `ALONE`.
        self.group = group
        history = layers[0]._buffers["history"] if layers else None
        #: The device of the histories.
        self.device = None if history is None else history.device

    def lacks(self, layers: Sequence[nn.Module]) -> bool:
        """Whether one of the layers is not among these."""
        return any(amax.number_of(layer) not in self.shapes for layer in layers)


class _Cache:
    """What the ranks of a default group have agreed on; another default group starts with an empty one."""

    def __init__(self, world: Any) -> None:
        self.world = world
        #: The result of `group_of` by the numbers of the layers.
        self.groups: dict[tuple[int, ...], Any] = {}
        #: Process groups by their ranks, so that no second one is made for the same ranks.
        self.by_ranks: dict[tuple[int, ...], Any] = {}
        #: The result of `agreed_layers` by its argument `group`.
        self.agreed: dict[Any, AgreedLayers] = {}


_lock = threading.RLock()
_cache: _Cache | None = None


def group_of(layers: Sequence[nn.Module], group: Any, where: str) -> Any:
    """The process group over which to reduce these layers.

    Without a given group all ranks of the default group must call this, ranks without layers too. They first vote if
    any of them has a new set of layers: a rank without layers comes with the same empty set for every model.

    Args:
        layers: of this rank.
        group: the group that the user gave, which is returned as it is; None to find the ranks with the same layers.
        where: the name of the caller, for the error of ranks that make different calls.
    Returns:
        A process group, None for the default one, or `ALONE`.
    """
    if group is not None:
        return group
    with _lock:
        cache = _cache_of_world()
        numbers = tuple(amax.number_of(layer) for layer in layers)
        if check_agreement(where, {}, flag=numbers not in cache.groups):
            keys_by_rank = _gather_keys(layers)
            if not any(keys_by_rank):
                # Do not cache this: another rank may have layers at the next call.
                return ALONE
            cache.groups[numbers] = _group_with_equal_keys(cache, keys_by_rank)
        return cache.groups[numbers]


def agreed_layers(
    list_layers: Callable[[], Sequence[nn.Module]], group: Any, others_may_have_layers: bool
) -> AgreedLayers | None:
    """The layers to reduce, and the group to reduce them over, as `group_of` finds it; None if there are no layers.

    Args:
        list_layers: lists the live layers of this rank, in order of construction. It is called again after garbage
            collection, so it must hold no references to layers.
        group: the group that the user gave, or None.
        others_may_have_layers: whether this rank takes part in the vote even if it has no layers.
    """
    with _lock:
        cache = _cache_of_world()
        agreed = cache.agreed.get(group)
        layers = list_layers()
        if _has_new(agreed, layers):
            # A dropped layer that is not yet collected here may be collected on other ranks.
            del layers
            gc.collect()
            layers = list_layers()
        new = _has_new(agreed, layers)
        if group is None and (agreed is not None or new or others_may_have_layers):
            new = check_agreement(ROLLS, {}, flag=new)
        if new:
            if group is None:
                # The vote may come from another rank: collect dropped layers here, too, before names are compared.
                del layers
                gc.collect()
                layers = list_layers()
            reduced_over = _group_with_equal_keys(cache, _gather_keys(layers)) if group is None else group
            agreed = cache.agreed[group] = AgreedLayers(layers, reduced_over)
        return agreed


def _shape_of(layer: nn.Module) -> torch.Size:
    history = layer._buffers["history"]
    assert history is not None
    return amax.newest_row(history).shape


def _has_new(agreed: AgreedLayers | None, layers: Sequence[nn.Module]) -> bool:
    return bool(layers) if agreed is None else agreed.lacks(layers)


def _cache_of_world() -> _Cache:
    """The cache of the present default group."""
    global _cache
    world = dist.group.WORLD
    if _cache is None or _cache.world is not world:
        _cache = _Cache(world)
    return _cache


def sort_by_key(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Layers in the order of their keys, the same on all ranks; layers with equal keys stay in the given order."""
    return sorted(layers, key=lambda layer: tuple(map(str, _key_of(layer))))


def _gather_keys(layers: Sequence[nn.Module]) -> list[list[LayerKey]]:
    """The sorted keys of each rank's layers, by rank of the default group."""
    keys_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(keys_by_rank, [_key_of(layer) for layer in sort_by_key(layers)])
    return keys_by_rank


def _group_with_equal_keys(cache: _Cache, keys_by_rank: Sequence[list[LayerKey]]) -> Any:
    """The group of the ranks with the same keys as this one: a process group, None for the default one, or `ALONE`."""
    if all(keys == keys_by_rank[0] for keys in keys_by_rank):
        return None
    own_rank, group = dist.get_rank(), ALONE
    # Every rank makes all groups in the same order, as `new_group` requires.
    for keys in [keys for rank, keys in enumerate(keys_by_rank) if keys not in keys_by_rank[:rank]]:
        ranks = tuple(rank for rank, other in enumerate(keys_by_rank) if other == keys)
        if len(ranks) == 1 or not keys:
            continue
        if ranks not in cache.by_ranks:
            cache.by_ranks[ranks] = new_group(ranks)
        if own_rank in ranks:
            group = cache.by_ranks[ranks]
    return group


def _key_of(layer: nn.Module) -> LayerKey:
    state = state_of(layer)
    features = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    return state.stage, layer.__dict__.get("qualified_name"), type(layer).__name__, *features
