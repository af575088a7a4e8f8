"""NVFP4: four-bit codes with an E4M3 scale per 16 elements along k or per 16 × 16, and one factor per tensor.

The sixteen elements of a block are sixteen tensors here, so that its amax, its rotation and its two int32 of codes stay
within a thread, whatever the storage order of x.
"""

import triton
import triton.language as tl

from quaver.kernels.numerics import (
    INFINITY_BITS,
    NAN_BITS,
    SMALLEST_NORMAL_BITS,
    decoded,
    encode,
    encode_factor,
    flushed,
    philox,
    power_of_two,
    rotate,
    store_amax,
    stream_at,
    swizzled,
    transposed,
)

#: Magnitude to which the tensor factor scales the largest element: 2688 = 1.3125 × 2**11.
LARGEST_DECODED = tl.constexpr(2688.0)
SIXTH = tl.constexpr(1 / 6)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def tensor_factor(bits, POWER_OF_TWO: tl.constexpr):
    """Return the tensor factor (first level of the scales) from the bits of the tensor's amax; 1 if it is 0 or not
    finite.
    """
    if POWER_OF_TWO:
        p = (11 + 127) - ((bits + (0x7FFFFF - 0x280000)) >> 23)
        p = tl.minimum(tl.maximum(p, -117), 100)
        e = power_of_two(tl.where((bits >= SMALLEST_NORMAL_BITS) & (bits < INFINITY_BITS), p, 0))
    else:
        e = encode_factor(bits, False, 0, 0, LARGEST_DECODED)
    return e


@triton.jit
def reciprocal(scale):
    """Return 1 / scale of positive E4M3 values, correctly rounded; NaN for 0.

    A Newton step squares the error of a rough reciprocal, and none of the eight mantissas has a reciprocal within
    2**-30 of a tie.
    """
    root = tl.rsqrt(scale)
    rough = root * root
    return tl.fma(rough, tl.fma(scale * -1.0, rough, 1.0), rough)


@triton.jit
def block_scale(bits, big, POWER_OF_TWO: tl.constexpr, INTEGERS: tl.constexpr):
    """Return the scale's E4M3 code, uint8, and the encode factor of a block, from its amax bits and the tensor factor.

    Unless POWER_OF_TWO, operations are in Transformer Engine's order, 1 / (scale × (1 / factor)).
    """
    # A power-of-two factor is at most 2**100, so subnormals stay far below half the smallest code.
    amax = bits if POWER_OF_TWO else flushed(bits)
    code = encode(amax.to(tl.float32, bitcast=True) * (big * SIXTH), tl.float8e4nv, INTEGERS)
    scale = decoded(code, tl.float8e4nv, INTEGERS)
    if POWER_OF_TWO:
        # At most 2**109.
        e = tl.where(code == 0, 0.0, big * reciprocal(scale))
    else:
        inverse = tl.div_rn(big * 0.0 + 1.0, big)
        e = tl.div_rn(scale * 0.0 + 1.0, tl.where(code == 0, 1.0, scale) * inverse).to(tl.int32, bitcast=True)
        e = tl.where(code == 0, 0, tl.minimum(e, INFINITY_BITS - 1)).to(tl.float32, bitcast=True)
    return tl.where(bits < INFINITY_BITS, code, 0x7F).to(tl.uint8), e


@triton.jit
def nearest(y, TIMES: tl.constexpr):
    """Return the E2M1 code of |y| / TIMES plus NEAREST_BIAS, int32: nearest even, saturating; 7 for NaN."""
    # A code is the minimum of three lines, 2 a, a + 2 and a / 2 + 4, and of 7. Each is added to a number whose ulp is
    # 1, which rounds it once, to a code. Rounding preserves the order, and so do the bits of positive numbers.
    a = tl.abs(y)
    below_2 = tl.fma(a, 2.0 / TIMES, 12582912.0).to(tl.int32, bitcast=True)
    below_4 = tl.fma(a, 1.0 / TIMES, 12582914.0).to(tl.int32, bitcast=True)
    above = tl.fma(a, 0.5 / TIMES, 12582916.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(tl.minimum(below_2, below_4), above), NEAREST_BIAS + 7)


@triton.jit
def stochastic(y, word, LOWER: tl.constexpr):
    """Return the E2M1 code of |y| in bits 28 to 30 of a uint32, rounded up if u is below the fraction.

    u is (h + 1/2) × 2**-16 of the word's upper half h, or the lower one if LOWER.
    """
    # In units of 2**-17 of a code's step, rounded up to an integer: the minimum of the same three lines, shifted by
    # eleven bits. Adding 2**28 - 1 - u × 2**28 carries over if the fraction is larger than u.
    a = tl.minimum(tl.abs(y), 6.0)
    steps = tl.ceil(a * 262144.0).to(tl.int32).to(tl.uint32, bitcast=True)
    least = tl.minimum(tl.minimum(steps << 11, (steps << 10) + 0x20000000), (steps << 9) + 0x40000000)
    other = word ^ 0xFFFFFFFF
    if LOWER:
        high = other << 12
    else:
        high = other >> 4
    return least + ((high & 0x0FFFF000) | 0x7FF)


#: Bias of codes until they are packed, subtracted from eight of them at once.
NEAREST_BIAS = tl.constexpr(0x4B400000)


@triton.jit
def flush(v):
    """Flush subnormals to zero."""
    return tl.where(tl.abs(v) < SMALLEST_NORMAL, 0.0, v)


@triton.jit
def largest(v):
    """Return the bits of the largest magnitude of sixteen tensors."""
    # The signed maximum finds the largest bits of nonnegative numbers, the unsigned maximum those of negative ones.
    top = v[0].to(tl.int32, bitcast=True)
    far = v[0].to(tl.uint32, bitcast=True)
    for j in tl.static_range(1, 16):
        top = tl.maximum(top, v[j].to(tl.int32, bitcast=True))
        far = tl.maximum(far, v[j].to(tl.uint32, bitcast=True))
    return tl.maximum(top, far.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def quarter(bits):
    """Convert amax bits of `transposed` results to those of `rotate` results (divide by four)."""
    return (bits.to(tl.float32, bitcast=True) * 0.25).to(tl.int32, bitcast=True)


@triton.jit
def rotation(v, FOUR: tl.constexpr):
    """Rotate sixteen tensors and return the bits of their amax; FOUR: the returned tensors are four times too large."""
    if FOUR:
        v = transposed(v)
        bits = quarter(largest(v))
    else:
        v = rotate(v)
        bits = largest(v)
    return v, bits


@triton.jit
def pack(word, y, code):
    """Shift the codes and signs of a word up by one element, and add y with its biased code."""
    codes, signs = word
    sign = y.to(tl.uint32, bitcast=True) >> 28
    return (codes << 4) + code, (signs << 4) | sign


@triton.jit
def finish(word, bits):
    """Return eight packed codes, int32; all are +6 if the block contains a NaN (by its amax bits)."""
    codes, signs = word
    off: tl.constexpr = (NEAREST_BIAS * 0x11111111) % 2**32
    both = (codes.to(tl.uint32, bitcast=True) - off) | (signs & 0x88888888)
    return tl.where(bits > INFINITY_BITS, 0x77777777, both.to(tl.int32, bitcast=True))


@triton.jit
def quantized(
    v, bits, big, place, upper, key,
    STOCHASTIC: tl.constexpr, FOUR: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Return scale codes and two int32 of codes for blocks given as sixteen tensors with these amax bits.

    FOUR: the tensors are four times too large. Not with STOCHASTIC, where subnormals count as zeros.
    """
    scale, e = block_scale(bits, big, POWER_OF_TWO, INTEGERS)
    place = (place >> 2) + (bits >> 31)
    words_of_codes = ()
    for half in tl.static_range(2):
        if STOCHASTIC:
            codes = tl.zeros_like(bits).to(tl.uint32)
            for i in tl.static_range(2):
                words = philox(place + (2 * half + 1 - i), upper, key)
                for j in tl.static_range(4):
                    x = v[8 * half + 7 - 4 * i - j]
                    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
                    codes = (codes << 4) | ((stochastic(flush(x) * e, words[(3 - j) // 2], (3 - j) % 2) | sign) >> 28)
            both = codes.to(tl.int32, bitcast=True)
            words_of_codes += (tl.where(bits > INFINITY_BITS, 0x77777777, both),)  # type: ignore[assignment]
        else:
            word = (tl.zeros_like(bits), tl.zeros_like(bits).to(tl.uint32))
            for j in tl.static_range(8):
                y = v[8 * half + 7 - j] * e
                word = pack(word, y, nearest(y, 4 if FOUR else 1))
            words_of_codes += (finish(word, bits),)  # type: ignore[assignment]
    return scale, words_of_codes[0], words_of_codes[1]  # type: ignore[misc]


@triton.jit
def widen(v):
    """Convert to float32; bf16 by its bits, because the compiler uses two instructions for half of them otherwise."""
    if v.dtype == tl.bfloat16:
        y = (v.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        y = v.to(tl.float32)
    return y


@triton.jit
def split8(v, BM: tl.constexpr, BG: tl.constexpr):
    """Split [BM, BG, 8] into eight [BM, BG]."""
    even, odd = tl.split(tl.reshape(v, [BM, BG, 4, 2]))
    v04, v26 = tl.split(tl.reshape(even, [BM, BG, 2, 2]))
    v15, v37 = tl.split(tl.reshape(odd, [BM, BG, 2, 2]))
    v0, v4 = tl.split(v04)
    v1, v5 = tl.split(v15)
    v2, v6 = tl.split(v26)
    v3, v7 = tl.split(v37)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def load_along(x, r, g, rows, columns, stride, BM: tl.constexpr, BG: tl.constexpr, EVEN: tl.constexpr):
    """Load groups g of sixteen columns in rows r, as sixteen float32 [BM, BG]."""
    line = x + r[:, None, None].to(tl.int64) * stride
    v = ()
    for half in tl.static_range(2):
        c = (16 * g + 8 * half)[None, :, None] + tl.arange(0, 8)[None, None, :]
        if EVEN:
            eight = tl.load(line + c)
        else:
            eight = tl.load(line + c, mask=(r[:, None, None] < rows) & (c < columns), other=0.0)
        v += split8(widen(eight), BM, BG)
    return v


@triton.jit
def load_down(x, g, c, rows, columns, stride, EVEN: tl.constexpr, WHOLE: tl.constexpr = False):
    """Load groups g of sixteen rows in columns c, as sixteen float32 [BG, BN]. WHOLE: no group ends early."""
    v = ()
    first = x + (16 * g)[:, None].to(tl.int64) * stride + c[None, :]
    for j in tl.static_range(16):
        at = first + j * stride.to(tl.int64)
        if EVEN:
            row = tl.load(at)
        else:
            last = 16 * g if WHOLE else 16 * g + j
            row = tl.load(at, mask=(last[:, None] < rows) & (c[None, :] < columns), other=0.0)
        v += (widen(row),)  # type: ignore[assignment]
    return v


@triton.jit
def rotated_amax(
    x, out, work, rows, columns, stride, programs,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """Compute the amax of x [rows, columns] after rotating groups of sixteen columns, or rows if DOWN: float32 [1].
    Exact.

    work: int32 [2] of zeros, left as zeros.
    """
    down, right = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    if DOWN:
        g = down * (BM // 16) + tl.arange(0, BM // 16)
        c = right * BN + tl.arange(0, BN)
        v = load_down(x, g, c, rows, columns, stride, EVEN)
    else:
        r = down * BM + tl.arange(0, BM)
        g = right * (BN // 16) + tl.arange(0, BN // 16)
        v = load_along(x, r, g, rows, columns, stride, BM, BN // 16, EVEN)
    bits = flushed(quarter(tl.max(largest(transposed(v)), None)))
    store_amax(work, bits, programs, out, None, None, False, False)


@triton.jit
def tensor_level(top, factor, writes, INVERSE: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Return the tensor factor from its amax, float32 [1]; the program that `writes` stores it, or its reciprocal if
    INVERSE.

    The stored value is NaN if the amax is not finite.
    """
    bits = flushed(tl.load(top).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    big = tensor_factor(bits, POWER_OF_TWO)
    if writes:
        nan = tl.where(bits < INFINITY_BITS, big.to(tl.int32, bitcast=True), NAN_BITS).to(tl.float32, bitcast=True)
        tl.store(factor, tl.div_rn(1.0, nan) if INVERSE else nan)
    return big


@triton.jit
def inside(g, words, k):
    """Mask the codes in the two int32 of groups g that are at or after column k."""
    first = tl.minimum(tl.maximum(k - 16 * g, 0), 16)
    low, high = tl.minimum(first, 8), tl.maximum(first - 8, 0)
    return words[0] & whole(low), words[1] & whole(high)


@triton.jit
def whole(n):
    """Return a mask of the lowest n codes of an int32, n at most 8."""
    return tl.where(n == 8, -1, (1 << (4 * n)) - 1)


@triton.jit
def block_along(
    x, q, s, factor, top, down, right, rows, columns, stride, k, q_stride4, across, key, upper,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, INVERSE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, SQUARE: tl.constexpr,
    HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Run the program of block (down, right) of `nvfp4_along`; INVERSE: store the reciprocal of the factor.

    key, upper: from `stream_at`.
    """
    BG: tl.constexpr = BN // 16
    r = down * BM + tl.arange(0, BM)
    g = right * BG + tl.arange(0, BG)
    big = tensor_level(top, factor, (down == 0) & (right == 0), INVERSE, POWER_OF_TWO)
    v = load_along(x, r, g, rows, columns, stride, BM, BG, EVEN)
    FOUR: tl.constexpr = HADAMARD and not STOCHASTIC
    if HADAMARD:
        v, bits = rotation(v, FOUR)
    else:
        bits = largest(v)
    if SQUARE:
        shared = tl.max(tl.reshape(bits, [BM // 16, 16, BG]), 1)[:, None, :]
        bits = tl.reshape(tl.broadcast_to(shared, [BM // 16, 16, BG]), [BM, BG])
    place = r[:, None].to(tl.int64) * k + 16 * g[None, :]
    scale, w0, w1 = quantized(v, bits, big, place, upper, key, STOCHASTIC, FOUR, POWER_OF_TWO, INTEGERS)
    c4 = right * (2 * BG) + tl.arange(0, 2 * BG)
    at = q + r[:, None].to(tl.int64) * q_stride4 + c4[None, :]
    if EVEN:
        tl.store(s + swizzled(r, g, across), scale)
        tl.store(at, tl.reshape(tl.join(w0, w1), [BM, 2 * BG]))
    else:
        if SQUARE:
            scale = tl.where(r[:, None] < rows, scale, 0).to(tl.uint8)
        tl.store(s + swizzled(r, g, across), scale, mask=(g < 4 * across)[None, :] & (r >= 0)[:, None])
        w0, w1 = inside(g[None, :], (w0, w1), k)
        both = tl.reshape(tl.join(w0, w1), [BM, 2 * BG])
        tl.store(at, both, mask=(r[:, None] < rows) & (c4[None, :] < q_stride4))


@triton.jit
def block_down(
    x, qt, st, factor, top, down, right, rows, columns, stride, k, qt_stride4, across, key, upper, words,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, INVERSE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, SQUARE: tl.constexpr,
    HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Run the program of block (down, right) of `nvfp4_down`; INVERSE: store the reciprocal of the factor.

    key, upper: from `stream_at`. words: int32 to write of each row of qt, of `qt_stride4`.
    """
    BG: tl.constexpr = BM // 16
    g = down * BG + tl.arange(0, BG)
    c = right * BN + tl.arange(0, BN)
    big = tensor_level(top, factor, (down == 0) & (right == 0), INVERSE, POWER_OF_TWO)
    v = load_down(x, g, c, rows, columns, stride, EVEN)
    FOUR: tl.constexpr = HADAMARD and not STOCHASTIC
    if HADAMARD:
        v, bits = rotation(v, FOUR)
    else:
        bits = largest(v)
    if SQUARE:
        shared = tl.max(tl.reshape(bits, [BG, BN // 16, 16]), 2)[:, :, None]
        bits = tl.reshape(tl.broadcast_to(shared, [BG, BN // 16, 16]), [BG, BN])
    place = c[None, :].to(tl.int64) * k + 16 * g[:, None]
    scale, w0, w1 = quantized(v, bits, big, place, upper, key, STOCHASTIC, FOUR, POWER_OF_TWO, INTEGERS)
    r4 = down * (2 * BG) + tl.arange(0, 2 * BG)
    at = qt + c[:, None].to(tl.int64) * qt_stride4 + r4[None, :]
    if EVEN:
        tl.store(st + swizzled(c, g, across), tl.trans(scale))
        tl.store(at, tl.reshape(tl.join(tl.trans(w0), tl.trans(w1)), [BN, 2 * BG]))
    else:
        if SQUARE:
            scale = tl.where(c[None, :] < columns, scale, 0).to(tl.uint8)
        tl.store(st + swizzled(c, g, across), tl.trans(scale), mask=(g < 4 * across)[None, :] & (c >= 0)[:, None])
        w0, w1 = inside(g[:, None], (w0, w1), k)
        both = tl.reshape(tl.join(tl.trans(w0), tl.trans(w1)), [BN, 2 * BG])
        tl.store(at, both, mask=(c[:, None] < columns) & (r4[None, :] < words))


@triton.jit
def nvfp4_along(
    x, q, s, factor, top, count,
    rows, columns, stride, k, q_stride4, across, id0, id1, seed0, seed1, seed2, seed3,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, SQUARE: tl.constexpr,
    HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Quantize x [rows, columns] in blocks of 1 × 16 (SQUARE: 16 × 16) to q, eight codes per int32, and swizzled E4M3
    scales s.

    top float32 [1]: amax of the tensor. factor float32 [1]: receives the tensor factor. count int64 [1]: noise count if
    STOCHASTIC. k: codes of a row, `columns` or that rounded up to 16 (HADAMARD), a multiple of 4 if STOCHASTIC.
    q_stride4: int32 per row of q; padding is zero. across: tiles of s side by side. id0 … seed3: halves of the tensor
    id and of the seed, low ones first, for `whole_word`. Exact.
    """
    down, right = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    key, upper = stream_at(count, id0, id1, seed0, seed1, seed2, seed3, STOCHASTIC)
    block_along(
        x, q, s, factor, top, down, right, rows, columns, stride, k, q_stride4, across, key, upper,
        BM, BN, EVEN, False, POWER_OF_TWO, SQUARE, HADAMARD, STOCHASTIC, INTEGERS,
    )  # fmt: skip


@triton.jit
def nvfp4_down(
    x, qt, st, factor, top, count,
    rows, columns, stride, k, qt_stride4, across, id0, id1, seed0, seed1, seed2, seed3,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, SQUARE: tl.constexpr,
    HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Quantize the transpose of x [rows, columns] like `nvfp4_along`: blocks of 16 rows of x, k codes for `rows`.
    Exact.
    """
    down, right = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    key, upper = stream_at(count, id0, id1, seed0, seed1, seed2, seed3, STOCHASTIC)
    block_down(
        x, qt, st, factor, top, down, right, rows, columns, stride, k, qt_stride4, across, key, upper, qt_stride4,
        BM, BN, EVEN, False, POWER_OF_TWO, SQUARE, HADAMARD, STOCHASTIC, INTEGERS,
    )  # fmt: skip


@triton.jit
def nvfp4_both(
    x, q, s, inverse, top, qt, st, transposed_inverse, transposed_top, drawn,
    rows, columns, first, a0, a1, b0, b1, seed0, seed1, seed2, seed3,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    BM_2: tl.constexpr, BN_2: tl.constexpr, EVEN_2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, STOCHASTIC: tl.constexpr,
    HADAMARD: tl.constexpr, TRANSPOSED_STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Quantize contiguous x [rows, columns] as `nvfp4_along` in the `first` programs, and its transpose as
    `nvfp4_down`.

    The transpose uses HADAMARD and TRANSPOSED_STOCHASTIC. Blocks are 1 × 16; sides are multiples of 16. inverse,
    transposed_inverse float32 [1]: receive the reciprocals of the tensor factors, NaN if the amax is not finite. drawn
    int64 [2]: noise counts of both. a0 … seed3: halves of both ids and of the seed. BM, BN; BM_2, BN_2: block sizes of
    both. Exact.
    """
    p = tl.program_id(0)
    # Written so that the compiler knows that rows of codes are multiples of 16 bytes.
    if p < first:
        across = tl.cdiv(columns, BN)
        key, upper = stream_at(drawn, a0, a1, seed0, seed1, seed2, seed3, STOCHASTIC)
        block_along(
            x, q, s, inverse, top, p // across, p % across, rows, columns, columns, columns,
            tl.cdiv(columns, 32) * 4, tl.cdiv(columns, 64), key, upper,
            BM, BN, EVEN, True, POWER_OF_TWO, False, False, STOCHASTIC, INTEGERS,
        )  # fmt: skip
    else:
        count = drawn
        if TRANSPOSED_STOCHASTIC:
            count = drawn + 1
        across_2 = tl.cdiv(columns, BN_2)
        key, upper = stream_at(count, b0, b1, seed0, seed1, seed2, seed3, TRANSPOSED_STOCHASTIC)
        words = tl.cdiv(rows, 32) * 4
        block_down(
            x, qt, st, transposed_inverse, transposed_top, (p - first) // across_2, (p - first) % across_2,
            rows, columns, columns, rows, words, tl.cdiv(rows, 64), key, upper, words,
            BM_2, BN_2, EVEN_2, True, POWER_OF_TWO, False, HADAMARD, TRANSPOSED_STOCHASTIC, INTEGERS,
        )  # fmt: skip
