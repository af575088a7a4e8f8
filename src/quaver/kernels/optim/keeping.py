"""A weight read as float32 and written from it, with what is kept beside it: `quaver.torch.optim.weights` in a kernel.

PLAIN      a float; bfloat16 may be rounded at random
REMAINDER  bfloat16, and the 16 bits that float32 has more
RESIDUAL   E4M3 codes and their scale, or bfloat16, and the bits that a longer mantissa has more
MASTER     E4M3 codes and their scale, and float32 itself
"""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import NAN_BITS, encode, widened
from quaver.kernels.optim.codes import bfloat16_at_random, with_sign

PLAIN, REMAINDER, RESIDUAL, MASTER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
#: From E4M3's exponents to where its bits are float32's, and back.
_BELOW_E4M3, _ABOVE_E4M3 = tl.constexpr(2.0**-120), tl.constexpr(2.0**120)


@triton.jit
def read_weight(weight, beside, scale, KEEPING: tl.constexpr, CODES: tl.constexpr):
    """float32 of what is kept. weight: codes as uint8, or floats; scale: of codes, float32. Exact."""
    if KEEPING == PLAIN:
        value = widened(weight)
    elif KEEPING == MASTER:
        value = beside
    else:
        MORE: tl.constexpr = 16 if beside.dtype == tl.int16 else 8
        if CODES:
            code = weight.to(tl.int32)
            number, sign = ((code & 0x7F) << MORE) + beside.to(tl.int32), code << 24
        else:
            sign = weight.to(tl.int16, bitcast=True).to(tl.int32)
            number = ((sign & 0x7FFF) << MORE) + beside.to(tl.int32)
        # Below a code of 0, which a pruning mask writes over a residual, there is nothing.
        value = with_sign(_longer(tl.maximum(number, 0), MORE, CODES), sign)
        if CODES:
            value = value * scale
    return value


@triton.jit
def write_weight(
    x, e, noise, KEEPING: tl.constexpr, CODES: tl.constexpr, WEIGHT: tl.constexpr, BESIDE: tl.constexpr,
    STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """What is kept of a weight, float32: itself (codes as uint8), what is beside it, and the magnitude that both are
    worth as a multiple of the scale, if CODES.

    e: what codes are rounded from, as a multiple of x. noise: int32 below 2**15, if STOCHASTIC. Exact.
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
        MORE: tl.constexpr = 16 if tl.int16 == BESIDE else 8
        BELOW: tl.constexpr = (20 if CODES else 16) - MORE
        HALF: tl.constexpr = 1 << (MORE - 1)
        if CODES:
            x = x * e
            # As far as the largest code reaches, of NaN too.
            MOST: tl.constexpr = ((0x7E << MORE) + HALF - 1) << BELOW
            bits = tl.minimum((tl.abs(x) * _BELOW_E4M3).to(tl.int32, bitcast=True), MOST)
        else:
            bits = tl.where(x != x, NAN_BITS, x.to(tl.int32, bitcast=True)) & 0x7FFFFFFF
        lost = noise >> (15 - BELOW) if STOCHASTIC else (1 << BELOW) // 2
        number = (bits + lost) >> BELOW
        sign = x.to(tl.int32, bitcast=True)
        code = (number + HALF) >> MORE
        beside = number.to(BESIDE)
        if CODES:
            kept = (code | ((sign >> 24) & 0x80)).to(tl.uint8)
        else:
            kept = (code | ((sign >> 16) & -0x8000)).to(tl.int16).to(tl.bfloat16, bitcast=True)
        value = _longer(number, MORE, CODES)
    return kept, beside, value


@triton.jit
def _longer(number, MORE: tl.constexpr, CODES: tl.constexpr):
    """The magnitude whose bits these are: float32. Exact."""
    if CODES:
        # Subnormals of E4M3 are float32's here, and numbers again by the product.
        value = (number << (20 - MORE)).to(tl.float32, bitcast=True) * _ABOVE_E4M3
    else:
        value = (number << (16 - MORE)).to(tl.float32, bitcast=True)
    return value
