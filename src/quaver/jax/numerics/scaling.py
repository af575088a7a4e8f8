"""From a block's largest magnitude to its factor and scale, on the bits: the twin of `quaver.core.numbers.scaling`.

XLA rewrites divisions and products of constants, on a GPU it divides approximately, on a CPU it flushes subnormals:
integers survive all of that, and what must be a float stands behind a barrier.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.core.numbers.formats import E4M3, Format
from quaver.core.numbers.rounding import magnitudes
from quaver.core.numbers.scaling import FACTOR_EXPONENTS, FLT_MAX, TENSOR_EXPONENTS, TWO_LEVEL_MAX
from quaver.core.spec import QuantSpec
from quaver.jax.numerics.quantized import blocked
from quaver.jax.numerics.rounding import INFINITY_BITS, SMALLEST_NORMAL_BITS, magnitude_bits, two_to_the


def block_bits(x: Array, spec: QuantSpec) -> Array:
    """Bits of the largest magnitude of each block of float32 x [rows, k]: int32 in the shape of the scales.

    Those of subnormals count as 0.
    """
    shape = spec.blocks(*x.shape)
    if x.size == 0:
        return jnp.zeros(shape, jnp.int32)
    if spec.per_tensor:
        top = magnitude_bits(x).max().reshape(1, 1)
    elif spec.block == (1, None):
        top = magnitude_bits(x).max(1, keepdims=True)
    else:
        top = magnitude_bits(blocked(x, spec.block)).max((1, 3))
    return jnp.where(top < SMALLEST_NORMAL_BITS, 0, top)


def given_bits(amax: Array | float, shape: tuple[int, int]) -> Array:
    """The bits of an amax that was given, in the shape of the scales."""
    a = jnp.asarray(amax, jnp.float32)
    bits = magnitude_bits(jnp.broadcast_to(a.reshape(()), shape) if a.size == 1 else a.reshape(shape))
    return jnp.where(bits < SMALLEST_NORMAL_BITS, 0, bits)


def factors(x: Array, spec: QuantSpec, amax: Array | float | None, factor: Array | float | None) -> "Factors":
    """Encode factors and stored scales of the blocks of float32 x; see `quaver.core.reference.factors`."""
    shape = spec.blocks(*x.shape)
    if spec.scale == "unit":
        one = jnp.ones(shape, jnp.float32)
        return one, one, None, None
    measured = block_bits(x, spec)
    if spec.two_level:
        return _two_level(measured, spec, amax)
    top = measured if amax is None else given_bits(amax, shape)
    e = encode_factor(top, spec.format, spec.power_of_two)
    if factor is not None:
        given = jnp.asarray(factor, jnp.float32).reshape(())
        e = jnp.where(given == 0, e, given)
    finite = (top < INFINITY_BITS) & (measured < INFINITY_BITS)
    if spec.scale == "e8m0":
        code = jnp.where(top == 0, 0, 254 - (lax.bitcast_convert_type(e, jnp.int32) >> 23))
        scale = jnp.where(finite, code, 255).astype(jnp.uint8)
        e = jnp.where(top == 0, jnp.float32(0), e)
    else:
        scale = jnp.where(finite, reciprocal(e), jnp.float32(jnp.nan))
    return e, scale, None, _float(measured) if spec.per_tensor else None


#: Encode factors and stored scales, [blocks of rows, blocks of k]; a two-level tensor's factor and the amax, [1, 1].
Factors = tuple[Array, Array, Array | None, Array | None]


def _two_level(blocks: Array, spec: QuantSpec, amax: Array | float | None) -> Factors:
    top = blocks.max(initial=0).reshape(1, 1)
    tensor = top if amax is None else given_bits(amax, (1, 1))
    if spec.scale == "two_level":
        big = two_to_the(exponent(tensor, TWO_LEVEL_MAX, TENSOR_EXPONENTS))
    else:
        big = _ratio(TWO_LEVEL_MAX, tensor)
    sixth = lax.optimization_barrier(big * jnp.float32(1 / 6))
    wanted = _float(blocks) * sixth
    small = jnp.where(wanted > E4M3.max, jnp.float32(E4M3.max), wanted).astype(jnp.float8_e4m3fn)
    small = lax.optimization_barrier(small)
    code = lax.bitcast_convert_type(small, jnp.uint8)
    # A look-up, so that nothing divides where the factor is a power of two.
    one_by = jnp.asarray(_RECIPROCALS)[code]
    if spec.scale == "two_level":
        e = big * one_by
    else:
        # Transformer Engine's order: 1 / (scale × (1 / factor)). XLA on a CPU would flush the reciprocal of a factor
        # beyond 2**126, so it is taken of a smaller one.
        lower = jnp.where(big > 2.0**100, jnp.float32(2.0**-32), jnp.float32(1))
        divided = lax.optimization_barrier(small.astype(jnp.float32) * lax.optimization_barrier(1 / (big * lower)))
        e = 1 / divided / lower
    e = jnp.where(one_by == 0, jnp.float32(0), jnp.minimum(e, FLT_MAX))
    stored = jnp.where(blocks < INFINITY_BITS, code, jnp.uint8(0x7F))
    tensor_factor = jnp.where(tensor < INFINITY_BITS, big, jnp.float32(jnp.nan))
    return jnp.where(jnp.isnan(one_by), one_by, e), stored, tensor_factor, _float(top)


def _reciprocals() -> np.ndarray:
    """1 / value of the E4M3 codes 0..127, and 0 for that of zero."""
    values = magnitudes(E4M3)
    return np.concatenate([[0], np.float32(1) / values[1:]]).astype(np.float32)


_RECIPROCALS = _reciprocals()


def encode_factor(bits: Array, fmt: Format, power_of_two: bool) -> Array:
    """What data are multiplied by before rounding; 1 where the amax of these bits is 0, infinite or NaN.

    Exact if a power of two, else within an ulp of fmt.max / amax.
    """
    return two_to_the(exponent(bits, fmt.max)) if power_of_two else _ratio(fmt.max, bits)


def exponent(bits: Array, largest: float, bounds: tuple[int, int] = FACTOR_EXPONENTS) -> Array:
    """The largest p within bounds with amax × 2**p <= largest, from amax's bits; 0 where amax is 0 or not finite."""
    mantissa, e = np.frexp(np.float32(largest))
    top_mantissa = int((2 * mantissa - 1) * 2**23)
    p = int(e) - 1 + 127 - ((bits + (0x7FFFFF - top_mantissa)) >> 23)
    return jnp.where(usable(bits), jnp.clip(p, *bounds), 0)


def usable(bits: Array) -> Array:
    """Where an amax defines a factor: finite, normal and so not zero."""
    return (bits >= SMALLEST_NORMAL_BITS) & (bits < INFINITY_BITS)


def reciprocal(e: Array) -> Array:
    """1 / e for normal e; of a power of two on its bits, for a GPU divides approximately."""
    bits = lax.bitcast_convert_type(e, jnp.int32)
    exact = lax.bitcast_convert_type((254 << 23) - bits, jnp.float32)
    return jnp.where((bits & 0x7FFFFF == 0) & (bits < 254 << 23), exact, 1 / lax.optimization_barrier(e))


def _ratio(largest: float, bits: Array) -> Array:
    amax = _float(jnp.where(usable(bits), bits, 0x3F800000))
    # Behind a barrier XLA cannot cancel it against the reciprocal that follows.
    e = lax.optimization_barrier(jnp.float32(largest) / amax)
    e = jnp.clip(e, np.finfo(np.float32).tiny, FLT_MAX)
    return jnp.where(usable(bits), e, jnp.float32(1))


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
