"""Rounding float32 to codes in JAX arrays: the twin of `quaver.reference.numerics`."""

from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import custom_jvp

from quaver.jax.numerics.quantized import FLOAT8, copysign, isnan, largest, padded, where
from quaver.recipes.formats import Format
from quaver.reference.numerics import GROUP, MULTIPLIERS, NAN_CODE, ROUNDS, SIGNS, WEYL

# ---- rounding --------------------------------------------------------------------------------------------

INFINITY_BITS = np.int32(0x7F800000)
SMALLEST_NORMAL_BITS = np.int32(0x00800000)


def widen(x: Array) -> Array:
    """An operand's float32 values, rounded to its own dtype even where XLA would skip that rounding within a fusion."""
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        return lax.bitcast_convert_type(lax.shift_left(bits, np.uint32(16)), jnp.float32)
    return x if x.dtype == jnp.float32 else lax.optimization_barrier(x).astype(jnp.float32)


def magnitude_bits(x: Array) -> Array:
    """The bits of |float32 x| as int32: they order as NaN > infinity > finite."""
    return lax.bitwise_and(lax.bitcast_convert_type(x, jnp.int32), np.int32(0x7FFFFFFF))


def flush(x: Array) -> Array:
    """Subnormals to zeros of their sign."""
    return where(lax.lt(magnitude_bits(x), SMALLEST_NORMAL_BITS), copysign(lax.full_like(x, 0), x), x)


def encode(y: Array, fmt: Format, u: Array | None) -> Array:
    """Scaled float32 values to codes: an array of y's shape in float8, or in uint8 where the format is none of those.

    Args:
        y: float32.
        fmt: a signed format.
        u: [0, 1) of y's shape rounds at random, away from zero where u is below the fraction; None rounds to nearest,
            ties to even.
    Exact.
    """
    if fmt.packed:
        return _e2m1(y, u)
    if fmt.name not in FLOAT8:
        return _in_bytes(y, fmt, u)
    if u is not None:
        y = _round_stochastically(y, fmt, u)
    # No version of XLA's casts saturates, and its clamp need not keep a NaN.
    clipped = where(isnan(y), y, lax.clamp(np.float32(-fmt.max), y, np.float32(fmt.max)))
    return clipped.astype(FLOAT8[fmt.name])


#: Halfway between one magnitude of E2M1 and the next; a tie goes to the even code, down at the first.
_TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)


def _e2m1(y: Array, u: Array | None) -> Array:
    a = lax.abs(y)
    if u is None:
        steps = [lax.gt(a, tie) if i % 2 == 0 else lax.ge(a, tie) for i, tie in enumerate(_TIES)]
        code = reduce(lax.add, (step.astype(jnp.uint8) for step in steps))
    else:
        a = lax.min(a, np.float32(6))
        # The grid has step 1/2 below 2, 1 below 4 and 2 above: codes count from 0, 2 and 4 there.
        beyond_2, beyond_4 = lax.ge(a, np.float32(2)), lax.ge(a, np.float32(4))
        per_step = where(beyond_4, lax.full_like(a, 0.5), where(beyond_2, lax.full_like(a, 1), 2))
        first = where(beyond_4, lax.full_like(a, 4), where(beyond_2, lax.full_like(a, 2), 0))
        steps_of_a = lax.mul(a, per_step)
        whole = lax.floor(steps_of_a)
        up = lax.lt(u, lax.sub(steps_of_a, whole)).astype(jnp.float32)
        code = lax.add(lax.add(whole, up), first).astype(jnp.int32).astype(jnp.uint8)
    sign = lax.shift_right_logical(lax.bitcast_convert_type(y, jnp.uint32), np.uint32(28)).astype(jnp.uint8)
    return where(isnan(y), 7, lax.bitwise_or(code, lax.bitwise_and(sign, np.uint8(8))))


def _round_stochastically(y: Array, fmt: Format, u: Array) -> Array:
    """float32 to the format's grid, away from zero where u is below the fraction of a step."""
    whole, e = _steps(y, fmt, u)
    return where(isnan(y), y, copysign(lax.mul(whole, two_to_the(e)), y))


def _in_bytes(y: Array, fmt: Format, u: Array | None) -> Array:
    """float32 to uint8 codes of any format, NaN as 0x7F or the largest code."""
    whole, e = _steps(y, fmt, u)
    # A number of a binade counts 2**mantissa_bits steps from its start, where the field of its exponent begins.
    binade = lax.shift_left(lax.add(e, np.int32(fmt.mantissa_bits - fmt.emin)), np.int32(fmt.mantissa_bits))
    code = lax.add(whole.astype(jnp.int32), binade)
    negative = lax.shift_right_logical(lax.bitcast_convert_type(y, jnp.int32), np.int32(31))
    sign = lax.shift_left(negative, np.int32(fmt.bits - 1))
    nan = NAN_CODE if fmt.has_nan else fmt.max_code
    return where(isnan(y), nan, lax.bitwise_or(code, sign)).astype(jnp.uint8)


def _steps(y: Array, fmt: Format, u: Array | None) -> tuple[Array, Array]:
    """|y|, held to the largest, in rounded steps of the format's grid: float32, and the exponent of a step, int32."""
    a = lax.min(lax.abs(y), np.float32(fmt.max))
    binade = lax.sub(lax.shift_right_arithmetic(magnitude_bits(a), np.int32(23)), np.int32(127))
    e = lax.sub(lax.clamp(np.int32(fmt.emin), binade, np.int32(fmt.emax)), np.int32(fmt.mantissa_bits))
    steps = lax.mul(a, two_to_the(lax.neg(e)))
    if u is None:
        return lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN), e
    whole = lax.floor(steps)
    return lax.add(whole, lax.lt(u, lax.sub(steps, whole)).astype(jnp.float32)), e


def two_to_the(p: Array) -> Array:
    """float32 2**p for int32 p in [-126, 127]."""
    return lax.bitcast_convert_type(lax.shift_left(lax.add(p, np.int32(127)), np.int32(23)), jnp.float32)


# ---- constants -------------------------------------------------------------------------------------------
# Arrays that no derivative may go through: where rounding would pass for a constant, or for the identity.

SECOND_DERIVATIVE = (
    "{}: quantized layers have no second derivative, and none in forward mode over a gradient: rounding has none. "
    "Compute the part that is differentiated twice in high precision, with quaver.jax.autocast(enabled=False), or put "
    "jax.lax.stop_gradient around the arguments of the inner gradient, if it is to count as a constant"
)

#: Sentences whose guard is kept: a layer's name is in them.
LAYERS = 4096


def constant(sentence: str, tree: Any) -> Any:
    """The same arrays. A derivative with respect to one, in either mode, is a NotImplementedError of this sentence."""
    return jax.tree.map(_same(sentence), tree)


def without_derivative(where: str, tree: Any) -> Any:
    """The same arrays in a rule of a layer's own gradient: its derivative is the NotImplementedError."""
    return constant(SECOND_DERIVATIVE.format(where), tree)


@lru_cache(LAYERS)
def _same(sentence: str) -> Callable[[Array], Array]:
    """The identity with that rule.

    Where JAX cuts a body into a forward and a backward (a scan's, say) it forgets the rule of a custom_jvp and inlines
    it. A custom_vmap it passes on as it is, with what is in it.
    """

    @custom_jvp
    def guarded(x: Array) -> Array:
        return x

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(sentence)

    same = custom_vmap(guarded)

    @same.def_vmap
    def of_batch(size: int, batched: list[bool], x: Array) -> tuple[Array, bool]:
        return same(x), True

    return same


# ---- hadamard --------------------------------------------------------------------------------------------
# The fixed 16-point rotation in JAX arrays: the twin of `quaver.reference.numerics`.

#: Groups whose largest magnitude lies below 2**-SMALL are rotated times 2**LIFT.
SMALL, LIFT = 60, 64


def rotate(x: Array) -> Array:
    """Rotate groups of 16 along the last axis, the tail padded with zeros: [rows, k] to float32 [rows, ceil16(k)].

    Exact, but where a group holds a subnormal and what is larger than 2**-60 cancels: XLA on a CPU takes subnormals for
    zeros.
    """
    x = widen(x)
    rows, k = x.shape
    groups = -(-k // GROUP)
    y = padded(x, 0, groups * GROUP - k).reshape(rows, groups, GROUP)
    small = lax.lt(largest(magnitude_bits(y), (2,)), np.int32((127 - SMALL) << 23))
    y = lax.mul(where(small, _lifted(y), y), np.array(SIGNS, np.float32).reshape(1, 1, GROUP))
    for stride in (1, 2, 4, 8):
        pairs = y.reshape(rows, groups, GROUP // (2 * stride), 2, stride)
        a, b = (lax.slice_in_dim(pairs, i, i + 1, axis=3) for i in (0, 1))
        y = lax.concatenate([lax.add(a, b), lax.sub(a, b)], 3).reshape(rows, groups, GROUP)
    quarter = lax.full(small.shape, np.float32(0.25))
    return lax.mul(y, where(small, 0.25 * 2.0**-LIFT, quarter)).reshape(rows, groups * GROUP)


def _lifted(x: Array) -> Array:
    """x × 2**LIFT for magnitudes below 2**-SMALL, subnormals included: on the bits, since XLA would flush them."""
    bits = magnitude_bits(x)
    normal = lax.bitcast_convert_type(lax.add(bits, np.int32(LIFT << 23)), jnp.float32)
    subnormal = lax.mul(bits.astype(jnp.float32), np.float32(2.0 ** (LIFT - 149)))
    return copysign(where(lax.lt(bits, np.int32(1 << 23)), subnormal, normal), x)


# ---- philox ----------------------------------------------------------------------------------------------
# Philox4x32-10 in uint32 arrays: the twin of `quaver.reference.numerics`, the same words on any device.
#
# JAX has no 64-bit integers unless it is asked for them: products are put together from 16-bit halves.

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
    Exact: `quaver.reference.numerics.uniform`, a shard's part of it if `place` is given.
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
