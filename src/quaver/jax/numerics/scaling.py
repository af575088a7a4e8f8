"""Encode factors and scales from block amaxes, computed on the bits; bit-compatible with `quaver.reference.numerics`.

XLA rewrites divisions and products with constants, divides approximately on a GPU, and flushes subnormals on a CPU.
Integer operations are unaffected; barriers protect the floating-point ones.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.jax.numerics.quantized import along, blocked, isnan, largest, where
from quaver.jax.numerics.rounding import INFINITY_BITS, SMALLEST_NORMAL_BITS, magnitude_bits, two_to_the
from quaver.recipes.formats import E4M3, Format
from quaver.recipes.spec import QuantSpec
from quaver.reference.numerics import FACTOR_EXPONENTS, FLT_MAX, TENSOR_EXPONENTS, TWO_LEVEL_MAX, magnitudes


def block_bits(x: Array, spec: QuantSpec, axis: int = 1) -> Array:
    """Return the bits of each block's amax in float32 x [rows, k], or [k, rows] if the contraction axis is 0: int32 in
    the shape of the stored scales.

    Subnormal amaxes count as 0.
    """
    if x.size == 0:
        return jnp.zeros(scale_shape(x, spec, axis), jnp.int32)
    block = along(axis, spec.block)
    if spec.per_tensor:
        amax_bits = largest(magnitude_bits(x), (0, 1))
    elif block in ((1, None), (None, 1)):
        amax_bits = largest(magnitude_bits(x), (block.index(None),))
    else:
        view, within = blocked(x, block)
        amax_bits = lax.reduce_max(magnitude_bits(view), within)
    return _flush_subnormal_bits(amax_bits)


def scale_shape(x: Array, spec: QuantSpec, axis: int) -> tuple[int, int]:
    """Return the shape of the stored scales of x."""
    return along(axis, spec.blocks(*along(axis, x.shape)))


def _flush_subnormal_bits(bits: Array) -> Array:
    return where(lax.lt(bits, SMALLEST_NORMAL_BITS), 0, bits)


def provided_amax_bits(amax: Array | float, shape: tuple[int, int]) -> Array:
    """Return the bits of a provided amax, in the shape of the scales."""
    a = jnp.asarray(amax, jnp.float32)
    return _flush_subnormal_bits(
        magnitude_bits(jnp.broadcast_to(a.reshape(()), shape) if a.size == 1 else a.reshape(shape))
    )


def factors(
    x: Array, spec: QuantSpec, amax: Array | float | None, factor: Array | float | None, axis: int = 1
) -> "Factors":
    """Return encode factors and stored scales of the blocks of float32 x; see `quaver.reference.factors`."""
    shape = scale_shape(x, spec, axis)
    if spec.scale == "unit":
        one = jnp.ones(shape, jnp.float32)
        return one, one, None, None
    measured = block_bits(x, spec, axis)
    if spec.two_level:
        return _two_level(measured, spec, amax)
    amax_bits = measured if amax is None else provided_amax_bits(amax, shape)
    e = encode_factor(amax_bits, spec.format, spec.power_of_two)
    if factor is not None:
        provided = jnp.asarray(factor, jnp.float32).reshape(())
        e = lax.select(lax.eq(provided, np.float32(0)), e, lax.broadcast(provided, shape))
    finite = lax.lt(amax_bits, INFINITY_BITS)
    if amax_bits is not measured:
        finite = lax.bitwise_and(finite, lax.lt(measured, INFINITY_BITS))
    if spec.scale == "e8m0":
        zero = lax.eq(amax_bits, np.int32(0))
        code = lax.sub(np.int32(254), lax.shift_right_arithmetic(lax.bitcast_convert_type(e, jnp.int32), np.int32(23)))
        scale = where(finite, where(zero, 0, code), 255).astype(jnp.uint8)
        e = where(zero, 0, e)
    else:
        scale = where(finite, reciprocal(e), jnp.nan)
    return e, scale, None, _float_of_bits(measured) if spec.per_tensor else None


#: (encode factors, stored scales) in the stored layout; (tensor factor of two-level scales, amax), [1, 1] or None.
Factors = tuple[Array, Array, Array | None, Array | None]


def _two_level(blocks: Array, spec: QuantSpec, amax: Array | float | None) -> Factors:
    amax_bits = largest(blocks, (0, 1))
    tensor = amax_bits if amax is None else provided_amax_bits(amax, (1, 1))
    if spec.scale == "two_level":
        big = two_to_the(exponent(tensor, TWO_LEVEL_MAX, TENSOR_EXPONENTS))
    else:
        big = _ratio(TWO_LEVEL_MAX, tensor)
    sixth = lax.optimization_barrier(lax.mul(big, np.float32(1 / 6)))
    wanted = lax.mul(_float_of_bits(blocks), sixth)
    small = where(lax.gt(wanted, np.float32(E4M3.max)), E4M3.max, wanted).astype(jnp.float8_e4m3fn)
    small = lax.optimization_barrier(small)
    code = lax.bitcast_convert_type(small, jnp.uint8)
    # A table look-up, so that nothing is divided if the tensor factor is a power of two.
    one_by = jnp.asarray(_RECIPROCALS)[code]
    if spec.scale == "two_level":
        e = lax.mul(big, one_by)
    else:
        # Transformer Engine's order: 1 / (scale × (1 / factor)). XLA on a CPU would flush the reciprocal of a factor
        # above 2**126, so a smaller factor is inverted.
        lower = where(lax.gt(big, np.float32(2.0**100)), lax.full_like(big, 2.0**-32), 1)
        inverse = lax.optimization_barrier(lax.div(np.float32(1), lax.mul(big, lower)))
        divided = lax.optimization_barrier(lax.mul(small.astype(jnp.float32), inverse))
        e = lax.div(lax.div(np.float32(1), divided), lower)
    e = where(lax.eq(one_by, np.float32(0)), 0, lax.min(e, np.float32(FLT_MAX)))
    stored = where(lax.lt(blocks, INFINITY_BITS), code, 0x7F)
    tensor_factor = where(lax.lt(tensor, INFINITY_BITS), big, jnp.nan)
    return where(isnan(one_by), one_by, e), stored, tensor_factor, _float_of_bits(amax_bits)


def _reciprocals() -> np.ndarray:
    """Return 1 / value of the E4M3 codes 0..127, with 0 for zero."""
    values = magnitudes(E4M3)
    return np.concatenate([[0], np.float32(1) / values[1:]]).astype(np.float32)


_RECIPROCALS = _reciprocals()


def encode_factor(bits: Array, fmt: Format, power_of_two: bool) -> Array:
    """Return the encode factors for these amax bits; 1 if the amax is 0, infinite or NaN.

    Exact for powers of two, else within an ulp of fmt.max / amax.
    """
    return two_to_the(exponent(bits, fmt.max)) if power_of_two else _ratio(fmt.max, bits)


def exponent(bits: Array, most: float, bounds: tuple[int, int] = FACTOR_EXPONENTS) -> Array:
    """Return the largest p within bounds with amax × 2**p <= most, from amax's bits; 0 if amax is 0 or not finite."""
    mantissa, e = np.frexp(np.float32(most))
    max_mantissa = int((2 * mantissa - 1) * 2**23)
    binade = lax.shift_right_arithmetic(lax.add(bits, np.int32(0x7FFFFF - max_mantissa)), np.int32(23))
    p = lax.sub(np.int32(e - 1 + 127), binade)
    return where(usable(bits), lax.clamp(np.int32(bounds[0]), p, np.int32(bounds[1])), 0)


def usable(bits: Array) -> Array:
    """Return True where an amax defines an encode factor: finite and normal, hence not zero."""
    return lax.bitwise_and(lax.ge(bits, SMALLEST_NORMAL_BITS), lax.lt(bits, INFINITY_BITS))


def reciprocal(e: Array) -> Array:
    """Return 1 / e for normal e; powers of two are inverted on the bits, because a GPU divides approximately."""
    bits = lax.bitcast_convert_type(e, jnp.int32)
    exact = lax.bitcast_convert_type(lax.sub(np.int32(254 << 23), bits), jnp.float32)
    mantissa = lax.bitwise_and(bits, np.int32(0x7FFFFF))
    power = lax.bitwise_and(lax.eq(mantissa, np.int32(0)), lax.lt(bits, np.int32(254 << 23)))
    return where(power, exact, lax.div(np.float32(1), lax.optimization_barrier(e)))


def _ratio(most: float, bits: Array) -> Array:
    defined = usable(bits)
    amax = _float_of_bits(where(defined, bits, 0x3F800000))
    # A barrier keeps XLA from cancelling it against the reciprocal that follows.
    e = lax.optimization_barrier(lax.div(np.float32(most), amax))
    e = lax.clamp(np.finfo(np.float32).tiny, e, np.float32(FLT_MAX))
    return where(defined, e, 1)


def _float_of_bits(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
