"""Rounding, stochastic rounding, Hadamard rotation and Philox noise in JAX; bit-compatible with
`quaver.reference.numerics`.
"""

from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import custom_jvp

from quaver.jax.numerics.quantized import FLOAT8, along, computed_once, copysign, isnan, largest, padded, where
from quaver.recipes.formats import Format
from quaver.reference.numerics import GROUP, MULTIPLIER, MULTIPLIERS, NAN_CODE, ROUNDS, SIGNS, WEYL

# ---- rounding ----

INFINITY_BITS = np.int32(0x7F800000)
SMALLEST_NORMAL_BITS = np.int32(0x00800000)


def widen(x: Array) -> Array:
    """Convert to float32, rounded to x's own dtype even where XLA would skip that rounding inside a fusion."""
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        return lax.bitcast_convert_type(lax.shift_left(bits, np.uint32(16)), jnp.float32)
    return x if x.dtype == jnp.float32 else lax.optimization_barrier(x).astype(jnp.float32)


def magnitude_bits(x: Array) -> Array:
    """Return the bits of |float32 x| as int32; as integers NaN > infinity > finite."""
    return lax.bitwise_and(lax.bitcast_convert_type(x, jnp.int32), np.int32(0x7FFFFFFF))


def flush(x: Array) -> Array:
    """Replace subnormals by zeros of their sign."""
    return where(lax.lt(magnitude_bits(x), SMALLEST_NORMAL_BITS), copysign(lax.full_like(x, 0), x), x)


def encode(y: Array, fmt: Format, u: Array | None) -> Array:
    """Round scaled float32 values to codes, in float8, or in uint8 if the format has no float8 dtype.

    Args:
        y: float32.
        fmt: a signed format.
        u: random numbers in [0, 1) of y's shape for stochastic rounding: rounds away from zero where u is below the
            fraction. None rounds to nearest, ties to even.

    Exact.
    """
    if fmt.packed:
        return _e2m1(y, u)
    if fmt.name not in FLOAT8:
        return _in_bytes(y, fmt, u)
    if u is not None:
        y = _round_stochastically(y, fmt, u)
    # XLA's casts do not saturate, and its clamp need not preserve NaN.
    clipped = where(isnan(y), y, lax.clamp(np.float32(-fmt.max), y, np.float32(fmt.max)))
    return clipped.astype(FLOAT8[fmt.name])


#: Midpoints between magnitudes of E2M1; a tie goes to the even code, which at the first is the lower one.
_TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)


def _e2m1(y: Array, u: Array | None) -> Array:
    a = lax.abs(y)
    if u is None:
        steps = [lax.gt(a, tie) if i % 2 == 0 else lax.ge(a, tie) for i, tie in enumerate(_TIES)]
        code = reduce(lax.add, (step.astype(jnp.uint8) for step in steps))
    else:
        a = lax.min(a, np.float32(6))
        # The step is 1/2 below 2, 1 below 4 and 2 above; codes there start at 0, 2 and 4.
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
    """Round float32 to the format's grid, away from zero where u is below the fraction of a step."""
    whole, e = _steps(y, fmt, u)
    return where(isnan(y), y, copysign(lax.mul(whole, two_to_the(e)), y))


def _in_bytes(y: Array, fmt: Format, u: Array | None) -> Array:
    """Round float32 to uint8 codes of any format, with NaN as 0x7F or the largest code."""
    whole, e = _steps(y, fmt, u)
    # The code of a binade's start is its exponent field; add the number of steps, of which each binade has
    # 2**mantissa_bits.
    binade = lax.shift_left(lax.add(e, np.int32(fmt.mantissa_bits - fmt.emin)), np.int32(fmt.mantissa_bits))
    code = lax.add(whole.astype(jnp.int32), binade)
    negative = lax.shift_right_logical(lax.bitcast_convert_type(y, jnp.int32), np.int32(31))
    sign = lax.shift_left(negative, np.int32(fmt.bits - 1))
    nan = NAN_CODE if fmt.has_nan else fmt.max_code
    return where(isnan(y), nan, lax.bitwise_or(code, sign)).astype(jnp.uint8)


def _steps(y: Array, fmt: Format, u: Array | None) -> tuple[Array, Array]:
    """Return |y|, saturated, as a rounded number of grid steps (float32), and the exponent of a step (int32)."""
    a = lax.min(lax.abs(y), np.float32(fmt.max))
    binade = lax.sub(lax.shift_right_arithmetic(magnitude_bits(a), np.int32(23)), np.int32(127))
    e = lax.sub(lax.clamp(np.int32(fmt.emin), binade, np.int32(fmt.emax)), np.int32(fmt.mantissa_bits))
    steps = lax.mul(a, two_to_the(lax.neg(e)))
    if u is None:
        return lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN), e
    whole = lax.floor(steps)
    return lax.add(whole, lax.lt(u, lax.sub(steps, whole)).astype(jnp.float32)), e


def two_to_the(p: Array) -> Array:
    """Return float32 2**p for int32 p in [-126, 127]."""
    return lax.bitcast_convert_type(lax.shift_left(lax.add(p, np.int32(127)), np.int32(23)), jnp.float32)


# ---- arrays through which no derivative may pass, where rounding would act as a constant or the identity ----

SECOND_DERIVATIVE = (
    "{}: quantized layers have no second derivative and no forward-mode derivative of a gradient, because "
    "rounding has no derivative. Compute the part that is differentiated twice in high precision, with "
    "quaver.jax.autocast(enabled=False), or put jax.lax.stop_gradient around the arguments of the inner gradient "
    "to treat it as a constant"
)

#: Maximum number of cached guards, one per message; messages contain layer names.
LAYERS = 4096


def forbid_derivative(message: str, tree: Any) -> Any:
    """Return the same arrays; differentiating one, in either mode, raises NotImplementedError with this message."""
    return jax.tree.map(_guard(message), tree)


def forbid_second_derivative(label: str, tree: Any) -> Any:
    """Return the same arrays for use in a layer's gradient rule; a second derivative raises NotImplementedError."""
    return forbid_derivative(SECOND_DERIVATIVE.format(label), tree)


@lru_cache(LAYERS)
def _guard(message: str) -> Callable[[Array], Array]:
    """Return an identity function whose derivative raises.

    Where JAX splits a body into forward and backward, such as a scan's, it drops the rule of a custom_jvp and inlines
    it. A custom_vmap and its content are passed through unchanged.
    """

    @custom_jvp
    def guarded(x: Array) -> Array:
        return x

    @guarded.defjvp
    def raise_error(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(message)

    same = custom_vmap(guarded)

    @same.def_vmap
    def of_batch(size: int, batched: list[bool], x: Array) -> tuple[Array, bool]:
        return same(x), True

    return same


# ---- the fixed 16-point Hadamard rotation ----

#: Groups with amax below 2**-SMALL are scaled by 2**LIFT before they are rotated.
SMALL, LIFT = 60, 64


def rotate(x: Array, axis: int = 1) -> Array:
    """Rotate groups of 16 along an axis of a matrix, zero-padded: [rows, k] to float32 [rows, ceil16(k)] for the last.

    Exact, except where a group contains a subnormal and values above 2**-60 cancel: XLA on a CPU flushes subnormals.
    """
    x = widen(x)
    k = x.shape[axis]
    groups = -(-k // GROUP)
    x = padded(x, *along(axis, (0, groups * GROUP - k)))
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    y = x.reshape(*before, groups, GROUP, *after)
    signs = np.expand_dims(np.array(SIGNS, np.float32), (0, 1) if axis == 1 else (0, 2))
    small = lax.lt(largest(magnitude_bits(y), (axis + 1,)), np.int32((127 - SMALL) << 23))
    y = lax.mul(where(small, _lifted(y), y), signs)
    for stride in (1, 2, 4, 8):
        pairs = y.reshape(*before, groups, GROUP // (2 * stride), 2, stride, *after)
        a, b = (lax.slice_in_dim(pairs, i, i + 1, axis=axis + 2) for i in (0, 1))
        y = lax.concatenate([lax.add(a, b), lax.sub(a, b)], axis + 2).reshape(y.shape)
    quarter = lax.full(small.shape, np.float32(0.25))
    return lax.mul(y, where(small, 0.25 * 2.0**-LIFT, quarter)).reshape(x.shape)


def _lifted(x: Array) -> Array:
    """Return x × 2**LIFT for magnitudes below 2**-SMALL, including subnormals, computed on the bits since XLA would
    flush them.
    """
    bits = magnitude_bits(x)
    normal = lax.bitcast_convert_type(lax.add(bits, np.int32(LIFT << 23)), jnp.float32)
    subnormal = lax.mul(bits.astype(jnp.float32), np.float32(2.0 ** (LIFT - 149)))
    return copysign(where(lax.lt(bits, np.int32(1 << 23)), subnormal, normal), x)


# ---- noise of stochastic rounding in uint32 arrays: the same words on every device ----
#
# JAX has no 64-bit integers by default, so products are composed of 16-bit halves.

_LOW = 0xFFFFFFFF

#: (first row, first column, columns of the whole) of a shard in its operand.
Place = tuple[Array | int, Array | int, int]


def uniform(
    rows: int, k: int, seed: int, tensor_id: Array | int, count: Array | int, place: Place | None = None, axis: int = 1
) -> Array:
    """Return the random numbers in (0, 1) for stochastic rounding of an operand, float32 [rows, k].

    Args:
        rows, k: shape of the operand, or of a shard of it.
        seed: 64-bit key.
        tensor_id: 32-bit number of the tensor.
        count: number of earlier quantizations of this tensor; its low 32 bits are used.
        place: position of the shard in the whole operand, or None.
        axis: 0 to return them as [k, rows].
    Exact: `quaver.reference.numerics.uniform`; with `place`, the shard's part of it.
    """
    first_row, first_column, whole = (0, 0, k) if place is None else place
    row = lax.broadcasted_iota(jnp.uint32, along(axis, (rows, 1)), 1 - axis) + _word(first_row)
    # If no counter spans two rows, the four halves of a counter belong to four neighbouring columns.
    together = (
        k % 4 == 0 and whole % 4 == 0 and (place is None or not isinstance(first_column, int) or first_column % 4 == 0)
    )
    step = 4 if together else 1
    column = lax.broadcasted_iota(jnp.uint32, along(axis, (1, k // step)), axis) + _word(first_column) // step
    high, low = mul_wide(row, whole // step)
    low, high = low + column, high + (low + column < column)
    key, upper = noise_stream(seed, _word(tensor_id), _word(count))
    sixteen, half = np.uint32(16), np.uint32(0xFFFF)
    if together:
        words = computed_once(philox2x32(low, high ^ upper, key))
        pieces = [lax.expand_dims(piece, (axis + 1,)) for word in words for piece in (word >> sixteen, word & half)]
        halves = lax.concatenate([piece.astype(jnp.uint16) for piece in pieces], axis + 1)
    else:
        lane = low & 3
        first, second = philox2x32(low >> 2 | high << 30, high >> 2 ^ upper, key)
        word = where(lax.lt(lane, np.uint32(2)), first, second)
        halves = where(lax.eq(lane & 1, np.uint32(0)), word >> sixteen, word & half)
    # Signed integers convert to float faster, and 16 bits fit.
    drawn = lax.add(halves.astype(jnp.int32).astype(jnp.float32), np.float32(0.5))
    return lax.mul(drawn, np.float32(2.0**-16)).reshape(along(axis, (rows, k)))


def noise_stream(seed: int | Array, tensor_id: Array, count: Array) -> tuple[Array, Array]:
    """Return the key and the upper counter word of one quantization's noise, uint32 [].

    They are the first two words of Philox4x32-10 at (0, 0, tensor_id, count), keyed by the seed: 64 bits, or an array
    of 32.
    """
    c0 = c1 = jnp.zeros((), jnp.uint32)
    c2, c3 = tensor_id, count
    low, high = (seed & _LOW, seed >> 32 & _LOW) if isinstance(seed, int) else (seed.astype(jnp.uint32), 0)
    for i in range(ROUNDS):
        weyl = np.uint32(i * WEYL[0] & _LOW)
        k0 = np.uint32(low + int(weyl) & _LOW) if isinstance(low, int) else low + weyl
        k1 = np.uint32(high + i * WEYL[1] & _LOW)
        high0, low0 = mul_wide(c0, MULTIPLIERS[0])
        high1, low1 = mul_wide(c2, MULTIPLIERS[1])
        c0, c2 = high1 ^ c1 ^ k0, high0 ^ c3 ^ k1
        c1, c3 = low1, low0
    return c0, c1


def philox2x32(c0: Array, c1: Array, key: Array) -> tuple[Array, Array]:
    """Run ten rounds of two-word Philox on two uint32 arrays of one shape; key: uint32 []."""
    for i in range(ROUNDS):
        high, low = mul_wide(c0, MULTIPLIER)
        c0, c1 = high ^ c1 ^ (key + np.uint32(i * WEYL[0] & _LOW)), low
    return c0, c1


def mul_wide(a: Array, m: Any) -> tuple[Array, Array]:
    """Return high and low word of a 32 × 32-bit product, from 16-bit halves; XLA cannot compile `lax.mulhi` for
    shards.
    """
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
    """Return the low 32 bits of an integer, or of a float32 counter's integer value."""
    return jnp.uint32(x & _LOW) if isinstance(x, int) else jnp.asarray(x).reshape(()).astype(jnp.uint32)
