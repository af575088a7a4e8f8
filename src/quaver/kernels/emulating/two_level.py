"""Blocks of sixteen with an E4M3 scale and a power of two for the tensor: a matrix to the bf16 values of its codes.

Two bits of an E2M1 value by four of an E4M3 scale are six, so bf16 holds the product, and a power of two moves it.
"""

import triton
import triton.language as tl

from quaver.kernels.bits.hadamard import turned
from quaver.kernels.bits.numbers import INFINITY_BITS, NAN_BITS, decoded, flushed, held, note_amax
from quaver.kernels.bits.philox import philox, whole_word
from quaver.kernels.emulating.values import LARGEST, inverse, rounded, signed
from quaver.kernels.quantizing.decode import e2m1
from quaver.kernels.quantizing.nvfp4 import (
    block_scale,
    flush,
    largest,
    load_along,
    load_down,
    quantized,
    quarter,
    rotation,
    stochastic,
    tensor_factor,
)


@triton.jit
def amaxes(
    x, top, turned_top, work, count, drawn, rows, columns, stride, programs,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """The amax of x [rows, columns], and that of x after the rotation of groups of sixteen rows; each may be None.

    top, turned_top: float32 [1]. work: int32 [4] of zeros, left as zeros. count int64 [2], or None: how often an
    operand and its transpose were rounded at random; it goes to drawn and moves on, each of them if FIRST and SECOND.
    Exact.
    """
    down, right = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    g = down * (BM // 16) + tl.arange(0, BM // 16)
    c = right * BN + tl.arange(0, BN)
    v = load_down(x, g, c, rows, columns, stride, EVEN, True)
    if top is not None:
        bits = flushed(tl.max(largest(v), None))
        note_amax(work, bits, programs, top, None, None, False, False)
    if turned_top is not None:
        bits = flushed(quarter(tl.max(largest(turned(v)), None)))
        note_amax(work + 2, bits, programs, turned_top, None, None, False, False)
    if count is not None:
        move_on(count, drawn, FIRST, SECOND)


@triton.jit
def move_on(count, drawn, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Two counts, int64, to drawn by the first program, which adds one to each that is wanted."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        first, second = tl.load(count), tl.load(count + 1)
        tl.store(drawn, first)
        tl.store(drawn + 1, second)
        if FIRST:
            tl.store(count, first + 1)
        if SECOND:
            tl.store(count + 1, second + 1)


@triton.jit
def level(top):
    """The tensor's factor from its amax, float32 [1], and its reciprocal, NaN where the amax is not finite."""
    bits = flushed(tl.load(top).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    big = tensor_factor(bits, True)
    small = tl.where(bits < INFINITY_BITS, inverse(big).to(tl.int32, bitcast=True), NAN_BITS)
    return big, small.to(tl.float32, bitcast=True)


@triton.jit
def values_of(
    v, bits, big, small, place, tensor_id, count, seed_low, seed_high,
    STOCHASTIC: tl.constexpr, FOUR: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Sixteen tensors, elements of blocks with amaxes of these bits, to the bf16 values of their codes; FOUR: the
    tensors are four times what is meant."""
    scale, e = block_scale(bits, big, True, INTEGERS)
    s = decoded(scale, tl.float8e4nv, INTEGERS) * small
    TIMES: tl.constexpr = 4.0 if FOUR else 1.0
    # What is beyond 6 is held here, and what is beyond bf16. NaN is the scale's.
    most = tl.minimum(e * LARGEST, 6.0 * TIMES)
    place = (place >> 2) + (bits >> 31)
    out = ()
    for i in tl.static_range(4):
        if STOCHASTIC:
            words = philox(place + i, tensor_id, tl.load(count), seed_low, seed_high)
            for j in tl.static_range(4):
                x = v[4 * i + j]
                # An exponent and a mantissa bit in their places, of a number that is 2**126 times too small.
                code = (stochastic(flush(x) * e, words[j]) >> 6) & 0x01C00000
                z = code.to(tl.float32, bitcast=True) * (2.0**126)
                out += (signed(tl.minimum(z, most) * s, x).to(tl.bfloat16),)  # type: ignore[assignment]
        else:
            for j in tl.static_range(4):
                y = v[4 * i + j] * e
                z = tl.minimum(rounded(y, 1, 2 if FOUR else 0), most) * (s * (1.0 / TIMES))
                out += (signed(z, y).to(tl.bfloat16),)  # type: ignore[assignment]
    return out


@triton.jit
def join8(v, FIRST: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr):
    """Eight tensors [BM, BG], from v[FIRST] on, to one [BM, BG, 8]."""
    even = tl.join(tl.join(v[FIRST], v[FIRST + 4]), tl.join(v[FIRST + 2], v[FIRST + 6]))
    odd = tl.join(tl.join(v[FIRST + 1], v[FIRST + 5]), tl.join(v[FIRST + 3], v[FIRST + 7]))
    return tl.reshape(tl.join(tl.reshape(even, [BM, BG, 4]), tl.reshape(odd, [BM, BG, 4])), [BM, BG, 8])


@triton.jit
def values_in_two_levels(
    x, along, down, codes, scales, top, turned_top, drawn,
    rows, columns, stride, a0, a1, b0, b1, seed0, seed1, seed2, seed3,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr, SQUARE: tl.constexpr,
    HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, TURNED_STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """x [rows, columns] to what its codes stand for, bf16 of the same shape; each result may be None. rows are whole
    blocks.

    along: in blocks of sixteen columns of a row, or sixteen by sixteen if SQUARE, by the amax `top`, float32 [1]. down:
    in blocks of sixteen rows of a column, rotated first if HADAMARD, by `turned_top`. codes: of the same, eight an
    int32, two int32 a block [blocks, 2, columns], and scales: E4M3 codes [blocks, columns], and one place more: the
    tensor's part as an E8M0 code. drawn: counts of both for random words. a0 … seed3: halves of the tensors' ids and
    of the seed, for `whole_word`. Exact, but that what is beyond bf16 becomes
    its largest number.
    """
    pm, pn = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    low, high = whole_word(seed0, seed1), whole_word(seed2, seed3)
    if along is not None:
        BG: tl.constexpr = BN // 16
        r = pm * BM + tl.arange(0, BM)
        g = pn * BG + tl.arange(0, BG)
        big, small = level(top)
        v = load_along(x, r, g, rows, columns, stride, BM, BG, EVEN)
        bits = largest(v)
        if SQUARE:
            shared = tl.max(tl.reshape(bits, [BM // 16, 16, BG]), 1)[:, None, :]
            bits = tl.reshape(tl.broadcast_to(shared, [BM // 16, 16, BG]), [BM, BG])
        place = r[:, None].to(tl.int64) * columns + 16 * g[None, :]
        out = values_of(v, bits, big, small, place, whole_word(a0, a1), drawn, low, high, STOCHASTIC, False, INTEGERS)
        line = along + r[:, None, None].to(tl.int64) * columns
        for part in tl.static_range(2):
            c = (16 * g + 8 * part)[None, :, None] + tl.arange(0, 8)[None, None, :]
            eight = join8(out, 8 * part, BM, BG)
            if EVEN:
                tl.store(line + c, eight)
            else:
                tl.store(line + c, eight, mask=(r[:, None, None] < rows) & (c < columns))
    if down is not None or codes is not None:
        BD: tl.constexpr = BM // 16
        g = pm * BD + tl.arange(0, BD)
        c = pn * BN + tl.arange(0, BN)
        big, small = level(turned_top)
        v = load_down(x, g, c, rows, columns, stride, EVEN, True)
        FOUR: tl.constexpr = HADAMARD and not TURNED_STOCHASTIC
        if HADAMARD:
            v, bits = rotation(v, FOUR)
        else:
            bits = largest(v)
        place = c[None, :].to(tl.int64) * rows + 16 * g[:, None]
        tensor_id, count = whole_word(b0, b1), drawn
        if TURNED_STOCHASTIC:
            count = drawn + 1
        inside = (16 * g[:, None] < rows) & (c[None, :] < columns)
        if down is not None:
            out = values_of(v, bits, big, small, place, tensor_id, count, low, high, TURNED_STOCHASTIC, FOUR, INTEGERS)
            for j in tl.static_range(16):
                at = down + (16 * g[:, None] + j).to(tl.int64) * columns + c[None, :]
                if EVEN:
                    tl.store(at, out[j])
                else:
                    tl.store(at, out[j], mask=inside)
        if codes is not None:
            scale, w0, w1 = quantized(
                v, bits, big, place, tensor_id, count, low, high, TURNED_STOCHASTIC, FOUR, True, INTEGERS
            )
            at = codes + g[:, None].to(tl.int64) * (2 * columns) + c[None, :]
            of_blocks = scales + g[:, None].to(tl.int64) * columns + c[None, :]
            if EVEN:
                tl.store(at, w0)
                tl.store(at + columns, w1)
                tl.store(of_blocks, scale)
            else:
                tl.store(at, w0, mask=inside)
                tl.store(at + columns, w1, mask=inside)
                tl.store(of_blocks, scale, mask=inside)
            if (pm == 0) & (pn == 0):
                exponent = tl.minimum(small.to(tl.int32, bitcast=True) >> 23, 255)
                tl.store(scales + (rows // 16).to(tl.int64) * columns, exponent.to(tl.uint8))


@triton.jit
def kept_values_in_two_levels(
    codes, scales, out, rows, columns,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """The codes and scales that `values_in_two_levels` writes to its `down`, bf16 [rows, columns]. Exact."""
    pm, pn = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    g = pm * (BM // 16) + tl.arange(0, BM // 16)
    c = pn * BN + tl.arange(0, BN)
    at = codes + g[:, None].to(tl.int64) * (2 * columns) + c[None, :]
    of_blocks = scales + g[:, None].to(tl.int64) * columns + c[None, :]
    inside = (16 * g[:, None] < rows) & (c[None, :] < columns)
    if EVEN:
        words = tl.load(at), tl.load(at + columns)
        scale = tl.load(of_blocks)
    else:
        words = tl.load(at, mask=inside, other=0), tl.load(at + columns, mask=inside, other=0)
        scale = tl.load(of_blocks, mask=inside, other=0)
    code = tl.load(scales + (rows // 16).to(tl.int64) * columns).to(tl.int32)
    small = tl.where(code == 255, NAN_BITS, code << 23).to(tl.float32, bitcast=True)
    s = decoded(scale, tl.float8e4nv, INTEGERS) * small
    for j in tl.static_range(16):
        v = held(e2m1((words[j // 8] >> (4 * (j % 8))) & 15) * s, tl.bfloat16)
        to = out + (16 * g[:, None] + j).to(tl.int64) * columns + c[None, :]
        if EVEN:
            tl.store(to, v)
        else:
            tl.store(to, v, mask=inside)
