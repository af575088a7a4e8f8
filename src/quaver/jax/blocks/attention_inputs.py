"""Arguments of attention, validated, in the form that the implementations take."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from quaver.jax.blocks.chunked_attention import Operands, ScoreOptions, Tokens
from quaver.jax.numerics.quantized import array
from quaver.reference.attention import (
    MASKS,
    OFF_BY_ONE,
    check_chunk,
    check_heads,
    check_numbers,
    check_type,
    check_window,
)

Mask = Array | tuple[Array, Array]
Segments = Array | tuple[Array, Array]


class Masking(NamedTuple):
    """The arguments of `attention` that decide which keys a query sees."""

    mask_type: str
    mask: Mask | None
    window: tuple[int, int] | None
    chunk: int | None
    segment_ids: Segments | None
    cu_seqlens: Segments | None


class AttentionCall(NamedTuple):
    """A call in the implementations' form."""

    options: ScoreOptions
    operands: Operands
    tokens: Tokens
    #: Position of query i minus i, if it is a number; see `chunk_pairs`.
    shift: int | None


# ---- q, k, v and what is added to the scores ----


def check_qkv(q: Array, k: Array, v: Array) -> None:
    """Raise ValueError unless q [B, Sq, H, D], k [B, Sk, G, D] and v [B, Sk, G, Dv] fit each other."""
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError(f"attention takes [batch, tokens, heads, features]; got {q.shape}, {k.shape} and {v.shape}")
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]):
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} do not fit: [B,Sq,H,D], [B,Sk,G,D], [B,Sk,G,Dv]")
    check_heads(q.shape[2], k.shape[2])


def operands_of(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
) -> Operands:
    """Return the operands with heads first, grouped; arguments as for `attention`."""
    batch, queries, heads, _ = q.shape
    groups = k.shape[2]
    if bias is not None:
        bias = grouped(fit("bias", bias, (batch, heads, queries, k.shape[1])), groups)
        if bias.dtype == jnp.bool_:
            raise ValueError("the bias is boolean; give a mask of pairs as `mask` with mask_type 'arbitrary'")
    if alibi_slopes is not None:
        alibi_slopes = array("attention", "alibi_slopes", alibi_slopes)
        if alibi_slopes.shape not in ((heads,), (batch, heads)):
            raise ValueError(f"alibi_slopes has shape {alibi_slopes.shape}; give [heads] = [{heads}] or [batch, heads]")
        alibi_slopes = alibi_slopes.reshape(-1, groups, heads // groups)
    if sinks is not None:
        if sinks.shape != (heads,):
            raise ValueError(f"sinks is of shape {sinks.shape}; give 'off_by_one', or logits [heads] = [{heads}]")
        sinks = sinks.reshape(groups, heads // groups)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))  # [B, heads, S, D]
    return Operands(grouped(q, groups), k, v, bias, alibi_slopes, sinks)


def named_sinks(name: str, heads: int) -> Array:
    """Return the logits of sinks that are given by name."""
    if name != OFF_BY_ONE:
        raise ValueError(f"sinks is {name!r}; give 'off_by_one', or logits [heads] = [{heads}]")
    return jnp.zeros(heads)


def grouped(x: Array, groups: int) -> Array:
    """Reshape [B, H, ...] to [B, G, R, ...]; one broadcast head stays one."""
    return x[:, :, None] if x.shape[1] == 1 else x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def heads_back(out: Array) -> Array:
    """Reshape [B, G, R, S, D] to [B, S, H, D]."""
    batch, groups, shared, tokens, dim = out.shape
    return out.reshape(batch, groups * shared, tokens, dim).swapaxes(1, 2)


def fit(name: str, x: Array, shape: tuple[int, ...]) -> Array:
    """Return x with four axes.

    Raises:
        ValueError: it does not broadcast to the scores.
    """
    ours = (1,) * (4 - x.ndim) + x.shape
    if len(ours) != 4 or any(a not in (1, b) for a, b in zip(ours, shape, strict=True)):
        raise ValueError(f"the {name} has shape {x.shape}, which does not broadcast to [B, H, Sq, Sk] = {list(shape)}")
    return x.reshape(ours)


# ---- which keys a query sees ----


def tokens_of(masking: Masking, shape: tuple[int, int, int, int], groups: int) -> tuple[Tokens, int | None]:
    """Return positions, segments and mask, and the shift for `chunk_pairs`.

    Args:
        masking: validated here.
        shape: (B, H, Sq, Sk).
        groups: heads of keys and values.
    """
    _check_masking(masking)
    mask_type, mask, _, chunk, segment_ids, cu_seqlens = masking
    queries, keys = shape[2:]
    bottom_right = mask_type.endswith("bottom_right")
    first, second = jnp.arange(queries, dtype=jnp.int32)[None], jnp.arange(keys, dtype=jnp.int32)[None]
    shift: int | None = keys - queries if bottom_right else 0
    segments: tuple[Array, Array] | None = None
    pairs = None
    if cu_seqlens is not None:
        first, second, segments = _ragged(cu_seqlens, shape, bottom_right)
        shift = None if isinstance(cu_seqlens, tuple) else 0
    else:
        if segment_ids is not None:
            segments = _pair("segment_ids", segment_ids, shape)
            first, second = (_within(ids) for ids in segments)
            shift = None if isinstance(segment_ids, tuple) else 0
        if mask_type == "arbitrary":
            assert mask is not None and not isinstance(mask, tuple)
            pairs = grouped(fit("mask", mask, shape), groups)
        elif mask is not None:
            padding = _pair("padding mask", mask, shape)
            own = segments or (jnp.int32(0), jnp.int32(0))
            segments = jnp.where(padding[0], -1, own[0]), jnp.where(padding[1], -1, own[1])
            if bottom_right:
                first = first + ((~padding[1]).sum(-1) - (~padding[0]).sum(-1))[:, None]
                shift = None
            if chunk is not None:
                leading = jnp.cumprod(padding[1], -1, dtype=jnp.int32).sum(-1)[:, None]
                first, second = first - leading, second - leading
        if bottom_right and shift is not None:
            first = first + shift
    first, second = (x.astype(jnp.int32) for x in (first, second))
    if segments is None:
        return Tokens(first, second, mask=pairs), shift
    # Padding has a negative number, another one for queries than for keys.
    q_segments, k_segments = (jnp.where(x < 0, number, x) for x, number in zip(segments, (-1, -2), strict=True))
    return Tokens(first, second, q_segments, k_segments, pairs), shift


def bounds(mask_type: str, window: tuple[int, int] | None) -> tuple[int, int]:
    """Return the window combined with the causal mask, which hides all later keys."""
    left, right = window or (-1, -1)
    return (left, 0) if MASKS[mask_type][1] else (left, right)


def _within(ids: Array) -> Array:
    """Return the position of each token in its run of equal segment ids."""
    at = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    starts = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], 1)
    return at - lax.cummax(jnp.where(starts, at, 0), axis=1)


def _ragged(
    cu_seqlens: Segments, shape: tuple[int, int, int, int], bottom_right: bool
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Return positions of queries and keys in their sequences, and the numbers of the sequences, [1, S] each."""
    pair = [jnp.asarray(x) for x in (cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens))]
    for ends in pair:
        if ends.ndim != 1 or ends.shape[0] < 1 or not jnp.issubdtype(ends.dtype, jnp.integer):
            raise ValueError(
                f"cu_seqlens is {ends.dtype} {list(ends.shape)}; give integers [sequences + 1], from 0 to the number "
                "of tokens"
            )
    if pair[0].shape != pair[1].shape or shape[0] != 1:
        raise ValueError(
            f"cu_seqlens has {pair[0].shape[0] - 1} sequences of queries and {pair[1].shape[0] - 1} of keys in a batch "
            f"of {shape[0]}; give each sequence of queries its keys, concatenated in a batch of one"
        )
    at = [jnp.arange(n, dtype=jnp.int32) for n in shape[2:]]
    numbers = [jnp.searchsorted(ends, x, side="right") - 1 for ends, x in zip(pair, at, strict=True)]
    first, second = (x - ends[number] for x, ends, number in zip(at, pair, numbers, strict=True))
    if bottom_right:
        first = first + (jnp.diff(pair[1]) - jnp.diff(pair[0]))[numbers[0]]
    # Tokens after the last sequence are padding.
    q_numbers, k_numbers = (
        jnp.where(number < ends.shape[0] - 1, number, -1).astype(jnp.int32)[None]
        for number, ends in zip(numbers, pair, strict=True)
    )
    return first[None], second[None], (q_numbers, k_numbers)


def _pair(name: str, x: Mask, shape: tuple[int, int, int, int]) -> tuple[Array, Array]:
    """Return (of queries [B, Sq], of keys [B, Sk])."""
    pair = x if isinstance(x, tuple) else (x, x)
    for what, tokens, length in zip(("queries", "keys"), pair, shape[2:], strict=True):
        if tokens.shape != (shape[0], length):
            raise ValueError(
                f"the {name} of the {what} has shape {tokens.shape}, expected {(shape[0], length)}; "
                f"give ({name} of queries, {name} of keys) where they differ"
            )
    return pair


def _check_masking(masking: Masking) -> None:
    mask_type, mask, window, chunk, segment_ids, cu_seqlens = masking
    check_type(mask_type, mask is not None)
    check_window(mask_type, window)
    check_chunk(chunk)
    parts = mask if isinstance(mask, tuple) else (mask,)
    if mask_type == "arbitrary" and isinstance(mask, tuple):
        raise ValueError("an arbitrary mask is one array, broadcastable to [B, H, Sq, Sk]; a pair is for padding")
    if any(m is not None and m.dtype != jnp.bool_ for m in parts):
        raise ValueError("a mask is boolean, True where masked out; pass an additive mask as `bias`")
    if cu_seqlens is not None and (segment_ids is not None or mask_type.startswith("padding")):
        plain = mask_type.removeprefix("padding").removeprefix("_") or "none"
        raise ValueError(f"cu_seqlens gives the sequences and their ends; give no segment_ids, and mask type {plain!r}")
    if segment_ids is not None:
        if mask_type.endswith("bottom_right"):
            raise ValueError(f"{mask_type!r} takes no segment_ids, which do not give lengths; give cu_seqlens")
        ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids,)
        if any(not jnp.issubdtype(x.dtype, jnp.integer) for x in ids):
            raise ValueError("segment_ids are integers, equal where a query may see a key and negative for padding")


# ---- a call ----


def prepare(
    operands: Operands,
    masking: Masking,
    scale: float | None,
    soft_cap: float | None,
    dropout: float,
    dropout_key: Array | None,
) -> AttentionCall:
    """Return a call in the implementations' form.

    Raises:
        ValueError: arguments that do not fit.
    """
    check_numbers(soft_cap, dropout)
    if dropout and dropout_key is None:
        raise ValueError(f"dropout is {dropout} and no dropout_key was passed; give dropout_key=jax.random.key(...)")
    batch, groups, shared, queries, dim = operands.q.shape
    tokens, shift = tokens_of(masking, (batch, groups * shared, queries, operands.k.shape[-2]), groups)
    if scale is None:
        scale = 1 / math.sqrt(dim) if dim else 1.0
    window = bounds(masking.mask_type, masking.window)
    options = ScoreOptions(scale, soft_cap, dropout, window, masking.chunk)
    return AttentionCall(options, operands, tokens._replace(dropout_key=dropout_key if dropout else None), shift)


def attend_without_padding(attend: Callable[[Operands], Array], operands: Operands, tokens: Tokens) -> Array:
    """Compute attention with padding replaced by zeros, so that no NaN in it spreads, forward or backward."""
    if tokens.q_segments is None or tokens.k_segments is None:
        return attend(operands)
    of_queries = (tokens.q_segments < 0)[:, None, None, :, None]
    of_keys = (tokens.k_segments < 0)[:, None, :, None]
    q = jnp.where(of_queries, 0, operands.q)
    k, v = (jnp.where(of_keys, 0, x) for x in (operands.k, operands.v))
    return jnp.where(of_queries, 0, attend(operands._replace(q=q, k=k, v=v)))
