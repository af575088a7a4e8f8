"""Rounding float32 to codes in JAX arrays: the twin of `quaver.core.numbers.rounding`."""

from functools import reduce

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.core.numbers.formats import Format
from quaver.core.numbers.rounding import NAN_CODE
from quaver.jax.numerics.elementwise import copysign, isnan, where
from quaver.jax.numerics.quantized import FLOAT8

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
