"""Attention over a sequence sharded across ranks: one function with the modes "gather", "ring" and "all_to_all"."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.recipes.text import check_name
from quaver.reference.attention import MASKS, OFF_BY_ONE, check_chunk, check_numbers, check_window
from quaver.torch.nn.attention.inputs import (
    CuSeqlens,
    Mask,
    Window,
    all_heads_first,
    bounds,
    heads_back,
    heads_first,
    ragged_of,
)
from quaver.torch.nn.attention.op import attention
from quaver.torch.operations import ops
from quaver.torch.parallel.comm import gather, sum_for_ranks
from quaver.torch.parallel.context import comm
from quaver.torch.parallel.context.comm import (
    CausalWindow,
    ChunkOrder,
    Group,
    SequenceGroup,
    all_to_all_parts,
    pack,
    send_to_next,
    spec_of,
    unpack,
)
from quaver.torch.state.history.sync import check_agreement, describe_tensor

# ---- gather ----
# Each rank all-gathers keys and values, and runs ordinary attention on those that its queries see.
#
# Backward sums the float32 gradients of keys and values over ranks in rank order. Source: Llama 3, arXiv:2407.21783
# §3.3.2.

Span = tuple[int, int]


def attend(q: Tensor, k: Tensor, v: Tensor, across: SequenceGroup, sight: CausalWindow, **options: Any) -> Tensor:
    """Return this rank's attention output in mode "gather"; q, k, v and the result have the layout in `options`."""
    dim, order = across.dim, across.order
    tokens = q.shape[dim] * order.ranks
    queries = order.spans(across.rank, tokens)
    keys = [sight.keys_of(*span, tokens) for span in queries]
    seen = _GatheredSpans.apply(k, v, across, keys)
    # Run each chunk separately: its causal mask is then aligned to the last keys and needs no mask tensor.
    parts = zip(q.chunk(len(queries), dim), queries, keys, seen[::2], seen[1::2], strict=True)
    outs = [attention(x, ks, vs, **as_seen(sight, own, span, q.device), **options) for x, own, span, ks, vs in parts]
    return torch.cat(outs, dim)


def as_seen(sight: CausalWindow, queries: Span, keys: Span, device: torch.device) -> dict[str, Any]:
    """Return the options of `attention` by which a span of queries sees a span of keys."""
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
    """Return cumulative lengths (`cu_seqlens`) of the sequences, or parts of them, within the spans of queries and
    keys.
    """
    cut = [[min(max(end, a), b) - a for end in ends] for a, b in (queries, keys)]
    pairs = list(dict.fromkeys(zip(*cut, strict=True)))
    query_ranges, key_ranges = zip(*pairs, strict=True)
    return _lengths(query_ranges), _lengths(key_ranges)


def _lengths(ends: tuple[int, ...]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device="cpu")


class _GatheredSpans(torch.autograd.Function):
    """All-gather keys and values, and return some spans of the whole sequence: keys, values, keys, values ..."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, across: SequenceGroup, spans: list[Span]) -> tuple[Tensor, ...]:
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


def _whole(gathered: list[Tensor], across: SequenceGroup, dtype: torch.dtype) -> Tensor:
    """Assemble the whole sequence from gathered, packed shards [ranks, ...]."""
    ranks = across.order.ranks
    parts = [unpack([part[rank] for part in gathered], across.spec, dtype) for rank in range(ranks)]
    return across.order.join(parts, across.dim)


def _own_sums(ctx: Any, which: int, grads: tuple[Tensor | None, ...]) -> Tensor:
    """Sum the gradients of all spans on all ranks, and return those of this rank's tokens."""
    across, dim, order, dtype = ctx.across, ctx.across.dim, ctx.across.order, ctx.dtypes[which]
    shape = [*ctx.shapes[which]]
    shape[dim] *= order.ranks
    gradients = [(g, span) for g, span in zip(grads, ctx.spans, strict=True) if g is not None]
    sums = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=ctx.device)
    for g, (a, b) in gradients:
        sums.narrow(dim, a, b - a).add_(g)
    parts = torch.stack([order.cut(sums, dim, rank) for rank in range(order.ranks)])
    total: Tensor = sum_for_ranks(parts, across.group, "keys_values")()
    return total.to(dtype)


# ---- all_to_all ----
# An all-to-all exchanges tokens for heads: each rank attends with some heads to the whole sequence, like one process.
#
# Nothing is summed between ranks, so gradients also match one process, and quantized attention, which needs whole
# heads,
# works. Source: Jacobs et al. 2023, arXiv:2309.14509 (DeepSpeed-Ulysses).


def attend_heads(
    q: Tensor, k: Tensor, v: Tensor, across: SequenceGroup, sight: CausalWindow, *, sinks: Tensor | None, **options: Any
) -> Tensor:
    """Return this rank's attention output in mode "all_to_all"; q, k, v and the result have the layout in `options`."""
    ranks, slopes = across.order.ranks, sight.slopes
    heads = q.shape[-2] // ranks
    own = slice(across.rank * heads, (across.rank + 1) * heads)
    plain = across._replace(spec=None)
    wide, keys, values = (_Exchange.apply(x, how, True) for x, how in ((q, plain), (k, across), (v, across)))
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
    local: Tensor = _Exchange.apply(out, plain, False)
    return local


class _Exchange(torch.autograd.Function):
    """All-to-all from this rank's tokens to its heads, [..., tokens, heads, D], or back; gradients are sent
    unquantized.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, across: SequenceGroup, to_heads: bool) -> Tensor:
        ctx.across, ctx.back = across._replace(spec=None), _to_tokens if to_heads else _to_heads
        return _to_heads(x, across) if to_heads else _to_tokens(x, across)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad, ctx.across), None, None


def _to_heads(x: Tensor, across: SequenceGroup) -> Tensor:
    ranks, spec = across.order.ranks, across.spec
    received = [all_to_all_parts(part, across.group) for part in pack(torch.stack(x.chunk(ranks, -2)), spec)]
    parts = [unpack([part[rank] for part in received], spec, x.dtype) for rank in range(ranks)]
    return across.order.join(parts, across.dim)


def _to_tokens(x: Tensor, across: SequenceGroup) -> Tensor:
    parts = torch.stack([across.order.cut(x, across.dim, rank) for rank in range(across.order.ranks)])
    return torch.cat(all_to_all_parts(parts, across.group).unbind(0), -2)


# ---- ring ----
# Keys and values travel around a ring of ranks while each rank's queries attend to those present.
#
# The next keys and values are received while a rank computes. In backward they travel again, followed one step later by
# their float32 gradients, which end at their owners. Source: Liu et al. 2023, arXiv:2310.01889.


def attend_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    across: SequenceGroup,
    sight: CausalWindow,
    *,
    layout: str,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return this rank's attention output in mode "ring"; q, k, v and the result have the given layout."""
    heads = (heads_first(x, layout) for x in (q, k, v))
    out: Tensor = _RingAttentionFunction.apply(*heads, sinks, across, sight, scale, soft_cap)
    return heads_back(out, layout)


class _RingAttentionFunction(torch.autograd.Function):
    """Ring attention. Saves q, this rank's packed keys and values, the output, and two numbers per query; no scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        across: SequenceGroup,
        sight: CausalWindow,
        scale: float,
        soft_cap: float | None,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        payload = [*pack(k.unsqueeze(0), across.spec), *pack(v.unsqueeze(0), across.spec)]
        queries = q.to(wide)
        merged = comm.MergedSoftmax(
            queries.new_zeros((*q.shape[:3], v.shape[3])),
            queries.new_full(q.shape[:3], -torch.inf),
            queries.new_zeros(q.shape[:3]),
        )
        for step, key_value in enumerate(_around(payload, across)):
            keys, values = _unpack(key_value, across, q.dtype)
            for rows, columns, block in _blocks(step, q, across, sight, scale, soft_cap):
                operands = queries[:, :, rows], keys[:, :, columns], values[:, :, columns]
                merged.rows(rows).add(comm.forward(*operands, block))
        if sinks is not None:
            # A sink is one more key whose value is 0.
            top = sinks.to(wide)[:, None].expand_as(merged.top)
            merged.add(comm.MergedSoftmax(torch.zeros_like(merged.out), top, torch.ones_like(top)))
        result = merged.normalized().to(q.dtype)
        ctx.save_for_backward(q, result, merged.top, merged.total, sinks, *payload)
        ctx.across, ctx.masked_by = across, (sight, scale, soft_cap)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, out, top, total, sinks, *key_value = ctx.saved_tensors
        across, masked_by, wide = ctx.across, ctx.masked_by, total.dtype
        queries, grad = q.to(wide), grad.to(wide)
        merged = comm.MergedSoftmax((grad * out.to(wide)).sum(-1, keepdim=True), top, total)
        dq, sums = torch.zeros_like(queries), None
        for step, present in enumerate(_around(key_value, across)):
            keys, values = _unpack(present, across, q.dtype)
            dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
            for rows, columns, block in _blocks(step, q, across, *masked_by):
                operands = grad[:, :, rows], queries[:, :, rows], keys[:, :, columns], values[:, :, columns]
                block_grads = comm.backward(*operands, merged.rows(rows), block)
                for x, part, g in zip((dq, dk, dv), (rows, columns, columns), block_grads, strict=True):
                    x[:, :, part] += g
            if sums is not None:
                # Add the gradients that the previous ranks computed for the keys present here.
                dk, dv = (own.add_(before) for own, before in zip((dk, dv), sums(), strict=True))
            if across.order.ranks > 1:
                sums = send_to_next((dk, dv), across.group)
        if sums is not None:
            dk, dv = sums()
        dsinks = None
        if sinks is not None:
            p = (sinks.to(wide)[:, None] - top).exp() / total
            dsinks = -(p * merged.out.squeeze(-1)).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dsinks, None, None, None, None


def _around(payload: list[Tensor], across: SequenceGroup) -> Iterator[list[Tensor]]:
    """Yield packed keys and values of this rank, then of each rank before it, while the next ones are received."""
    ranks = across.order.ranks
    for step in range(ranks):
        coming = send_to_next(payload, across.group) if step < ranks - 1 else None
        yield payload
        if coming is not None:
            payload = coming()


def _unpack(key_value: list[Tensor], across: SequenceGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Unpack keys and values, rounded to `dtype` as in a single process, then widened to at least float32."""
    half = len(key_value) // 2
    wide = torch.promote_types(dtype, torch.float32)
    keys, values = (
        unpack([x[0] for x in part], across.spec, dtype).to(wide) for part in (key_value[:half], key_value[half:])
    )
    return keys, values


def _blocks(
    step: int, q: Tensor, across: SequenceGroup, sight: CausalWindow, scale: float, soft_cap: float | None
) -> Iterator[tuple[slice, slice, comm.ScoreBlock]]:
    """Yield the visible pairs of query and key chunks at a ring step: slices of both, and their `ScoreBlock`."""
    order, rank = across.order, across.rank
    tokens = q.shape[2] * order.ranks
    length = tokens // order.chunks
    key_spans = order.spans((rank - step) % order.ranks, tokens)
    for i, queries in enumerate(order.spans(rank, tokens)):
        first, last = sight.keys_of(*queries, tokens)
        for j, keys in enumerate(key_spans):
            if keys[0] >= last or keys[1] <= first:
                continue
            hidden, bias = sight.hidden(queries, keys, q.device), sight.bias(queries, keys, q.device)
            block = comm.ScoreBlock(scale, soft_cap, hidden, bias)
            yield slice(i * length, (i + 1) * length), slice(j * length, (j + 1) * length), block


# ---- public function ----

#: Implementations by mode.
WAYS: dict[str, Any] = {"gather": attend, "ring": attend_ring, "all_to_all": attend_heads}


@torch.compiler.disable
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | Group | None = None,
    how: str = "gather",
    balanced: bool = True,
    quantized: str | Recipe | None = None,
    mask_type: str = "none",
    mask: Mask | None = None,
    window: Window | None = None,
    chunk: int | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: str | Tensor | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    layout: str = "bshd",
    cu_seqlens: CuSeqlens | None = None,
    recipe: str | Recipe | None = None,
) -> Tensor:
    """Return this rank's attention output for a sequence that is sharded over ranks.

    Args:
        q, k, v: this rank's chunks, as `ChunkOrder.cut` selects them; the same number of tokens on each rank.
        mesh: one-dimensional mesh or process group; None means all ranks.
        how: "gather": each rank all-gathers keys and values. "ring": keys and values pass from rank to rank.
            "all_to_all": ranks exchange tokens for heads; needs at least as many kv heads as ranks.
        balanced: order of the chunks.
        quantized: recipe whose input spec quantizes keys and values for sending; gradients are sent unquantized.
        cu_seqlens: cumulative lengths of the whole batch, the same for queries and keys.
        mask, bias, dropout: not supported; must have their defaults.
        recipe: a recipe that quantizes attention requires "all_to_all".
        The other arguments are those of `quaver.torch.nn.attention.attention`.
    Returns:
        Like q, with v's features. It can be differentiated once, in q, k, v and sinks; the gradient of sinks covers
        this rank's queries.
    Raises:
        ValueError: unsupported options (mask tensors, a bias, dropout, keys of another sequence), a mesh of several
            dimensions, or heads that do not divide.
    Exact: without `quantized`, "all_to_all" has the bits of one process, and "gather" those of one that attends chunk
        by chunk and adds gradients rank by rank. Bounded: "ring" within 1e-6 of the largest value in float32. With
        `quantized`, results are those of quantized and dequantized keys and values.
    """
    group = group_of(mesh)
    order = ChunkOrder(dist.get_world_size(group), balanced)
    kind = ops.autocast_device(q)
    q, k, v = _as_autocast(kind, q, k, v)
    spec, ends = None, None
    error: str | Exception = ""
    try:
        recipe = None if recipe is None else recipes.get(recipe)
        _check_options(how, mask_type, window, chunk, soft_cap, dropout, alibi_slopes)
        spec = spec_of(quantized)
        wide, keys, _ = all_heads_first(layout, q, k, v)
        refuse(mask_type, mask is not None, bias is not None, dropout, how, recipe)
        _check_parts(wide.shape[2], keys.shape[2], order)
        if how == "all_to_all":
            check_heads_divide(wide.shape[1], keys.shape[1], order.ranks)
        ends = _ends(layout, cu_seqlens, wide.shape[2] * order.ranks)
        sinks = _as_tensor(sinks, wide)
    except Exception as raised:  # any exception, because the other ranks wait
        error = raised
    compared: dict[str, Any] = {name: describe_tensor(x) for name, x in (("q", q), ("k", k), ("v", v))}
    # The full text of the recipe, because its name does not include its options.
    compared |= {"recipe": getattr(recipe, "text", recipe), "how": how, "balanced": balanced, "quantized": spec}
    compared |= {"sinks": describe_tensor(sinks) if isinstance(sinks, Tensor) else sinks, "mask_type": mask_type}
    compared |= {"layout": layout, "window": window, "chunk": chunk, "alibi_slopes": describe_tensor(alibi_slopes)}
    compared |= {"scale": scale, "soft_cap": soft_cap, "cu_seqlens": ends, "gradients": torch.is_grad_enabled()}
    check_agreement("attention across ranks", compared, group, error=error, forward=True)
    across = SequenceGroup(group, order, 1 if layout == "bshd" else 0, spec)
    sight = CausalWindow(*bounds(mask_type, window), chunk, alibi_slopes, ends)
    scale = 1 / math.sqrt(q.shape[-1] or 1) if scale is None else scale
    options: dict[str, Any] = {"layout": layout, "scale": scale, "soft_cap": soft_cap, "sinks": sinks}
    options |= {"recipe": recipe} if how == "all_to_all" else {}
    with torch.autocast(kind, enabled=False):
        out: Tensor = WAYS[how](q, k, v, across, sight, **options)
    return out


def _as_autocast(kind: str, *tensors: Tensor) -> Iterator[Tensor]:
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (x if dtype is None or x.dtype not in ops.DTYPES else x.to(dtype) for x in tensors)


def _check_options(
    how: str,
    mask_type: str,
    window: Window | None,
    chunk: int | None,
    soft_cap: float | None,
    dropout: float,
    alibi_slopes: Tensor | None,
) -> None:
    check_name("how", how, WAYS)
    check_name("mask type", mask_type, MASKS)
    check_window(mask_type, window)
    check_chunk(chunk)
    check_numbers(soft_cap, dropout)
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes require a gradient, which context parallelism does not support; detach them")


def _as_tensor(sinks: str | Tensor | None, wide: Tensor) -> Tensor | None:
    """Return sinks given by name as a tensor of zeros, one per head of the queries `wide` [B, H, S, D]."""
    if not isinstance(sinks, str):
        return sinks
    check_name("sinks", sinks, (OFF_BY_ONE,))
    return wide.new_zeros(wide.shape[1], dtype=torch.float32)


def group_of(mesh: DeviceMesh | Group | None) -> Group:
    """Return the process group that shares a sequence.

    Raises:
        ValueError: the mesh has several dimensions.
    """
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            which = f"mesh[{names[-1]!r}]" if names else "one with names, and of it the one dimension, mesh['cp']"
            raise ValueError(
                f"context parallelism needs a mesh of one dimension, and this one has {mesh.ndim}, "
                f"{names or tuple(mesh.shape)}; give one dimension, such as {which}"
            )
        return mesh.get_group()
    group = dist.group.WORLD if mesh is None else mesh
    if group is None:
        raise ValueError("there is no process group; call torch.distributed.init_process_group first, or run torchrun")
    return group


def refuse(
    mask_type: str, mask: bool, bias: bool, dropout: float, how: str, recipe: Recipe | None, where: str = "attention"
) -> None:
    """Raise a ValueError for attention options that do not support a sharded sequence."""
    if mask or mask_type not in ("none", "causal", "causal_bottom_right"):
        raise ValueError(
            f"{where} with mask_type {mask_type!r} and a mask tensor does not support a sharded sequence: "
            "pack sequences instead of padding them, in layout 'thd' with cu_seqlens, and use mask_type "
            "'causal' or 'none'"
        )
    if bias:
        raise ValueError(f"{where} has a bias of scores, which is not supported yet for a sharded sequence; ALiBi is")
    if dropout:
        raise ValueError(
            f"{where} has dropout {dropout} of attention probabilities, whose mask would depend on the number "
            "of ranks; use dropout 0, or drop the outputs of layers"
        )
    if recipe is not None and recipe.attention is not None and how != "all_to_all":
        raise ValueError(
            f"recipe {recipe} quantizes attention, by amaxes of whole sequences, and with how={how!r} no rank "
            "has the queries of a whole sequence; use how='all_to_all', or a recipe without attention=True"
        )


def check_heads_divide(queries: int, groups: int, ranks: int, where: str = "attention") -> None:
    """Raise a ValueError unless the number of ranks divides both the query heads and the kv heads."""
    if queries % ranks or groups % ranks:
        raise ValueError(
            f"{where} has {queries} query heads and {groups} key and value heads, and both must be multiples "
            f"of {ranks} ranks; use how='ring' or 'gather', or fewer ranks"
        )


def _check_parts(queries: int, keys: int, order: ChunkOrder) -> None:
    chunks = len(order.of(0))
    if queries != keys or queries == 0 or queries % chunks:
        raise ValueError(
            f"this rank's shard has {queries} queries and {keys} keys; each rank needs the same number of "
            f"both, a positive multiple of {chunks}, as `cut` of the whole sequence returns them"
        )


def _ends(layout: str, cu_seqlens: CuSeqlens | None, tokens: int) -> tuple[int, ...] | None:
    if isinstance(cu_seqlens, tuple) and len(cu_seqlens) == 2 and cu_seqlens[0] is not cu_seqlens[1]:
        raise ValueError("cu_seqlens differ for queries and keys, but a sharded sequence attends to itself: pass one")
    ragged = ragged_of(layout, cu_seqlens, tokens, tokens)
    return None if ragged is None else tuple(ragged.cu_seqlens_q.tolist())
