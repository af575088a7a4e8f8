"""One scale per tensor: amax, FP8 cast of a matrix and its transpose, transposition of codes, and history rolls."""

import triton
import triton.language as tl

from quaver.kernels.numerics import (
    HIGHEST,
    INFINITY_BITS,
    LOWEST,
    SMALLEST_NORMAL_BITS,
    combine_amaxes,
    decode_scale,
    encode4,
    encode_factor,
    exponent,
    flushed,
    largest_bits4,
    load_tile,
    magnitude_bits,
    packed_codes,
    power_of_two,
    store_amax,
    store_tile,
    widened,
)

# ---- amax ----


@triton.jit
def block_amax(
    pm, pn, x, out, work, rows, columns, stride, programs,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Run the program of block (pm, pn) of `amax`."""
    r = pm * BM + tl.arange(0, BM)
    c = pn * BN + tl.arange(0, BN)
    bits = flushed(tl.max(magnitude_bits(load_tile(x, r, c, rows, columns, stride, EVEN)), None))
    store_amax(work, bits, programs, out, None, None, False, False)


@triton.jit
def amax(
    x, out, work, rows, columns, stride, programs,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """Compute the amax of x [rows, columns] with row stride `stride` into out float32 [1], in one pass without
    initialization.

    work: int32 [2] of zeros, left as zeros. TALL: rows are the grid's first axis. Exact: the bits of |x|, NaN above
    infinity, subnormals 0.
    """
    pm, pn = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    block_amax(pm, pn, x, out, work, rows, columns, stride, programs, BM, BN, EVEN)


@triton.jit
def amax_of_two(
    x, out, work, x_2, out_2, work_2, rows, columns, stride, programs, rows_2, columns_2, stride_2, programs_2, first,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, BM_2: tl.constexpr, EVEN_2: tl.constexpr,
):  # fmt: skip
    """Compute `amax` of two matrices: the `first` programs process x, the others x_2. Exact."""
    p = tl.program_id(0)
    if p < first:
        across = tl.cdiv(columns, BN)
        block_amax(p // across, p % across, x, out, work, rows, columns, stride, programs, BM, BN, EVEN)
    else:
        q = p - first
        across_2 = tl.cdiv(columns_2, BN)
        block_amax(
            q // across_2, q % across_2, x_2, out_2, work_2, rows_2, columns_2, stride_2, programs_2, BM_2, BN, EVEN_2
        )


# ---- cast: FP8 with one scale per tensor, and its transpose from the same read ----


@triton.jit
def load4(x, r, c, rows, columns, stride, EVEN: tl.constexpr):
    """Load four consecutive rows from each row of r [BM / 4], columns c: four float32 [BM / 4, BN], zero outside x."""
    x0, x1, x2, x3 = load4_as_is(x, r, c, rows, columns, stride, EVEN)
    return widened(x0), widened(x1), widened(x2), widened(x3)


@triton.jit
def load4_as_is(x, r, c, rows, columns, stride, EVEN: tl.constexpr):
    """Run `load4` in x's own dtype."""
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
    """Store the codes of those rows row-major; the row length `stride` is a multiple of 16, padding is zero."""
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
def store_transposed(qt, r4, c, columns, stride4, packed, EVEN: tl.constexpr):
    """Store the packed codes of four rows [BM / 4, BN] to the transpose, whose row stride is `stride4` int32.

    r4 [BM / 4]: row of each packed element, divided by four. Derived from r, the compiler would no longer see that they
    are contiguous.
    """
    transposed = tl.trans(packed)  # [BN, BM / 4]
    store_tile(qt, transposed, c, r4, columns, stride4, stride4, EVEN)


@triton.jit
def keep_newest(newest, bits):
    """Raise a history's newest amax to this one, unless it is not finite."""
    if bits < INFINITY_BITS:
        # A history has no NaN, so magnitudes are ordered like their bits.
        before = tl.load(newest).to(tl.int32, bitcast=True)
        tl.store(newest, tl.maximum(before, bits).to(tl.float32, bitcast=True))


@triton.jit
def cast_block(
    pm, pn, x, q, qt, scale, top, factor, known_amax, newest, work, partial,
    rows, columns, stride, q_stride, qt_lines, programs,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MEASURED: tl.constexpr, FACTOR: tl.constexpr, KNOWN_AMAX: tl.constexpr, NEWEST: tl.constexpr,
    SUMS: tl.constexpr, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Run the program of block (pm, pn) of `cast`."""
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
    elif KNOWN_AMAX:
        limit = flushed(magnitude_bits(tl.load(known_amax)))
    if MEASURED or KNOWN_AMAX:
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
        last, largest = combine_amaxes(work, bits, programs)
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
        store_transposed(qt, r4, c, columns, 4 * qt_lines, packed, EVEN)


@triton.jit
def cast(
    x, q, qt, scale, top, factor, known_amax, newest, work, partial,
    rows, columns, stride, q_stride, qt_lines, programs,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MEASURED: tl.constexpr, FACTOR: tl.constexpr, KNOWN_AMAX: tl.constexpr, NEWEST: tl.constexpr, TALL: tl.constexpr,
    SUMS: tl.constexpr, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Cast x [rows, columns] to q of the same shape (ROWS) and to its transpose qt as int32 (COLUMNS), scale float32
    [1].

    MEASURED: top float32 [1] is the amax. Otherwise the scale follows from the amax `known_amax` (KNOWN_AMAX), or from
    factor, and top is written with the amax of x, measured in the same pass. factor (if FACTOR) overrides the factor
    of an amax unless it is 0.
    newest (if NEWEST): newest entry of a history, raised to the amax if that is finite.
    partial (if SUMS): float32 [blocks of BM rows, columns], sums of the unscaled x over the rows of each block.
    q_stride, qt_lines: bytes of a row of q, and 16-byte lines of a row of qt; the padding of rows is zero.
    work: int32 [2] of zeros, left as zeros; programs: number of programs that share it. TALL: rows are the grid's first
    axis.
    Codes and scale are exact; sums are float32 in a fixed order.
    """
    cast_block(
        tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0),
        x, q, qt, scale, top, factor, known_amax, newest, work, partial,
        rows, columns, stride, q_stride, qt_lines, programs,
        BM, BN, EVEN, ROWS, COLUMNS, MEASURED, FACTOR, KNOWN_AMAX, NEWEST,
        SUMS, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
    )  # fmt: skip


@triton.jit
def cast_two(
    x, q, qt, scale, top, factor, known_amax, newest, work, partial,
    x_2, q_2, qt_2, scale_2, top_2, factor_2, known_amax_2, newest_2, work_2, partial_2,
    rows, columns, stride, q_stride, qt_lines, programs,
    rows_2, columns_2, stride_2, q_stride_2, qt_lines_2, programs_2, first,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, EVEN_2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MEASURED: tl.constexpr, FACTOR: tl.constexpr, KNOWN_AMAX: tl.constexpr,
    NEWEST: tl.constexpr, SUMS: tl.constexpr, SUMS_2: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, EMAX_2: tl.constexpr,
    TOP_MANTISSA_2: tl.constexpr, MAX_2: tl.constexpr, INTEGERS: tl.constexpr,
    dtype: tl.constexpr, dtype_2: tl.constexpr,
):  # fmt: skip
    """Run `cast` on two matrices: the `first` programs process x, the others x_2."""
    p = tl.program_id(0)
    if p < first:
        across = tl.cdiv(columns, BN)
        cast_block(
            p // across, p % across, x, q, qt, scale, top, factor, known_amax, newest, work, partial,
            rows, columns, stride, q_stride, qt_lines, programs,
            BM, BN, EVEN, ROWS, COLUMNS, MEASURED, FACTOR, KNOWN_AMAX, NEWEST,
            SUMS, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
        )  # fmt: skip
    else:
        other = p - first
        across_2 = tl.cdiv(columns_2, BN)
        cast_block(
            other // across_2, other % across_2,
            x_2, q_2, qt_2, scale_2, top_2, factor_2, known_amax_2, newest_2, work_2, partial_2,
            rows_2, columns_2, stride_2, q_stride_2, qt_lines_2, programs_2,
            BM, BN, EVEN_2, ROWS, COLUMNS, MEASURED, FACTOR, KNOWN_AMAX, NEWEST,
            SUMS_2, POWER_OF_TWO, EMAX_2, TOP_MANTISSA_2, MAX_2, INTEGERS, dtype_2,
        )  # fmt: skip


# ---- transpose of eight-bit codes, four bytes at a time on both sides ----


@triton.jit
def transpose(
    q, qt, rows, columns, q_lines, qt_lines,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """Transpose codes [rows, columns] to [columns, rows], each as int32, with rows of q_lines and qt_lines times 16
    bytes.

    The line counts let the compiler use wide loads and stores. The padding of the transpose's rows is zero. Squares of
    4 × 4 bytes are transposed in registers, in two rounds.
    """
    pm = tl.program_id(0 if TALL else 1)
    pn = tl.program_id(1 if TALL else 0)
    r = pm * BM + 4 * tl.arange(0, BM // 4)
    c4 = pn * (BN // 4) + tl.arange(0, BN // 4)
    q_stride4 = 4 * q_lines
    v0, v1, v2, v3 = load4_as_is(q, r, c4, rows, q_stride4, q_stride4, EVEN)
    even01, odd01 = shuffled(v0, v1)
    even23, odd23 = shuffled(v2, v3)
    r4 = pm * (BM // 4) + tl.arange(0, BM // 4)
    c = 4 * c4
    store_transposed(qt, r4, c, columns, 4 * qt_lines, (even01 & 0xFFFF) | (even23 << 16), EVEN)
    store_transposed(qt, r4, c + 1, columns, 4 * qt_lines, (odd01 & 0xFFFF) | (odd23 << 16), EVEN)
    store_transposed(qt, r4, c + 2, columns, 4 * qt_lines, ((even01 >> 16) & 0xFFFF) | (even23 & -0x10000), EVEN)
    store_transposed(qt, r4, c + 3, columns, 4 * qt_lines, ((odd01 >> 16) & 0xFFFF) | (odd23 & -0x10000), EVEN)


@triton.jit
def shuffled(a, b):
    """Return the even bytes of two int32, of a and b alternately, and the odd ones."""
    even = (a & 0x00FF00FF) | ((b & 0x00FF00FF) << 8)
    odd = ((a >> 8) & 0x00FF00FF) | (b & -0xFF0100)
    return even, odd


# ---- roll: delayed-scaling state of a whole model in one launch ----
# A table holds the addresses of histories and factors, so that they can remain buffers of their layers. Source of the
# scheme: Transformer Engine's delayed scaling; the numbers are those of `quaver.reference.operations`.


@triton.jit
def _factor(
    bits, margin, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr
):
    """Return the encode factor of a window whose amax has these bits, times 2**-margin, clamped to bounds."""
    if POWER_OF_TWO:
        p = exponent(bits, EMAX, TOP_MANTISSA) - margin
        return power_of_two(tl.minimum(tl.maximum(p, LOWEST), HIGHEST))
    e = encode_factor(bits, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX).to(tl.int32, bitcast=True)
    # The margin changes the exponent field; overflow becomes the largest normal number, underflow the smallest.
    field = (e >> 23) - margin
    moved = tl.where(field > 254, INFINITY_BITS - 1, (field << 23) | (e & 0x7FFFFF))
    return tl.where(field < 1, SMALLEST_NORMAL_BITS, moved).to(tl.float32, bitcast=True)


@triton.jit
def roll(
    table, factors, length, step, column_step, margin,
    BLOCK: tl.constexpr, LARGEST: tl.constexpr,
    POWER0: tl.constexpr, EMAX0: tl.constexpr, TOP0: tl.constexpr, MAX0: tl.constexpr,
    POWER1: tl.constexpr, EMAX1: tl.constexpr, TOP1: tl.constexpr, MAX1: tl.constexpr,
    POWER2: tl.constexpr, EMAX2: tl.constexpr, TOP2: tl.constexpr, MAX2: tl.constexpr,
):  # fmt: skip
    """Roll one history column (axis 1) of one layer (axis 0) per program. Exact.

    table: int64 [layers, 2], addresses of history float32 [length, 3] and factor float32 [3], contiguous.
    factors: float32 [layers, 3], receives a copy of all new factors.
    step, column_step: distance of consecutive values of a column, and of columns. BLOCK ≥ length.
    LARGEST: the factor follows from the maximum of the window, else from the newest value.
    """
    layer = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    history = tl.load(table + 2 * layer).to(tl.pointer_type(tl.float32)) + column * column_step
    factor = tl.load(table + 2 * layer + 1).to(tl.pointer_type(tl.float32)) + column
    newest = tl.load(history)
    e = tl.load(factor)
    if newest > 0.0:
        i = tl.arange(0, BLOCK)
        # Shift by one: row i takes row i + 1, the last row takes what row 0 has recorded, and row 0 becomes 0.
        following = tl.load(history + (i + 1) * step, mask=i + 1 < length, other=0.0)
        top = magnitude_bits(newest)
        if LARGEST:
            top = tl.maximum(top, tl.max(magnitude_bits(following), 0))
        bits = flushed(top)
        e0 = _factor(bits, margin, POWER0, EMAX0, TOP0, MAX0)
        e1 = _factor(bits, margin, POWER1, EMAX1, TOP1, MAX1)
        e2 = _factor(bits, margin, POWER2, EMAX2, TOP2, MAX2)
        e = tl.where(column == 0, e0, tl.where(column == 1, e1, e2))
        rolled = tl.where(i == length - 1, newest, following)
        # All threads must have read before one writes.
        tl.debug_barrier()
        tl.store(history + i * step, tl.where(i == 0, 0.0, rolled), mask=i < length)
        tl.store(factor, e)
    tl.store(factors + 3 * layer + column, e)


@triton.jit
def note(history, top, at):
    """Set history[at] to the maximum of itself and top, both float32, ignoring infinities and NaN. One program."""
    bits = magnitude_bits(tl.load(top))
    here = history + at
    known = tl.load(here)
    tl.store(here, tl.where(bits < INFINITY_BITS, tl.maximum(known, bits.to(tl.float32, bitcast=True)), known))
