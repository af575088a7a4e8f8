"""Optimizer states inside a kernel: `quaver.core.states.reference` for rows that are blocks, bit for bit.

What is encoded is float32 [R, B], a block a row; R scales are taken along. Where the reference divides or takes a root,
an approximation is mended until it gives the same code, or the operation is IEEE's; each function says which. A number
is rounded to a whole one by adding `_ROUND`, whose last bit is worth one, and its code then lies in the lowest byte.

Products that enter a sum are written as `tl.fma` where they are exact, so that a compiler has nothing to fuse.
"""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import (
    INFINITY_BITS,
    NAN_BITS,
    SMALLEST_NORMAL_BITS,
    decoded,
    encode,
    magnitude_bits,
)

#: 1.5 × 2**23.
_ROUND = tl.constexpr(12582912.0)
LARGEST_SCALE_BITS = tl.constexpr(0x7E800000)
#: 1 / 127² and 1 / 255² in float32.
_BY_127, _BY_255 = tl.constexpr(6.200012285262346e-05), tl.constexpr(1.537870048196055e-05)
#: E4M4: its bias of an exponent under float32's as a factor, and the bounds of its exponent.
_E4M4_BIAS, _E4M4_LOW, _E4M4_HIGH = tl.constexpr(2.0**120), tl.constexpr(-6), tl.constexpr(8)


@triton.jit
def scale_of(amax, LARGEST: tl.constexpr):
    """The bits of bfloat16 scales, rounded up, in float32's places: int32, from `block_amax`; those of NaN where an
    amax is not finite, 0 where a block counts as zeros. Exact."""
    if LARGEST == 1.0:
        bits = amax
    else:
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
def encode_softsign(x, inverse):
    """int8 codes to nearest. Exact: the quotient by an approximation and its remainder, which near the middles between
    codes, where alone it matters, is the rounded one."""
    y = _multiple(x, inverse, 1.0)
    c = _quotient(y, -1.0 - y) * 254.0
    return _whole(_with_sign(c, x)).to(tl.int8)


@triton.jit
def decode_softsign(codes):
    """What int8 codes are worth as multiples of their scale: c / (254 - |c|). Exact, as the division is of all 255."""
    c = codes.to(tl.float32)
    return _quotient(c, tl.abs(c) - 254.0)


@triton.jit
def encode_root(x, inverse, least, noise, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, FLOOR: tl.constexpr):
    """int8 codes (SIGNED) or uint8 of roots.

    noise: int32 below 2**15, [R, B], if STOCHASTIC; signed ones are to nearest only. least: as `inverse_of` gives it.
    Exact: to nearest the root is IEEE's; at random the code below it is that of an approximation, one less where its
    square is above.
    """
    tl.static_assert(not (SIGNED and (STOCHASTIC or FLOOR)))
    TOP: tl.constexpr = 127.0 if SIGNED else 255.0
    z = _multiple(x, inverse, 1.0) * (TOP * TOP)
    if STOCHASTIC:
        rounded = tl.sqrt(z) + _ROUND
        low = rounded - _ROUND
        low = tl.where(low * low > z, low - 1.0, low)
        # Between c and c + 1 the square grows from c² by 2 c + 1, here with the other sign; the noise is -1 - u.
        wide = tl.fma(low, -2.0, -1.0)
        up = z > tl.fma(wide, _less_one_and(noise), tl.fma(low, low, wide))
        c = _whole(tl.where(up, low + 1.0, low))
    else:
        root = tl.sqrt_rn(z)
        c = _whole(_with_sign(root, x) if SIGNED else root)
    if SIGNED:
        code = c.to(tl.int8)
    else:
        code = _at_least(c & 0xFF, x, least, FLOOR).to(tl.uint8)
    return code


@triton.jit
def decode_root(codes):
    """What int8 or uint8 codes of roots are worth as multiples of their scale. Exact."""
    c = codes.to(tl.float32)
    if codes.dtype == tl.int8:
        value = (tl.abs(c) * c) * _BY_127
    else:
        value = (c * c) * _BY_255
    return value


@triton.jit
def encode_root_e4m4(x, inverse, least, noise, STOCHASTIC: tl.constexpr, FLOOR: tl.constexpr):
    """uint8 codes of E4M4 of the root; noise and least as in `encode_root`. Exact: the root is IEEE's."""
    y = _multiple(x, inverse, 246016.0)
    value = tl.sqrt_rn(y)
    e = (value.to(tl.int32, bitcast=True) >> 23) - 127
    e = tl.minimum(tl.maximum(e, _E4M4_LOW), _E4M4_HIGH)
    per_step = ((4 + 127 - e) << 23).to(tl.float32, bitcast=True)
    steps = value * per_step
    if STOCHASTIC:
        low = tl.floor(steps)
        wide = tl.fma(low, -2.0, -1.0)
        up = (y * per_step) * per_step > tl.fma(wide, _less_one_and(noise), tl.fma(low, low, wide))
        steps = tl.where(up, low + 1.0, low)
    # Steps of a binade count on from where the field of its exponent begins.
    c = tl.minimum((_whole(steps) - 0x4B400000) + ((e - _E4M4_LOW) << 4), 255)
    return _at_least(c, x, least, FLOOR).to(tl.uint8)


@triton.jit
def decode_root_e4m4(codes):
    """What uint8 codes of E4M4 of a root are worth as multiples of their scale. Exact."""
    value = (codes.to(tl.int32) << 19).to(tl.float32, bitcast=True) * _E4M4_BIAS
    return value * value


@triton.jit
def encode_e4m3(x, inverse, INTEGERS: tl.constexpr):
    """uint8 codes of E4M3 to nearest, zeros without a sign; INTEGERS as `bits.numbers.encode` takes it. Exact."""
    code = encode(_with_sign(_multiple(x, inverse, 448.0), x), tl.float8e4nv, INTEGERS)
    return tl.where((code & 0x7F) == 0, 0, code).to(tl.uint8)


@triton.jit
def decode_e4m3(codes, INTEGERS: tl.constexpr):
    """What uint8 codes of E4M3 are worth as multiples of their scale. Exact."""
    return decoded(codes, tl.float8e4nv, INTEGERS)


@triton.jit
def bfloat16_at_random(x, noise):
    """bfloat16 of float32 x by noise, int32 below 2**15 of x's shape; infinities and NaN stay. Exact."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = tl.where(x != x, bits | 0x400000, bits + (noise << 1))
    return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _multiple(x, inverse, LARGEST: tl.constexpr):
    """|x| times an inverse scale, from 0 to LARGEST; 0 times what is not finite is 0: a maximum drops NaN."""
    return tl.minimum(tl.maximum(tl.abs(x) * inverse, 0.0), LARGEST)


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
def _with_sign(magnitude, x):
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _whole(c):
    """A number below 2**22 in magnitude to nearest, ties to even, in the lowest bits of an int32 above 0x4B400000."""
    return (c + _ROUND).to(tl.int32, bitcast=True)


@triton.jit
def _less_one_and(noise):
    """-1 - noise / 2**15: float32."""
    return ((noise << 8) | -0x40800000).to(tl.float32, bitcast=True)


@triton.jit
def _at_least(c, x, least, FLOOR: tl.constexpr):
    """Codes of x, not negative; of FLOOR at least 1 where x is not zero and its block has a scale."""
    if FLOOR:
        c = tl.maximum(c, tl.minimum(x.to(tl.int32, bitcast=True), least))
    return c
