"""GEMMs whose operand is gathered, or whose output is reduce-scattered, over a mesh axis, inside `jax.shard_map`.

With `ShardedOperand(overlap=True)` the collective is a ring of `ppermute`: each step multiplies one shard while the
next one is sent. Codes and scales are sent, and partial sums of outputs in float32. Without it one collective precedes
or follows one GEMM. Both sum the same products; a ring adds those of the shards in another order.

Source: collective matmul, Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition".
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from quaver.jax.numerics.quantized import Quantized
from quaver.jax.operations.ops import matmul
from quaver.jax.operations.sharding import (
    ShardPlacement,
    all_gather_operand,
    flattened,
    is_manual,
    shard_of_gradient,
    unflattened,
)


def gathered_matmul(
    a: Quantized,
    placement: ShardPlacement | None,
    b: Quantized,
    dtype: Any,
    bias: Array | None = None,
    *,
    fast_accum: bool = False,
) -> Array:
    """Return a [m, k] @ b [n, k].T + bias, where a's rows are gathered over the placement's mesh axis first."""
    if placement is None or not overlaps(placement):
        return matmul(all_gather_operand(a, placement), b, dtype, bias, fast_accum=fast_accum)
    views = []
    for shard in _ring(a, placement):
        y = matmul(shard, b, dtype, bias, fast_accum=fast_accum)
        views.append(unflattened(y, placement)[0])
    dim = placement.position
    # Step s had the shard of rank (own - s).
    size, width = len(views), views[0].shape[dim]
    steps = (lax.axis_index(placement.gather.axis) - jnp.arange(size)) % size
    ordered = jnp.take(jnp.stack(views, dim), steps, axis=dim)
    return flattened(ordered.reshape(*views[0].shape[:dim], size * width, *views[0].shape[dim + 1 :]), placement)


def scattered_matmul(
    a: Quantized, b: Quantized, placement: ShardPlacement | None, dtype: Any, *, fast_accum: bool = False
) -> Array:
    """Return a [m, k] @ b [n, k].T, reduce-scattered over the placement's mesh axis along the rows."""
    if placement is None or not overlaps(placement):
        return shard_of_gradient(matmul(a, b, dtype, fast_accum=fast_accum), placement)
    axis = placement.gather.axis
    size, own = lax.axis_size(axis), lax.axis_index(axis)
    total = None
    for step in range(size):
        # After the remaining sends the sum arrives at the rank whose rows these are.
        part = matmul(_shard(a, placement, (own - 1 - step) % size), b, dtype, fast_accum=fast_accum)
        total = part if total is None else lax.add(_sent(total, axis), part)
    assert total is not None
    return total


def contracted_matmul(
    a: Quantized,
    b: Quantized,
    placement: ShardPlacement | None,
    gathered: str,
    dtype: Any,
    *,
    fast_accum: bool = False,
) -> Array:
    """Return a [m, k] @ b [n, k].T, where one operand's k is gathered over the placement's mesh axis first.

    Args:
        a, b: operands.
        placement: position of the shards along k; None if nothing is gathered.
        gathered: "a" or "b", the operand that is a shard.
        dtype: of the output.
        fast_accum: as for `matmul`.
    """
    if placement is None or not overlaps(placement):
        a, b = (all_gather_operand(q, placement) if gathered == which else q for which, q in (("a", a), ("b", b)))
        return matmul(a, b, dtype, fast_accum=fast_accum)
    size, own = lax.axis_size(placement.gather.axis), lax.axis_index(placement.gather.axis)
    shards, rest = (a, b) if gathered == "a" else (b, a)
    total = None
    for step, shard in enumerate(_ring(shards, placement)):
        other = _shard(rest, placement, (own - step) % size)
        left, right = (shard, other) if gathered == "a" else (other, shard)
        part = matmul(left, right, jnp.float32, fast_accum=fast_accum)
        total = part if total is None else lax.add(total, part)
    assert total is not None
    return total.astype(dtype)


def overlaps(placement: ShardPlacement | None) -> bool:
    """Return True if a placement's collective is a ring."""
    return placement is not None and placement.gather.overlap and is_manual(placement.gather)


def _ring(q: Quantized, placement: ShardPlacement) -> Iterator[Quantized]:
    """Yield this rank's shard, then those of the ranks before it; each is sent on before it is used."""
    axis = placement.gather.axis
    size = lax.axis_size(axis)
    # A block that spans all shards has the same scale on each.
    shared = q.spec.block[placement.axis] is None
    for step in range(size):
        following = q
        if step < size - 1:
            # Send bytes: XLA on a CPU would send float8 as float16.
            data = _sent(lax.bitcast_convert_type(q.data, jnp.uint8), axis)
            data = lax.bitcast_convert_type(data, q.data.dtype)
            following = replace(q, data=data, scale=q.scale if shared else _sent(q.scale, axis))
        yield q
        q = following


def _sent(x: Array, axis: str) -> Array:
    """Send an array to the next rank of a mesh axis."""
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


def _shard(q: Quantized, placement: ShardPlacement, index: Array) -> Quantized:
    """Return the rows or columns of a whole operand that belong to one rank."""
    size, stored = lax.axis_size(placement.gather.axis), placement if q.axis == 1 else placement.T

    def cut(a: Array) -> Array:
        view, dim = unflattened(a, stored)
        width = view.shape[dim] // size
        return flattened(lax.dynamic_slice_in_dim(view, index * width, width, dim), stored)

    rows, k = q.shape
    shape = (rows // size, k) if placement.axis == 0 else (rows, k // size)
    shared = q.spec.block[placement.axis] is None
    return replace(q, data=cut(q.data), scale=q.scale if shared else cut(q.scale), shape=shape)
