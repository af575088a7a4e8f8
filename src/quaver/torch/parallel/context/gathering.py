"""Each rank gathers all keys and values, and attends to those that its queries see by the attention of one process.

Backward adds the ranks' float32 gradients of keys and values, in the order of ranks. Source: Llama 3, arXiv:2407.21783
§3.3.2.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quaver.torch.blocks.attention.op import attention
from quaver.torch.parallel.context.exchange import Across, scatter_in_order
from quaver.torch.parallel.context.parcels import pack, unpack
from quaver.torch.parallel.context.sequence import Sight
from quaver.torch.parallel.wire import gather

Span = tuple[int, int]


def attend(q: Tensor, k: Tensor, v: Tensor, across: Across, sight: Sight, **options: Any) -> Tensor:
    """This rank's part of attention, q, k, v and the result in the layout of `options`."""
    dim, order = across.dim, across.order
    tokens = q.shape[dim] * order.ranks
    queries = order.spans(across.rank, tokens)
    keys = [sight.keys_of(*span, tokens) for span in queries]
    seen = _Seen.apply(k, v, across, keys)
    # Of each chunk on its own: then a causal mask is one of the last keys, which needs no tensor.
    parts = zip(q.chunk(len(queries), dim), queries, keys, seen[::2], seen[1::2], strict=True)
    outs = [attention(x, ks, vs, **as_seen(sight, own, span, q.device), **options) for x, own, span, ks, vs in parts]
    return torch.cat(outs, dim)


def as_seen(sight: Sight, queries: Span, keys: Span, device: torch.device) -> dict[str, Any]:
    """The options of `attention` by which queries of a span see keys of another."""
    cumulative: dict[str, Any] = {} if sight.ends is None else {"cu_seqlens": _between(sight.ends, queries, keys)}
    if sight.right == 0:
        window = None if sight.left < 0 else (sight.left, 0)
        by_position = {"window": window, "chunk": sight.chunk, "alibi_slopes": sight.slopes}
        return {"mask_type": "causal_bottom_right", **by_position, **cumulative}
    if not sight.by_position:
        return cumulative
    if sight.ends is not None:
        cumulative = {"cu_seqlens": tuple(_lengths((0, b - a)) for a, b in (queries, keys))}
    hidden, bias = sight.hidden(queries, keys, device), sight.bias(queries, keys, device)
    masked: dict[str, Any] = {} if hidden is None else {"mask_type": "arbitrary", "mask": hidden}
    return {**masked, "bias": bias, **cumulative}


def _between(ends: tuple[int, ...], queries: Span, keys: Span) -> tuple[Tensor, Tensor]:
    """Cumulative lengths of the sequences, or their parts, that have tokens in the spans."""
    cut = [[min(max(end, a), b) - a for end in ends] for a, b in (queries, keys)]
    pairs = list(dict.fromkeys(zip(*cut, strict=True)))
    of_queries, of_keys = zip(*pairs, strict=True)
    return _lengths(of_queries), _lengths(of_keys)


def _lengths(ends: tuple[int, ...]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device="cpu")


class _Seen(torch.autograd.Function):
    """The keys and values of some spans of the whole sequence: keys, values, keys, values ..."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, across: Across, spans: list[Span]) -> tuple[Tensor, ...]:
        ctx.across, ctx.spans, ctx.dtypes = across, spans, (k.dtype, v.dtype)
        ctx.set_materialize_grads(False)
        ctx.shapes, ctx.device = (tuple(k.shape), tuple(v.shape)), k.device
        packed = [pack(x.unsqueeze(0), across.spec) for x in (k, v)]
        pending = [[gather(part, 0, across.group, kind="keys_values") for part in parts] for parts in packed]
        wholes = [_whole([finish() for finish in each], across, k.dtype) for each in pending]
        return tuple(x.narrow(across.dim, a, b - a) for a, b in spans for x in wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dk, dv = (_own_sums(ctx, i, grads[i::2]) if ctx.needs_input_grad[i] else None for i in (0, 1))
        return dk, dv, None, None


def _whole(gathered: list[Tensor], across: Across, dtype: torch.dtype) -> Tensor:
    """Of what each rank packed, [ranks, ...], the whole sequence."""
    ranks = across.order.ranks
    parts = [unpack([part[rank] for part in gathered], across.spec, dtype) for rank in range(ranks)]
    return across.order.join(parts, across.dim)


def _own_sums(ctx: Any, which: int, grads: tuple[Tensor | None, ...]) -> Tensor:
    """The sums over all ranks' spans of the gradients of this rank's tokens."""
    across, dim, order, dtype = ctx.across, ctx.across.dim, ctx.across.order, ctx.dtypes[which]
    shape = [*ctx.shapes[which]]
    shape[dim] *= order.ranks
    given = [(g, span) for g, span in zip(grads, ctx.spans, strict=True) if g is not None]
    sums = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=ctx.device)
    for g, (a, b) in given:
        sums.narrow(dim, a, b - a).add_(g)
    parts = torch.stack([order.cut(sums, dim, rank) for rank in range(order.ranks)])
    return scatter_in_order(parts, across.group).to(dtype)
