"""Philox4x32-10 in uint32 arrays: the twin of `quaver.core.numbers.philox`, the same words on any device.

JAX has no 64-bit integers unless it is asked for them: products are put together from 16-bit halves.
"""

import jax.numpy as jnp
from jax import Array, lax

from quaver.core.numbers.philox import MULTIPLIERS, ROUNDS, WEYL

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
        words = jnp.stack(philox4x32((low, high, _word(tensor_id), _word(count)), seed), -1)
    else:
        lane = low & 3
        drawn = philox4x32((low >> 2 | high << 30, high >> 2, _word(tensor_id), _word(count)), seed)
        words = jnp.where(lane < 2, jnp.where(lane == 0, *drawn[:2]), jnp.where(lane == 2, *drawn[2:]))
    # As signed integers, which machines turn into floats faster: they have 24 bits.
    return ((words >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-24)).reshape(rows, k)


def philox4x32(counter: tuple[Array, Array, Array, Array], seed: int) -> tuple[Array, Array, Array, Array]:
    """Ten rounds on four uint32 arrays that broadcast to one shape."""
    c0, c1, c2, c3 = jnp.broadcast_arrays(*counter)
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(ROUNDS):
        high0, low0 = product(c0, MULTIPLIERS[0])
        high1, low1 = product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ jnp.uint32(k0), low1, high0 ^ c3 ^ jnp.uint32(k1), low0
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def product(a: Array, m: int) -> tuple[Array, Array]:
    """High and low word of a 32 × 32 bit product, from 16-bit halves: XLA does not compile `lax.mulhi` for shards."""
    mh, ml = jnp.uint32(m >> 16), jnp.uint32(m & 0xFFFF)
    ah, al = a >> 16, a & jnp.uint32(0xFFFF)
    middle = ah * ml + (al * ml >> 16)
    other = al * mh + (middle & jnp.uint32(0xFFFF))
    return ah * mh + (middle >> 16) + (other >> 16), a * jnp.uint32(m)


def _word(x: Array | int) -> Array:
    """The low 32 bits of a number; of a float32 that counts, its whole number."""
    return jnp.uint32(x & _LOW) if isinstance(x, int) else jnp.asarray(x).reshape(()).astype(jnp.uint32)
