"""Rows of tokens laid expert by expert, and summed again: `quaver.torch.permute` and `unpermute` for arrays of JAX.

    permute      rows[places[t k + j]] = x[t]                          for each token t and each of its k choices j
    unpermute    y[t] = Σ_j weights[t, j] · rows[places[t k + j]]      added from j = 0 on, in float32

Shapes do not depend on who goes where, so that both are traced once.
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

# ---- permutation -----------------------------------------------------------------------------------------


class Permuted(NamedTuple):
    """Tokens in the order of their experts."""

    #: [rows, H] as x, or `Quantized`: those of expert 0 first, of an expert in the order of tokens; zeros up to the
    #: next multiple of `pad`, and after those of the last expert.
    rows: Any
    #: int32 [experts]: how many rows each expert has, its padding included, as `grouped_dot` takes them.
    group_sizes: Array
    #: int32 [T × k], in the order of tokens and of the choices of each: its row, -1 if it was dropped.
    places: Array


def permute(
    x: Array | Quantized, indices: Array, experts: int, *, pad: int = 1, capacity: int | None = None
) -> Permuted:
    """Copy each token's row to those of each expert that it chose.

    Args:
        x: [T, H], differentiable; or `Quantized` in blocks of a row or with one scale for all, whose codes and scales
            are copied as bytes: the same as quantizing what was permuted.
        indices: integers [T, k], as `route` gives them. A number outside of [0, experts) is a choice of no expert here.
        experts: how many there are.
        pad: each expert's rows are filled with zeros up to a multiple of it.
        capacity: how many choices an expert takes, those of the first tokens; all others are dropped. None drops none.
    Returns:
        T k + min(T k, experts) (pad - 1) rows, rounded down to a multiple of pad; with a capacity no more than all
        experts take.
    Raises:
        ValueError: shapes that do not fit, a capacity or a pad of less than one, an operand whose scales are of
            several rows and not of all.
        TypeError: what is no array.
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
    sizes, places, sources = _order(indices, experts, pad, capacity)
    if isinstance(x, Quantized):
        return Permuted(_take_quantized(x, sources, indices.shape[1]), sizes, places)
    return Permuted(_gather(indices.shape[1], x, sources, places), sizes, places)


def unpermute(rows: Array, places: Array, k: int, weights: Array | None = None) -> Array:
    """Sum what came of each token's k rows, each times its weight.

    Args:
        rows: [rows, H], differentiable.
        places: [T × k] of `permute`.
        k: choices of each token.
        weights: [T, k], differentiable; None is 1 for each. They multiply in float32.
    Returns:
        [T, H] in rows' dtype. A dropped choice adds nothing.
    Raises:
        ValueError: shapes that do not fit.
        TypeError: what is no array.
    Exact: the sums of `quaver.torch.unpermute`, and the gradient of rows. Bounded: the gradient of weights, relative
        RMS 1e-6 of float64.
    """
    rows, places = array("unpermute", "rows", rows), array("unpermute", "places", places)
    weights = None if weights is None else array("unpermute", "weights", weights)
    integers = jnp.issubdtype(places.dtype, jnp.integer)
    check_unpermute(rows.shape, places.shape, integers, k, None if weights is None else weights.shape)
    return _combine(k, rows, places, weights)


def _order(indices: Array, experts: int, pad: int, capacity: int | None) -> tuple[Array, Array, Array]:
    """Where rows lie: sizes and places as `Permuted` has them, and the choice that each row is of, -1 for none."""
    flat = indices.reshape(-1).astype(jnp.int32)
    count = flat.shape[0]
    numbers = jnp.arange(experts, dtype=jnp.int32)
    by_expert = jnp.argsort(flat, stable=True).astype(jnp.int32)
    ids = flat[by_expert]
    begin = jnp.searchsorted(ids, numbers).astype(jnp.int32)
    sizes = jnp.searchsorted(ids, numbers, side="right").astype(jnp.int32) - begin
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
    return padded, places, _inverse(places, total)


def _inverse(places: Array, count: int) -> Array:
    """The choice that each of so many rows is of, -1 for none."""
    numbers = jnp.arange(places.shape[0], dtype=jnp.int32)
    rows = jnp.where(places < 0, count, places)
    return jnp.full(count, -1, jnp.int32).at[rows].set(numbers, mode="drop")


def _taken(x: Array, at: Array) -> Array:
    """Rows of x; zeros where a number is negative."""
    return jnp.take(x, jnp.where(at < 0, x.shape[0], at), axis=0, mode="fill", fill_value=0)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(k: int, x: Array, sources: Array, places: Array) -> Array:
    """Rows of tokens; its derivative sums them up."""
    return _taken(x, jnp.where(sources < 0, -1, sources // k))


def _gather_forward(k: int, x: Array, sources: Array, places: Array) -> tuple[Array, Array]:
    return _gather(k, x, sources, places), places


def _gather_backward(k: int, places: Array, g: Array) -> tuple[Any, ...]:
    return _combine(k, g, places, None), None, None


_gather.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(k: int, rows: Array, places: Array, weights: Array | None) -> Array:
    """Weighted sums of rows; its derivatives are rows of tokens, and products of two rows."""
    each = places.reshape(-1, k)
    total: Any = None
    for choice in range(k):
        at = each[:, choice, None]
        part = _wide(_taken(rows, each[:, choice]))
        if weights is not None:
            part = part * jnp.where(at < 0, 0, weights[:, choice, None].astype(part.dtype))
        # Compilers make one instruction, rounded once, of a product and a sum, and no barrier keeps XLA from it: let
        # that be a product by 1, which they cannot know.
        part = part * jnp.where(at < -1, 2, 1).astype(part.dtype)
        total = part if total is None else total + part
    return total.astype(rows.dtype)


def _combine_forward(k: int, rows: Array, places: Array, weights: Array | None) -> tuple[Array, Any]:
    # Of rows that nothing multiplies, how many there are.
    kept = rows if weights is not None else jnp.zeros((rows.shape[0], 0), rows.dtype)
    return _combine(k, rows, places, weights), (kept, places, weights)


def _combine_backward(k: int, kept: Any, g: Array) -> tuple[Any, ...]:
    rows, places, weights = kept
    sources = _inverse(places, rows.shape[0])
    of_rows = _gather(k, g, sources, places)
    if weights is None:
        return of_rows, None, None
    factors = _taken(weights.reshape(-1).astype(_wide(g).dtype), sources)
    of_rows = (_wide(of_rows) * factors[:, None]).astype(g.dtype)
    each, along = places.reshape(-1, k), _wide(g)
    products = [(_wide(_taken(rows, each[:, j])) * along).sum(1) for j in range(k)]
    return of_rows, None, jnp.stack(products, 1).astype(weights.dtype)


_combine.defvjp(_combine_forward, _combine_backward)


def _take_quantized(q: Quantized, sources: Array, k: int) -> Quantized:
    """Codes and scales by the choice that each row is of; a row of none is what zeros are quantized to."""
    token = jnp.where(sources < 0, q.shape[0], sources // k)
    zeros = quantize(jnp.zeros((1, q.shape[1]), jnp.float32), q.spec)

    def moved(of_rows: Array, of_zeros: Array) -> Array:
        narrow = of_rows.dtype.itemsize == 1
        as_lying = partial(lax.bitcast_convert_type, new_dtype=np.uint8 if narrow else np.uint32)
        both = jnp.concatenate([as_lying(of_rows), as_lying(of_zeros)])
        return lax.bitcast_convert_type(both[token], of_rows.dtype)

    scale = q.scale if q.spec.block[0] is None else moved(q.scale, zeros.scale)
    return replace(q, data=moved(q.data, zeros.data), scale=scale, shape=(sources.shape[0], q.shape[1]))


# ---- routing ---------------------------------------------------------------------------------------------
# Which experts a token goes to, and how much each counts: `quaver.torch.route` for arrays of JAX.

#: Below it softplus(z) is exp(z) in float32, and the derivative of its root is still a number.
FAR = -40.0


class Routing(NamedTuple):
    """What `route` decides for T tokens, E experts and k choices."""

    #: int32 [T, k], the best first.
    indices: Array
    #: [T, k], float32, or float64 of such logits; differentiable.
    weights: Array
    #: [T, E], of the weights' dtype: scores that add up to 1 for each token; differentiable.
    probabilities: Array
    #: [T, E], of the weights' dtype: what was given.
    logits: Array


def _root_of_softplus(z: Array) -> Array:
    near = jnp.sqrt(jax.nn.softplus(jnp.maximum(z, FAR)))
    return jnp.where(z < FAR, jnp.exp(z / 2), near)


#: Logits to scores, each of them monotone.
SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": lambda z: jax.nn.softmax(z, -1),
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": _root_of_softplus,
}

#: Logits to the logarithms of their scores.
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
    """Choose k of E experts for each token by their scores, and give each a weight.

    Args:
        logits: [T, E], floating; computed with in float32 or float64.
        k: experts a token.
        scores: a row of `SCORES`.
        softmax_first: take the softmax over all experts and then choose; False takes it over the chosen logits alone.
        groups, top_groups: into how many groups of E / groups experts, and how many of them a token may choose from.
        best_of_group: how many scores of a group are summed; None is k / top_groups, rounded down, at least 1.
        bias: [E], added to scores where experts are chosen and not where they are weighted; gets no gradient.
        scale: multiplies the weights.
        normalize: divide the chosen scores by their sum; None does of sigmoid and sqrtsoftplus where k is more than 1.
    Returns:
        Ties and NaN as in `quaver.torch.route`.
    Raises:
        ValueError: options that do not fit one another or the logits.
        TypeError: what is no array.
    Exact: the choice without bias and groups, that of `quaver.torch.route`. Bounded: scores, weights and their
        gradients, relative RMS 1e-6 of float64 in float32.
    """
    logits = array("route", "logits", logits)
    of_bias = None if bias is None else jnp.shape(bias)
    check_route(logits.shape, k, scores, softmax_first, groups, top_groups, best_of_group, of_bias, normalize)
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
    # From logarithms: at logits near -60 the sum of all scores is below any floor that a division could have.
    lowest = jnp.finfo(z.dtype).min / 2
    probabilities = jax.nn.softmax(jnp.maximum(LOG_SCORES[scores](z), lowest), -1)
    return Routing(indices, chosen if scale == 1.0 else chosen * scale, probabilities, z)


def best(x: Array, k: int) -> Array:
    """The places of the k largest of each row of x [T, E], int32 [T, k], in descending order.

    Of equal numbers the first comes first; NaN is more than infinity, and -0 equals 0. Exact: compared as float32.
    """
    narrow = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(narrow, jnp.int32)
    bits = jnp.where(bits == jnp.int32(-(1 << 31)), 0, bits)
    bits = jnp.where(jnp.isnan(narrow), jnp.int32(0x7FC00000), bits)
    # Negative numbers descend as their bits ascend.
    order = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
    return lax.top_k(order, k)[1]


def _within_groups(by: Array, groups: int, top: int, count: int) -> Array:
    """[T, E] with -inf for the experts of all but the best groups."""
    each = by.reshape(by.shape[0], groups, -1)
    taken = best(lax.top_k(each, count)[0].sum(-1), top)
    keep = (taken[:, None, :] == jnp.arange(groups, dtype=taken.dtype)[None, :, None]).any(-1)
    return jnp.where(keep[:, :, None], each, -jnp.inf).reshape(by.shape)
