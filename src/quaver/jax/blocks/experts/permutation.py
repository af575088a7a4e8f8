"""Rows of tokens laid expert by expert, and summed again: `quaver.torch.permute` and `unpermute` for arrays of JAX.

    permute      rows[places[t k + j]] = x[t]                          for each token t and each of its k choices j
    unpermute    y[t] = Σ_j weights[t, j] · rows[places[t k + j]]      added from j = 0 on, in float32

Shapes do not depend on who goes where, so that both are traced once.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.core.reference.experts import check_permute, check_unpermute, rows_of, why_not_rows
from quaver.jax.numerics.given import array
from quaver.jax.numerics.quantized import Quantized
from quaver.jax.operations.ops import quantize


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
