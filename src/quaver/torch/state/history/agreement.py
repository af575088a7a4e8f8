"""`check_agreement`: compare shapes, dtypes and options between ranks before a collective.

If ranks disagree on a shape, a dtype, a recipe or on whether there is a gradient, a collective hangs until its timeout,
ends the process or mixes numbers silently. So every collective of this library comes after a check that raises the same
error on all ranks:

- All ranks run the check at every call. If only a rank whose input has changed ran it, that rank would hang.
- The check is an all-reduce of 24 bytes: a digest of the compared values. The values themselves are gathered only if
  digests differ.
- An error that only one rank has, such as a wrong width, is part of its digest, so that the others raise too.
- Tensors of the check are on the CPU, so that the host does not wait for a GPU.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.torch.state.history.groups import new_group

#: How many differing values an error lists.
MAX_SHOWN = 3


class _TrafficHook:
    """What counts the all-reduces of this module; `quaver.torch.parallel.traffic` sets it."""

    def __init__(self) -> None:
        #: (tensor, group) -> the context manager in which the tensor is all-reduced.
        self.by: Callable[[Tensor, Any], AbstractContextManager[Any]] = lambda header, group: nullcontext()


watched = _TrafficHook()


class _GlooGroups:
    """Gloo groups with the ranks of groups whose backend has no CPU tensors (NCCL)."""

    #: The default group that they were made under; another one, after `init_process_group`, drops them.
    world: Any = None
    #: By the name of the group with the same ranks.
    by_name: dict[str, Any] = {}  # noqa: RUF012


def check_agreement(
    where: str, what: Mapping[str, Any], *groups: Any, error: str | Exception = "", flag: bool = False, advice: str = ""
) -> bool:
    """Raise the same ValueError on all ranks if their values differ, or if one of them has an error.

    All ranks of the groups must call it. With one rank, or without `torch.distributed`, it only raises `error`.

    Args:
        where: the name of the call, for the error message. It is compared as well.
        what: the values to compare, by name. `str(value)` is compared.
        groups: process groups; all ranks that they connect are compared. For a DeviceMesh, one group a dimension.
            None given: the default group.
        error: what is wrong on this rank. If all ranks have the same error and it is an exception, that is raised.
        flag: a bool that is or-ed over the ranks.
        advice: the end of the error message: what to do about a difference.
    Returns:
        Whether `flag` is True on any rank.
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
    """Whether one of these process groups has several ranks; without arguments, whether the default group has."""
    initialized = dist.is_available() and dist.is_initialized()
    return initialized and any(dist.get_world_size(group) > 1 for group in groups or (None,))


def facts_of(x: Tensor | None) -> str:
    """Shape, dtype and requires_grad of a tensor as text, for `check_agreement`; "none" for None."""
    if x is None:
        return "none"
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}{' requires_grad' if x.requires_grad else ''}"


def exchange(
    where: str, text: str, shown: Any, groups: tuple[Any, ...], flag: bool = False, error: str = ""
) -> tuple[dict[int, tuple[Any, str]] | None, bool]:
    """Compare a text between ranks, and or a flag over them.

    Args:
        where: the call, for errors.
        text: what is compared.
        shown: what this rank sends to the others if texts differ; any picklable object.
        groups: process groups, None for the default one; all ranks that they connect are compared.
        flag: of this rank.
        error: why this rank cannot go on; part of the text.
    Returns:
        None if all texts are equal, else `shown` and `error` of every rank by its rank in the default group; and
        whether any rank has the flag.
    Raises:
        ValueError: on all ranks, if they make different calls.
        RuntimeError: if another rank does not make this call.
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
                    f"this rank came to {where} and waited for the others in vain ({failed}): one of them has ended, "
                    "or makes other calls, so see its error, and call it on all ranks alike"
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
    """A group of the same ranks that takes CPU tensors: the group itself if it does, else a gloo group.

    All ranks of the group must call it: the first call makes the gloo group.
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
    """The error message of ranks that differ.

    Args:
        where: the call.
        by_rank: facts and error of each rank, as in `check_agreement`.
        advice: what to do; left out if a rank has an error, which says so itself.
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
