"""The fixed 16-point rotation in JAX arrays: the twin of `quaver.core.numbers.hadamard`."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.core.numbers.hadamard import GROUP, SIGNS
from quaver.jax.numerics.elementwise import copysign, largest, padded, where
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
