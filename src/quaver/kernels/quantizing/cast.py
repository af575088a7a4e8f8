"""Eight bits with one scale for the tensor, and its transpose from the same read."""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import (
    INFINITY_BITS,
    decode_scale,
    encode4,
    encode_factor,
    flushed,
    largest_bits4,
    magnitude_bits,
    meet,
    packed_codes,
    widened,
)
from quaver.kernels.bits.tiles import store_tile


@triton.jit
def load4(x, r, c, rows, columns, stride, EVEN: tl.constexpr):
    """Four consecutive rows from each row of r [BM / 4], columns c: float32 [BM / 4, BN] each, zero outside x."""
    x0, x1, x2, x3 = load4_as_is(x, r, c, rows, columns, stride, EVEN)
    return widened(x0), widened(x1), widened(x2), widened(x3)


@triton.jit
def load4_as_is(x, r, c, rows, columns, stride, EVEN: tl.constexpr):
    """`load4` in x's own dtype."""
    at = x + r[:, None].to(tl.int64) * stride + c[None, :]
    if EVEN:
        x0 = tl.load(at)
        x1 = tl.load(at + stride)
        x2 = tl.load(at + 2 * stride)
        x3 = tl.load(at + 3 * stride)
    else:
        inside = c[None, :] < columns
        x0 = tl.load(at, mask=inside & (r[:, None] < rows), other=0)
        x1 = tl.load(at + stride, mask=inside & (r[:, None] + 1 < rows), other=0)
        x2 = tl.load(at + 2 * stride, mask=inside & (r[:, None] + 2 < rows), other=0)
        x3 = tl.load(at + 3 * stride, mask=inside & (r[:, None] + 3 < rows), other=0)
    return x0, x1, x2, x3


@triton.jit
def store4(q, r, c, rows, stride, c0, c1, c2, c3, EVEN: tl.constexpr):
    """The codes of those rows as they lie. Rows are `stride` long, a multiple of 16: what lies past x is zero."""
    dtype: tl.constexpr = q.dtype.element_ty
    at = q + r[:, None].to(tl.int64) * stride + c[None, :]
    if EVEN:
        tl.store(at, c0.to(dtype, bitcast=True))
        tl.store(at + stride, c1.to(dtype, bitcast=True))
        tl.store(at + 2 * stride, c2.to(dtype, bitcast=True))
        tl.store(at + 3 * stride, c3.to(dtype, bitcast=True))
    else:
        inside = c[None, :] < stride
        tl.store(at, c0.to(dtype, bitcast=True), mask=inside & (r[:, None] < rows))
        tl.store(at + stride, c1.to(dtype, bitcast=True), mask=inside & (r[:, None] + 1 < rows))
        tl.store(at + 2 * stride, c2.to(dtype, bitcast=True), mask=inside & (r[:, None] + 2 < rows))
        tl.store(at + 3 * stride, c3.to(dtype, bitcast=True), mask=inside & (r[:, None] + 3 < rows))


@triton.jit
def store_turned(qt, r4, c, columns, stride4, packed, EVEN: tl.constexpr):
    """The codes of four rows, packed [BM / 4, BN], into the transpose, whose rows are `stride4` int32 long.

    r4 [BM / 4]: the row of each packed one, by fours: derived from r, a compiler no longer sees that they lie together.
    """
    turned = tl.trans(packed)  # [BN, BM / 4]
    store_tile(qt, turned, c, r4, columns, stride4, stride4, EVEN)


@triton.jit
def keep_newest(newest, bits):
    """Raise a history's newest amax to this one, unless it is not finite."""
    if bits < INFINITY_BITS:
        # A history holds no NaN, so that magnitudes order as their bits.
        before = tl.load(newest).to(tl.int32, bitcast=True)
        tl.store(newest, tl.maximum(before, bits).to(tl.float32, bitcast=True))


@triton.jit
def cast_block(
    pm, pn, x, q, qt, scale, top, factor, given, newest, work, partial,
    rows, columns, stride, q_stride, qt_lines, programs,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MEASURED: tl.constexpr, FACTOR: tl.constexpr, GIVEN: tl.constexpr, NEWEST: tl.constexpr,
    SUMS: tl.constexpr, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """What the program of block (pm, pn) does for `cast`."""
    r = pm * BM + 4 * tl.arange(0, BM // 4)
    c = pn * BN + tl.arange(0, BN)
    x0, x1, x2, x3 = load4(x, r, c, rows, columns, stride, EVEN)
    if SUMS:
        sums = tl.sum((x0 + x1) + (x2 + x3), 0)
        at = partial + pm.to(tl.int64) * columns + c
        if EVEN:
            tl.store(at, sums)
        else:
            tl.store(at, sums, mask=c < columns)
    limit = 0
    if MEASURED:
        limit = flushed(magnitude_bits(tl.load(top)))
    elif GIVEN:
        limit = flushed(magnitude_bits(tl.load(given)))
    if MEASURED or GIVEN:
        e = encode_factor(limit, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
        if FACTOR:
            known = tl.load(factor)
            e = tl.where(known == 0.0, e, known)
    else:
        e = tl.load(factor)
    if MEASURED:
        if (pm == 0) & (pn == 0):
            tl.store(scale, decode_scale(limit, e, POWER_OF_TWO))
            if NEWEST:
                keep_newest(newest, limit)
    else:
        m = largest_bits4(x0, x1, x2, x3)
        bits = flushed(tl.max(m, None))
        last, largest = meet(work, bits, programs)
        if last:
            tl.store(top, largest.to(tl.float32, bitcast=True))
            tl.store(scale, decode_scale(tl.maximum(largest, limit), e, POWER_OF_TWO))
            if NEWEST:
                keep_newest(newest, largest)
    y0, y1, y2, y3 = x0 * e, x1 * e, x2 * e, x3 * e
    c0, c1, c2, c3 = encode4(y0, y1, y2, y3, dtype, INTEGERS)
    if ROWS:
        store4(q, r, c, rows, q_stride, c0, c1, c2, c3, EVEN)
    if COLUMNS:
        r4 = pm * (BM // 4) + tl.arange(0, BM // 4)
        packed = packed_codes(y0, y1, y2, y3, c0, c1, c2, c3, dtype, INTEGERS)
        store_turned(qt, r4, c, columns, 4 * qt_lines, packed, EVEN)


@triton.jit
def cast(
    x, q, qt, scale, top, factor, given, newest, work, partial,
    rows, columns, stride, q_stride, qt_lines, programs,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MEASURED: tl.constexpr, FACTOR: tl.constexpr, GIVEN: tl.constexpr, NEWEST: tl.constexpr, TALL: tl.constexpr,
    SUMS: tl.constexpr, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """x [rows, columns] to q of the same shape (ROWS), its transpose qt as int32 (COLUMNS), and scale float32 [1].

    MEASURED: top float32 [1] is the amax. Otherwise the amax `given` goes before it (GIVEN), or factor is set; top is
    written: the amax of x, taken on the way. factor (if FACTOR) goes before what an amax implies unless it is 0.
    newest (if NEWEST): the newest entry of a history, which notes the amax where that is finite.
    partial (if SUMS): float32 [blocks of BM rows, columns], the sums of x, unscaled, over the rows of each block.
    q_stride, qt_lines: bytes of a row of q, 16 of them in a row of qt; the ends of rows beyond x are zeros.
    work: int32 [2] of zeros, left as zeros; programs: how many share it. TALL: rows are the grid's first axis.
    Exact; sums Bounded: of float32 in a fixed order.
    """
    cast_block(
        tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0),
        x, q, qt, scale, top, factor, given, newest, work, partial, rows, columns, stride, q_stride, qt_lines, programs,
        BM, BN, EVEN, ROWS, COLUMNS, MEASURED, FACTOR, GIVEN, NEWEST,
        SUMS, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
    )  # fmt: skip


@triton.jit
def cast_two(
    x, q, qt, scale, top, factor, given, newest, work, partial,
    x_2, q_2, qt_2, scale_2, top_2, factor_2, given_2, newest_2, work_2, partial_2,
    rows, columns, stride, q_stride, qt_lines, programs,
    rows_2, columns_2, stride_2, q_stride_2, qt_lines_2, programs_2, first,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, EVEN_2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MEASURED: tl.constexpr, FACTOR: tl.constexpr, GIVEN: tl.constexpr,
    NEWEST: tl.constexpr, SUMS: tl.constexpr, SUMS_2: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, EMAX_2: tl.constexpr,
    TOP_MANTISSA_2: tl.constexpr, MAX_2: tl.constexpr, INTEGERS: tl.constexpr,
    dtype: tl.constexpr, dtype_2: tl.constexpr,
):  # fmt: skip
    """`cast` of two matrices: the `first` programs take x, the others x_2. Exact; sums as `cast`'s."""
    p = tl.program_id(0)
    if p < first:
        across = tl.cdiv(columns, BN)
        cast_block(
            p // across, p % across, x, q, qt, scale, top, factor, given, newest, work, partial,
            rows, columns, stride, q_stride, qt_lines, programs,
            BM, BN, EVEN, ROWS, COLUMNS, MEASURED, FACTOR, GIVEN, NEWEST,
            SUMS, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
        )  # fmt: skip
    else:
        other = p - first
        across_2 = tl.cdiv(columns_2, BN)
        cast_block(
            other // across_2, other % across_2,
            x_2, q_2, qt_2, scale_2, top_2, factor_2, given_2, newest_2, work_2, partial_2,
            rows_2, columns_2, stride_2, q_stride_2, qt_lines_2, programs_2,
            BM, BN, EVEN_2, ROWS, COLUMNS, MEASURED, FACTOR, GIVEN, NEWEST,
            SUMS_2, POWER_OF_TWO, EMAX_2, TOP_MANTISSA_2, MAX_2, INTEGERS, dtype_2,
        )  # fmt: skip
