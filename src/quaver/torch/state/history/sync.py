"""Find the ranks that have the same layers: without a given process group, delayed scaling reduces amaxes over them.

Pipeline ranks have different layers, and amaxes of one stage must not be reduced with those of another. So ranks gather
the names of their layers once, when a step begins; ranks with the same names form a group. If all ranks have the same
layers, that is the default group.

Python's garbage collector frees dropped layers at different times on different ranks, so lists of live layers may
differ. Hence ranks reduce the layers that they agreed on, with zeros for freed ones, until a rank has a new layer. They
vote on that at the beginning of each step, with the flag of `check_agreement`.
"""

import gc
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quaver.torch.state.history import amax
from quaver.torch.state.layer_state import state_of

# ---- process groups with the timeout of the default group ----
# torch would give a new group its own timeout, 30 minutes over gloo, whatever the default group has.


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Call `torch.distributed.new_group` with the default group's timeout.

    Args:
        ranks: ranks of the group, or None for all.
        options: further arguments of that function, except the timeout.
    """
    return dist.new_group(None if ranks is None else list(ranks), timeout=timeout(), **options)


def timeout(group: Any = None) -> timedelta | None:
    """Return the timeout of a process group (None: the default group), or None if torch does not expose it."""
    # Private to torch; without it new groups have torch's own timeout.
    find: Any = getattr(group or dist.group.WORLD, "_get_backend", None)
    if find is None:
        return None
    for kind in ("cpu", "cuda"):
        try:
            backend = find(torch.device(kind))
        except RuntimeError:
            # The group has no backend for this kind of device.
            continue
        configured_timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
        if configured_timeout is not None:
            return configured_timeout
    return None


# ---- agreement: compare shapes, dtypes and options between ranks before a collective ----
# If ranks disagree on a shape, a dtype, a recipe or on whether there is a gradient, a collective hangs until its
# timeout, ends the process or mixes numbers silently. So every collective of this library follows a check that raises
# the same error on all ranks:
#
# - All ranks run the check at every call. If only a rank whose input has changed ran it, that rank would hang.
# - The check is an all-reduce of 24 bytes with a digest of the compared values. The values themselves are gathered only
#   if digests differ.
# - An error on one rank only, such as a wrong width, is part of its digest, so that the others raise too.
# - The check uses CPU tensors, so that the host does not wait for a GPU.

#: Number of differing values that an error lists.
MAX_SHOWN = 3


class _TrafficHook:
    """Hook that counts the all-reduces of this module; set by `quaver.torch.parallel.comm`."""

    def __init__(self) -> None:
        #: (tensor, group) -> context manager around the all-reduce.
        self.by: Callable[[Tensor, Any], AbstractContextManager[Any]] = lambda header, group: nullcontext()


watched = _TrafficHook()


class _GlooGroups:
    """Gloo groups with the ranks of groups whose backend has no CPU tensors (NCCL)."""

    #: Default group under which they were made; a new one after `init_process_group` drops them.
    world: Any = None
    #: By the name of the group with the same ranks.
    by_name: dict[str, Any] = {}  # noqa: RUF012


def check_agreement(
    where: str, what: Mapping[str, Any], *groups: Any, error: str | Exception = "", flag: bool = False, advice: str = ""
) -> bool:
    """Raise the same ValueError on all ranks if their values differ, or if one of them has an error.

    All ranks of the groups must call it. With one rank, or without `torch.distributed`, it only raises `error`.

    Args:
        where: name of the call, for the error message; compared as well.
        what: values to compare, by name, as `str(value)`.
        groups: process groups; all ranks that they connect are compared. For a DeviceMesh, one group per dimension.
            Without any, the default group.
        error: error of this rank, or "". If all ranks have the same error and it is an exception, that is raised.
        flag: bool that is or-ed over the ranks.
        advice: end of the error message: what to do about a difference.

    Returns:
        True if `flag` is True on any rank.

    Raises:
        ValueError: on all ranks, with the values of each.
    """
    if has_ranks(*groups):
        why = str(error) or type(error).__name__ * isinstance(error, Exception)
        facts = {name: str(value) for name, value in what.items()}
        by_rank, flag = exchange(where, f"{facts} {why}", facts, groups or (None,), flag, why)
        if by_rank is not None:
            raise ValueError(_message(where, by_rank, advice))
    if error:
        raise error if isinstance(error, Exception) else ValueError(error)
    return flag


def has_ranks(*groups: Any) -> bool:
    """Return True if one of these process groups (default: the default group) has several ranks."""
    initialized = dist.is_available() and dist.is_initialized()
    return initialized and any(dist.get_world_size(group) > 1 for group in groups or (None,))


def describe_tensor(x: Tensor | None) -> str:
    """Shape, dtype and requires_grad of a tensor as text, for `check_agreement`; "none" for None."""
    if x is None:
        return "none"
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}{' requires_grad' if x.requires_grad else ''}"


def exchange(
    where: str, text: str, shown: Any, groups: tuple[Any, ...], flag: bool = False, error: str = ""
) -> tuple[dict[int, tuple[Any, str]] | None, bool]:
    """Compare a text between ranks, and or a flag over them.

    Args:
        where: name of the call, for errors.
        text: text to compare.
        shown: picklable object to send to the others if texts differ.
        groups: process groups, None for the default one; all ranks that they connect are compared.
        flag: flag of this rank.
        error: why this rank cannot continue; part of the text.

    Returns:
        None if all texts are equal, else a dict from each rank of the default group to its (`shown`, `error`); and
        whether any rank has the flag.

    Raises:
        ValueError: on all ranks, if they make different calls.
        RuntimeError: another rank does not make this call.
    """
    bits = int.from_bytes(hashlib.blake2b(f"{where} {text}".encode(), digest_size=7).digest(), "big")
    cpu_groups = [_cpu_group(group) for group in groups]
    device = torch.device("cpu" if dist.is_gloo_available() else "cuda")
    # max(bits) == -max(-bits) == min(bits) only if all ranks have the same digest.
    header = torch.tensor([bits, -bits, flag], dtype=torch.int64, device=device)
    for group in cpu_groups:
        with watched.by(header, group):
            try:
                dist.all_reduce(header, dist.ReduceOp.MAX, group)
            except RuntimeError as failed:
                raise RuntimeError(
                    f"this rank waited at {where} for the other ranks ({failed}): one of them has ended or makes other "
                    "calls; see its error, and make the call on all ranks"
                ) from failed
    largest, negated_smallest, any_flag = header.tolist()
    if largest == -negated_smallest:
        return None, bool(any_flag)
    by_rank = {dist.get_rank(): (where, shown, error)}
    for group in cpu_groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, by_rank, group)
        by_rank = {rank: value for each in gathered for rank, value in each.items()}
    if len({call for call, _, _ in by_rank.values()}) > 1:
        lines = "; ".join(f"rank {rank}: {by_rank[rank][2] or by_rank[rank][0]}" for rank in sorted(by_rank))
        raise ValueError(f"ranks make different calls: {lines}; have all ranks make the same calls in one order")
    return {rank: (facts, why) for rank, (_, facts, why) in by_rank.items()}, bool(any_flag)


def _cpu_group(group: Any) -> Any:
    """Return a group of the same ranks that accepts CPU tensors: the group itself, or a gloo group.

    All ranks of the group must call it, because the first call creates the gloo group.
    """
    if "cpu:" in dist.get_backend_config(group) or not dist.is_gloo_available():
        return group
    world: Any = dist.group.WORLD
    if _GlooGroups.world is not world:
        _GlooGroups.world, _GlooGroups.by_name = world, {}
    name = str((group or world).group_name)
    if name not in _GlooGroups.by_name:
        ranks = dist.get_process_group_ranks(group or world)
        _GlooGroups.by_name[name] = new_group(ranks, backend="gloo", use_local_synchronization=group is not None)
    return _GlooGroups.by_name[name]


def _message(where: str, by_rank: Mapping[int, tuple[Mapping[str, str], str]], advice: str) -> str:
    """Return the error message for ranks that differ.

    Args:
        where: name of the call.
        by_rank: facts and error of each rank, as in `check_agreement`.
        advice: what to do; omitted if a rank has an error, which says so itself.
    """
    lines, errors = {}, any(error for _, error in by_rank.values())
    names = list(dict.fromkeys(name for facts, _ in by_rank.values() for name in facts))
    differ = [name for name in names if len({facts.get(name) for facts, _ in by_rank.values()}) > 1]
    for rank in sorted(by_rank):
        facts, error = by_rank[rank]
        values = ", ".join(f"{name} {facts.get(name, 'unknown')}" for name in differ[:MAX_SHOWN])
        lines[rank] = error or ("no error" if errors else values)
    what = "; ".join(f"rank {rank}: {line}" for rank, line in lines.items())
    return f"ranks differ at {where}: {what}" + (
        "" if errors else f"; {advice or 'give all ranks of the group the same'}"
    )


# ---- ranks with the same layers ----

#: Names of the calls in error messages.
ROLLS, AGREES = "the end of a step of delayed scaling", "sync_amax_histories"
FORWARD = f"{ROLLS} by a forward outside of qt.autocast"
#: Used in place of a process group: no other rank has these layers, and nothing is reduced.
ALONE = object()
#: (pipeline stage, qualified name, class name, in_features, out_features), which identify a layer on all ranks.
LayerKey = tuple[Any, ...]


class AgreedLayers:
    """Layers that the ranks of a group have agreed to reduce."""

    def __init__(self, layers: Sequence[nn.Module], group: Any) -> None:
        #: Shape of the newest history row of each layer, by `amax.number_of`, in the order of `sort_by_key`.
        self.shapes = {amax.number_of(layer): _shape_of(layer) for layer in sort_by_key(layers)}
        #: Process group, None for the default one, or `ALONE`.
        self.group = group
        history = layers[0]._buffers["history"] if layers else None
        #: Device of the histories.
        self.device = None if history is None else history.device

    def lacks(self, layers: Sequence[nn.Module]) -> bool:
        """Return True if one of the layers is not among these."""
        return any(amax.number_of(layer) not in self.shapes for layer in layers)


class _Cache:
    """Agreements of the ranks of a default group; another default group starts with an empty cache."""

    def __init__(self, world: Any) -> None:
        self.world = world
        #: Results of `group_of` by the numbers of the layers.
        self.groups: dict[tuple[int, ...], Any] = {}
        #: Process groups by their ranks, so that none is created twice.
        self.by_ranks: dict[tuple[int, ...], Any] = {}
        #: Results of `agreed_layers` by its argument `group`.
        self.agreed: dict[Any, AgreedLayers] = {}


_lock = threading.RLock()
_cache: _Cache | None = None


def group_of(layers: Sequence[nn.Module], group: Any, where: str) -> Any:
    """Return the process group over which to reduce these layers.

    Without a given group all ranks of the default group must call this, including ranks without layers. They first vote
    if any of them has a new set of layers: a rank without layers has the same empty set for every model.

    Args:
        layers: layers of this rank.
        group: group that the user passed, returned unchanged; None to find the ranks with the same layers.
        where: name of the caller, for the error of ranks that make different calls.

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
                # Not cached, because another rank may have layers at the next call.
                return ALONE
            cache.groups[numbers] = _group_with_equal_keys(cache, keys_by_rank)
        return cache.groups[numbers]


def agreed_layers(
    list_layers: Callable[[], Sequence[nn.Module]], group: Any, others_may_have_layers: bool
) -> AgreedLayers | None:
    """Return the layers to reduce and their group, as `group_of` finds it; None if there are no layers.

    Args:
        list_layers: lists the live layers of this rank in order of construction. It is called again after garbage
            collection, so it must hold no references to layers.
        group: group that the user passed, or None.
        others_may_have_layers: True if this rank takes part in the vote even without layers.
    """
    with _lock:
        cache = _cache_of_world()
        agreed = cache.agreed.get(group)
        layers = list_layers()
        if _has_new(agreed, layers):
            # A dropped layer that is not collected here yet may be collected on other ranks.
            del layers
            gc.collect()
            layers = list_layers()
        new = _has_new(agreed, layers)
        if group is None and (agreed is not None or new or others_may_have_layers):
            new = check_agreement(ROLLS, {}, flag=new)
        if new:
            if group is None:
                # The vote may come from another rank: collect dropped layers here too, before names are compared.
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
    """Return the cache of the present default group."""
    global _cache
    world = dist.group.WORLD
    if _cache is None or _cache.world is not world:
        _cache = _Cache(world)
    return _cache


def sort_by_key(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Sort layers by their keys, which gives the same order on all ranks; equal keys keep the given order."""
    return sorted(layers, key=lambda layer: tuple(map(str, _key_of(layer))))


def _gather_keys(layers: Sequence[nn.Module]) -> list[list[LayerKey]]:
    """Return the sorted keys of each rank's layers, by rank of the default group."""
    keys_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(keys_by_rank, [_key_of(layer) for layer in sort_by_key(layers)])
    return keys_by_rank


def _group_with_equal_keys(cache: _Cache, keys_by_rank: Sequence[list[LayerKey]]) -> Any:
    """Return the group of ranks with the same keys: a process group, None for the default one, or `ALONE`."""
    if all(keys == keys_by_rank[0] for keys in keys_by_rank):
        return None
    own_rank, group = dist.get_rank(), ALONE
    # Every rank creates all groups in the same order, as `new_group` requires.
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
