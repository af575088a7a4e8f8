"""Agreement between ranks before a collective: each sends a header of 24 bytes, and all raise the same error or none.

A collective of ranks that differ in a shape, a dtype, a recipe or in whether there is a gradient waits to a timeout,
ends the process or mixes numbers silently. So collectives of the library follow a check that all ranks enter at the
same call, whether or not their own input has changed: a check that only the rank with a change enters would hang, too.
What a rank alone must refuse is part of its header, so that no rank leaves before the others know. Headers are compared
on processors: no GPU is waited for. Texts travel only where headers differ.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.torch.state.history.groups import new_group

#: Differences that an error names.
SHOWN = 3


class _Watched:
    """Who counts headers; see `quaver.torch.parallel.traffic`, which is above."""

    def __init__(self) -> None:
        #: Of a header and its group, what is entered around its exchange.
        self.by: Callable[[Tensor, Any], AbstractContextManager[Any]] = lambda header, group: nullcontext()


watched = _Watched()


class _HostGroups:
    """Groups over gloo beside those that carry no tensors of processors, by name, of one default group."""

    world: Any = None
    of: dict[str, Any] = {}  # noqa: RUF012


def check_agreement(
    where: str, what: Mapping[str, Any], *groups: Any, error: str | Exception = "", flag: bool = False, advice: str = ""
) -> bool:
    """Raise the same ValueError on all ranks if they differ, or if one of them has an error.

    Args:
        where: the call, for an error; it must be the same on all ranks, too.
        what: by name, what ranks must have alike: values whose text says all that matters.
        groups: process groups that are compared one after the other, such as those of a mesh's dimensions; none for
            the default group.
        error: what is wrong on this rank; an exception is raised as it is where all ranks have the same one.
        flag: this rank's vote.
        advice: what to do about a difference.
    Returns:
        Whether any rank has voted.
    Raises:
        ValueError: on all ranks, with what each has.
    """
    if has_ranks(*groups):
        why = str(error) or type(error).__name__ * isinstance(error, Exception)
        facts = {name: str(value) for name, value in what.items()}
        every, flag = exchange(where, f"{facts} {why}", facts, groups or (None,), flag, why)
        if every is not None:
            raise ValueError(_difference(where, every, advice))
    if error:
        raise error if isinstance(error, Exception) else ValueError(error)
    return flag


def has_ranks(*groups: Any) -> bool:
    """Whether one of these process groups, the default one if none is given, has several ranks."""
    there = dist.is_available() and dist.is_initialized()
    return there and any(dist.get_world_size(group) > 1 for group in groups or (None,))


def facts_of(x: Tensor | None) -> str:
    """Shape and dtype of a tensor, and whether it needs a gradient, for `check_agreement`."""
    if x is None:
        return "none"
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}{' with a gradient' if x.requires_grad else ''}"


def exchange(
    where: str, text: str, shown: Any, groups: tuple[Any, ...], flag: bool = False, error: str = ""
) -> tuple[dict[int, tuple[Any, str]] | None, bool]:
    """Compare a text among ranks.

    Args:
        where: the call.
        shown: what this rank tells of itself where texts differ; pickled.
        error: why this rank cannot go on; part of the text.
    Returns:
        What every rank has shown and its error, by rank of the default group, None where texts are equal; and whether
        any rank has voted.
    Raises:
        ValueError: on all ranks, where they came to different calls.
        RuntimeError: another rank does not come here.
    """
    bits = int.from_bytes(hashlib.blake2b(f"{where} {text}".encode(), digest_size=7).digest(), "big")
    hosts = [_on_host(group) for group in groups]
    device = torch.device("cpu" if dist.is_gloo_available() else "cuda")
    # The largest digest is the smallest where all are one.
    header = torch.tensor([bits, -bits, flag], dtype=torch.int64, device=device)
    for group in hosts:
        with watched.by(header, group):
            try:
                dist.all_reduce(header, dist.ReduceOp.MAX, group)
            except RuntimeError as failed:
                raise RuntimeError(
                    f"this rank came to {where} and waited for the others in vain ({failed}): one of them has ended, "
                    "or makes other calls, so see its error, and call it on all ranks alike"
                ) from failed
    largest, smallest, voted = header.tolist()
    if largest == -smallest:
        return None, bool(voted)
    known = {dist.get_rank(): (where, shown, error)}
    for group in hosts:
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, known, group)
        known = {rank: value for each in every for rank, value in each.items()}
    if len({call for call, _, _ in known.values()}) > 1:
        lines = "; ".join(f"rank {rank}: {known[rank][2] or known[rank][0]}" for rank in sorted(known))
        raise ValueError(f"ranks came to different calls: {lines}; have all ranks make the same calls in one order")
    return {rank: (facts, why) for rank, (_, facts, why) in known.items()}, bool(voted)


def _on_host(group: Any) -> Any:
    """The group itself where it carries tensors of processors, else one beside it, which all its ranks make."""
    if "cpu:" in dist.get_backend_config(group) or not dist.is_gloo_available():
        return group
    world: Any = dist.group.WORLD
    if _HostGroups.world is not world:
        _HostGroups.world, _HostGroups.of = world, {}
    name = str((group or world).group_name)
    if name not in _HostGroups.of:
        ranks = dist.get_process_group_ranks(group or world)
        _HostGroups.of[name] = new_group(ranks, backend="gloo", use_local_synchronization=group is not None)
    return _HostGroups.of[name]


def _difference(where: str, every: Mapping[int, tuple[Mapping[str, str], str]], advice: str) -> str:
    """An error of ranks whose headers differ."""
    lines, errors = {}, any(error for _, error in every.values())
    names = list(dict.fromkeys(name for facts, _ in every.values() for name in facts))
    differ = [name for name in names if len({facts.get(name) for facts, _ in every.values()}) > 1]
    for rank in sorted(every):
        facts, error = every[rank]
        said = ", ".join(f"{name} {facts.get(name, 'unknown')}" for name in differ[:SHOWN])
        lines[rank] = error or ("it fits" if errors else said)
    what = "; ".join(f"rank {rank}: {line}" for rank, line in lines.items())
    return f"ranks differ at {where}: {what}" + (
        "" if errors else f"; {advice or 'give all ranks of the group the same'}"
    )
