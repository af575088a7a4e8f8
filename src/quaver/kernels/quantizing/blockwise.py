"""Eight bits with a scale for each run of 128 in a row, or each square of 128 by 128, and its transpose from one read.

A run of the transpose is a column of a square, so a program that holds a square has all that both directions need.
Source: DeepSeek-V3 technical report (arXiv:2412.19437), section 3.3.
"""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import (
    decode_scale,
    encode4,
    encode_factor,
    flushed,
    largest_bits4,
    magnitude_bits,
    packed_codes,
)
from quaver.kernels.quantizing.cast import load4, store4, store_turned


@triton.jit
def factor_and_scale(
    bits, given, at, inside, GIVEN: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """Of blocks whose amaxes have these bits, or are given and lie at `at`: the encode factors and decode scales."""
    measured = flushed(bits)
    top = measured
    if GIVEN:
        top = flushed(magnitude_bits(tl.load(given + at, mask=inside, other=0.0)))
    e = encode_factor(top, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
    return e, decode_scale(tl.maximum(top, measured), e, POWER_OF_TWO)


@triton.jit
def blockwise(
    x, q, qt, scale, turned_scale, given,
    rows, columns, stride, q_stride, qt_lines, scale_stride, turned_stride,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GIVEN: tl.constexpr, TALL: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """x [rows, columns] in runs of BN to q (ROWS), its transpose in runs of BM to qt as int32 (COLUMNS).

    scale [blocks, rows], `scale_stride` apart, turned_scale [blocks, columns]: float32, blocks along the first axis.
    given: amaxes, GIVEN for one of the two directions, as its scales lie. TALL: rows are the grid's first axis.
    With both directions x is read again for each, from the first-level cache: registers hold no more than it as read.
    Exact. A block whose amax is not finite has factor 1 and scale NaN.
    """
    pm = tl.program_id(0 if TALL else 1)
    pn = tl.program_id(1 if TALL else 0)
    r = pm * BM + 4 * tl.arange(0, BM // 4)
    c = pn * BN + tl.arange(0, BN)
    x0, x1, x2, x3 = load4(x, r, c, rows, columns, stride, EVEN)
    m0, m1, m2, m3 = magnitude_bits(x0), magnitude_bits(x1), magnitude_bits(x2), magnitude_bits(x3)
    if ROWS:
        at = pn.to(tl.int64) * scale_stride + r
        e0, s0 = factor_and_scale(tl.max(m0, 1), given, at, r < rows, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
        e1, s1 = factor_and_scale(
            tl.max(m1, 1), given, at + 1, r + 1 < rows, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX
        )
        e2, s2 = factor_and_scale(
            tl.max(m2, 1), given, at + 2, r + 2 < rows, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX
        )
        e3, s3 = factor_and_scale(
            tl.max(m3, 1), given, at + 3, r + 3 < rows, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX
        )
        tl.store(scale + at, s0, mask=r < rows)
        tl.store(scale + at + 1, s1, mask=r + 1 < rows)
        tl.store(scale + at + 2, s2, mask=r + 2 < rows)
        tl.store(scale + at + 3, s3, mask=r + 3 < rows)
        if COLUMNS:
            x0, x1, x2, x3 = load4(x, r, c, rows, columns, stride, EVEN)
        y0, y1, y2, y3 = x0 * e0[:, None], x1 * e1[:, None], x2 * e2[:, None], x3 * e3[:, None]
        c0, c1, c2, c3 = encode4(y0, y1, y2, y3, dtype, INTEGERS)
        store4(q, r, c, rows, q_stride, c0, c1, c2, c3, EVEN)
    if COLUMNS:
        m = tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3))
        at = pm.to(tl.int64) * turned_stride + c
        e, s = factor_and_scale(tl.max(m, 0), given, at, c < columns, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
        tl.store(turned_scale + at, s, mask=c < columns)
        if ROWS:
            x0, x1, x2, x3 = load4(x, r, c, rows, columns, stride, EVEN)
        packed = packed_four(x0, x1, x2, x3, e[None, :], dtype, INTEGERS)
        store_turned(qt, pm * (BM // 4) + tl.arange(0, BM // 4), c, columns, 4 * qt_lines, packed, EVEN)


@triton.jit
def packed_four(x0, x1, x2, x3, e, dtype: tl.constexpr, INTEGERS: tl.constexpr):
    """The codes of four rows times e, packed to an int32."""
    y0, y1, y2, y3 = x0 * e, x1 * e, x2 * e, x3 * e
    c0, c1, c2, c3 = encode4(y0, y1, y2, y3, dtype, INTEGERS)
    return packed_codes(y0, y1, y2, y3, c0, c1, c2, c3, dtype, INTEGERS)


@triton.jit
def squares(
    x, q, qt, scale, turned_scale, given,
    rows, columns, stride, q_stride, qt_lines, scale_stride, turned_stride,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GIVEN: tl.constexpr, TALL: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """x [rows, columns] in squares of BM = BN, and its transpose, as `blockwise` does.

    scale [blocks of rows, blocks of columns], rows `scale_stride` apart; turned_scale its transpose. given lies as
    scale, or as turned_scale where that alone is written.
    """
    pm = tl.program_id(0 if TALL else 1)
    pn = tl.program_id(1 if TALL else 0)
    r = pm * BM + 4 * tl.arange(0, BM // 4)
    c = pn * BN + tl.arange(0, BN)
    x0, x1, x2, x3 = load4(x, r, c, rows, columns, stride, EVEN)
    m = largest_bits4(x0, x1, x2, x3)
    straight = pm.to(tl.int64) * scale_stride + pn
    turned = pn.to(tl.int64) * turned_stride + pm
    at = straight if ROWS else turned
    e, s = factor_and_scale(tl.max(m, None), given, at, True, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
    y0, y1, y2, y3 = x0 * e, x1 * e, x2 * e, x3 * e
    c0, c1, c2, c3 = encode4(y0, y1, y2, y3, dtype, INTEGERS)
    if ROWS:
        tl.store(scale + straight, s)
        store4(q, r, c, rows, q_stride, c0, c1, c2, c3, EVEN)
    if COLUMNS:
        tl.store(turned_scale + turned, s)
        packed = packed_codes(y0, y1, y2, y3, c0, c1, c2, c3, dtype, INTEGERS)
        store_turned(qt, pm * (BM // 4) + tl.arange(0, BM // 4), c, columns, 4 * qt_lines, packed, EVEN)
