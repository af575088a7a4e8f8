"""FP8 with one scale per row, per 128 elements of a row or per 128 × 128 square; for a matrix and its transpose.

A row's amax is known after reading the row, a column's only after reading the whole matrix. So the row kernel measures
the columns' amaxes too, and a second kernel writes the transpose.
"""

import triton
import triton.language as tl

from quaver.kernels.numerics import (
    decode_scale,
    encode,
    encode4,
    encode_factor,
    flushed,
    largest_bits4,
    largest_of_runs,
    load_tile,
    magnitude_bits,
    packed_codes,
    store_tile,
)
from quaver.kernels.tensorwise import load4, store4, store_transposed

# ---- one scale per 128 elements of a row, or per 128 × 128 square, and the transpose from the same read ----
# A 1 × 128 block of the transpose is a column of a square, so a program that holds a square has the data for both
# directions. Source: DeepSeek-V3 technical report (arXiv:2412.19437), section 3.3.


@triton.jit
def factor_and_scale(
    bits, known_amax, at, inside, KNOWN_AMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """Return encode factors and decode scales of blocks, from these amax bits or the given amaxes at offsets `at`."""
    measured = flushed(bits)
    top = measured
    if KNOWN_AMAX:
        top = flushed(magnitude_bits(tl.load(known_amax + at, mask=inside, other=0.0)))
    e = encode_factor(top, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
    return e, decode_scale(tl.maximum(top, measured), e, POWER_OF_TWO)


@triton.jit
def blockwise(
    x, q, qt, scale, transposed_scale, known_amax,
    rows, columns, stride, q_stride, qt_lines, scale_stride, transposed_stride,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KNOWN_AMAX: tl.constexpr, TALL: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Quantize x [rows, columns] in 1 × BN blocks to q (ROWS), and its transpose in 1 × BM blocks to qt as int32
    (COLUMNS).

    scale [blocks, rows] with stride `scale_stride`, transposed_scale [blocks, columns]: float32, blocks along the first
    axis. known_amax: amaxes for one of the two directions (KNOWN_AMAX), in the layout of its scales. TALL: rows are
    the grid's first axis. With both directions x is read again for each, from the L1 cache, because registers hold
    only x as loaded. Exact. A block whose amax is not finite has factor 1 and scale NaN.
    """
    blockwise_at(
        tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0),
        x, q, qt, scale, transposed_scale, known_amax,
        rows, columns, stride, q_stride, qt_lines, scale_stride, transposed_stride,
        BM, BN, EVEN, ROWS, COLUMNS, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
    )  # fmt: skip


@triton.jit
def blockwise_at(
    pm, pn, x, q, qt, scale, transposed_scale, known_amax,
    rows, columns, stride, q_stride, qt_lines, scale_stride, transposed_stride,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KNOWN_AMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Run the program of block (pm, pn) of `blockwise`."""
    r = pm * BM + 4 * tl.arange(0, BM // 4)
    c = pn * BN + tl.arange(0, BN)
    x0, x1, x2, x3 = load4(x, r, c, rows, columns, stride, EVEN)
    m0, m1, m2, m3 = magnitude_bits(x0), magnitude_bits(x1), magnitude_bits(x2), magnitude_bits(x3)
    if ROWS:
        at = pn.to(tl.int64) * scale_stride + r
        e0, s0 = factor_and_scale(
            tl.max(m0, 1), known_amax, at, r < rows, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX
        )
        e1, s1 = factor_and_scale(
            tl.max(m1, 1), known_amax, at + 1, r + 1 < rows, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX
        )
        e2, s2 = factor_and_scale(
            tl.max(m2, 1), known_amax, at + 2, r + 2 < rows, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX
        )
        e3, s3 = factor_and_scale(
            tl.max(m3, 1), known_amax, at + 3, r + 3 < rows, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX
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
        at = pm.to(tl.int64) * transposed_stride + c
        e, s = factor_and_scale(
            tl.max(m, 0), known_amax, at, c < columns, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX
        )
        tl.store(transposed_scale + at, s, mask=c < columns)
        if ROWS:
            x0, x1, x2, x3 = load4(x, r, c, rows, columns, stride, EVEN)
        packed = packed_four(x0, x1, x2, x3, e[None, :], dtype, INTEGERS)
        store_transposed(qt, pm * (BM // 4) + tl.arange(0, BM // 4), c, columns, 4 * qt_lines, packed, EVEN)


@triton.jit
def packed_four(x0, x1, x2, x3, e, dtype: tl.constexpr, INTEGERS: tl.constexpr):
    """Return the packed codes of four rows times e, as int32."""
    y0, y1, y2, y3 = x0 * e, x1 * e, x2 * e, x3 * e
    c0, c1, c2, c3 = encode4(y0, y1, y2, y3, dtype, INTEGERS)
    return packed_codes(y0, y1, y2, y3, c0, c1, c2, c3, dtype, INTEGERS)


@triton.jit
def squares(
    x, q, qt, scale, transposed_scale, known_amax,
    rows, columns, stride, q_stride, qt_lines, scale_stride, transposed_stride,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KNOWN_AMAX: tl.constexpr, TALL: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Quantize x [rows, columns] in squares of BM = BN, and its transpose, otherwise as `blockwise`.

    scale [blocks of rows, blocks of columns] with row stride `scale_stride`; transposed_scale is its transpose. given
    has the layout of scale, or of transposed_scale if only that is written.
    """
    squares_at(
        tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0),
        x, q, qt, scale, transposed_scale, known_amax,
        rows, columns, stride, q_stride, qt_lines, scale_stride, transposed_stride,
        BM, BN, EVEN, ROWS, COLUMNS, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
    )  # fmt: skip


@triton.jit
def squares_at(
    pm, pn, x, q, qt, scale, transposed_scale, known_amax,
    rows, columns, stride, q_stride, qt_lines, scale_stride, transposed_stride,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KNOWN_AMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Run the program of block (pm, pn) of `squares`."""
    r = pm * BM + 4 * tl.arange(0, BM // 4)
    c = pn * BN + tl.arange(0, BN)
    x0, x1, x2, x3 = load4(x, r, c, rows, columns, stride, EVEN)
    m = largest_bits4(x0, x1, x2, x3)
    straight = pm.to(tl.int64) * scale_stride + pn
    transposed = pn.to(tl.int64) * transposed_stride + pm
    at = straight if ROWS else transposed
    e, s = factor_and_scale(tl.max(m, None), known_amax, at, True, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
    y0, y1, y2, y3 = x0 * e, x1 * e, x2 * e, x3 * e
    c0, c1, c2, c3 = encode4(y0, y1, y2, y3, dtype, INTEGERS)
    if ROWS:
        tl.store(scale + straight, s)
        store4(q, r, c, rows, q_stride, c0, c1, c2, c3, EVEN)
    if COLUMNS:
        tl.store(transposed_scale + transposed, s)
        packed = packed_codes(y0, y1, y2, y3, c0, c1, c2, c3, dtype, INTEGERS)
        store_transposed(qt, pm * (BM // 4) + tl.arange(0, BM // 4), c, columns, 4 * qt_lines, packed, EVEN)


# ---- one scale per row ----


@triton.jit
def rows_at(
    p, x, q, scale, amax_values, known_amax, rows, columns, stride, q_stride,
    BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, AMAX_VALUES: tl.constexpr,
    KNOWN_AMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Run program p of `rowwise`."""
    c = tl.arange(0, BN)
    largest = tl.zeros([BN], tl.int32)
    for step in range(STEPS):
        r = (p * STEPS + step) * BM + tl.arange(0, BM)
        v = load_tile(x, r, c, rows, columns, stride, EVEN)
        if AMAX_VALUES:
            m = magnitude_bits(v)
            largest = tl.maximum(largest, tl.max(m, 0))
        else:
            # A thread holds 16 adjacent elements; runs of 8 give the shortest code, also with masks.
            m = tl.reshape(largest_of_runs(v, 3), [BM, BN // 8])
        e, s = factor_and_scale(
            tl.max(m, 1), known_amax, r, r < rows, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX
        )
        tl.store(scale + r, s, mask=r < rows)
        codes = encode(v * e[:, None], dtype, INTEGERS).to(q.dtype.element_ty, bitcast=True)
        store_tile(q, codes, r, c, rows, q_stride, q_stride, EVEN)
    if AMAX_VALUES:
        tl.atomic_max(amax_values + c, largest, mask=c < columns, sem="relaxed")


@triton.jit
def rowwise(
    x, q, scale, amax_values, known_amax,
    rows, columns, stride, q_stride,
    BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, AMAX_VALUES: tl.constexpr,
    KNOWN_AMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Quantize x [rows, columns] by rows kept in registers to q and scale float32 [rows]; one read. BN covers q_stride
    columns.

    amax_values (if AMAX_VALUES): int32 [columns], zero before, bits of the columns' amaxes after; a maximum does not
    depend on the order. known_amax (if KNOWN_AMAX): float32 [rows], amaxes that override the measured ones. A program
    processes BM rows, STEPS times. Exact.
    """
    rows_at(
        tl.program_id(0), x, q, scale, amax_values, known_amax, rows, columns, stride, q_stride,
        BM, BN, STEPS, EVEN, AMAX_VALUES, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
    )  # fmt: skip


@triton.jit
def rowwise_two(
    x, q, scale, amax_values, known_amax, x_2, q_2, scale_2, amax_values_2, known_amax_2,
    rows, columns, stride, q_stride, rows_2, columns_2, stride_2, q_stride_2, first,
    BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    BM_2: tl.constexpr, BN_2: tl.constexpr, STEPS_2: tl.constexpr, EVEN_2: tl.constexpr, AMAX_VALUES: tl.constexpr,
    KNOWN_AMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Run `rowwise` on two matrices: the `first` programs process x, the others x_2. Exact."""
    p = tl.program_id(0)
    if p < first:
        rows_at(
            p, x, q, scale, amax_values, known_amax, rows, columns, stride, q_stride,
            BM, BN, STEPS, EVEN, AMAX_VALUES, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
        )  # fmt: skip
    else:
        rows_at(
            p - first, x_2, q_2, scale_2, amax_values_2, known_amax_2, rows_2, columns_2, stride_2, q_stride_2,
            BM_2, BN_2, STEPS_2, EVEN_2, AMAX_VALUES, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX,
            INTEGERS, dtype,
        )  # fmt: skip


@triton.jit
def long_rowwise(
    x, q, scale, known_amax,
    rows, columns, stride, q_stride,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, KNOWN_AMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Run `rowwise` for rows too long for registers; they are read twice, the second time from a cache."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = r < rows
    m = tl.zeros([BM, BN], tl.int32)
    for start in range(0, columns, BN):
        c = start + tl.arange(0, BN)
        m = tl.maximum(m, magnitude_bits(load_tile(x, r, c, rows, columns, stride, EVEN)))
    e, s = factor_and_scale(tl.max(m, 1), known_amax, r, inside, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
    tl.store(scale + r, s, mask=inside)
    for start in range(0, q_stride, BN):
        c = start + tl.arange(0, BN)
        v = load_tile(x, r, c, rows, columns, stride, EVEN)
        codes = encode(v * e[:, None], dtype, INTEGERS).to(q.dtype.element_ty, bitcast=True)
        store_tile(q, codes, r, c, rows, q_stride, q_stride, EVEN)


@triton.jit
def column_amax(
    x, amax_values, rows, columns, stride,
    BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """Compute the amax bits of each column of x [rows, columns] into amax_values int32 [columns], zero before."""
    pm = tl.program_id(0 if TALL else 1)
    c = tl.program_id(1 if TALL else 0) * BN + tl.arange(0, BN)
    largest = tl.zeros([BM, BN], tl.int32)
    for step in range(STEPS):
        r = (pm * STEPS + step) * BM + tl.arange(0, BM)
        largest = tl.maximum(largest, magnitude_bits(load_tile(x, r, c, rows, columns, stride, EVEN)))
    tl.atomic_max(amax_values + c, tl.max(largest, 0), mask=c < columns, sem="relaxed")


@triton.jit
def columns_at(
    pm, pn, x, qt, scale, amax_values, known_amax, rows, columns, stride, qt_lines, down,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, KNOWN_AMAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Run the program of block (pm, pn) of `columnwise`."""
    r = pm * BM + 4 * tl.arange(0, BM // 4)
    c = pn * BN + tl.arange(0, BN)
    x0, x1, x2, x3 = load4(x, r, c, rows, columns, stride, EVEN)
    inside = c < columns
    bits = tl.load(amax_values + c, mask=inside, other=0)
    e, s = factor_and_scale(bits, known_amax, c, inside, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
    if pm == 0:
        tl.store(scale + c, s, mask=inside)
    # The last program to read the amaxes of these columns zeroes them for the next launch.
    tl.debug_barrier()
    readers = amax_values + columns + pn
    if tl.atomic_add(readers, 1, sem="acq_rel") == down - 1:
        tl.store(amax_values + c, tl.zeros([BN], tl.int32), mask=inside)
        tl.store(readers, 0)
    packed = packed_four(x0, x1, x2, x3, e[None, :], dtype, INTEGERS)
    store_transposed(qt, pm * (BM // 4) + tl.arange(0, BM // 4), c, columns, 4 * qt_lines, packed, EVEN)


@triton.jit
def columnwise(
    x, qt, scale, amax_values, known_amax,
    rows, columns, stride, qt_lines, down,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, KNOWN_AMAX: tl.constexpr, TALL: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Quantize x [rows, columns] with one scale per column to its transpose qt as int32, and scale float32 [columns].
    Exact.

    amax_values: int32 [columns], bits of the columns' amaxes, followed by a zero counter per column of programs; all
    zero after. known_amax (if KNOWN_AMAX): float32 [columns], amaxes that override them. down: number of programs that
    read the same columns.
    """
    columns_at(
        tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0),
        x, qt, scale, amax_values, known_amax, rows, columns, stride, qt_lines, down,
        BM, BN, EVEN, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
    )  # fmt: skip


@triton.jit
def columnwise_two(
    x, qt, scale, amax_values, known_amax, x_2, qt_2, scale_2, amax_values_2, known_amax_2,
    rows, columns, stride, qt_lines, down, rows_2, columns_2, stride_2, qt_lines_2, down_2, first,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, EVEN_2: tl.constexpr, KNOWN_AMAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Run `columnwise` on two matrices: the `first` programs process x, the others x_2. Exact."""
    p = tl.program_id(0)
    if p < first:
        across = tl.cdiv(columns, BN)
        columns_at(
            p // across, p % across, x, qt, scale, amax_values, known_amax, rows, columns, stride, qt_lines, down,
            BM, BN, EVEN, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
        )  # fmt: skip
    else:
        other = p - first
        across_2 = tl.cdiv(columns_2, BN)
        columns_at(
            other // across_2, other % across_2, x_2, qt_2, scale_2, amax_values_2, known_amax_2,
            rows_2, columns_2, stride_2, qt_lines_2, down_2,
            BM, BN, EVEN_2, KNOWN_AMAX, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
        )  # fmt: skip
