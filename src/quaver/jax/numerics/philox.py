"""Philox4x32-10 in uint32 arrays: the twin of `quaver.core.numbers.philox`, the same words on any device.

JAX has no 64-bit integers unless it is asked for them: products are put together from 16-bit halves.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.core.numbers.philox import MULTIPLIERS, ROUNDS, WEYL
from quaver.jax.numerics.elementwise import where

_LOW = 0xFFFFFFFF

#: (first row, first column, columns of the whole) of a piece within the operand that it was cut from.
Place = tuple[Array | int, Array | int, int]


def uniform(
    rows: int, k: int, seed: int, tensor_id: Array | int, count: Array | int, place: Place | None = None
) -> Array:
    """The number in [0, 1) that each element of an operand is rounded with, float32 [rows, k].

    Args:
        rows, k: shape of the operand, or of a piece of it.
        seed: 64 bits, the key.
        tensor_id: which tensor, 32 bits.
        count: how often this tensor was quantized before; its low 32 bits.
        place: where the piece lies in the whole operand; None if it is the whole.
    Exact: `quaver.core.numbers.philox.uniform`, a shard's part of it if `place` is given.
    """
    first_row, first_column, whole = (0, 0, k) if place is None else place
    row = lax.broadcasted_iota(jnp.uint32, (rows, 1), 0) + _word(first_row)
    # Where no counter serves two rows, the four words of each are four neighbours.
    together = (
        k % 4 == 0 and whole % 4 == 0 and (place is None or not isinstance(first_column, int) or first_column % 4 == 0)
    )
    step = 4 if together else 1
    column = lax.broadcasted_iota(jnp.uint32, (1, k // step), 1) + _word(first_column) // step
    high, low = product(row, whole // step)
    low, high = low + column, high + (low + column < column)
    if together:
        drawn = philox4x32((low, high, _word(tensor_id), _word(count)), seed)
        words = lax.concatenate([lax.expand_dims(word, (2,)) for word in drawn], 2)
    else:
        lane = low & 3
        drawn = philox4x32((low >> 2 | high << 30, high >> 2, _word(tensor_id), _word(count)), seed)
        first, second = (where(lax.eq(lane, np.uint32(i)), *drawn[i : i + 2]) for i in (0, 2))
        words = where(lax.lt(lane, np.uint32(2)), first, second)
    # As signed integers, which machines turn into floats faster: they have 24 bits.
    top = lax.shift_right_logical(words, np.uint32(8)).astype(jnp.int32).astype(jnp.float32)
    return lax.mul(top, np.float32(2.0**-24)).reshape(rows, k)


def philox4x32(counter: tuple[Array, Array, Array, Array], seed: int) -> tuple[Array, Array, Array, Array]:
    """Ten rounds on four uint32 arrays that broadcast to one shape."""
    c0, c1, c2, c3 = jnp.broadcast_arrays(*counter)
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(ROUNDS):
        high0, low0 = product(c0, MULTIPLIERS[0])
        high1, low1 = product(c2, MULTIPLIERS[1])
        c0 = lax.bitwise_xor(lax.bitwise_xor(high1, c1), np.uint32(k0))
        c2 = lax.bitwise_xor(lax.bitwise_xor(high0, c3), np.uint32(k1))
        c1, c3 = low1, low0
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def product(a: Array, m: Any) -> tuple[Array, Array]:
    """High and low word of a 32 × 32 bit product, from 16-bit halves: XLA does not compile `lax.mulhi` for shards."""
    sixteen, half = np.uint32(16), np.uint32(0xFFFF)
    # A symbolic dimension (`jax.export`) becomes an array.
    m = np.uint32(m) if isinstance(m, int) else _word(m)
    mh, ml = m >> sixteen, m & half
    ah, al = lax.shift_right_logical(a, sixteen), lax.bitwise_and(a, half)
    middle = lax.add(lax.mul(ah, ml), lax.shift_right_logical(lax.mul(al, ml), sixteen))
    other = lax.add(lax.mul(al, mh), lax.bitwise_and(middle, half))
    carried = lax.add(lax.shift_right_logical(middle, sixteen), lax.shift_right_logical(other, sixteen))
    return lax.add(lax.mul(ah, mh), carried), lax.mul(a, m)


def _word(x: Array | int) -> Array:
    """The low 32 bits of a number; of a float32 that counts, its whole number."""
    return jnp.uint32(x & _LOW) if isinstance(x, int) else jnp.asarray(x).reshape(()).astype(jnp.uint32)
