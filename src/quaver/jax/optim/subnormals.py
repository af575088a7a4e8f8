"""Sums and products of float32 arrays with the bits of IEEE arithmetic, which XLA on a CPU does not give.

XLA flushes subnormals there, and second moments contain many; and LLVM contracts a product and a sum to a fused
multiply-add, through optimization barriers too. Tiny operands are scaled by 2**64, and subnormal products are rounded
as integers.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.jax.numerics.rounding import SMALLEST_NORMAL_BITS, magnitude_bits

F, W = np.float32, np.int32
SIGN = W(-0x80000000)
LIFT = 64
#: Bits of 2**-60: numbers below are scaled by 2**LIFT.
SMALL = W((127 - 60) << 23)


def bits_of(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def rounded(product: Array) -> Array:
    """Return a product that no compiler fuses with a sum: multiplied by a 1 that might be 2 for NaN."""
    return product * jnp.where(product != product, F(2), F(1))


def is_small(x: Array) -> Array:
    return magnitude_bits(x) < SMALL


def lifted(x: Array) -> Array:
    """Return x × 2**64 for |x| < 2**-60, subnormals included. Exact."""
    bits = magnitude_bits(x)
    subnormal = bits_of(bits.astype(jnp.float32) * F(2.0 ** (LIFT - 149)))
    return float_of(jnp.where(bits < SMALLEST_NORMAL_BITS, subnormal, bits + W(LIFT << 23)) | bits_of(x) & SIGN)


def lowered(y: Array) -> Array:
    """Return y × 2**-64 for multiples of 2**-85. Exact."""
    bits = magnitude_bits(y)
    # The bits of a subnormal are its multiple of 2**-149.
    subnormal = (jnp.abs(y) * F(2.0 ** (149 - LIFT))).astype(jnp.int32)
    low = jnp.where(bits < W(LIFT + 1 << 23), subnormal, bits - W(LIFT << 23))
    return float_of(jnp.maximum(low, W(0)) | bits_of(y) & SIGN)


def add(x: Array, y: Array) -> Array:
    """Return x + y, subnormals included. Exact IEEE float32."""
    small = is_small(x) & is_small(y)
    total = jnp.where(small, lifted(x), x) + jnp.where(small, lifted(y), y)
    return jnp.where(small, lowered(total), total)


def multiply(x: Array, y: Array) -> Array:
    """Return x × y, subnormal x and products included. Exact IEEE float32 if y is not subnormal, or is x.

    Args:
        x, y: float32 of one shape, or y [].
    """
    small = is_small(x)
    factor = jnp.where(small, lifted(x), x)
    product = rounded(factor * y) * jnp.where(small, F(2.0**-LIFT), F(1))
    bits_x, bits_y = bits_of(factor), bits_of(y)
    e = _binade(bits_x) + _binade(bits_y) - jnp.where(small, W(LIFT), W(0))
    # 48-bit product of both mantissas, with the lowest 21 bits collapsed to one sticky bit.
    (a1, a0), (b1, b0) = _halves(bits_x), _halves(bits_y)
    middle = a1 * b0 + a0 * b1
    low = a0 * b0 + ((middle & W(0xFFF)) << W(12))
    high = a1 * b1 + (middle >> W(12)) + (low >> W(24))
    sticky = ((low & W(0x1FFFFF)) != W(0)).astype(jnp.int32)
    q = (high << W(3)) | ((low & W(0xFFFFFF)) >> W(21)) | sticky
    # Round to nearest even in steps of 2**-149.
    n = jnp.clip(W(-103 - 21) - e, W(2), W(30))
    count = (q + (W(1) << (n - W(1))) - W(1) + ((q >> n) & W(1))) >> n
    nonzero = (magnitude_bits(x) != W(0)) & (magnitude_bits(y) != W(0))
    tiny = (e <= W(-127)) & nonzero
    return jnp.where(tiny, float_of(count | (bits_x ^ bits_y) & SIGN), product)


def _binade(bits: Array) -> Array:
    return ((bits >> W(23)) & W(0xFF)) - W(127)


def _halves(bits: Array) -> tuple[Array, Array]:
    mantissa = (bits & W(0x7FFFFF)) | W(0x800000)
    return mantissa >> W(12), mantissa & W(0xFFF)
