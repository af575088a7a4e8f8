"""Optimizer states inside a kernel: `quaver.core.states.reference` for rows that are blocks, bit for bit.

What is encoded is float32 [R, B], a block a row; R scales are taken along. A number is rounded to a whole one by adding
`_ROUND`, whose last bit is worth one, and its code then lies in the lowest byte. Codes are those that a preset of ours
keeps; others step in plain torch.
"""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import (
    INFINITY_BITS,
    NAN_BITS,
    SMALLEST_NORMAL_BITS,
    magnitude_bits,
)

#: 1.5 × 2**23.
_ROUND = tl.constexpr(12582912.0)
#: float32's 1/3.
_THIRD = tl.constexpr(0.3333333432674408)
LARGEST_SCALE_BITS = tl.constexpr(0x7E800000)


@triton.jit
def scale_of(amax, LARGEST: tl.constexpr):
    """The bits of bfloat16 scales, rounded up, in float32's places: int32, from `block_amax`; those of NaN where an
    amax is not finite, 0 where a block counts as zeros. Exact."""
    bits = tl.div_rn(amax.to(tl.float32, bitcast=True), tl.full(amax.shape, LARGEST, tl.float32))
    bits = bits.to(tl.int32, bitcast=True)
    bits = tl.minimum((bits + 0xFFFF) & -0x10000, LARGEST_SCALE_BITS)
    bits = tl.where(bits < SMALLEST_NORMAL_BITS, 0, bits)
    return tl.where(amax < INFINITY_BITS, bits, NAN_BITS)


@triton.jit
def block_amax(x, SIGNED: tl.constexpr):
    """The bits of each row's largest magnitude, int32 [R]: those of NaN are above those of infinity."""
    bits = magnitude_bits(x) if SIGNED else x.to(tl.int32, bitcast=True)
    top = tl.max(bits, axis=1)
    # A row of negative zeros.
    return top if SIGNED else tl.maximum(top, 0)


@triton.jit
def inverse_of(scale_bits):
    """1 / scale, 0 where there is none, and the smallest code that a number other than zero may have: [R, 1] each.
    Exact: it is of all scales of eight bits."""
    usable = (scale_bits >= SMALLEST_NORMAL_BITS) & (scale_bits <= LARGEST_SCALE_BITS)
    scale = tl.where(usable, scale_bits, 0x3F800000).to(tl.float32, bitcast=True)
    inverse = tl.where(usable, _quotient(1.0, -scale), 0.0)
    return tl.expand_dims(inverse, 1), tl.expand_dims(tl.where(usable, 1, 0), 1)


@triton.jit
def encode_mitchell(x, inverse, least, noise, HALVINGS: tl.constexpr, SIGNED: tl.constexpr, NOISY: tl.constexpr):
    """int8 codes (SIGNED), or uint8 of what is not negative, at least 1 where that is not zero.

    noise: int32 below 2**15, [R, B], if NOISY, else codes are rounded to nearest; least: as `inverse_of` gives it.
    Exact.
    """
    y = tl.where(inverse > 0, tl.abs(x) * inverse, 0.0)
    c = ((y.to(tl.int32, bitcast=True) >> HALVINGS) + (32 * (HALVINGS + 1) << 23)).to(tl.float32, bitcast=True)
    if HALVINGS == 1:
        # A straight line from code 0 to 1, and from 1 to 2.
        twice = y * 2.0
        c = tl.minimum(c, tl.minimum(twice, (twice + 2.0) * _THIRD))
    if NOISY:
        # Noise and a half from 1 to 2, less 1.5.
        c = c + (((noise << 8) | 0x3F800080).to(tl.float32, bitcast=True) - 1.5)
    if SIGNED:
        code = _whole(with_sign(c, x.to(tl.int32, bitcast=True))).to(tl.int8)
    else:
        code = _at_least(_whole(c) & 0xFF, x, least).to(tl.uint8)
    return code


@triton.jit
def decode_mitchell(codes, HALVINGS: tl.constexpr):
    """What int8 or uint8 codes are worth as multiples of their scale. Exact."""
    LOW: tl.constexpr = 2.0**-64 if HALVINGS == 1 else 2.0**-96
    bits = (codes.to(tl.float32) * LOW).to(tl.int32, bitcast=True)
    value = bits << HALVINGS
    if codes.dtype == tl.int8:
        value = (value & 0x7FFFFFFF) | (bits & -0x80000000)
    return value.to(tl.float32, bitcast=True)


@triton.jit
def bfloat16_at_random(x, noise):
    """bfloat16 of float32 x by noise, int32 below 2**15 of x's shape; infinities and NaN stay. Exact."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = tl.where(x != x, bits | 0x400000, bits + (noise << 1))
    return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _quotient(a, b):
    """a / -b, b below 0: an approximation, and what it lacks. Rounded once for the numbers of this file; see the tests.

    A divisor is given with the other sign, since a sign of what enters `tl.fma` costs an instruction.
    """
    r = tl.rsqrt(tl.abs(b))
    r = r * r
    q = a * r
    return tl.fma(tl.fma(q, b, a), r, q)


@triton.jit
def with_sign(magnitude, bits):
    """A magnitude, float32, with the sign that these bits have as float32's: int32."""
    return (magnitude.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _whole(c):
    """A number below 2**22 in magnitude to nearest, ties to even, in the lowest bits of an int32 above 0x4B400000."""
    return (c + _ROUND).to(tl.int32, bitcast=True)


@triton.jit
def _at_least(c, x, least):
    """Codes of x, not negative; at least 1 where x is not zero and its block has a scale."""
    return tl.maximum(c, tl.minimum(x.to(tl.int32, bitcast=True), least))
