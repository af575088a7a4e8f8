"""Ranks trade heads for tokens: each attends with some heads to the whole sequence, as one process would.

Nothing is summed between ranks, so that gradients are one process's too, and what goes by whole heads, such as
attention in eight bits, is right. Source: Jacobs et al. 2023, arXiv:2309.14509 (DeepSpeed-Ulysses).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quaver.torch.blocks.attention.op import attention
from quaver.torch.parallel.context.exchange import Across, trade
from quaver.torch.parallel.context.parcels import pack, unpack
from quaver.torch.parallel.context.sequence import Sight


def attend(
    q: Tensor, k: Tensor, v: Tensor, across: Across, sight: Sight, *, sinks: Tensor | None, **options: Any
) -> Tensor:
    """This rank's part of attention, q, k, v and the result in the layout of `options`."""
    ranks, slopes = across.order.ranks, sight.slopes
    heads = q.shape[-2] // ranks
    own = slice(across.rank * heads, (across.rank + 1) * heads)
    plain = across._replace(spec=None)
    wide, keys, values = (_ToHeads.apply(x, how) for x, how in ((q, plain), (k, across), (v, across)))
    hides = sight.left >= 0 or sight.right > 0
    ends = None if sight.ends is None else torch.tensor(sight.ends, dtype=torch.int32, device="cpu")
    out = attention(
        *(wide, keys, values),
        mask_type="causal" if sight.right == 0 else "none",
        window=(sight.left, sight.right) if hides else None,
        chunk=sight.chunk,
        alibi_slopes=None if slopes is None else slopes[..., own],
        sinks=None if sinks is None else sinks[own],
        cu_seqlens=ends,
        **options,
    )
    local: Tensor = _ToTokens.apply(out, plain)
    return local


class _ToHeads(torch.autograd.Function):
    """[..., tokens, heads, D] of this rank's tokens to that of this rank's heads; the gradient travels as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, across: Across) -> Tensor:
        ctx.across = across._replace(spec=None)
        return _to_heads(x, across)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _to_tokens(grad, ctx.across), None


class _ToTokens(torch.autograd.Function):
    """The inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, across: Across) -> Tensor:
        ctx.across = across
        return _to_tokens(x, across)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _to_heads(grad, ctx.across), None


def _to_heads(x: Tensor, across: Across) -> Tensor:
    ranks, spec = across.order.ranks, across.spec
    received = [trade(part, across.group) for part in pack(torch.stack(x.chunk(ranks, -2)), spec)]
    parts = [unpack([part[rank] for part in received], spec, x.dtype) for rank in range(ranks)]
    return across.order.join(parts, across.dim)


def _to_tokens(x: Tensor, across: Across) -> Tensor:
    parts = torch.stack([across.order.cut(x, across.dim, rank) for rank in range(across.order.ranks)])
    return torch.cat(trade(parts, across.group).unbind(0), -2)
