"""Optimizer states in Triton: encoding and decoding of moments and weights, and access to blocks of parameters.

The bits equal those of `quaver.reference.optim`, with a block per row: values are float32 [R, B] with R scales. A
number is rounded to an integer by adding `_ROUND`, whose last bit is worth one; the code is then in the lowest byte.
Only codes of Quaver's presets are supported; others step in plain torch.
"""

import triton
import triton.language as tl

from quaver.kernels.numerics import (
    INFINITY_BITS,
    NAN_BITS,
    SMALLEST_NORMAL_BITS,
    encode,
    magnitude_bits,
    noise_stream,
    widened,
)

# ---- codes of moments ----

#: 1.5 × 2**23.
_ROUND = tl.constexpr(12582912.0)
#: 1/3 in float32.
_THIRD = tl.constexpr(0.3333333432674408)
LARGEST_SCALE_BITS = tl.constexpr(0x7E800000)


@triton.jit
def scale_of(amax, LARGEST: tl.constexpr):
    """Return the bits of bfloat16 scales, rounded up, as float32 bits int32, from `block_amax`. Exact.

    NaN if an amax is not finite, 0 if a block counts as zeros.
    """
    bits = tl.div_rn(amax.to(tl.float32, bitcast=True), tl.full(amax.shape, LARGEST, tl.float32))
    bits = bits.to(tl.int32, bitcast=True)
    bits = tl.minimum((bits + 0xFFFF) & -0x10000, LARGEST_SCALE_BITS)
    bits = tl.where(bits < SMALLEST_NORMAL_BITS, 0, bits)
    return tl.where(amax < INFINITY_BITS, bits, NAN_BITS)


@triton.jit
def block_amax(x, SIGNED: tl.constexpr):
    """Return the bits of each row's largest magnitude, int32 [R], ordered NaN > infinity > finite."""
    bits = magnitude_bits(x) if SIGNED else x.to(tl.int32, bitcast=True)
    top = tl.max(bits, axis=1)
    # A row of negative zeros would give a negative maximum.
    return top if SIGNED else tl.maximum(top, 0)


@triton.jit
def inverse_of(scale_bits):
    """Return 1 / scale (0 without a scale), and the smallest code of a nonzero number, [R, 1] each.

    Exact for all scales with eight significant bits.
    """
    usable = (scale_bits >= SMALLEST_NORMAL_BITS) & (scale_bits <= LARGEST_SCALE_BITS)
    scale = tl.where(usable, scale_bits, 0x3F800000).to(tl.float32, bitcast=True)
    inverse = tl.where(usable, _quotient(1.0, -scale), 0.0)
    return tl.expand_dims(inverse, 1), tl.expand_dims(tl.where(usable, 1, 0), 1)


@triton.jit
def encode_mitchell(x, inverse, least, noise, HALVINGS: tl.constexpr, SIGNED: tl.constexpr, NOISY: tl.constexpr):
    """Encode x as int8 codes (SIGNED), or uint8 for nonnegative x, where nonzero numbers get at least code 1. Exact.

    noise: int32 below 2**15, [R, B], if NOISY, else codes are rounded to nearest; least: from `inverse_of`.
    """
    y = tl.where(inverse > 0, tl.abs(x) * inverse, 0.0)
    c = ((y.to(tl.int32, bitcast=True) >> HALVINGS) + (32 * (HALVINGS + 1) << 23)).to(tl.float32, bitcast=True)
    if HALVINGS == 1:
        # Linear from code 0 to 1, and from 1 to 2.
        twice = y * 2.0
        c = tl.minimum(c, tl.minimum(twice, (twice + 2.0) * _THIRD))
    if NOISY:
        # Noise plus a half as a float from 1 to 2, minus 1.5.
        c = c + (((noise << 8) | 0x3F800080).to(tl.float32, bitcast=True) - 1.5)
    if SIGNED:
        code = _whole(with_sign(c, x.to(tl.int32, bitcast=True))).to(tl.int8)
    else:
        code = _at_least(_whole(c) & 0xFF, x, least).to(tl.uint8)
    return code


@triton.jit
def decode_mitchell(codes, HALVINGS: tl.constexpr):
    """Decode int8 or uint8 codes to multiples of their scale. Exact."""
    LOW: tl.constexpr = 2.0**-64 if HALVINGS == 1 else 2.0**-96
    bits = (codes.to(tl.float32) * LOW).to(tl.int32, bitcast=True)
    value = bits << HALVINGS
    if codes.dtype == tl.int8:
        value = (value & 0x7FFFFFFF) | (bits & -0x80000000)
    return value.to(tl.float32, bitcast=True)


@triton.jit
def bfloat16_at_random(x, noise):
    """Round float32 x to bfloat16 stochastically with noise, int32 below 2**15 of x's shape; infinities and NaN stay.
    Exact.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = tl.where(x != x, bits | 0x400000, bits + (noise << 1))
    return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _quotient(a, b):
    """Return a / -b for b below 0: an approximation plus its residual; correctly rounded for the numbers of this file
    (tested).

    The divisor is passed negated, because negating an operand of `tl.fma` costs an instruction.
    """
    r = tl.rsqrt(tl.abs(b))
    r = r * r
    q = a * r
    return tl.fma(tl.fma(q, b, a), r, q)


@triton.jit
def with_sign(magnitude, bits):
    """Return a float32 magnitude with the sign bit of `bits`, int32."""
    return (magnitude.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _whole(c):
    """Round a number below 2**22 in magnitude to nearest even; the integer is in the lowest bits of an int32 above
    0x4B400000.
    """
    return (c + _ROUND).to(tl.int32, bitcast=True)


@triton.jit
def _at_least(c, x, least):
    """Return codes of nonnegative x, at least 1 where x is nonzero and its block has a scale."""
    return tl.maximum(c, tl.minimum(x.to(tl.int32, bitcast=True), least))


# ---- weights: read as float32, and written with their residual or master ----
# As `quaver.torch.optim.master_weights`:
#
# PLAIN      a float; bfloat16 may be rounded stochastically
# REMAINDER  bfloat16, and the other 16 bits of float32
# RESIDUAL   E4M3 codes and their scale, or bfloat16, and further mantissa bits
# MASTER     E4M3 codes and their scale, and float32 itself

PLAIN, REMAINDER, RESIDUAL, MASTER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
#: Factors that move E4M3's exponents to float32 bits, and back.
_BELOW_E4M3, _ABOVE_E4M3 = tl.constexpr(2.0**-120), tl.constexpr(2.0**120)


@triton.jit
def read_weight(weight, beside, scale, MASTER_FORMAT: tl.constexpr, CODES: tl.constexpr):
    """Return the float32 weight. weight: codes as uint8, or floats; scale: of codes, float32. Exact."""
    if MASTER_FORMAT == PLAIN:
        value = widened(weight)
    elif MASTER_FORMAT == MASTER:
        value = beside
    else:
        MORE: tl.constexpr = 16 if beside.dtype == tl.int16 else 8
        if CODES:
            code = weight.to(tl.int32)
            number, sign = ((code & 0x7F) << MORE) + beside.to(tl.int32), code << 24
        else:
            sign = weight.to(tl.int16, bitcast=True).to(tl.int32)
            number = ((sign & 0x7FFF) << MORE) + beside.to(tl.int32)
        # A code of 0 written by a pruning mask over a residual must not give a negative number.
        value = with_sign(_longer(tl.maximum(number, 0), MORE, CODES), sign)
        if CODES:
            value = value * scale
    return value


@triton.jit
def write_weight(
    x, e, noise, MASTER_FORMAT: tl.constexpr, CODES: tl.constexpr, WEIGHT: tl.constexpr, BESIDE: tl.constexpr,
    STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Encode a float32 weight; return the weight (codes as uint8), residual or master, and their magnitude if CODES.

    The magnitude is a multiple of the scale. e: factor from x to the range of codes. noise: int32 below 2**15, if
    STOCHASTIC. Exact.
    """
    beside, value = x, x
    if MASTER_FORMAT == PLAIN:
        stored = bfloat16_at_random(x, noise) if STOCHASTIC else x.to(WEIGHT)
    elif MASTER_FORMAT == REMAINDER:
        bits = tl.where(x != x, NAN_BITS, x.to(tl.int32, bitcast=True))
        beside = bits.to(tl.int16)
        stored = ((bits - beside.to(tl.int32)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif MASTER_FORMAT == MASTER:
        stored = encode(x * e, tl.float8e4nv, INTEGERS)
    else:
        MORE: tl.constexpr = 16 if tl.int16 == BESIDE else 8
        BELOW: tl.constexpr = (20 if CODES else 16) - MORE
        HALF: tl.constexpr = 1 << (MORE - 1)
        if CODES:
            x = x * e
            # Clamp to the range of the largest code, including NaN.
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
            stored = (code | ((sign >> 24) & 0x80)).to(tl.uint8)
        else:
            stored = (code | ((sign >> 16) & -0x8000)).to(tl.int16).to(tl.bfloat16, bitcast=True)
        value = _longer(number, MORE, CODES)
    return stored, beside, value


@triton.jit
def _longer(number, MORE: tl.constexpr, CODES: tl.constexpr):
    """Return the float32 magnitude with these bits. Exact."""
    if CODES:
        # E4M3 subnormals are float32 subnormals here, which the product makes normal.
        value = (number << (20 - MORE)).to(tl.float32, bitcast=True) * _ABOVE_E4M3
    else:
        value = (number << (16 - MORE)).to(tl.float32, bitcast=True)
    return value


# ---- addressing: blocks of 64 along the rows of a parameter, several at a time ----
# EVEN: rows are whole blocks, all blocks of a program exist, and addresses are multiples of 16 bytes, so that accesses
# are contiguous. Otherwise each block is found by its row, and elements beyond a row or the parameter read as zero.


@triton.jit
def blocks_at(first, columns, across, blocks, BLOCKS: tl.constexpr, EVEN: tl.constexpr):
    """Return numbers, masks and offsets of the blocks first, first + 1, ...

    The results are block numbers [BLOCKS] and their mask, offsets of elements [BLOCKS, 64] and their mask, and numbers
    of the scales that pairs of blocks share, [BLOCKS]. columns: of the parameter; across: blocks per row; blocks: in
    all.
    """
    i, k = tl.arange(0, BLOCKS), tl.arange(0, 64)
    if EVEN:
        number = first.to(tl.int64) + i
        there = tl.full([BLOCKS], True, tl.int1)
        at = (first.to(tl.int64) * 64) + (tl.expand_dims(i * 64, 1) + tl.expand_dims(k, 0))
        inside = tl.full([BLOCKS, 64], True, tl.int1)
        pair = (first >> 1).to(tl.int64) + (i >> 1)
    else:
        b = first + i
        number, there = b.to(tl.int64), b < blocks
        row, block = (b // across).to(tl.int64), b % across
        column = tl.expand_dims(block * 64, 1) + tl.expand_dims(k, 0)
        at = tl.expand_dims(row * columns, 1) + column
        inside = tl.expand_dims(there, 1) & (column < columns)
        pair = row * ((across + 1) >> 1) + (block >> 1)
    return number, there, at, inside, pair


@triton.jit
def read(address, at, inside, dtype: tl.constexpr, EVEN: tl.constexpr):
    """Load elements of the tensor at an int64 address."""
    if EVEN:
        x = tl.load(tl.multiple_of(address.to(tl.pointer_type(dtype)), 16) + at)
    else:
        x = tl.load(address.to(tl.pointer_type(dtype)) + at, mask=inside, other=0)
    return x


@triton.jit
def write(address, x, at, inside, dtype: tl.constexpr, EVEN: tl.constexpr):
    """Store x at the same offsets."""
    if EVEN:
        tl.store(tl.multiple_of(address.to(tl.pointer_type(dtype)), 16) + at, x)
    else:
        tl.store(address.to(tl.pointer_type(dtype)) + at, x, mask=inside)


@triton.jit
def read_scales(address, number, there, dtype: tl.constexpr, EVEN: tl.constexpr):
    """Load one number per block as float32 [BLOCKS, 1]."""
    if EVEN:
        scale = tl.load(address.to(tl.pointer_type(dtype)) + number)
    else:
        scale = tl.load(address.to(tl.pointer_type(dtype)) + number, mask=there, other=0)
    return tl.expand_dims(scale.to(tl.float32), 1)


@triton.jit
def write_scales(address, scale, number, there, dtype: tl.constexpr, EVEN: tl.constexpr):
    """Store scale [BLOCKS] at the same offsets."""
    if EVEN:
        tl.store(address.to(tl.pointer_type(dtype)) + number, scale)
    else:
        tl.store(address.to(tl.pointer_type(dtype)) + number, scale, mask=there)


@triton.jit
def tile_at(row, block, columns, across, rows, BLOCKS: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr):
    """Return the results of `blocks_at` for BLOCKS / WIDE rows from `row` on, with WIDE blocks each from `block` on."""
    i, k = tl.arange(0, BLOCKS), tl.arange(0, 64)
    r, b = row + i // WIDE, block + i % WIDE
    number = r.to(tl.int64) * across + b
    if EVEN:
        there = tl.full([BLOCKS], True, tl.int1)
        inside = tl.full([BLOCKS, 64], True, tl.int1)
        at = tl.expand_dims(number * 64, 1) + tl.expand_dims(k, 0)
    else:
        there = (r < rows) & (b < across)
        column = tl.expand_dims(b * 64, 1) + tl.expand_dims(k, 0)
        inside = tl.expand_dims(there, 1) & (column < columns)
        at = tl.expand_dims(r.to(tl.int64) * columns, 1) + column
    return number, there, at, inside, r.to(tl.int64) * ((across + 1) >> 1) + (b >> 1)


# ---- moments of a program's blocks, by the kind of their code: `quaver.torch.optim.codes` ----
# A kind is a number, 0 if there is no such moment; block scales are bfloat16.

NONE, FLOAT32, BFLOAT16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
#: Kind "mitchell": int8 with one halving, uint8 with two.
INT8, UINT8 = tl.constexpr(3), tl.constexpr(4)
#: Largest magnitudes of the two kinds.
_INT8_LARGEST, _UINT8_LARGEST = tl.constexpr(8063.876953125), tl.constexpr(528474240.0)


@triton.jit
def read_state(address, scales, number, there, at, inside, KIND: tl.constexpr, EVEN: tl.constexpr):
    """Load a moment as float32 [BLOCKS, 64]. Exact."""
    if KIND == FLOAT32:
        value = read(address, at, inside, tl.float32, EVEN)
    elif KIND == BFLOAT16:
        value = read(address, at, inside, tl.bfloat16, EVEN).to(tl.float32)
    else:
        if KIND == INT8:
            value = decode_mitchell(read(address, at, inside, tl.int8, EVEN), 1)
        else:
            value = decode_mitchell(read(address, at, inside, tl.uint8, EVEN), 2)
        value = value * read_scales(scales, number, there, tl.bfloat16, EVEN)
    return value


@triton.jit
def write_state(
    x, address, scales, noise, number, there, at, inside, KIND: tl.constexpr, STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Store a moment, float32 [BLOCKS, 64], nonnegative for UINT8; noise as in `encode_mitchell`. Exact."""
    if KIND == FLOAT32:
        write(address, x, at, inside, tl.float32, EVEN)
    elif KIND == BFLOAT16:
        narrow = bfloat16_at_random(x, noise) if STOCHASTIC else x.to(tl.bfloat16)
        write(address, narrow, at, inside, tl.bfloat16, EVEN)
    else:
        bits = scale_of(block_amax(x, KIND == INT8), _INT8_LARGEST if KIND == INT8 else _UINT8_LARGEST)
        inverse, least = inverse_of(bits)
        if KIND == INT8:
            write(address, encode_mitchell(x, inverse, least, noise, 1, True, STOCHASTIC), at, inside, tl.int8, EVEN)
        else:
            code = encode_mitchell(x, inverse, least, noise, 2, False, STOCHASTIC)
            write(address, code, at, inside, tl.uint8, EVEN)
        scale = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        write_scales(scales, scale, number, there, tl.bfloat16, EVEN)


# ---- table: an int64 row of addresses and numbers per parameter ----

#: Columns of the table: addresses, then numbers.
WEIGHT, WEIGHT_SCALE, BESIDE, FIRST, FIRST_SCALE, SECOND, SECOND_SCALE = (
    *(tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)),
    *(tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)),
)
GRADIENT, GRADIENT_SCALE, FACTOR, AMAX, STEP = (
    *(tl.constexpr(7), tl.constexpr(8), tl.constexpr(9), tl.constexpr(10), tl.constexpr(11)),
)
COLUMNS, ACROSS, BLOCKS_IN_ALL, PROGRAMS, PLACE, NUMBER, SEED_LOW, SEED_HIGH = (
    *(tl.constexpr(12), tl.constexpr(13), tl.constexpr(14), tl.constexpr(15)),
    *(tl.constexpr(16), tl.constexpr(17), tl.constexpr(18), tl.constexpr(19)),
)
FIELDS = tl.constexpr(20)


@triton.jit
def addresses_of(row):
    """Load the addresses for every round: weight, residual or master, gradient, and codes and scale of each moment."""
    weight, beside, gradient = tl.load(row + WEIGHT), tl.load(row + BESIDE), tl.load(row + GRADIENT)
    first, first_scale = tl.load(row + FIRST), tl.load(row + FIRST_SCALE)
    second, second_scale = tl.load(row + SECOND), tl.load(row + SECOND_SCALE)
    return weight, beside, gradient, first, first_scale, second, second_scale


@triton.jit
def drawing_of(row, count):
    """Return the offset of this shard in the whole parameter, and the noise key and upper counter word, uint32.

    count: number of steps, float32.
    """
    seed_low, seed_high = tl.load(row + SEED_LOW), tl.load(row + SEED_HIGH)
    number = tl.load(row + NUMBER)
    key, upper = noise_stream(number, count.to(tl.int64), seed_low, seed_high)
    return tl.load(row + PLACE), key, upper
