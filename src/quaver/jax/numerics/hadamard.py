"""The fixed 16-point rotation in JAX arrays: the twin of `quaver.core.numbers.hadamard`."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.core.numbers.hadamard import GROUP, SIGNS
from quaver.jax.numerics.rounding import magnitude_bits, widen

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
    y = jnp.pad(x, ((0, 0), (0, groups * GROUP - k))).reshape(rows, groups, GROUP)
    small = magnitude_bits(y).max(-1, keepdims=True, initial=0) < (127 - SMALL) << 23
    y = jnp.where(small, _lifted(y), y) * np.array(SIGNS, np.float32)
    for stride in (1, 2, 4, 8):
        pairs = y.reshape(rows, groups, GROUP // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([a + b, a - b], -2).reshape(rows, groups, GROUP)
    y = y * jnp.where(small, jnp.float32(0.25 * 2.0**-LIFT), jnp.float32(0.25))
    return y.reshape(rows, groups * GROUP)


def _lifted(x: Array) -> Array:
    """x × 2**LIFT for magnitudes below 2**-SMALL, subnormals included: on the bits, since XLA would flush them."""
    bits = magnitude_bits(x)
    normal = lax.bitcast_convert_type(bits + (LIFT << 23), jnp.float32)
    subnormal = bits.astype(jnp.float32) * jnp.float32(2.0 ** (LIFT - 149))
    y = jnp.where(bits < 1 << 23, subnormal, normal)
    sign = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(2**31))
    return lax.bitcast_convert_type(lax.bitcast_convert_type(y, jnp.int32) | sign, jnp.float32)
