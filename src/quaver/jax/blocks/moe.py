"""Mixture of experts: permute tokens by expert, sum the outputs back, and route tokens; `quaver.torch` for JAX arrays.

    permute      rows[places[t k + j]] = x[t]                          for each token t and each of its k choices j
    unpermute    y[t] = Σ_j weights[t, j] · rows[places[t k + j]]      added in the order of j, in float32

Shapes do not depend on the routing, so each function is traced once.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.jax.numerics.quantized import Quantized, array
from quaver.jax.operations.ops import quantize
from quaver.reference.moe import TINY, check_permute, check_route, check_unpermute, rows_of, why_not_rows

# ---- permute and unpermute ----


class Permuted(NamedTuple):
    """Tokens in the order of their experts."""

    #: [rows, H], of x's dtype or `Quantized`. Expert 0's rows come first; within an expert they follow the token order.
    #: Rows of padding and rows after the last expert's are zero.
    rows: Any
    #: int32 [experts]: number of rows of each expert, including padding, as `grouped_dot` takes them.
    group_sizes: Array
    #: int32 [T * k], by token and choice: the row of each choice, -1 if it was dropped.
    places: Array


def permute(
    x: Array | Quantized, indices: Array, experts: int, *, pad: int = 1, capacity: int | None = None
) -> Permuted:
    """Copy each token's row to each expert that it chose.

    Args:
        x: [T, H], differentiable; or `Quantized` with blocks within a row or one scale per tensor, whose codes and
            scales are copied as bytes. That equals quantizing the permuted rows.
        indices: integers [T, k], from `route`. A number outside [0, experts) is a choice of an expert on another
            device.
        experts: number of experts.
        pad: each expert's rows are padded with zeros to a multiple of it.
        capacity: maximum number of choices per expert; the first tokens have priority, the rest is dropped. None drops
            none.
    Returns:
        T k + min(T k, experts) (pad - 1) rows, rounded down to a multiple of pad; with a capacity at most the capacity
        of all experts.
    Raises:
        ValueError: shapes that do not fit, a capacity or pad below one, or an operand with blocks of several rows.
        TypeError: an argument is not an array.
    Exact: the rows of `quaver.torch.permute`, and the gradient of x.
    """
    indices = array("permute", "indices", indices)
    check_permute(indices.shape, jnp.issubdtype(indices.dtype, jnp.integer), experts, pad, capacity)
    if isinstance(x, Quantized):
        why = why_not_rows(x.spec)
        if why:
            raise ValueError(why)
    else:
        x = array("permute", "x", x)
    if len(x.shape) != 2 or x.shape[0] != indices.shape[0]:
        raise ValueError(f"x is [T, H] and indices [T, k] of the same tokens; these are {x.shape}, {indices.shape}")
    sizes, places, sources = order(indices, experts, pad, capacity)
    if isinstance(x, Quantized):
        return Permuted(_take_quantized(x, sources, indices.shape[1]), sizes, places)
    return Permuted(gather_rows(indices.shape[1], x, sources, places), sizes, places)


def unpermute(rows: Array, places: Array, k: int, weights: Array | None = None) -> Array:
    """Sum each token's k rows, each multiplied by its weight.

    Args:
        rows: [rows, H], differentiable.
        places: [T * k] from `permute`.
        k: choices per token.
        weights: [T, k], differentiable; None is 1 for each. The products are computed in float32.
    Returns:
        [T, H] in rows' dtype. A dropped choice adds nothing.
    Raises:
        ValueError: shapes that do not fit.
        TypeError: an argument is not an array.
    Exact: the sums of `quaver.torch.unpermute`, and the gradient of rows. Bounded: the gradient of weights, relative
        RMS 1e-6 of float64.
    """
    rows, places = array("unpermute", "rows", rows), array("unpermute", "places", places)
    weights = None if weights is None else array("unpermute", "weights", weights)
    integers = jnp.issubdtype(places.dtype, jnp.integer)
    check_unpermute(rows.shape, places.shape, integers, k, None if weights is None else weights.shape)
    return _combine(k, rows, places, weights)


def order(indices: Array, experts: int, pad: int, capacity: int | None) -> tuple[Array, Array, Array]:
    """Compute the permutation: sizes and places as in `Permuted`, and the choice of each row, -1 for an empty row."""
    flat = indices.reshape(-1).astype(jnp.int32)
    count = flat.shape[0]
    by_expert = jnp.argsort(flat, stable=True).astype(jnp.int32)
    ids = flat[by_expert]
    # jax 0.10's searchsorted fails inside jax.shard_map over some axes of a mesh.
    sizes = jnp.zeros(experts, jnp.int32).at[jnp.where(flat < 0, experts, flat)].add(1, mode="drop")
    begin = jnp.cumsum(sizes, dtype=jnp.int32) - sizes + (flat < 0).sum(dtype=jnp.int32)
    sizes = sizes if capacity is None else jnp.minimum(sizes, capacity)
    padded = (sizes + (pad - 1)) // pad * pad
    total = rows_of(count, experts, pad, capacity)
    shift = jnp.cumsum(padded, dtype=jnp.int32) - padded - begin
    ours = jnp.clip(ids, 0, experts - 1)
    within = jnp.arange(count, dtype=jnp.int32)
    there = ids == ours
    if capacity is not None:
        there = there & (within - begin[ours] < capacity)
    row = jnp.where(there, within + shift[ours], -1)
    places = jnp.zeros(count, jnp.int32).at[by_expert].set(row)
    return padded, places, inverse(places, total)


def inverse(places: Array, count: int) -> Array:
    """Return the choice of each row, -1 for an empty row."""
    numbers = jnp.arange(places.shape[0], dtype=jnp.int32)
    rows = jnp.where(places < 0, count, places)
    return jnp.full(count, -1, jnp.int32).at[rows].set(numbers, mode="drop")


def _taken(x: Array, at: Array) -> Array:
    """Gather rows of x; zeros where the index is negative."""
    return jnp.take(x, jnp.where(at < 0, x.shape[0], at), axis=0, mode="fill", fill_value=0)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_rows(k: int, x: Array, sources: Array, places: Array) -> Array:
    """Gather token rows; the derivative sums them per token."""
    return _taken(x, jnp.where(sources < 0, -1, sources // k))


def _gather_forward(k: int, x: Array, sources: Array, places: Array) -> tuple[Array, Array]:
    return gather_rows(k, x, sources, places), places


def _gather_backward(k: int, places: Array, g: Array) -> tuple[Any, ...]:
    return _combine(k, g, places, None), None, None


gather_rows.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(k: int, rows: Array, places: Array, weights: Array | None) -> Array:
    """Compute the weighted sum of each token's rows; the derivatives are gathered rows and products of two rows."""
    each = places.reshape(-1, k)
    total: Any = None
    for choice in range(k):
        at = each[:, choice, None]
        part = _wide(_taken(rows, each[:, choice]))
        if weights is not None:
            part = part * jnp.where(at < 0, 0, weights[:, choice, None].astype(part.dtype))
        # Prevent FMA contraction of the product and the sum, which no barrier does: multiply by a 1 that compilers do
        # not know, even if places are constants.
        part = part * jnp.where(part != part, 2, 1).astype(part.dtype)
        total = part if total is None else total + part
    return total.astype(rows.dtype)


def _combine_forward(k: int, rows: Array, places: Array, weights: Array | None) -> tuple[Array, Any]:
    # Without weights only the number of rows is needed.
    saved = rows if weights is not None else jnp.zeros((rows.shape[0], 0), rows.dtype)
    return _combine(k, rows, places, weights), (saved, places, weights)


def _combine_backward(k: int, saved: Any, g: Array) -> tuple[Any, ...]:
    rows, places, weights = saved
    sources = inverse(places, rows.shape[0])
    grad_rows = gather_rows(k, g, sources, places)
    if weights is None:
        return grad_rows, None, None
    factors = _taken(weights.reshape(-1).astype(_wide(g).dtype), sources)
    grad_rows = (_wide(grad_rows) * factors[:, None]).astype(g.dtype)
    each, along = places.reshape(-1, k), _wide(g)
    products = [(_wide(_taken(rows, each[:, j])) * along).sum(1) for j in range(k)]
    return grad_rows, None, jnp.stack(products, 1).astype(weights.dtype)


_combine.defvjp(_combine_forward, _combine_backward)


def _take_quantized(q: Quantized, sources: Array, k: int) -> Quantized:
    """Gather codes and scales by the choice of each row; an empty row has the codes of zeros."""
    token = jnp.where(sources < 0, q.shape[0], sources // k)
    zeros = quantize(jnp.zeros((1, q.shape[1]), jnp.float32), q.spec)

    def gather(rows: Array, zero_row: Array) -> Array:
        narrow = rows.dtype.itemsize == 1
        as_integers = partial(lax.bitcast_convert_type, new_dtype=np.uint8 if narrow else np.uint32)
        both = jnp.concatenate([as_integers(rows), as_integers(zero_row)])
        return lax.bitcast_convert_type(both[token], rows.dtype)

    scale = q.scale if q.spec.block[0] is None else gather(q.scale, zeros.scale)
    return replace(q, data=gather(q.data, zeros.data), scale=scale, shape=(sources.shape[0], q.shape[1]))


# ---- routing: `quaver.torch.route` for JAX arrays ----

#: Logit below which softplus(z) equals exp(z) in float32; above it the derivative of its root is finite.
FAR = -40.0


class Routing(NamedTuple):
    """Result of `route` for T tokens, E experts and k choices."""

    #: int32 [T, k], best expert first.
    indices: Array
    #: [T, k], float32, or float64 for float64 logits; differentiable.
    weights: Array
    #: [T, E], dtype of the weights: scores normalized to sum 1 per token; differentiable.
    probabilities: Array
    #: [T, E], dtype of the weights: the input logits.
    logits: Array


def _root_of_softplus(z: Array) -> Array:
    near = jnp.sqrt(jax.nn.softplus(jnp.maximum(z, FAR)))
    return jnp.where(z < FAR, jnp.exp(z / 2), near)


#: Score functions of logits, all monotone.
SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": lambda z: jax.nn.softmax(z, -1),
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": _root_of_softplus,
}

#: Logarithms of the score functions, up to a constant per token.
LOG_SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": lambda z: z,
    "sigmoid": jax.nn.log_sigmoid,
    "sqrtsoftplus": lambda z: jnp.where(z < FAR, z, jnp.log(jax.nn.softplus(jnp.maximum(z, FAR)))) / 2,
}


def route(
    logits: Array,
    k: int,
    *,
    scores: str = "softmax",
    softmax_first: bool = False,
    groups: int | None = None,
    top_groups: int | None = None,
    best_of_group: int | None = None,
    bias: Array | None = None,
    scale: float = 1.0,
    normalize: bool | None = None,
) -> Routing:
    """Choose k of E experts per token by their scores, and compute a weight for each.

    Args:
        logits: [T, E], floating-point; computed in float32 or float64.
        k: experts per token.
        scores: a name in `SCORES`.
        softmax_first: True takes the softmax over all experts before choosing; False over the chosen logits only.
        groups: number of groups of E / groups experts.
        top_groups: number of groups that a token may choose from.
        best_of_group: number of scores per group that are summed; None is k / top_groups, rounded down, at least 1.
        bias: [E], added to scores for the choice but not for the weights; gets no gradient.
        scale: factor of the weights.
        normalize: divide the chosen scores by their sum; None does so for sigmoid and sqrtsoftplus if k > 1.
    Returns:
        The routing. Ties and NaN are resolved as in `quaver.torch.route`.
    Raises:
        ValueError: options that do not fit each other or the logits.
        TypeError: an argument is not an array.
    Exact: the choice without bias and groups, that of `quaver.torch.route`. Bounded: scores, weights and their
        gradients, relative RMS 1e-6 of float64 in float32.
    """
    logits = array("route", "logits", logits)
    bias_shape = None if bias is None else jnp.shape(bias)
    check_route(logits.shape, k, scores, softmax_first, groups, top_groups, best_of_group, bias_shape, normalize)
    z = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    late = scores == "softmax" and not softmax_first
    score = z if late else SCORES[scores](z)
    by = lax.stop_gradient(z if bias is None and groups is None else score)
    by = by if bias is None else by + lax.stop_gradient(array("route", "bias", bias)).astype(by.dtype)
    if groups is not None and top_groups is not None:
        by = _within_groups(by, groups, top_groups, best_of_group or max(1, k // top_groups))
    indices = best(by, k)
    chosen = jnp.take_along_axis(score, indices, 1)
    if late:
        chosen = jax.nn.softmax(chosen, -1)
    elif normalize or (normalize is None and scores != "softmax" and k > 1):
        chosen = chosen / (chosen.sum(-1, keepdims=True) + TINY)
    # Computed from log scores: at logits near -60 the sum of the scores underflows any epsilon of a division.
    lowest = jnp.finfo(z.dtype).min / 2
    probabilities = jax.nn.softmax(jnp.maximum(LOG_SCORES[scores](z), lowest), -1)
    return Routing(indices, chosen if scale == 1.0 else chosen * scale, probabilities, z)


def best(x: Array, k: int) -> Array:
    """Return the indices of the k largest values of each row of x [T, E], int32 [T, k], in descending order.

    Of equal values the first comes first; NaN is larger than infinity, and -0 equals 0. Exact: compared as float32.
    """
    narrow = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(narrow, jnp.int32)
    bits = jnp.where(bits == jnp.int32(-(1 << 31)), 0, bits)
    bits = jnp.where(jnp.isnan(narrow), jnp.int32(0x7FC00000), bits)
    # The bits of negative floats sort in reverse order.
    order = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
    return lax.top_k(order, k)[1]


def _within_groups(by: Array, groups: int, top: int, count: int) -> Array:
    """Return [T, E] with -inf for the experts outside of the best groups."""
    each = by.reshape(by.shape[0], groups, -1)
    taken = best(lax.top_k(each, count)[0].sum(-1), top)
    keep = (taken[:, None, :] == jnp.arange(groups, dtype=taken.dtype)[None, :, None]).any(-1)
    return jnp.where(keep[:, :, None], each, -jnp.inf).reshape(by.shape)
