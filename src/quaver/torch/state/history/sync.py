"""Agreement of ranks before a collective, and the all-reduce of delayed scaling's amaxes.

Ranks may have different layers: those of a pipeline do, and Python's garbage collector frees dropped layers at
different times. So ranks exchange the names of their layers once, and reduce the union, with zeros for layers that a
rank lacks. At each step they vote whether a rank has a new layer, with the flag of `check_agreement`.
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
from quaver.torch.state.layer_state import graph_task_id, state_of
from quaver.torch.state.selective_checkpoint import hide_from_policies

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
    """Counts the all-reduces of this module; set by `quaver.torch.parallel.CommCounter`."""

    def __init__(self) -> None:
        #: (kind of traffic, tensor, group) -> context manager around an all-reduce.
        self.reduction: Callable[[Any, Tensor, Any], AbstractContextManager[Any]] = lambda *_: nullcontext()


watched = _TrafficHook()


class _Companions:
    """Further groups with the ranks of a group."""

    #: Default group under which they were made; a new one after `init_process_group` drops them.
    world: Any = None
    #: By their purpose and the name of the group with the same ranks.
    by_name: dict[tuple[str, str], Any] = {}  # noqa: RUF012


def companion(group: Any, purpose: str, **options: Any) -> Any:
    """Return another group with the same ranks, whose collectives need no order among those of the first.

    All ranks of the group must call it, because the first call for a purpose creates the group.

    Args:
        group: process group; None is the default one.
        purpose: what the group is for; calls with the same purpose share it.
        options: further arguments of torch's `new_group`.
    """
    world: Any = dist.group.WORLD
    if _Companions.world is not world:
        _Companions.world, _Companions.by_name = world, {}
    key = purpose, str((group or world).group_name)
    if key not in _Companions.by_name:
        ranks = dist.get_process_group_ranks(group or world)
        _Companions.by_name[key] = new_group(ranks, use_local_synchronization=group is not None, **options)
    return _Companions.by_name[key]


def check_agreement(
    where: str,
    what: Mapping[str, Any],
    *groups: Any,
    error: str | Exception = "",
    flag: int = False,
    advice: str = "",
    forward: bool = False,
) -> int:
    """Raise the same ValueError on all ranks if their values differ, or if one of them has an error.

    All ranks of the groups must call it. With one rank, or without `torch.distributed`, it only raises `error`.

    Args:
        where: name of the call, for the error message; compared as well.
        what: values to compare, by name, as `str(value)`.
        groups: process groups; all ranks that they connect are compared. For a DeviceMesh, one group per dimension.
            Without any, the default group.
        error: error of this rank, or "". If all ranks have the same error and it is an exception, that is raised.
        flag: bool or number, of which the largest over the ranks is returned.
        advice: end of the error message: what to do about a difference.
        forward: the call is in a layer's forward; its recomputation in a backward was compared and only raises `error`.

    Returns:
        The largest `flag` of all ranks.

    Raises:
        ValueError: on all ranks, with the values of each.
    """
    if has_ranks(*groups) and not (forward and graph_task_id() != -1):
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
    where: str, text: str, shown: Any, groups: tuple[Any, ...], flag: int = False, error: str = ""
) -> tuple[dict[int, tuple[Any, str]] | None, int]:
    """Compare a text between ranks, and return the largest flag.

    Args:
        where: name of the call, for errors.
        text: text to compare.
        shown: picklable object to send to the others if texts differ.
        groups: process groups, None for the default one; all ranks that they connect are compared.
        flag: flag of this rank.
        error: why this rank cannot continue; part of the text.

    Returns:
        None if all texts are equal, else a dict from each rank of the default group to its (`shown`, `error`); and
        the largest flag.

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
        with watched.reduction("control", header, group):
            try:
                dist.all_reduce(header, dist.ReduceOp.MAX, group)
            except RuntimeError as failed:
                raise RuntimeError(
                    f"this rank waited at {where} for the other ranks ({failed}): one of them has ended or makes other "
                    "calls; see its error, and make the call on all ranks"
                ) from failed
    largest, negated_smallest, largest_flag = header.tolist()
    if largest == -negated_smallest:
        return None, largest_flag
    by_rank = {dist.get_rank(): (where, shown, error)}
    for group in cpu_groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, by_rank, group)
        by_rank = {rank: value for each in gathered for rank, value in each.items()}
    if len({call for call, _, _ in by_rank.values()}) > 1:
        lines = "; ".join(f"rank {rank}: {by_rank[rank][2] or by_rank[rank][0]}" for rank in sorted(by_rank))
        raise ValueError(f"ranks make different calls: {lines}; have all ranks make the same calls in one order")
    return {rank: (facts, why) for rank, (_, facts, why) in by_rank.items()}, largest_flag


def _cpu_group(group: Any) -> Any:
    """Return a group of the same ranks that accepts CPU tensors: the group itself, or a gloo group beside NCCL."""
    if "cpu:" in dist.get_backend_config(group) or not dist.is_gloo_available():
        return group
    return companion(group, "CPU tensors", backend="gloo")


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


# ---- reduction of amaxes ----

#: Names of the calls in error messages.
ROLLS, AGREES = "the end of a step of delayed scaling", "sync_amax_histories"
FORWARD = f"{ROLLS} by a forward outside of qt.autocast"


class _Layout:
    """Rows that the ranks of a process group reduce together, as they last agreed."""

    def __init__(self) -> None:
        #: Position of each of this rank's layers, by `amax.number_of`.
        self.positions: dict[int, int] = {}
        #: Amaxes in the row at each position, and the device of the ranks that have the row.
        self.sizes: list[int] = []
        self.device = torch.device("cpu")
        #: True once a step has begun with rows; then every rank takes part where a step begins.
        self.in_steps = False


class _Layouts:
    """Layouts by process group, for the present default group."""

    world: Any = None
    by_group: dict[Any, _Layout] = {}  # noqa: RUF012


_lock = threading.Lock()


# A recomputed forward reduces nothing.
@hide_from_policies
def reduce(list_layers: Callable[[], Sequence[nn.Module]], group: Any, where: str, always: bool = True) -> None:
    """All-reduce row 0 of the layers' histories by maximum over a process group.

    All its ranks must call this. They may have different layers, as the stages of a pipeline do, or branches that only
    some ranks ran: a layer is known by its stage, name, class and sizes, and ranks without it contribute zeros.

    Args:
        list_layers: lists this rank's layers in order of construction. It is called again after garbage collection,
            so it must hold no references to layers that may be dropped.
        group: process group, or None for the default one.
        where: name of the caller, for the error of ranks that make different calls.
        always: False to do nothing if this rank has no layers, unless an earlier such call had rows.
    """
    if not has_ranks(group):
        return
    layout, layers = _layout_of(group), _with_rows(list_layers())
    if not (always or layers or layout.in_steps):
        return
    is_new = any(amax.number_of(layer) not in layout.positions for layer in layers)
    if check_agreement(where, {}, group, flag=is_new):
        # A dropped layer that is not collected here yet may be collected on other ranks.
        del layers
        gc.collect()
        layers = _with_rows(list_layers())
        _agree(layout, layers, group)
    layout.in_steps |= where == ROLLS and bool(layout.sizes)
    if layout.sizes:
        rows = [torch.zeros(size, dtype=torch.float32, device=layout.device) for size in layout.sizes]
        for layer in layers:
            rows[layout.positions[amax.number_of(layer)]] = _newest_row(layer)
        reduce_rows(rows, group)


@torch.no_grad()
def reduce_rows(rows: list[Tensor], group: Any) -> None:
    """All-reduce tensors of equal sizes on all ranks by maximum, in place."""
    flat = torch.cat([row.reshape(-1) for row in rows])
    with watched.reduction("amaxes", flat, group):
        dist.all_reduce(flat, dist.ReduceOp.MAX, group)
    copy_each(
        rows, [part.view(row.shape) for part, row in zip(flat.split([row.numel() for row in rows]), rows, strict=True)]
    )


def _copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


#: Copies many small tensors in few launches.
copy_each: Any = getattr(torch, "_foreach_copy_", _copy_each)


def _layout_of(group: Any) -> _Layout:
    """Return the layout of a process group; another default group starts with empty ones."""
    with _lock:
        world = dist.group.WORLD
        if _Layouts.world is not world:
            _Layouts.world, _Layouts.by_group = world, {}
        return _Layouts.by_group.setdefault(group, _Layout())


def _agree(layout: _Layout, layers: Sequence[nn.Module], group: Any) -> None:
    """Exchange the layers of all ranks and lay out their rows; layers of the previous layout remain."""
    new = {amax.number_of(layer) for layer in layers}
    own: dict[tuple[Any, ...], nn.Module] = {}
    # Of layers with equal keys the newest come first: a rank may keep models that others have dropped.
    for layer in reversed(amax.layers()):
        if amax.number_of(layer) in new or amax.number_of(layer) in layout.positions:
            key, copies = _key_of(layer), 0
            while (*key, copies) in own:
                copies += 1
            own[*key, copies] = layer
    rows = {key: (_newest_row(layer).numel(), _newest_row(layer).device.type) for key, layer in own.items()}
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, rows, group)
    union = {key: row for rows in by_rank for key, row in rows.items()}
    keys = sorted(union, key=lambda key: tuple(map(str, key)))
    layout.sizes = [union[key][0] for key in keys]
    layout.positions = {amax.number_of(own[key]): at for at, key in enumerate(keys) if key in own}
    layout.device = torch.device(union[keys[0]][1] if keys else "cpu")


def _with_rows(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers that are not on meta, where there are no amaxes."""
    return [layer for layer in layers if not layer.history.is_meta]


def _newest_row(layer: nn.Module) -> Tensor:
    history = layer._buffers["history"]
    assert history is not None
    return amax.newest_row(history)


def _key_of(layer: nn.Module) -> tuple[Any, ...]:
    """Return what identifies a layer on all ranks; ranks may have several members of an expert's stack."""
    features = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    size = _newest_row(layer).numel()
    return state_of(layer).stage, layer.__dict__.get("qualified_name"), type(layer).__name__, *features, size
