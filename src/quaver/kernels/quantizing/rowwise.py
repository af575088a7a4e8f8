"""Eight bits with a scale for each row, and for each column: the rows of the transpose.

A row's amax is known once the row has been read, a column's when the whole matrix has been. So the kernel for rows
takes the columns' amaxes on the way, and a second one writes the transpose.
"""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import encode, largest_of_runs, magnitude_bits
from quaver.kernels.bits.tiles import load_tile, store_tile
from quaver.kernels.quantizing.blockwise import factor_and_scale, packed_four
from quaver.kernels.quantizing.cast import load4, store_turned


@triton.jit
def rows_at(
    p, x, q, scale, tops, given, rows, columns, stride, q_stride,
    BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, TOPS: tl.constexpr,
    GIVEN: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """What program p does for `rowwise`."""
    c = tl.arange(0, BN)
    largest = tl.zeros([BN], tl.int32)
    for step in range(STEPS):
        r = (p * STEPS + step) * BM + tl.arange(0, BM)
        v = load_tile(x, r, c, rows, columns, stride, EVEN)
        if TOPS:
            m = magnitude_bits(v)
            largest = tl.maximum(largest, tl.max(m, 0))
        else:
            # A thread holds 16 side by side, of which 8 leave the shortest code with masks too.
            m = tl.reshape(largest_of_runs(v, 3), [BM, BN // 8])
        e, s = factor_and_scale(tl.max(m, 1), given, r, r < rows, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
        tl.store(scale + r, s, mask=r < rows)
        codes = encode(v * e[:, None], dtype, INTEGERS).to(q.dtype.element_ty, bitcast=True)
        store_tile(q, codes, r, c, rows, q_stride, q_stride, EVEN)
    if TOPS:
        tl.atomic_max(tops + c, largest, mask=c < columns, sem="relaxed")


@triton.jit
def rowwise(
    x, q, scale, tops, given,
    rows, columns, stride, q_stride,
    BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, TOPS: tl.constexpr,
    GIVEN: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """x [rows, columns], a row in registers, to q and scale float32 [rows]; one read. BN holds q_stride columns.

    tops (if TOPS): int32 [columns], zero before, the bits of the columns' amaxes after; a maximum does not depend on
    the order. given (if GIVEN): float32 [rows], amaxes that go before those measured. A program takes BM rows, STEPS
    times. Exact.
    """
    rows_at(
        tl.program_id(0), x, q, scale, tops, given, rows, columns, stride, q_stride,
        BM, BN, STEPS, EVEN, TOPS, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
    )  # fmt: skip


@triton.jit
def rowwise_two(
    x, q, scale, tops, given, x_2, q_2, scale_2, tops_2, given_2,
    rows, columns, stride, q_stride, rows_2, columns_2, stride_2, q_stride_2, first,
    BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    BM_2: tl.constexpr, BN_2: tl.constexpr, STEPS_2: tl.constexpr, EVEN_2: tl.constexpr, TOPS: tl.constexpr,
    GIVEN: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """`rowwise` of two matrices: the `first` programs take x, the others x_2. Exact."""
    p = tl.program_id(0)
    if p < first:
        rows_at(
            p, x, q, scale, tops, given, rows, columns, stride, q_stride,
            BM, BN, STEPS, EVEN, TOPS, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
        )  # fmt: skip
    else:
        rows_at(
            p - first, x_2, q_2, scale_2, tops_2, given_2, rows_2, columns_2, stride_2, q_stride_2,
            BM_2, BN_2, STEPS_2, EVEN_2, TOPS, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
        )  # fmt: skip


@triton.jit
def long_rowwise(
    x, q, scale, given,
    rows, columns, stride, q_stride,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, GIVEN: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """`rowwise` for rows that no program holds: they are read twice, the second time from a cache."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = r < rows
    m = tl.zeros([BM, BN], tl.int32)
    for start in range(0, columns, BN):
        c = start + tl.arange(0, BN)
        m = tl.maximum(m, magnitude_bits(load_tile(x, r, c, rows, columns, stride, EVEN)))
    e, s = factor_and_scale(tl.max(m, 1), given, r, inside, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
    tl.store(scale + r, s, mask=inside)
    for start in range(0, q_stride, BN):
        c = start + tl.arange(0, BN)
        v = load_tile(x, r, c, rows, columns, stride, EVEN)
        codes = encode(v * e[:, None], dtype, INTEGERS).to(q.dtype.element_ty, bitcast=True)
        store_tile(q, codes, r, c, rows, q_stride, q_stride, EVEN)


@triton.jit
def column_amax(
    x, tops, rows, columns, stride,
    BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """The bits of the amax of each column of x [rows, columns] to tops int32 [columns], zero before; as `rowwise`."""
    pm = tl.program_id(0 if TALL else 1)
    c = tl.program_id(1 if TALL else 0) * BN + tl.arange(0, BN)
    largest = tl.zeros([BM, BN], tl.int32)
    for step in range(STEPS):
        r = (pm * STEPS + step) * BM + tl.arange(0, BM)
        largest = tl.maximum(largest, magnitude_bits(load_tile(x, r, c, rows, columns, stride, EVEN)))
    tl.atomic_max(tops + c, tl.max(largest, 0), mask=c < columns, sem="relaxed")


@triton.jit
def columns_at(
    pm, pn, x, qt, scale, tops, given, rows, columns, stride, qt_lines, down,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, GIVEN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """What the program of block (pm, pn) does for `columnwise`."""
    r = pm * BM + 4 * tl.arange(0, BM // 4)
    c = pn * BN + tl.arange(0, BN)
    x0, x1, x2, x3 = load4(x, r, c, rows, columns, stride, EVEN)
    inside = c < columns
    bits = tl.load(tops + c, mask=inside, other=0)
    e, s = factor_and_scale(bits, given, c, inside, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
    if pm == 0:
        tl.store(scale + c, s, mask=inside)
    # Once each program of these columns has read their amaxes, the last one leaves zeros to the next launch.
    tl.debug_barrier()
    readers = tops + columns + pn
    if tl.atomic_add(readers, 1, sem="acq_rel") == down - 1:
        tl.store(tops + c, tl.zeros([BN], tl.int32), mask=inside)
        tl.store(readers, 0)
    packed = packed_four(x0, x1, x2, x3, e[None, :], dtype, INTEGERS)
    store_turned(qt, pm * (BM // 4) + tl.arange(0, BM // 4), c, columns, 4 * qt_lines, packed, EVEN)


@triton.jit
def columnwise(
    x, qt, scale, tops, given,
    rows, columns, stride, qt_lines, down,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, GIVEN: tl.constexpr, TALL: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """x [rows, columns] with a scale for each column to its transpose qt as int32, and scale float32 [columns].

    tops: int32 [columns], the bits of the columns' amaxes, and behind them a zero for each program across; zeros after.
    given (if GIVEN): float32 [columns] that go before those amaxes. down: programs that read the same columns. Exact.
    """
    columns_at(
        tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0),
        x, qt, scale, tops, given, rows, columns, stride, qt_lines, down,
        BM, BN, EVEN, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
    )  # fmt: skip


@triton.jit
def columnwise_two(
    x, qt, scale, tops, given, x_2, qt_2, scale_2, tops_2, given_2,
    rows, columns, stride, qt_lines, down, rows_2, columns_2, stride_2, qt_lines_2, down_2, first,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, EVEN_2: tl.constexpr, GIVEN: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """`columnwise` of two matrices: the `first` programs take x, the others x_2. Exact."""
    p = tl.program_id(0)
    if p < first:
        across = tl.cdiv(columns, BN)
        columns_at(
            p // across, p % across, x, qt, scale, tops, given, rows, columns, stride, qt_lines, down,
            BM, BN, EVEN, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
        )  # fmt: skip
    else:
        other = p - first
        across_2 = tl.cdiv(columns_2, BN)
        columns_at(
            other // across_2, other % across_2, x_2, qt_2, scale_2, tops_2, given_2,
            rows_2, columns_2, stride_2, qt_lines_2, down_2,
            BM, BN, EVEN_2, GIVEN, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
        )  # fmt: skip
