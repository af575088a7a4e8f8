"""Context parallelism: attention of tokens that a mesh axis shards, whose keys and values travel around a ring.

Every shard has the queries of its own tokens. In each of n steps it adds the keys that it has to its softmax and sends
them to the next shard; in backward their gradients travel with them. Keys that a causal mask or a window hides are not
computed. Source: Liu et al. 2023, arXiv:2310.01889.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.jax.blocks.attention_inputs import (
    Masking,
    Segments,
    attend_without_padding,
    check_qkv,
    heads_back,
    named_sinks,
    operands_of,
    prepare,
)
from quaver.jax.blocks.chunked_attention import (
    KEYS,
    QUERIES,
    Operands,
    Pairs,
    ScoreOptions,
    Tokens,
    add_keys,
    chunk_pairs,
    finish,
    gradients_of_keys,
    padded,
    sink_gradient,
    start,
    varying_like,
    zeros,
)
from quaver.jax.numerics.quantized import array
from quaver.jax.operations.sharding import psum_like
from quaver.jax.state.context import recipe_in_force
from quaver.recipes.spec import Recipe

#: Mask types that depend on positions only; padding is a negative segment id.
RING_MASKS = ("none", "causal")


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    axis_name: str,
    positions: Array | None = None,
    mask_type: str = "none",
    window: tuple[int, int] | None = None,
    segment_ids: Segments | None = None,
    alibi_slopes: Array | None = None,
    sinks: str | Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    recipe: str | Recipe | None = None,
) -> Array:
    """Compute attention inside `jax.shard_map`, with the tokens of q, k and v sharded over a mesh axis.

    Args:
        q: [B, S, H, D], this shard's tokens.
        k: [B, S, G, D].
        v: [B, S, G, Dv].
        axis_name: the mesh axis.
        positions: int [S], positions of this shard's tokens in the sequence; None if shards are consecutive. A causal
            mask costs every shard the same with tokens in the order `balanced_order`.
        mask_type: "none" or "causal".
        segment_ids: int [B, S] of this shard's tokens; a query sees keys with its id, and a negative id is padding.
        window, alibi_slopes, sinks, scale, soft_cap: as for `quaver.jax.blocks.attention.attention`; distances are
            those of positions.
        recipe: the caller's own recipe; None uses the ambient one. It must not quantize attention.
    Returns:
        [B, S, H, Dv] in q's dtype.
    Raises:
        ValueError: arguments that do not fit, or a recipe with attention=True.
    Bounded: relative RMS 1e-6 of attention on one device, in float32.
    """
    q, k, v = (array("ring_attention", what, x) for what, x in (("q", q), ("k", k), ("v", v)))
    check_qkv(q, k, v)
    chosen = recipe_in_force(recipe)
    if chosen is not None and chosen.attention is not None:
        raise ValueError(
            f"recipe {chosen.name!r} has attention=True and ring_attention does not quantize; use it without"
        )
    if mask_type not in RING_MASKS:
        raise ValueError(f"mask_type is {mask_type!r}; ring_attention takes {' or '.join(map(repr, RING_MASKS))}")
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"a shard has {q.shape[1]} queries and {k.shape[1]} keys; give both of the same tokens")
    if positions is None:
        positions = shard_positions(axis_name, q.shape[1])
    if positions.shape != (q.shape[1],):
        raise ValueError(f"positions have shape {positions.shape}; give one of each token, {(q.shape[1],)}")
    logits = named_sinks(sinks, q.shape[2]) if isinstance(sinks, str) else sinks
    operands = operands_of(q, k, v, None, alibi_slopes, logits)
    masking = Masking(mask_type, None, window, None, segment_ids, None)
    call = prepare(operands, masking, scale, soft_cap, 0.0, None)
    own = positions.astype(jnp.int32)[None]
    tokens = call.tokens._replace(q_positions=own, k_positions=own)
    return heads_back(
        attend_without_padding(
            lambda operands: _attend_ring(axis_name, call.options, operands, tokens), operands, tokens
        )
    )


def shard_positions(axis_name: str, tokens: int) -> Array:
    """Return the positions of a shard's tokens if shards are consecutive, int32 [tokens]."""
    return lax.axis_index(axis_name) * tokens + jnp.arange(tokens, dtype=jnp.int32)


def balanced_order(tokens: int, shards: int) -> np.ndarray:
    """Return the positions of all tokens in an order where shard r has the r-th and the r-th last of 2 n chunks.

    `x[:, order]` is the array to shard, `positions=order` (sharded) the argument of `ring_attention` and of the layers,
    and `np.argsort(order)` restores the sequence.

    Raises:
        ValueError: tokens that do not divide into 2 n chunks.
    """
    if tokens % (2 * shards):
        raise ValueError(f"{tokens} tokens do not divide into {2 * shards} chunks, two of each shard; pad them")
    chunks = np.arange(tokens, dtype=np.int32).reshape(2 * shards, -1)
    return np.concatenate([chunks[[r, 2 * shards - 1 - r]].reshape(-1) for r in range(shards)])


def _attend_ring(axis: str, options: ScoreOptions, operands: Operands, tokens: Tokens) -> Array:
    count = operands.q.shape[-2]
    # At least two chunks, one of each half of a shard in balanced order.
    longest = min(QUERIES, -(-count // 2)), min(KEYS, -(-count // 2))
    pairs = chunk_pairs(count, count, options, None, longest)._replace(at_run_time=True)
    operands, tokens = padded(operands, tokens, pairs)
    return _ring(axis, options, pairs, operands, tokens)[..., :count, :]


def _send(axis: str, tree: Any) -> Any:
    """Return the previous shard's arrays, and send one's own to the next shard."""
    shards = lax.axis_size(axis)
    return jax.tree.map(lambda x: lax.ppermute(x, axis, [(i, (i + 1) % shards) for i in range(shards)]), tree)


def _split(operands: Operands, tokens: Tokens) -> Any:
    """Return what travels."""
    return operands.k, operands.v, tokens.k_positions, tokens.k_segments


def _joined(moving: Any, operands: Operands, tokens: Tokens) -> tuple[Operands, Tokens]:
    k, v, positions, segments = moving
    return operands._replace(k=k, v=v), tokens._replace(k_positions=positions, k_segments=segments)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _ring(axis: str, options: ScoreOptions, pairs: Pairs, operands: Operands, tokens: Tokens) -> Array:
    """Return the output [B, G, R, S, Dv]."""
    return _forward(axis, options, pairs, operands, tokens)[0]


def _forward(axis: str, options: ScoreOptions, pairs: Pairs, operands: Operands, tokens: Tokens) -> tuple[Array, Any]:
    def step(carry: Any, _: None) -> tuple[Any, None]:
        softmax, moving = carry
        received = _send(axis, moving)
        softmax = add_keys(softmax, *_joined(moving, operands, tokens), options, pairs)
        return (softmax, received), None

    moving = _split(operands, tokens)
    carry = varying_like((start(operands), moving), (operands, tokens, lax.axis_index(axis)))
    (softmax, _), _ = lax.scan(step, carry, length=lax.axis_size(axis))
    out, logsumexp = finish(softmax, options)
    out = out.astype(operands.q.dtype)
    return out, (operands, tokens, out, logsumexp)


def _backward(axis: str, options: ScoreOptions, pairs: Pairs, saved: Any, grad: Array) -> tuple[Operands, None]:
    operands, tokens, out, logsumexp = saved
    delta = (out.astype(jnp.float32) * grad.astype(jnp.float32)).sum(-1)
    grad = grad.astype(operands.v.dtype)

    def step(carry: Any, number: Array) -> tuple[Any, None]:
        sums, moving = carry
        received = _send(axis, moving)
        near, visible = _joined(moving, operands, tokens)
        sums = gradients_of_keys(sums, grad, delta, logsumexp, near, visible, options, pairs)
        if operands.sinks is not None and sums.sinks is not None:
            # In the loop, so that no shard sums over the mesh while others still send: they would wait for each other.
            own = sink_gradient(operands.sinks, logsumexp, delta)
            sums = sums._replace(sinks=sums.sinks + jnp.where(number == 0, own, 0))
        dk, dv = _send(axis, (sums.k, sums.v))
        return (sums._replace(k=dk, v=dv), received), None

    carry = zeros(operands), _split(operands, tokens)
    carry = varying_like(carry, (operands, tokens, grad, lax.axis_index(axis)))
    (sums, _), _ = lax.scan(step, carry, jnp.arange(lax.axis_size(axis)))
    return jax.tree.map(lambda g, x: psum_like(g.astype(x.dtype), x), sums, operands), None


_ring.defvjp(_forward, _backward)
