"""Attention over chunks of queries and keys, forward and backward, without an array of all scores.

Forward is FlashAttention's online softmax over a scan of the pairs (chunk of queries, chunk of keys) that see each
other, and saves only the output and the logsumexp of each query. Backward computes the scores of each pair again.
Scores, softmax and sums are float32 for any dtype of q, k and v.

Source: Dao et al. 2022, arXiv:2205.14135; Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.jax.operations.sharding import ordered, psum_like, varying

#: Greatest number of queries and of keys in a chunk, by measurement (docs/lab/jax.md).
QUERIES, KEYS = 256, 256


class ScoreOptions(NamedTuple):
    """Static options of the scores."""

    scale: float
    soft_cap: float | None = None
    dropout: float = 0.0
    #: A query sees keys that are at most so many positions behind and ahead of it; -1 is no bound.
    window: tuple[int, int] = (-1, -1)
    #: A query sees only keys in its own range of this many positions; None for all.
    local: int | None = None


class Operands(NamedTuple):
    """The arrays that have gradients; each of G groups of R query heads shares a head of keys and values."""

    #: [B, G, R, Sq, D]
    q: Array
    #: [B, G, Sk, D]
    k: Array
    #: [B, G, Sk, Dv]
    v: Array
    #: Broadcastable to [B, G, R, Sq, Sk], added to the scores; or None.
    bias: Array | None = None
    #: [1 or B, G, R]: score -= slope × distance; or None.
    slopes: Array | None = None
    #: [G, R]: logits of an extra column of the softmax whose value is 0; or None.
    sinks: Array | None = None


class Tokens(NamedTuple):
    """The arrays that decide which keys a query sees."""

    #: int32 [1 or B, Sq] and [1 or B, Sk].
    q_positions: Array
    k_positions: Array
    #: int32 [1 or B, Sq] and [1 or B, Sk], which are equal where a query may see a key; or None.
    q_segments: Array | None = None
    k_segments: Array | None = None
    #: bool, broadcastable to [B, G, R, Sq, Sk], True where hidden; or None.
    mask: Array | None = None
    #: Key of the dropout masks, or None.
    dropout_key: Array | None = None


class Softmax(NamedTuple):
    """Running sums of the online softmax over the keys so far, float32."""

    #: Highest score, [B, G, R, Sq].
    highest: Array
    #: Sum of exp(score - highest), [B, G, R, Sq].
    total: Array
    #: Sum of exp(score - highest) v, [B, G, R, Sq, Dv].
    weighted: Array


class Pairs(NamedTuple):
    """Lengths of the chunks, and the pairs (chunk of queries, chunk of keys) to compute."""

    queries: int
    keys: int
    visible: tuple[tuple[int, int], ...]
    #: True to skip further pairs by the positions of their tokens, which are arrays.
    at_run_time: bool = False


def chunk_pairs(
    queries: int, keys: int, options: ScoreOptions, shift: int | None, longest: tuple[int, int] = (QUERIES, KEYS)
) -> Pairs:
    """Return the chunks of a call, without the pairs that positions hide completely.

    Args:
        queries, keys: numbers of tokens.
        options: with the window.
        shift: position of query i minus i, if positions are those of the tokens in the array; None computes all pairs.
        longest: greatest number of queries and of keys in a chunk.
    """
    if not (isinstance(queries, int) and isinstance(keys, int)):
        # A symbolic dimension (`jax.export`) is one chunk.
        return Pairs(queries, keys, ((0, 0),))
    (q_count, q_length), (k_count, k_length) = (
        (count, -(-n // count)) for n, most in zip((queries, keys), longest, strict=True) for count in [-(-n // most)]
    )
    every = [(i, j) for i in range(q_count) for j in range(k_count)]
    if shift is None:
        return Pairs(q_length, k_length, tuple(every))

    def is_visible(i: int, j: int) -> bool:
        first, start = i * q_length + shift, j * k_length
        last, end = min((i + 1) * q_length, queries) - 1 + shift, min((j + 1) * k_length, keys) - 1
        left, right = options.window
        return (right < 0 or start - last <= right) and (left < 0 or first - end <= left)

    return Pairs(q_length, k_length, tuple(pair for pair in every if is_visible(*pair)))


# ---- slices ----


def take(x: Array, index: Array | int, length: int, axis: int) -> Array:
    """Return chunk number `index` along an axis, or all of an axis that is broadcast."""
    if x.shape[axis] == 1 or x.shape[axis] == length:
        return x
    return lax.dynamic_slice_in_dim(x, index * length, length, axis)


def put(x: Array, chunk: Array, index: Array | int, axis: int) -> Array:
    if x.shape[axis] == chunk.shape[axis]:
        return chunk
    return lax.dynamic_update_slice_in_dim(x, chunk, index * chunk.shape[axis], axis)


def add_chunk(x: Array, chunk: Array, index: Array | int, axis: int) -> Array:
    return put(x, take(x, index, chunk.shape[axis], axis) + chunk, index, axis)


def pad(x: Array, length: int, axis: int, value: int = 0) -> Array:
    """Pad an axis to a multiple of the chunk's length."""
    more = -x.shape[axis] % length
    if x.shape[axis] == 1 or not more:
        return x
    widths = [(0, more if i == axis % x.ndim else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def _over_pairs(
    body: Callable[[Any, Any, Any], Any],
    carry: Any,
    visible: tuple[tuple[int, int], ...],
    is_visible: Callable[[Any, Any], Array] | None,
) -> Any:
    """Run the body on every pair, unless `is_visible` says at run time that nothing is; one pair needs no loop."""

    def run(carry: Any, i: Any, j: Any) -> Any:
        if is_visible is None:
            return body(carry, i, j)
        return lax.cond(is_visible(i, j), lambda carry: body(carry, i, j), lambda carry: carry, carry)

    if len(visible) == 1:
        i, j = visible[0]
        return run(carry, i, j)
    pairs: Any = np.array(visible, np.int32).reshape(-1, 2)
    return lax.scan(lambda carry, ij: (run(carry, ij[0], ij[1]), None), carry, pairs)[0]


def _visibility(tokens: Tokens, options: ScoreOptions, pairs: Pairs) -> Callable[[Any, Any], Array] | None:
    """Return the function that says at run time whether positions hide a pair of chunks completely; None if the pairs
    are those of `chunk_pairs` already.
    """
    if not pairs.at_run_time or options.window == (-1, -1):
        return None
    left, right = options.window

    def is_visible(i: Any, j: Any) -> Array:
        q, k = (
            take(x, n, length, -1)
            for x, n, length in ((tokens.q_positions, i, pairs.queries), (tokens.k_positions, j, pairs.keys))
        )
        seen = jnp.bool_(True)
        if right >= 0:
            seen &= k.min() - q.max() <= right
        if left >= 0:
            seen &= q.min() - k.max() <= left
        return seen

    return is_visible


# ---- one pair of chunks ----


def adjust(scores: Array, bias: Array | None, slopes: Array | None, ahead: Array, options: ScoreOptions) -> Array:
    """Return the scores q kᵀ scale with soft cap, bias and ALiBi."""
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if slopes is not None:
        scores = scores - slopes.astype(jnp.float32)[..., None, None] * jnp.abs(ahead)
    return scores


def _hidden(tokens: Tokens, bias: Array | None, ahead: Array, options: ScoreOptions) -> Array | None:
    """Return True where a query of the chunk may not see a key, broadcastable to its scores; None if nothing is."""
    parts = [] if tokens.mask is None else [tokens.mask]
    left, right = options.window
    if right >= 0:
        parts.append(ahead > right)
    if left >= 0:
        parts.append(ahead < -left)
    if options.local is not None:
        q_range, k_range = tokens.q_positions // options.local, tokens.k_positions // options.local
        parts.append(_wide(q_range[:, :, None] != k_range[:, None, :]))
    if tokens.q_segments is not None and tokens.k_segments is not None:
        parts.append(_wide(tokens.q_segments[:, :, None] != tokens.k_segments[:, None, :]))
    if bias is not None:
        parts.append(bias == -jnp.inf)
    return None if not parts else reduce(or_, parts)


def _wide(x: Array) -> Array:
    return x[:, None, None]  # [B, Sq, Sk] to [B, 1, 1, Sq, Sk]


class ScoreChunk(NamedTuple):
    """The scores of a pair of chunks."""

    operands: Operands
    #: q kᵀ scale, float32 [B, G, R, queries, keys].
    scaled: Array
    #: Position of each key minus that of each query, [1 or B, 1, 1, queries, keys].
    ahead: Array
    hidden: Array | None
    #: True where dropout keeps a probability, or None.
    kept: Array | None

    def scores(self, options: ScoreOptions) -> tuple[Array, Any]:
        """Return the scores, -inf where hidden; and the function that maps their gradient to those of `scaled`, bias
        and slopes.
        """
        rule = partial(adjust, ahead=self.ahead, options=options)
        # A shard's own gradients: JAX would sum those of a replicated bias over the mesh for each chunk.
        added = varying_like((self.operands.bias, self.operands.slopes), self.scaled)
        scores, pull = jax.vjp(rule, self.scaled, *added)
        return (scores if self.hidden is None else jnp.where(self.hidden, -jnp.inf, scores)), pull


def score_chunk(operands: Operands, tokens: Tokens, options: ScoreOptions, pairs: Pairs, i: Any, j: Any) -> ScoreChunk:
    """Return the scores of chunk i of the queries and chunk j of the keys."""
    rows, columns = partial(take, index=i, length=pairs.queries), partial(take, index=j, length=pairs.keys)

    def both(x: Array | None) -> Array | None:
        return None if x is None else columns(rows(x, axis=-2), axis=-1)

    some = operands._replace(
        q=rows(operands.q, axis=-2),
        k=columns(operands.k, axis=-2),
        v=columns(operands.v, axis=-2),
        bias=both(operands.bias),
    )
    near = tokens._replace(
        q_positions=rows(tokens.q_positions, axis=-1),
        k_positions=columns(tokens.k_positions, axis=-1),
        q_segments=None if tokens.q_segments is None else rows(tokens.q_segments, axis=-1),
        k_segments=None if tokens.k_segments is None else columns(tokens.k_segments, axis=-1),
        mask=both(tokens.mask),
    )
    scaled = options.scale * jnp.einsum("bgrqd,bgkd->bgrqk", some.q, some.k, preferred_element_type=jnp.float32)
    ahead = _wide(near.k_positions[:, None, :] - near.q_positions[:, :, None])
    kept = None
    if options.dropout:
        assert tokens.dropout_key is not None
        columns_of_pairs = -(-operands.k.shape[-2] // pairs.keys)
        key = jax.random.fold_in(tokens.dropout_key, i * columns_of_pairs + j)
        kept = jax.random.bernoulli(key, 1 - options.dropout, scaled.shape)
    return ScoreChunk(some, scaled, ahead, _hidden(near, some.bias, ahead, options), kept)


# ---- all pairs ----


def start(operands: Operands) -> Softmax:
    """Return the softmax before any key: empty, or with the sink's column."""
    q, v, sinks = operands.q, operands.v, operands.sinks
    shape = q.shape[:-1]
    if sinks is None:
        highest, total = jnp.full(shape, -jnp.inf), jnp.zeros(shape)
    else:
        highest, total = jnp.broadcast_to(sinks.astype(jnp.float32)[:, :, None], shape), jnp.ones(shape)
    return Softmax(highest, total, jnp.zeros((*shape, v.shape[-1])))


def add_keys(softmax: Softmax, operands: Operands, tokens: Tokens, options: ScoreOptions, pairs: Pairs) -> Softmax:
    """Add all visible keys to the softmax."""

    def add(softmax: Softmax, i: Any, j: Any) -> Softmax:
        pair = score_chunk(operands, tokens, options, pairs, i, j)
        before, total = (take(x, i, pairs.queries, -1) for x in softmax[:2])
        weighted = take(softmax.weighted, i, pairs.queries, -2)
        scores, _ = pair.scores(options)
        highest = jnp.maximum(before, scores.max(-1))
        # exp(-inf - -inf) would be NaN.
        shift = jnp.where(highest == -jnp.inf, 0, highest)
        weights, shrink = jnp.exp(scores - shift[..., None]), jnp.exp(before - shift)
        dropped = weights if pair.kept is None else jnp.where(pair.kept, weights, 0)
        v = pair.operands.v
        new = jnp.einsum("bgrqk,bgkd->bgrqd", dropped.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return Softmax(
            put(softmax.highest, highest, i, -1),
            put(softmax.total, total * shrink + weights.sum(-1), i, -1),
            put(softmax.weighted, weighted * shrink[..., None] + new, i, -2),
        )

    first = varying_like(softmax, (operands, tokens))
    return _over_pairs(add, first, pairs.visible, _visibility(tokens, options, pairs))


def finish(softmax: Softmax, options: ScoreOptions) -> tuple[Array, Array]:
    """Return the output, float32 [B, G, R, Sq, Dv], and the logsumexp [B, G, R, Sq]; 0 and -inf where nothing is
    seen.
    """
    total = jnp.where(softmax.total == 0, 1, softmax.total)
    out = softmax.weighted / (total * (1 - options.dropout))[..., None]
    return out, jnp.where(softmax.total == 0, -jnp.inf, softmax.highest + jnp.log(total))


def varying_like(tree: Any, arguments: Any) -> Any:
    """Return the arrays with the mesh axes over which any of the arguments varies, as a loop's carry needs it."""
    axes = varying(arguments)
    return jax.tree.map(lambda x: lax.pcast(x, ordered(axes - varying(x)), to="varying"), tree) if axes else tree


def gradients_of_keys(
    sums: Operands,
    grad: Array,
    delta: Array,
    logsumexp: Array,
    operands: Operands,
    tokens: Tokens,
    options: ScoreOptions,
    pairs: Pairs,
) -> Operands:
    """Add the gradients of all visible pairs to float32 sums, which are None where there is no operand.

    Args:
        sums: gradients so far; that of the sinks is not changed.
        grad: of the output, [B, G, R, Sq, Dv], divided by 1 - dropout.
        delta: sum of output times its gradient, float32 [B, G, R, Sq].
        logsumexp: from forward, float32 [B, G, R, Sq].
    """
    shift = jnp.where(logsumexp == -jnp.inf, 0, logsumexp)

    def add(sums: Operands, i: Any, j: Any) -> Operands:
        pair = score_chunk(operands, tokens, options, pairs, i, j)
        q, k, v = pair.operands[:3]
        out = take(grad, i, pairs.queries, -2)
        own_shift, own_delta = (take(x, i, pairs.queries, -1)[..., None] for x in (shift, delta))
        scores, pull = pair.scores(options)
        weights = jnp.exp(scores - own_shift)
        back = jnp.einsum("bgrqd,bgkd->bgrqk", out, v, preferred_element_type=jnp.float32)
        dropped = weights
        if pair.kept is not None:
            dropped, back = jnp.where(pair.kept, weights, 0), jnp.where(pair.kept, back, 0)
        dv = jnp.einsum("bgrqk,bgrqd->bgkd", dropped.astype(v.dtype), out, preferred_element_type=jnp.float32)
        ds = weights * (back - own_delta)
        if pair.hidden is not None:
            ds = jnp.where(pair.hidden, 0, ds)
        ds, dbias, dslopes = pull(ds)
        ds = (ds * options.scale).astype(q.dtype)
        dq = jnp.einsum("bgrqk,bgkd->bgrqd", ds, k, preferred_element_type=jnp.float32)
        dk = jnp.einsum("bgrqk,bgrqd->bgkd", ds, q, preferred_element_type=jnp.float32)
        return sums._replace(
            q=add_chunk(sums.q, dq, i, -2),
            k=add_chunk(sums.k, dk, j, -2),
            v=add_chunk(sums.v, dv, j, -2),
            bias=None if sums.bias is None else add_both(sums.bias, dbias, i, j),
            slopes=None if sums.slopes is None else sums.slopes + dslopes,
        )

    first = varying_like(sums, (operands, tokens, grad))
    return _over_pairs(add, first, pairs.visible, _visibility(tokens, options, pairs))


def add_both(x: Array, chunk: Array, i: Any, j: Any) -> Array:
    rows = take(x, i, chunk.shape[-2], -2)
    return put(x, add_chunk(rows, chunk, j, -1), i, -2)


def zeros(operands: Operands) -> Operands:
    """Return float32 zeros for `gradients_of_keys`."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), operands)


def sink_gradient(sinks: Array, logsumexp: Array, delta: Array) -> Array:
    """Return the gradient of the sinks [G, R]."""
    shift = jnp.where(logsumexp == -jnp.inf, jnp.inf, logsumexp)
    return -(jnp.exp(sinks.astype(jnp.float32)[:, :, None] - shift) * delta).sum((0, 3))


# ---- attention ----


def attend_chunked(
    options: ScoreOptions,
    operands: Operands,
    tokens: Tokens,
    shift: int | None,
    longest: tuple[int, int] = (QUERIES, KEYS),
) -> Array:
    """Return the output [B, G, R, Sq, Dv] in q's dtype.

    Args:
        options, operands, tokens: of the call.
        shift, longest: as for `chunk_pairs`.
    """
    queries, keys = operands.q.shape[-2], operands.k.shape[-2]
    pairs = chunk_pairs(queries, keys, options, shift, longest)
    operands, tokens = padded(operands, tokens, pairs)
    return _attend(options, pairs, operands, tokens)[..., :queries, :]


def padded(operands: Operands, tokens: Tokens, pairs: Pairs) -> tuple[Operands, Tokens]:
    """Pad queries and keys to whole chunks, which hide the added keys."""
    rows, columns = pairs.queries, pairs.keys
    queries, keys = operands.q.shape[-2], operands.k.shape[-2]
    if (queries == rows or queries % rows == 0) and (keys == columns or keys % columns == 0):
        return operands, tokens

    def both(x: Array | None) -> Array | None:
        return None if x is None else pad(pad(x, rows, -2), columns, -1)

    q_segments, k_segments = tokens.q_segments, tokens.k_segments
    if keys % columns and (q_segments is None or k_segments is None):
        q_segments, k_segments = jnp.zeros((1, queries), jnp.int32), jnp.zeros((1, keys), jnp.int32)
    tokens = tokens._replace(
        q_positions=pad(tokens.q_positions, rows, -1),
        k_positions=pad(tokens.k_positions, columns, -1),
        q_segments=None if q_segments is None else pad(q_segments, rows, -1, -1),
        k_segments=None if k_segments is None else pad(k_segments, columns, -1, -2),
        mask=both(tokens.mask),
    )
    q, k, v = pad(operands.q, rows, -2), pad(operands.k, columns, -2), pad(operands.v, columns, -2)
    return operands._replace(q=q, k=k, v=v, bias=both(operands.bias)), tokens


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(options: ScoreOptions, pairs: Pairs, operands: Operands, tokens: Tokens) -> Array:
    return _forward(options, pairs, operands, tokens)[0]


def _forward(options: ScoreOptions, pairs: Pairs, operands: Operands, tokens: Tokens) -> tuple[Array, Any]:
    softmax = add_keys(start(operands), operands, tokens, options, pairs)
    out, logsumexp = finish(softmax, options)
    out = out.astype(operands.q.dtype)
    return out, (operands, tokens, out, logsumexp)


def _backward(options: ScoreOptions, pairs: Pairs, saved: Any, grad: Array) -> tuple[Operands, Any]:
    operands, tokens, out, logsumexp = saved
    delta = (out.astype(jnp.float32) * grad.astype(jnp.float32)).sum(-1)
    grad = (grad / (1 - options.dropout)).astype(operands.v.dtype)
    sums = gradients_of_keys(zeros(operands), grad, delta, logsumexp, operands, tokens, options, pairs)
    if operands.sinks is not None:
        sums = sums._replace(sinks=sink_gradient(operands.sinks, logsumexp, delta))
    return jax.tree.map(lambda g, x: psum_like(g.astype(x.dtype), x), sums, operands), None


_attend.defvjp(_forward, _backward)
