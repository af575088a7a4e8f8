"""Attention with every GEMM quantized, chunk by chunk of the queries: `quaver.reference.attention` in float32.

A chunk of queries sees all keys at once, because probabilities are quantized after they are normalized. Backward
quantizes and computes everything again; only the arguments are saved.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.jax.blocks.chunked_attention import (
    QUERIES,
    Operands,
    Pairs,
    ScoreOptions,
    Tokens,
    add_both,
    padded,
    put,
    score_chunk,
    sink_gradient,
    take,
    varying_like,
    zeros,
)
from quaver.jax.numerics.rounding import encode, forbid_second_derivative
from quaver.jax.operations.ops import DTYPES, quantize
from quaver.jax.operations.sharding import psum_like
from quaver.recipes.formats import E4M3
from quaver.recipes.spec import PROBABILITY_FACTOR, AttentionSpec, QuantSpec

LABEL = "quaver.jax.blocks.attention"


def attend_quantized(spec: AttentionSpec, options: ScoreOptions, operands: Operands, tokens: Tokens) -> Array:
    """Return the output [B, G, R, Sq, Dv] in q's dtype, of attention whose operands are quantized, each head on its
    own.

    Hidden keys count in the amax of their blocks. A block with an infinity or NaN has scale NaN.

    Raises:
        ValueError: a dtype that cannot be quantized.
    Bounded: relative RMS 1e-3 of `quaver.reference.attention`; a probability near a tie of E4M3 may round to the other
        side. The codes of q, k, v and the output's gradient are exact. Statistical: dropout.
    """
    for x in operands[:3]:
        if x.dtype not in DTYPES:
            raise ValueError(
                f"quantized attention takes float32, bfloat16 or float16, not {x.dtype}: convert q, k and v, or use a "
                "recipe without attention=True"
            )
    queries, keys = operands.q.shape[-2], operands.k.shape[-2]
    block = spec.grad_output.block[1] or 1
    length = min(queries, max(QUERIES // block, 1) * block)
    pairs = Pairs(length, keys, tuple((i, 0) for i in range(-(-queries // length))))
    return _attend(spec, options, pairs, operands, tokens)


def rounded(x: Array, spec: QuantSpec, amax: Array | None = None) -> Array:
    """Return float32 x [..., rows, k] as the GEMM sees it: each matrix quantized along k and dequantized."""
    matrices = x.reshape(-1, *x.shape[-2:])
    if amax is None:
        values = jax.vmap(lambda x: quantize(x, spec).dequantize())(matrices)
    else:
        amaxes = amax.reshape(matrices.shape[0], *amax.shape[-2:])
        values = jax.vmap(lambda x, amax: quantize(x, spec, amax).dequantize())(matrices, amaxes)
    return values.reshape(x.shape)


def transposed(x: Array, spec: QuantSpec, amax: Array | None = None) -> Array:
    """Return float32 x [..., rows, k], quantized along rows."""
    return rounded(x.swapaxes(-1, -2), spec, amax).swapaxes(-1, -2)


class _Probabilities(NamedTuple):
    """Softmax of a chunk of queries over all keys."""

    #: float32 [B, G, R, queries, Sk], before quantization.
    exact: Array
    #: Values that the GEMMs see, times `PROBABILITY_FACTOR`; 0 where dropped.
    codes: Array
    #: float32 [B, G, R, queries]; -inf where nothing is seen.
    logsumexp: Array
    #: True where dropout keeps a probability, or None.
    kept: Array | None
    #: Maps the gradient of the scores to those of q kᵀ scale, bias and slopes.
    pull: Any


def _probabilities(rounded: Operands, tokens: Tokens, options: ScoreOptions, pairs: Pairs, i: Any) -> _Probabilities:
    chunk = score_chunk(rounded, tokens, options, pairs, i, 0)
    scores, pull = chunk.scores(options)
    total = jax.nn.logsumexp(scores, -1)
    if rounded.sinks is not None:
        total = jnp.logaddexp(total, rounded.sinks.astype(jnp.float32)[:, :, None])
    # -inf minus -inf would be NaN.
    exact = jnp.exp(scores - jnp.where(total == -jnp.inf, 0, total)[..., None])
    dropped = exact if chunk.kept is None else jnp.where(chunk.kept, exact, 0)
    codes = lax.optimization_barrier(encode(dropped * np.float32(PROBABILITY_FACTOR), E4M3, None))
    return _Probabilities(exact, codes.astype(jnp.float32), total, chunk.kept, pull)


def _forward(
    spec: AttentionSpec, options: ScoreOptions, pairs: Pairs, operands: Operands, tokens: Tokens
) -> tuple[Array, Any]:
    saved = operands, tokens
    operands = forbid_second_derivative(LABEL, operands)
    queries = operands.q.shape[-2]
    rows, visible = padded(_rounded(operands, spec), tokens, pairs)
    v = transposed(operands.v, spec.input)

    def chunk(out: Array, ij: Array) -> tuple[Array, None]:
        p = _probabilities(rows, visible, options, pairs, ij[0])
        y = jnp.einsum("bgrqk,bgkd->bgrqd", p.codes, v) / (PROBABILITY_FACTOR * (1 - options.dropout))
        return put(out, y, ij[0], -2), None

    empty = jnp.zeros((*rows.q.shape[:-1], v.shape[-1]), jnp.float32)
    out, _ = lax.scan(chunk, varying_like(empty, (operands, tokens)), _numbers(pairs))
    return out[..., :queries, :].astype(operands.q.dtype), saved


def _rounded(operands: Operands, spec: AttentionSpec) -> Operands:
    q, k, v = (rounded(x, spec.input) for x in operands[:3])
    return operands._replace(q=q, k=k, v=v)


def _numbers(pairs: Pairs) -> Any:
    return np.array(pairs.visible, np.int32)


def _backward(
    spec: AttentionSpec, options: ScoreOptions, pairs: Pairs, saved: Any, grad: Array
) -> tuple[Operands, None]:
    operands, tokens = saved
    operands, grad = forbid_second_derivative(LABEL, (operands, grad))
    queries, length = operands.q.shape[-2], pairs.queries
    rows, visible = padded(_rounded(operands, spec), tokens, pairs)
    kt, qt = transposed(operands.k, spec.input), _padded_rows(transposed(operands.q, spec.input), length)
    do, dot = (_padded_rows(f(grad, spec.grad_output), length) for f in (rounded, transposed))
    rescale = 1 / (1 - options.dropout)

    def scores_gradient(i: Any) -> tuple[_Probabilities, Array, Array]:
        """Return the probabilities, the gradient of the scores, and delta."""
        p = _probabilities(rows, visible, options, pairs, i)
        dp = jnp.einsum("bgrqd,bgkd->bgrqk", take(do, i, length, -2), rows.v) * rescale
        if p.kept is not None:
            dp = jnp.where(p.kept, dp, 0)
        delta = (p.exact * dp).sum(-1)
        return p, p.exact * (dp - delta[..., None]), delta

    amax = None
    if spec.grad_output.block[1] is None:
        # Amax of each column of dS over all queries, which blocks along the queries share.
        def largest(amax: Array, ij: Array) -> tuple[Array, None]:
            p, ds, _ = scores_gradient(ij[0])
            ds = jnp.abs(p.pull(ds)[0])
            return jnp.maximum(amax, ds.max(-2)), None

        none = jnp.zeros((*rows.q.shape[:3], operands.k.shape[-2]), jnp.float32)
        amax, _ = lax.scan(largest, varying_like(none, (operands, tokens, grad)), _numbers(pairs))

    def add(sums: Any, ij: Array) -> tuple[Any, None]:
        i = ij[0]
        sums, dsinks = sums
        p, ds, delta = scores_gradient(i)
        ds, dbias, dslopes = p.pull(ds)
        along, across = _quantized_scores(ds, spec.grad_output, amax)
        out, q = take(dot, i, length, -2), take(qt, i, length, -2)
        dv = jnp.einsum("bgrqk,bgrqd->bgkd", p.codes, out) * (rescale / PROBABILITY_FACTOR)
        dk = jnp.einsum("bgrqk,bgrqd->bgkd", across, q) * options.scale
        dq = jnp.einsum("bgrqk,bgkd->bgrqd", along, kt) * options.scale
        if operands.sinks is not None:
            dsinks = dsinks + sink_gradient(operands.sinks, p.logsumexp, delta)
        sums = sums._replace(
            q=put(sums.q, dq, i, -2),
            k=sums.k + dk,
            v=sums.v + dv,
            bias=None if sums.bias is None else add_both(sums.bias, dbias, i, 0),
            slopes=None if sums.slopes is None else sums.slopes + dslopes,
        )
        return (sums, dsinks), None

    first = zeros(rows._replace(sinks=None)), jnp.zeros(rows.q.shape[1:3], jnp.float32)
    (sums, dsinks), _ = lax.scan(add, varying_like(first, (operands, tokens, grad)), _numbers(pairs))
    sums = sums._replace(q=sums.q[..., :queries, :], sinks=None if operands.sinks is None else dsinks)
    if operands.bias is not None:
        sums = sums._replace(bias=sums.bias[..., : operands.bias.shape[-2], :])
    return jax.tree.map(lambda g, x: psum_like(g.astype(x.dtype), x), sums, operands), None


def _quantized_scores(ds: Array, spec: QuantSpec, columns: Array | None) -> tuple[Array, Array]:
    """Return dS of a chunk of queries quantized along the keys, and along the queries.

    Args:
        ds: float32 [B, G, R, queries, Sk].
        spec: how to quantize.
        columns: amax of each column over all queries, if blocks are as long as the matrix.
    """
    if columns is None:
        return rounded(ds, spec), transposed(ds, spec)
    if spec.per_tensor:
        amax = columns.max(-1)[..., None, None]
        along = rounded(ds, spec, amax)
        return along, along
    return rounded(ds, spec), transposed(ds, spec, columns[..., None])


def _padded_rows(x: Array, length: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % length), (0, 0)])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(spec: AttentionSpec, options: ScoreOptions, pairs: Pairs, operands: Operands, tokens: Tokens) -> Array:
    return _forward(spec, options, pairs, operands, tokens)[0]


_attend.defvjp(_forward, _backward)
