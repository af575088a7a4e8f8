"""Rounding float32 to codes in JAX arrays: the twin of `quaver.core.numbers.rounding`."""

import jax.numpy as jnp
from jax import Array, lax

from quaver.core.numbers.formats import Format
from quaver.core.numbers.rounding import NAN_CODE
from quaver.jax.numerics.quantized import FLOAT8

INFINITY_BITS = 0x7F800000
SMALLEST_NORMAL_BITS = 0x00800000


def widen(x: Array) -> Array:
    """An operand's float32 values, rounded to its own dtype even where XLA would skip that rounding within a fusion."""
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
        return lax.bitcast_convert_type(bits, jnp.float32)
    return x if x.dtype == jnp.float32 else lax.optimization_barrier(x).astype(jnp.float32)


def magnitude_bits(x: Array) -> Array:
    """The bits of |float32 x| as int32: they order as NaN > infinity > finite."""
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def flush(x: Array) -> Array:
    """Subnormals to zeros of their sign."""
    return jnp.where(magnitude_bits(x) < SMALLEST_NORMAL_BITS, jnp.copysign(jnp.float32(0), x), x)


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
    clipped = jnp.where(jnp.isnan(y), y, lax.clamp(jnp.float32(-fmt.max), y, jnp.float32(fmt.max)))
    return clipped.astype(FLOAT8[fmt.name])


#: Halfway between one magnitude of E2M1 and the next; a tie goes to the even code, down at the first.
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _e2m1(y: Array, u: Array | None) -> Array:
    a = jnp.abs(y)
    if u is None:
        steps = [a > tie if i % 2 == 0 else a >= tie for i, tie in enumerate(_TIES)]
        code = sum(step.astype(jnp.uint8) for step in steps)
    else:
        a = jnp.minimum(a, jnp.float32(6))
        # The grid has step 1/2 below 2, 1 below 4 and 2 above: codes count from 0, 2 and 4 there.
        per_step = jnp.where(a >= 4, jnp.float32(0.5), jnp.where(a >= 2, jnp.float32(1), jnp.float32(2)))
        first = jnp.where(a >= 4, jnp.float32(4), jnp.where(a >= 2, jnp.float32(2), jnp.float32(0)))
        whole = jnp.floor(a * per_step)
        up = (u < a * per_step - whole).astype(jnp.float32)
        code = (whole + up + first).astype(jnp.int32).astype(jnp.uint8)
    sign = (lax.bitcast_convert_type(y, jnp.uint32) >> 28).astype(jnp.uint8) & 8
    return jnp.where(jnp.isnan(y), jnp.uint8(7), code | sign)


def _round_stochastically(y: Array, fmt: Format, u: Array) -> Array:
    """float32 to the format's grid, away from zero where u is below the fraction of a step."""
    whole, e = _steps(y, fmt, u)
    return jnp.where(jnp.isnan(y), y, jnp.copysign(whole * two_to_the(e), y))


def _in_bytes(y: Array, fmt: Format, u: Array | None) -> Array:
    """float32 to uint8 codes of any format, NaN as 0x7F or the largest code."""
    whole, e = _steps(y, fmt, u)
    # A number of a binade counts 2**mantissa_bits steps from its start, where the field of its exponent begins.
    code = whole.astype(jnp.int32) + (e + (fmt.mantissa_bits - fmt.emin) << fmt.mantissa_bits)
    sign = (lax.bitcast_convert_type(y, jnp.uint32) >> 31).astype(jnp.int32) << (fmt.bits - 1)
    nan = NAN_CODE if fmt.has_nan else fmt.max_code
    return jnp.where(jnp.isnan(y), nan, code | sign).astype(jnp.uint8)


def _steps(y: Array, fmt: Format, u: Array | None) -> tuple[Array, Array]:
    """|y|, held to the largest, in rounded steps of the format's grid: float32, and the exponent of a step, int32."""
    a = jnp.minimum(jnp.abs(y), jnp.float32(fmt.max))
    e = jnp.clip((magnitude_bits(a) >> 23) - 127, fmt.emin, fmt.emax) - fmt.mantissa_bits
    steps = a * two_to_the(-e)
    if u is None:
        return jnp.rint(steps), e
    whole = jnp.floor(steps)
    return whole + (u < steps - whole).astype(jnp.float32), e


def two_to_the(p: Array) -> Array:
    """float32 2**p for int32 p in [-126, 127]."""
    return lax.bitcast_convert_type((p + 127) << 23, jnp.float32)
