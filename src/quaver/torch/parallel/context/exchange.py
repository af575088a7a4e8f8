"""What goes between the ranks of a sequence: all to all, sums in the order of ranks, and one step around a ring."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.parallel.context.sequence import Order
from quaver.torch.parallel.traffic import Kind, awaited, during

Group = dist.ProcessGroup


class Across(NamedTuple):
    """The ranks that hold a sequence, and how they exchange it."""

    group: Group
    order: Order
    #: The axis of tokens.
    dim: int
    #: By which keys and values travel; None for as they are.
    spec: QuantSpec | None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)


def trade(parts: Tensor, group: Group, kind: Kind = "keys_values") -> Tensor:
    """parts [ranks, ...]: part i goes to rank i, and part i of the result is rank i's part for this one."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    with during(kind, "exchange", parts, group):
        dist.all_to_all_single(received, parts, group=group)
    return received


def scatter_in_order(parts: Tensor, group: Group, kind: Kind = "keys_values") -> Tensor:
    """The sum over ranks of the part [...] that is for this one, of float32 parts [ranks, ...].

    Ranks are added in their order, one after the other, whatever a backend's reduction would do: the bits are those of
    one process that adds the same, and the bytes those of a reduce-scatter.
    """
    assert parts.dtype in (torch.float32, torch.float64)
    received = trade(parts, group, kind)
    total = received[0].clone()
    for part in received[1:]:
        total += part
    return total


def pass_on(tensors: Sequence[Tensor], group: Group) -> Callable[[], list[Tensor]]:
    """Begin to send tensors to the next rank; what is returned waits for those of the rank before."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    fresh = [torch.empty_like(x) for x in tensors]
    waits: list[Callable[[], object]] = []
    full = [x for x in tensors if x.numel()]
    if full:
        sends = [dist.P2POp(dist.isend, x, after, group) for x in full]
        receipts = [dist.P2POp(dist.irecv, x, before, group) for x in fresh if x.numel()]
        works = dist.batch_isend_irecv([*sends, *receipts])
        # All are waited for with the first.
        waits = [awaited("keys_values", "send", x, group, [] if i else works) for i, x in enumerate(full)]

    def finish() -> list[Tensor]:
        for wait in waits:
            wait()
        return fresh

    return finish
