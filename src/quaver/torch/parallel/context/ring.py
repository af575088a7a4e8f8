"""Keys and values go around a ring, rank to rank, while each rank's queries attend to those that are there.

The next ones are on their way while a rank computes. In backward they go round again, and their float32 gradients go
with them, a rank behind, back to whom they belong to. Source: Liu et al. 2023, arXiv:2310.01889.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quaver.torch.blocks.attention.inputs.layout import heads_back, heads_first
from quaver.torch.parallel.context import blocks
from quaver.torch.parallel.context.exchange import Across, pass_on
from quaver.torch.parallel.context.parcels import pack, unpack
from quaver.torch.parallel.context.sequence import Sight


class _Asked(NamedTuple):
    across: Across
    sight: Sight
    scale: float
    soft_cap: float | None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    across: Across,
    sight: Sight,
    *,
    layout: str,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """This rank's part of attention, q, k, v and the result in the layout."""
    asked = _Asked(across, sight, scale, soft_cap)
    out: Tensor = _Ring.apply(*(heads_first(x, layout) for x in (q, k, v)), sinks, asked)
    return heads_back(out, layout)


class _Ring(torch.autograd.Function):
    """Keeps q, this rank's keys and values as they travel, the output and two numbers a query; never a score."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, asked: _Asked) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        parcel = [*pack(k.unsqueeze(0), asked.across.spec), *pack(v.unsqueeze(0), asked.across.spec)]
        queries = q.to(wide)
        merged = blocks.Merged(
            queries.new_zeros((*q.shape[:3], v.shape[3])),
            queries.new_full(q.shape[:3], -torch.inf),
            queries.new_zeros(q.shape[:3]),
        )
        coming, ranks = None, asked.across.order.ranks
        for step in range(ranks):
            held = parcel if coming is None else coming()
            coming = pass_on(held, asked.across.group) if step < ranks - 1 else None
            keys, values = _opened(held, asked, q.dtype)
            for rows, columns, block in _blocks(asked, step, q):
                operands = queries[:, :, rows], keys[:, :, columns], values[:, :, columns]
                merged.rows(rows).add(blocks.forward(*operands, block))
        if sinks is not None:
            # One more column, whose value is 0.
            top = sinks.to(wide)[:, None].expand_as(merged.top)
            merged.add(blocks.Merged(torch.zeros_like(merged.out), top, torch.ones_like(top)))
        result = merged.normalized().to(q.dtype)
        ctx.save_for_backward(q, result, merged.top, merged.total, sinks, *parcel)
        ctx.asked = asked
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, out, top, total, sinks, *held = ctx.saved_tensors
        asked, wide = ctx.asked, total.dtype
        queries, grad = q.to(wide), grad.to(wide)
        merged = blocks.Merged((grad * out.to(wide)).sum(-1, keepdim=True), top, total)
        dq, ranks, group = torch.zeros_like(queries), asked.across.order.ranks, asked.across.group
        coming = sums = None
        for step in range(ranks):
            held = held if coming is None else coming()
            coming = pass_on(held, group) if step < ranks - 1 else None
            keys, values = _opened(held, asked, q.dtype)
            dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
            for rows, columns, block in _blocks(asked, step, q):
                operands = grad[:, :, rows], queries[:, :, rows], keys[:, :, columns], values[:, :, columns]
                of_block = blocks.backward(*operands, merged.rows(rows), block)
                for x, part, g in zip((dq, dk, dv), (rows, columns, columns), of_block, strict=True):
                    x[:, :, part] += g
            if sums is not None:
                # Those of the ranks before, of the keys that are here.
                dk, dv = (own.add_(before) for own, before in zip((dk, dv), sums(), strict=True))
            sums = pass_on((dk, dv), group) if ranks > 1 else lambda given=(dk, dv): given
        assert sums is not None
        dk, dv = sums()
        dsinks = None
        if sinks is not None:
            p = (sinks.to(wide)[:, None] - top).exp() / total
            dsinks = -(p * merged.out.squeeze(-1)).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dsinks, None


def _opened(held: list[Tensor], asked: _Asked, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of what was sent, rounded as one process has them."""
    half = len(held) // 2
    wide = torch.promote_types(dtype, torch.float32)
    keys, values = (
        unpack([x[0] for x in part], asked.across.spec, dtype).to(wide) for part in (held[:half], held[half:])
    )
    return keys, values


def _blocks(asked: _Asked, step: int, q: Tensor) -> Iterator[tuple[slice, slice, blocks.Block]]:
    """Of each pair of a chunk of queries and one of keys that is there after so many steps, where both lie."""
    across, sight = asked.across, asked.sight
    order, rank = across.order, across.rank
    tokens = q.shape[2] * order.ranks
    length = tokens // order.chunks
    of_keys = order.spans((rank - step) % order.ranks, tokens)
    for i, queries in enumerate(order.spans(rank, tokens)):
        first, last = sight.keys_of(*queries, tokens)
        for j, keys in enumerate(of_keys):
            if keys[0] >= last or keys[1] <= first:
                continue
            hidden, bias = sight.hidden(queries, keys, q.device), sight.bias(queries, keys, q.device)
            block = blocks.Block(asked.scale, asked.soft_cap, hidden, bias)
            yield slice(i * length, (i + 1) * length), slice(j * length, (j + 1) * length), block
