"""Attention with masks, rope and position biases, as functions. **True in a mask means masked out.**

Scores and softmax are float32 for any dtype of q, k and v.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from quaver.jax.blocks.attention_inputs import (
    AttentionCall,
    Mask,
    Masking,
    Segments,
    attend_without_padding,
    check_qkv,
    heads_back,
    named_sinks,
    operands_of,
)
from quaver.jax.blocks.attention_inputs import prepare as prepare_call
from quaver.jax.blocks.chunked_attention import attend_chunked
from quaver.jax.blocks.cudnn_attention import attend_cudnn, cudnn_refusal, runs_on_gpu
from quaver.jax.blocks.fp8_attention import attend_quantized
from quaver.jax.blocks.options import CoreOptions, Rope
from quaver.jax.blocks.ring_attention import ring_attention, shard_positions
from quaver.jax.linears.dot_general import KernelMatrix
from quaver.jax.numerics.quantized import array
from quaver.jax.operations.sharding import partition_spec_of, with_auto_sharding
from quaver.jax.state.context import recipe_in_force
from quaver.options import pick
from quaver.recipes.spec import AttentionSpec, Recipe
from quaver.reference.attention import alibi_numbers, check_heads

# ---- dot-product attention ----


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask_type: str = "none",
    mask: Mask | None = None,
    window: tuple[int, int] | None = None,
    chunk: int | None = None,
    segment_ids: Segments | None = None,
    cu_seqlens: Segments | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: str | Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
    recipe: str | Recipe | None = None,
) -> Array:
    """Compute attention of [B, Sq, H, D] on [B, Sk, G, D]; each of G key heads serves H / G query heads (MQA, GQA).

    Chunks of queries and keys are computed one after the other, forward and backward, so that no array of all scores
    exists. On a GPU cuDNN computes the calls that it supports.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, G, D].
        v: [B, Sk, G, Dv].
        mask_type: a name from `MASKS`. "causal" hides key j from query i if j > i; with "_bottom_right" the last query
            sees the last key: if j > i + (keys - queries), without padding. "padding" takes a mask of tokens,
            "arbitrary" one of pairs.
        mask: True where masked out. Padding: [B, Sk] for both queries and keys, or ([B, Sq], [B, Sk]). Arbitrary:
            broadcastable to [B, H, Sq, Sk].
        window: (left, right): a query sees that many keys before and after its own position, -1 for all. Positions are
            aligned as the mask type says.
        chunk: a query sees only keys in its own chunk of this many positions, counted from the first token that is not
            padding (Llama 4); None for all.
        segment_ids: integers [B, S] for both queries and keys, or ([B, Sq], [B, Sk]): a query sees keys with its id; a
            negative id is padding. The tokens of a segment are adjacent, and positions are counted within it.
        cu_seqlens: integers [sequences + 1], start of each sequence and end of the last, for sequences concatenated in
            a batch of one; a pair (of queries, of keys) if they differ. Positions are counted within a sequence.
        bias: added to the scores; broadcastable to [B, H, Sq, Sk]. -inf hides, as a mask does.
        alibi_slopes: [H] or [B, H]: score -= slope × distance, with positions aligned as the mask type says.
        sinks: an extra softmax column whose value is 0: logits [H], or "off_by_one" for logits of 0.
        scale: factor of the scores; None is 1 / sqrt(D).
        soft_cap: scores become cap tanh(scores / cap), before bias and mask (Gemma-2).
        dropout: probability of dropping an attention weight; the others are scaled by 1 / (1 - dropout).
        dropout_key: jax.random key; required if dropout is not 0.
        recipe: the caller's own recipe; None uses the ambient one. With attention=True q, k, v, the probabilities and
            their gradients are quantized.
    Returns:
        [B, Sq, H, Dv] in q's dtype. A query that sees no key gets 0 and zero gradients.
    Raises:
        ValueError: shapes, heads, masks or numbers that do not fit.
    Bounded: relative RMS 1e-6 of float64 in float32, without dropout. Statistical with it.
    """
    recipe = recipe_in_force(recipe)
    q, k, v = (array("attention", what, x) for what, x in (("q", q), ("k", k), ("v", v)))
    check_qkv(q, k, v)
    if isinstance(sinks, str):
        sinks = named_sinks(sinks, q.shape[2])
    spec = None if recipe is None else recipe.attention

    def compute(q: Array, k: Array, v: Array, arrays: Any) -> Array:
        mask, segment_ids, cu_seqlens, bias, slopes, sinks, key = arrays
        masking = Masking(mask_type, mask, window, chunk, segment_ids, cu_seqlens)
        operands = operands_of(q, k, v, bias, slopes, sinks)
        return _attend(q, k, v, prepare_call(operands, masking, scale, soft_cap, dropout, key), mask_type, spec)

    sharding = (*partition_spec_of(q)[:3], partition_spec_of(v)[3])
    arrays = mask, segment_ids, cu_seqlens, bias, alibi_slopes, sinks, dropout_key
    return with_auto_sharding(compute, q, sharding)(q, k, v, arrays)


def _attend(q: Array, k: Array, v: Array, call: AttentionCall, mask_type: str, spec: AttentionSpec | None) -> Array:
    """Run the implementation of a validated call."""
    if 0 in (*q.shape, *k.shape):
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    if spec is not None:
        return heads_back(attend_quantized(spec, call.options, call.operands, call.tokens))
    if runs_on_gpu() and not cudnn_refusal(call, mask_type):
        return attend_cudnn(q, k, v, call)
    run = partial(attend_chunked, call.options, tokens=call.tokens, shift=call.shift)
    return heads_back(attend_without_padding(run, call.operands, call.tokens))


# ---- rotary position embedding (rope): rotates pairs of features by angles that grow with the position ----
#
# Source: Su et al. 2021, arXiv:2104.09864; rotating only the first features is GPT-NeoX's.


def angles(positions: Array, dim: int, theta: float = 10_000.0) -> Array:
    """Return positions * theta^(-2i / dim) for i < dim / 2: float32 [..., dim / 2] from positions [...]."""
    half = dim // 2
    frequency = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    return positions.astype(jnp.float32)[..., None] * frequency


def rope(
    x: Array,
    positions: Array | None = None,
    *,
    offset: int | Array = 0,
    theta: float = 10_000.0,
    fraction: float = 1.0,
    interleaved: bool = False,
) -> Array:
    """Rotate the features of queries or keys by their positions.

    Args:
        x: [B, S, H, D].
        positions: [S] or [B, S]; None counts 0, 1, 2 ...
        offset: added to the positions, a number or [B], such as the number of cached tokens.
        theta: base of the frequencies.
        fraction: share of the D features that rotates, the first ones; the rest is unchanged.
        interleaved: True pairs neighbours (0, 1), (2, 3) ...; False pairs feature i with i + half.
    Returns:
        [B, S, H, D] in x's dtype, rounded once.
    Raises:
        ValueError: an odd number of rotated features, or shapes that do not fit.
    Bounded: relative RMS 1e-6 of float64 in float32, for positions whose angles float32 can represent.
    """
    x = array("rope", "x", x)
    if x.ndim != 4:
        raise ValueError(f"rope takes [batch, tokens, heads, features], and got an array of shape {x.shape}")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; give the share of the features that rotates, above 0 and up to 1")
    rotary_dim = int(x.shape[-1] * fraction)
    if rotary_dim % 2 or rotary_dim == 0:
        raise ValueError(
            f"rope rotates pairs of features, and {fraction} of {x.shape[-1]} is {rotary_dim}; make it an even number"
        )
    if positions is None:
        positions = jnp.arange(x.shape[1])
    if positions.shape not in ((x.shape[1],), x.shape[:2]):
        raise ValueError(f"positions have shape {positions.shape}; x {x.shape} needs {x.shape[1:2]} or {x.shape[:2]}")
    shift = jnp.asarray(offset)
    positions = positions + (shift[:, None] if shift.ndim else shift)
    angle = angles(positions, rotary_dim, theta)
    angle = angle.reshape(-1, x.shape[1], 1, rotary_dim // 2)  # [1 or B, S, 1, turning / 2]
    rotated = _rotate(x[..., :rotary_dim].astype(jnp.float32), jnp.cos(angle), jnp.sin(angle), interleaved)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., rotary_dim:]], axis=-1)


def _rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


# ---- parts of multi-head attention that linen and NNX share: projections, and what precedes and follows attention ----


def positions_of(context_axis: str | None, positions: Array | None, tokens: int) -> Array | None:
    """Return the positions of tokens that a mesh axis may shard; None counts 0, 1, 2 ..."""
    if positions is not None or context_axis is None:
        return positions
    return shard_positions(context_axis, tokens)


def prepare(
    x: Array,
    norm: Callable[[Array], Array] | None,
    options: Rope | None,
    positions: Array | None,
    offset: int | Array,
    norm_after_rope: bool,
) -> Array:
    """Apply the optional norm and rope to queries or keys."""
    if norm is not None and not norm_after_rope:
        x = norm(x)
    if options is not None:
        x = rope(x, positions, offset=offset, **vars(options))
    return norm(x) if norm is not None and norm_after_rope else x


def split_fused(fused: Array, *parts: int) -> tuple[Array, ...]:
    """Split [B, S, G, sum of parts, D] into one [B, S, G * part, D] per part, with the heads of a group adjacent.

    This layout lets a mesh axis shard the groups without separating a group's queries from its keys and values.
    """
    out, start = [], 0
    for part in parts:
        x = fused[..., start : start + part, :]
        out.append(x.reshape(*x.shape[:2], -1, x.shape[-1]))
        start += part
    return tuple(out)


def projections(heads: int, groups: int, dim: int, fused: bool, cross: bool) -> dict[str, KernelMatrix]:
    """Return the projection matrices by layer name; with `cross`, keys and values are projected from a memory."""
    query = KernelMatrix((heads, dim), ("embed", "heads", "head_dim"))
    if not fused:
        return {"query": query} | dict.fromkeys(("key", "value"), KernelMatrix((groups, dim), query.axes))
    kv_axes = ("embed", "heads", None, "head_dim")
    if cross:
        return {"query": query, "kv": KernelMatrix((groups, 2, dim), kv_axes)}
    return {"qkv": KernelMatrix((groups, heads // groups + 2, dim), kv_axes)}


def project(
    x: Array, memory: Array | None, layers: Mapping[str, Callable[[Array], Array]], shared: int
) -> tuple[Array, ...]:
    """Return queries, keys and values [B, S, H or G, D].

    Args:
        x: input of the layer.
        memory: input of keys and values, or None for x.
        layers: the layers named by `projections`.
        shared: number of query heads per key head.
    """
    memory = x if memory is None else memory
    if "qkv" in layers:
        return split_fused(layers["qkv"](x), shared, 1, 1)
    q = layers["query"](x)
    if "kv" in layers:
        return q, *split_fused(layers["kv"](memory), 1, 1)
    return q, layers["key"](memory), layers["value"](memory)


def attend(
    layer: Any, q: Array, k: Array, v: Array, *, sinks: Array | None, dropout_key: Array | None, **arguments: Any
) -> Array:
    """Call `attention` with a layer's options; without a key there is no dropout.

    Args:
        layer: module with the fields of `CoreOptions`.
        q, k, v, dropout_key: as for `attention`.
        sinks: learnable sinks, or None.
        arguments: mask, bias, segment_ids and positions of this call; positions are for a ring only.
    """
    options = pick(CoreOptions, layer)
    axis, positions = options.pop("context_axis"), arguments.pop("positions")
    if dropout_key is None:
        options["dropout"] = 0.0
    if sinks is not None:
        options["sinks"] = sinks
    if options.pop("alibi"):
        options["alibi_slopes"] = jnp.asarray(alibi_numbers(q.shape[2]), jnp.float32)
    if axis is None:
        return attention(q, k, v, dropout_key=dropout_key, **(options | arguments))
    options |= arguments
    unsupported = [name for name in ("mask", "bias", "chunk") if options.pop(name) is not None]
    unsupported += ["dropout"] if options.pop("dropout") else []
    if unsupported:
        raise ValueError(f"attention with context_axis takes no {' or '.join(unsupported)}; leave it out")
    return ring_attention(q, k, v, axis_name=axis, positions=positions, **options)


def count_heads(features: int, heads: int, groups: int | None, head_dim: int | None) -> tuple[int, int, int]:
    """Return heads, groups and head_dim with defaults groups = heads and head_dim = features / heads.

    Raises:
        ValueError: numbers that do not divide.
    """
    groups = heads if groups is None else groups
    check_heads(heads, groups)
    if head_dim is None and features % heads:
        raise ValueError(f"{features} features do not divide among {heads} heads; give head_dim, or other heads")
    return heads, groups, features // heads if head_dim is None else head_dim


# ---- relative position bias: a learned number per head and bucket of distances, added to attention's scores ----
#
# Source: Raffel et al. 2019 (T5), arXiv:1910.10683, and its public code's rule for the buckets.


def relative_position_buckets(
    queries: int, keys: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> Array:
    """Return the bucket of each pair: one per small distance, logarithmically shared by large ones.

    Args:
        queries, keys: numbers of positions.
        buckets: number of buckets; half of them are for later keys if bidirectional.
        max_distance: distances from here on share the last bucket.
        bidirectional: False puts every later key into bucket 0.
    Returns:
        int32 [queries, keys].
    Raises:
        ValueError: too few buckets, or a max_distance that single-distance buckets already reach.

    Exact.
    """
    side = buckets // 2 if bidirectional else buckets
    near = side // 2
    if near < 1 or (bidirectional and buckets % 2):
        least = 4 if bidirectional else 2
        raise ValueError(f"{buckets} buckets are too few or odd; give {least} or more, an even number if bidirectional")
    if max_distance <= near:
        raise ValueError(f"max_distance is {max_distance}; {buckets} buckets need more than {near}")
    distance = jnp.arange(queries)[:, None] - jnp.arange(keys)[None, :]  # positive where the key came before
    bucket = jnp.zeros_like(distance)
    if bidirectional:
        bucket = jnp.where(distance < 0, side, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(distance, 0)
    # Integer bounds of each shared bucket: a logarithm of the distance would round differently across machines.
    shared = side - near
    bounds = [math.ceil(near * (max_distance / near) ** (i / shared) - 1e-9) for i in range(1, shared)]
    far = near + sum((distance >= bound).astype(jnp.int32) for bound in bounds) if bounds else near
    return (bucket + jnp.where(distance < near, distance, far)).astype(jnp.int32)


def relative_position_bias(
    table: Array, queries: int, keys: int, *, max_distance: int = 128, bidirectional: bool = True
) -> Array:
    """Return the bias for `attention`: [1, H, queries, keys] from a table [H, buckets]."""
    bucket = relative_position_buckets(
        queries, keys, buckets=table.shape[1], max_distance=max_distance, bidirectional=bidirectional
    )
    return table[:, bucket][None]
