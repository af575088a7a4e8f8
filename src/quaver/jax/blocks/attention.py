"""Attention in high precision with masks, rope and position biases, as functions. **True in a mask means masked out.**

Plain array code that XLA fuses. Scores and softmax are float32 for any dtype of q, k and v.
"""

import math
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from quaver.jax.blocks.options import CoreOptions, Rope
from quaver.jax.linears.dot_general import KernelMatrix
from quaver.jax.numerics.quantized import array
from quaver.jax.state.context import recipe_in_force
from quaver.options import pick
from quaver.recipes.spec import Recipe
from quaver.reference.attention import MASKS, check_heads, check_type, check_window

# ---- dot-product attention ----

Mask = Array | tuple[Array, Array]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask_type: str = "none",
    mask: Mask | None = None,
    window: tuple[int, int] | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
    recipe: str | Recipe | None = None,
) -> Array:
    """Compute attention of [B, Sq, H, D] on [B, Sk, G, D]; each of G key heads serves H / G query heads (MQA, GQA).

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
        bias: added to the scores; broadcastable to [B, H, Sq, Sk]. -inf hides, as a mask does.
        scale: factor of the scores; None is 1 / sqrt(D).
        soft_cap: scores become cap tanh(scores / cap), before bias and mask (Gemma-2).
        dropout: probability of dropping an attention weight; the others are scaled by 1 / (1 - dropout).
        dropout_key: jax.random key; required if dropout is not 0.
        recipe: the caller's own recipe; None uses the ambient one. A recipe with attention=True raises an error.
    Returns:
        [B, Sq, H, Dv] in q's dtype. A query that sees no key gets 0 and zero gradients.
    Raises:
        ValueError: shapes, heads or masks that do not fit, or a recipe that quantizes attention.
    Bounded: relative RMS 1e-6 of float64 in float32, without dropout. Statistical with it.
    """
    check_not_quantized(recipe)
    q, k, v = (array("attention", what, x) for what, x in (("q", q), ("k", k), ("v", v)))
    _check(q, k, v, mask_type, mask, window)
    batch, queries, heads, dim = q.shape
    keys, groups = k.shape[1:3]
    if dropout and dropout_key is None:
        raise ValueError(f"dropout is {dropout} and no dropout_key was passed; give dropout_key=jax.random.key(...)")
    shared = heads // groups
    grouped = q.reshape(batch, queries, groups, shared, dim)
    scores = jnp.einsum("bqgsd,bkgd->bgsqk", grouped, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, queries, keys) * (1 / math.sqrt(dim) if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    unseen = hidden(mask_type, mask, window, scores.shape)
    if bias is not None:
        bias = _fit("bias", bias, scores.shape).astype(jnp.float32)
        hides, scores = bias == -jnp.inf, scores + bias
        unseen = hides if unseen is None else unseen | hides
    probabilities = _softmax(scores, unseen)
    if dropout:
        assert dropout_key is not None
        keep_mask = jax.random.bernoulli(dropout_key, 1 - dropout, probabilities.shape)
        probabilities = jnp.where(keep_mask, probabilities / (1 - dropout), 0)
    probabilities = probabilities.reshape(batch, groups, shared, queries, keys).astype(v.dtype)
    out = jnp.einsum("bgsqk,bkgd->bqgsd", probabilities, v, preferred_element_type=jnp.float32)
    return out.reshape(batch, queries, heads, v.shape[-1]).astype(q.dtype)


def check_not_quantized(own: str | Recipe | None = None) -> None:
    """Raise ValueError if the recipe in force quantizes attention, which quaver.jax does not support."""
    recipe = recipe_in_force(own)
    if recipe is not None and recipe.attention is not None:
        raise ValueError(
            f"recipe {recipe.name!r} has attention=True and quaver.jax does not quantize attention; use the recipe "
            "without it, or quaver.torch"
        )


def hidden(mask_type: str, mask: Mask | None, window: tuple[int, int] | None, shape: tuple[int, ...]) -> Array | None:
    """Return the mask, True where a query may not see a key, broadcastable to [B, H, Sq, Sk]; None if nothing is
    hidden.
    """
    batch, _, queries, keys = shape
    takes_mask, causal = MASKS[mask_type]
    parts: list[Array] = []
    shift: int | Array = keys - queries if mask_type.endswith("bottom_right") else 0
    if mask_type == "arbitrary":
        assert not isinstance(mask, tuple) and mask is not None
        parts.append(_fit("mask", mask, shape))
    elif takes_mask:
        query_mask, key_mask = mask if isinstance(mask, tuple) else (mask, mask)
        assert query_mask is not None and key_mask is not None
        for name, tokens, length in (("queries", query_mask, queries), ("keys", key_mask, keys)):
            if tokens.shape != (batch, length):
                raise ValueError(
                    f"the padding mask of the {name} has shape {tokens.shape}, expected {(batch, length)}; "
                    "give (mask of queries, mask of keys) where they differ"
                )
        parts += [query_mask[:, None, :, None], key_mask[:, None, None, :]]
        if mask_type.endswith("bottom_right"):
            shift = ((~key_mask).sum(-1) - (~query_mask).sum(-1))[:, None, None, None]
    left, right = window or (-1, -1)
    if causal:
        right = 0 if right < 0 else min(right, 0)
    ahead = jnp.arange(keys)[None, None, None, :] - jnp.arange(queries)[None, None, :, None] - shift
    if right >= 0:
        parts.append(ahead > right)
    if left >= 0:
        parts.append(ahead < -left)
    return reduce(or_, parts) if parts else None


def _softmax(scores: Array, where_hidden: Array | None) -> Array:
    """Softmax over the last axis; 0 in rows that are hidden completely."""
    if where_hidden is None:
        return jax.nn.softmax(scores, axis=-1)
    scores = jnp.where(where_hidden, -jnp.inf, scores)
    highest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    # exp(-inf - -inf) would be NaN, also in the gradient.
    weights = jnp.exp(scores - jnp.where(highest == -jnp.inf, 0, highest))
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def _fit(name: str, x: Array, shape: tuple[int, ...]) -> Array:
    ours = (1,) * (4 - x.ndim) + x.shape
    if len(ours) != 4 or any(a not in (1, b) for a, b in zip(ours, shape, strict=True)):
        raise ValueError(f"the {name} has shape {x.shape}, which does not broadcast to [B, H, Sq, Sk] = {list(shape)}")
    return x.reshape(ours)


def _check(q: Array, k: Array, v: Array, mask_type: str, mask: Mask | None, window: tuple[int, int] | None) -> None:
    check_type(mask_type, mask is not None)
    check_window(mask_type, window)
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError(f"attention takes [batch, tokens, heads, features]; got {q.shape}, {k.shape} and {v.shape}")
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]):
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} do not fit: [B,Sq,H,D], [B,Sk,G,D], [B,Sk,G,Dv]")
    check_heads(q.shape[2], k.shape[2])
    parts = mask if isinstance(mask, tuple) else (mask,)
    if mask_type == "arbitrary" and isinstance(mask, tuple):
        raise ValueError("an arbitrary mask is one array, broadcastable to [B, H, Sq, Sk]; a pair is for padding")
    if any(m is not None and m.dtype != jnp.bool_ for m in parts):
        raise ValueError("a mask is boolean, True where masked out; pass an additive mask as `bias`")


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
    layer: Any, q: Array, k: Array, v: Array, mask: Mask | None, bias: Array | None, dropout_key: Array | None
) -> Array:
    """Call `attention` with a layer's options; without a key there is no dropout."""
    options = pick(CoreOptions, layer)
    if dropout_key is None:
        options["dropout"] = 0.0
    return attention(q, k, v, mask=mask, bias=bias, dropout_key=dropout_key, **options)


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
