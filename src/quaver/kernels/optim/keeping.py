"""A weight read as float32 and written from it, with what is kept beside it: `quaver.torch.optim.weights` in a kernel.

PLAIN      a float; bfloat16 may be rounded at random
REMAINDER  bfloat16, and the 16 bits that float32 has more
RESIDUAL   E4M3 codes and their scale, or bfloat16, and what is missing in parts of half a step
MASTER     E4M3 codes and their scale, and float32 itself
"""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import NAN_BITS, decoded, encode, widened
from quaver.kernels.optim.codes import bfloat16_at_random

PLAIN, REMAINDER, RESIDUAL, MASTER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
#: 1.5 × 2**23: added to a number below 2**22 it leaves a whole one, ties to even, in the lowest bits.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def read_weight(weight, beside, scale, KEEPING: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr):
    """float32 of what is kept. weight: codes as uint8, or floats; scale: of codes, float32. Exact."""
    if KEEPING == PLAIN:
        value = widened(weight)
    elif KEEPING == REMAINDER:
        bits = (weight.to(tl.int16, bitcast=True).to(tl.int32) << 16) + beside.to(tl.int32)
        value = bits.to(tl.float32, bitcast=True)
    elif KEEPING == MASTER:
        value = beside
    else:
        value = _value(weight, CODES, INTEGERS)
        value = _with_parts(value, _field(weight, CODES), beside.to(tl.float32), beside.dtype == tl.int16, CODES)
        if CODES:
            value = value * scale
    return value


@triton.jit
def write_weight(
    x, e, inverse, scale, noise, POWER_OF_TWO: tl.constexpr, KEEPING: tl.constexpr, CODES: tl.constexpr,
    WEIGHT: tl.constexpr, BESIDE: tl.constexpr, STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """What is kept of a weight, float32: itself (codes as uint8), what is beside it, and what both are worth as a
    multiple of the scale, if CODES.

    e, inverse: what codes are rounded from and what residuals are measured of, as multiples of x: one number, but where
    a scale is of zeros alone. scale: 1 / e. noise: int32 below 2**15, if STOCHASTIC. Exact.
    """
    beside, value = x, x
    if KEEPING == PLAIN:
        kept = bfloat16_at_random(x, noise) if STOCHASTIC else x.to(WEIGHT)
    elif KEEPING == REMAINDER:
        bits = tl.where(x != x, NAN_BITS, x.to(tl.int32, bitcast=True))
        beside = bits.to(tl.int16)
        kept = ((bits - beside.to(tl.int32)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif KEEPING == MASTER:
        kept = encode(x * e, tl.float8e4nv, INTEGERS)
    else:
        if CODES:
            kept = encode(x * e, tl.float8e4nv, INTEGERS)
            # By a power of two a division is the product with the inverse.
            scaled = x * inverse if POWER_OF_TWO else tl.div_rn(x, tl.zeros_like(x) + scale)
        else:
            kept = x.to(tl.bfloat16)
            scaled = x
        near, field = _value(kept, CODES, INTEGERS), _field(kept, CODES)
        parts = _parts(scaled - near, field, noise, tl.int16 == BESIDE, CODES, STOCHASTIC)
        beside = parts.to(tl.int32).to(BESIDE)
        value = _with_parts(near, field, parts, tl.int16 == BESIDE, CODES)
    return kept, beside, value


@triton.jit
def _value(kept, CODES: tl.constexpr, INTEGERS: tl.constexpr):
    return decoded(kept, tl.float8e4nv, INTEGERS) if CODES else widened(kept)


@triton.jit
def _field(kept, CODES: tl.constexpr):
    """The field of the exponent of the step around a number, as float32's bits have it in its place: int32."""
    if CODES:
        # From E4M3's bias to float32's; a step is 2**-3 of a power of two, half of it 2**-4.
        field = (tl.maximum((kept.to(tl.int32) >> 3) & 15, 1) + 116) << 23
    else:
        bits = kept.to(tl.int16, bitcast=True).to(tl.int32) & 0x7F80
        field = tl.minimum(tl.maximum(bits << 16, 10 << 23), 254 << 23)
    return field


@triton.jit
def _with_parts(value, field, parts, WIDE: tl.constexpr, CODES: tl.constexpr):
    """A number and so many parts of half a step around it. The product is exact."""
    BITS: tl.constexpr = 15 if WIDE else 7
    if CODES:
        part = (field - (BITS << 23)).to(tl.float32, bitcast=True)
        sum = tl.fma(parts, part, value)
    else:
        # A part itself may be subnormal, and half a step 2**-8 of the power of two.
        half = (field - (8 << 23)).to(tl.float32, bitcast=True)
        sum = tl.fma(parts * half, 2.0**-BITS, value)
    return sum


@triton.jit
def _parts(rest, field, noise, WIDE: tl.constexpr, CODES: tl.constexpr, STOCHASTIC: tl.constexpr):
    """What is missing, in parts of half a step: whole numbers as float32; beside no codes 0 for NaN."""
    BITS: tl.constexpr = 15 if WIDE else 7
    if CODES:
        inverse = (((BITS << 23) - field) + (254 << 23)).to(tl.float32, bitcast=True)
    else:
        rest = rest * (((8 << 23) - field) + (254 << 23)).to(tl.float32, bitcast=True)
        inverse = tl.full(rest.shape, 2.0**BITS, tl.float32)
    MOST: tl.constexpr = 2.0**BITS
    if STOCHASTIC:
        # 1 + u less 1: exact.
        u = ((noise << 8) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
        parts = tl.floor(tl.fma(rest, inverse, u))
    else:
        parts = rest * inverse
    held = tl.minimum(tl.maximum(parts, -MOST), MOST - 1.0)
    # Of codes whose weight is NaN so is the scale.
    parts = held if CODES else tl.where(parts == parts, held, 0.0)
    if not STOCHASTIC:
        parts = (parts + _ROUND) - _ROUND
    return parts
