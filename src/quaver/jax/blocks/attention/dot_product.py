"""softmax(q kᵀ scale) v in high precision, with the masks that models use. **True in a mask means masked out.**

Plain array code: XLA fuses it. Scores and softmax are float32 whatever q, k and v are.
"""

import math
from functools import reduce
from operator import or_

import jax
import jax.numpy as jnp
from jax import Array

from quaver.core.reference.masks import MASKS, check_heads, check_type, check_window
from quaver.core.spec import Recipe
from quaver.jax.numerics.given import array
from quaver.jax.state.context import recipe_in_force

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
    """Attention of [B, Sq, H, D] on [B, Sk, G, D], each of G heads serving H / G query heads (MQA, GQA).

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, G, D].
        v: [B, Sk, G, Dv].
        mask_type: a name from `MASKS`. "causal" hides key j from query i if j > i; with "_bottom_right" the last
            query sees the last key: if j > i + (keys - queries), padding not counted. "padding" takes a mask of
            tokens, "arbitrary" one of pairs.
        mask: True where masked out. Padding: [B, Sk] that serves queries and keys, or ([B, Sq], [B, Sk]).
            Arbitrary: broadcastable to [B, H, Sq, Sk].
        window: (left, right): a query sees that many keys before and after its own position, -1 for all.
            The position is the one that the mask type aligns by.
        bias: added to the scores; broadcastable to [B, H, Sq, Sk]. One of -inf hides, as a mask does.
        scale: of the scores; None is 1 / sqrt(D).
        soft_cap: scores become cap tanh(scores / cap), before bias and mask (Gemma-2).
        dropout: probability of dropping a probability; the others grow by 1 / (1 - dropout).
        dropout_key: jax.random key; needed where dropout is not 0.
        recipe: the caller's own; None takes the ambient one. One with attention=True is refused, not ignored.
    Returns:
        [B, Sq, H, Dv] in q's dtype. A query that sees no key gets 0, and so do its gradients.
    Raises:
        ValueError: shapes, heads or masks that do not fit, or a recipe that quantizes attention.
    Bounded: relative RMS 1e-6 of float64 in float32, without dropout. Statistical with it.
    """
    refuse_quantized(recipe)
    q, k, v = (array("attention", what, x) for what, x in (("q", q), ("k", k), ("v", v)))
    _check(q, k, v, mask_type, mask, window)
    batch, queries, heads, dim = q.shape
    keys, groups = k.shape[1:3]
    if dropout and dropout_key is None:
        raise ValueError(f"dropout is {dropout} and there is no key for it; give dropout_key=jax.random.key(...)")
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
        kept = jax.random.bernoulli(dropout_key, 1 - dropout, probabilities.shape)
        probabilities = jnp.where(kept, probabilities / (1 - dropout), 0)
    probabilities = probabilities.reshape(batch, groups, shared, queries, keys).astype(v.dtype)
    out = jnp.einsum("bgsqk,bkgd->bqgsd", probabilities, v, preferred_element_type=jnp.float32)
    return out.reshape(batch, queries, heads, v.shape[-1]).astype(q.dtype)


def refuse_quantized(own: str | Recipe | None = None) -> None:
    """Raise a ValueError if the recipe in force quantizes attention, which JAX's attention cannot."""
    recipe = recipe_in_force(own)
    if recipe is not None and recipe.attention is not None:
        raise ValueError(
            f"recipe {recipe.name!r} has attention=True and quaver.jax does not quantize attention; use the recipe "
            "without it, or quaver.torch"
        )


def hidden(mask_type: str, mask: Mask | None, window: tuple[int, int] | None, shape: tuple[int, ...]) -> Array | None:
    """True where a query may not see a key: broadcastable to the scores' [B, H, Sq, Sk], or None for nowhere."""
    batch, _, queries, keys = shape
    takes_mask, causal = MASKS[mask_type]
    parts: list[Array] = []
    shift: int | Array = keys - queries if mask_type.endswith("bottom_right") else 0
    if mask_type == "arbitrary":
        assert not isinstance(mask, tuple) and mask is not None
        parts.append(_fit("mask", mask, shape))
    elif takes_mask:
        of_queries, of_keys = mask if isinstance(mask, tuple) else (mask, mask)
        assert of_queries is not None and of_keys is not None
        for name, tokens, length in (("queries", of_queries, queries), ("keys", of_keys, keys)):
            if tokens.shape != (batch, length):
                raise ValueError(
                    f"the padding mask of the {name} has shape {tokens.shape}, expected {(batch, length)}; "
                    "give (mask of queries, mask of keys) where they differ"
                )
        parts += [of_queries[:, None, :, None], of_keys[:, None, None, :]]
        if mask_type.endswith("bottom_right"):
            shift = ((~of_keys).sum(-1) - (~of_queries).sum(-1))[:, None, None, None]
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
    """Softmax over the last axis; 0 in rows that are hidden throughout."""
    if where_hidden is None:
        return jax.nn.softmax(scores, axis=-1)
    scores = jnp.where(where_hidden, -jnp.inf, scores)
    highest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    # exp(-inf - -inf) would be NaN, in the gradient too.
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
        raise ValueError("a mask is boolean, True where masked out; an additive one is given as `bias`")
