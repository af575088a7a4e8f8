"""Operations on all elements that `jax.lax` lacks, made of its primitives alone.

A function of jax.numpy, and so an operator between two arrays, is a program within the program: of a shape that is new
it takes four times as long to trace as a primitive of `jax.lax`, and twice as long to lower. What every operand passes
through is written in primitives; they ask for operands of one dtype, and of one rank unless one of them is a number. A
number is numpy's, of that dtype: Python's has 64 bits where `jax_enable_x64` is set.
"""

import numpy as np
from jax import Array, lax


def where(condition: Array, x: Array | float, y: Array | float) -> Array:
    """x where the condition holds, else y: numbers, or arrays of the result's shape, one at least. Exact.

    Args:
        condition: bool, of the result's rank, or one for all; axes of length one are repeated.
    """
    like = x if _is_array(x) else y
    assert isinstance(like, Array)
    if condition.shape not in ((), like.shape):
        condition = lax.broadcast_in_dim(condition, like.shape, range(like.ndim))
    x, y = (one if _is_array(one) else lax.full_like(like, one) for one in (x, y))
    return lax.select(condition, x, y)


def _is_array(x: object) -> bool:
    return isinstance(x, (Array, np.ndarray))


def isnan(x: Array) -> Array:
    """True for each NaN. Exact."""
    return lax.ne(x, x)


def copysign(magnitude: Array, y: Array) -> Array:
    """float32 magnitudes, which are no negative numbers, with the signs of float32 y. Exact."""
    bits = lax.bitcast_convert_type(magnitude, np.uint32)
    sign = lax.bitwise_and(lax.bitcast_convert_type(y, np.uint32), np.uint32(0x80000000))
    return lax.bitcast_convert_type(lax.bitwise_or(bits, sign), np.float32)


def largest(x: Array, axes: tuple[int, ...]) -> Array:
    """The largest int32, at least 0, over these axes, which stay with length one. Exact."""
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    return lax.reshape(lax.max(lax.reduce_max(x, axes), np.int32(0)), kept)


def padded(x: Array, *after: int) -> Array:
    """x with so many zeros after the end of each axis. Exact."""
    return lax.pad(x, np.zeros((), x.dtype), [(0, more, 0) for more in after]) if any(after) else x


def without_elements(x: Array) -> Array:
    """x with a last axis of length zero: what knows its dtype and its place on a mesh."""
    return lax.slice_in_dim(x, 0, 0, axis=-1)
