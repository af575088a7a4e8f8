"""Emulation kernels: round a matrix to the bf16 values of its codes in one pass, and finish or group products.

A bf16 GEMM reads either operand in either direction, so the transpose's values keep the layout of the matrix.
"""

import triton
import triton.language as tl

from quaver.kernels.mxfp8 import decoded_scale, e2m1
from quaver.kernels.numerics import (
    INFINITY_BITS,
    NAN_BITS,
    decode_scale,
    decoded,
    encode,
    flushed,
    load_tile,
    magnitude_bits,
    philox,
    saturated,
    shared_exponent,
    store_amax,
    store_tile,
    stream_at,
    transposed,
)
from quaver.kernels.nvfp4 import (
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

# ---- rounding to the values of a format, without codes ----

#: The sign bit, and bf16's largest number.
SIGN, LARGEST = tl.constexpr(-0x7FFFFFFF - 1), tl.constexpr(3.3895313892515355e38)


@triton.jit
def rounded(y, MANTISSA: tl.constexpr, EMIN: tl.constexpr):
    """Round the magnitude of float32 y, within a format's range, to nearest even; arbitrary if y is not finite.

    MANTISSA: bits of the format's mantissa. EMIN: exponent of its smallest normal number.
    """
    # A number whose ulp is the format's step at y: adding it rounds to the step. Uses the bits of y instead of |y|,
    # which would have to be computed first.
    exponent = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, (EMIN + 127) << 23)
    magic = (exponent + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True)
    return (tl.abs(y) + magic) - magic


@triton.jit
def signed(v, y):
    """Return nonnegative v with the sign of y."""
    bits = v.to(tl.int32, bitcast=True) | (y.to(tl.int32, bitcast=True) & SIGN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def inverse(e):
    """Return 1 / e of a power of two from 2**-126 to 2**126, by its exponent field."""
    return (0x7F000000 - e.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


# ---- blocks with power-of-two scales ----


@triton.jit
def values_of_blocks(
    x, along, down, codes, scales,
    rows, columns, stride,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    WIDTH: tl.constexpr, SQUARE: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
    MANTISSA: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr,
):  # fmt: skip
    """Round x [rows, columns] to the values of its codes, bf16 of the same shape; each result may be None.

    along: in blocks of WIDTH columns of a row, or WIDTH × WIDTH if SQUARE. down: in blocks of WIDTH rows of a column.
    codes: FP8 codes of the same values, in a format CODES that can represent them, with scales: uint8 exponents [blocks
    of rows, columns], 255 for a block that is not finite. Exact, except that 2**128, which bf16 cannot represent,
    becomes its largest number.
    """
    pm, pn = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    block_of_values(
        pm, pn, x, along, down, codes, scales, rows, rows, columns, stride,
        BM, BN, EVEN, WIDTH, SQUARE, CODES, INTEGERS, MANTISSA, EMIN, EMAX, TOP_MANTISSA,
    )  # fmt: skip


@triton.jit
def block_of_values(
    pm, pn, x, along, down, codes, scales, rows, slots, columns, stride,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr, SQUARE: tl.constexpr,
    CODES: tl.constexpr, INTEGERS: tl.constexpr,
    MANTISSA: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr,
):  # fmt: skip
    """Run the program of block (pm, pn) of `values_of_blocks`; down and codes have `slots` rows, zeros after `rows`."""
    r = pm * BM + tl.arange(0, BM)
    c = pn * BN + tl.arange(0, BN)
    v = load_tile(x, r, c, rows, columns, stride, EVEN)
    m = magnitude_bits(v)
    if along is not None:
        top = tl.max(tl.reshape(m, [BM, BN // WIDTH, WIDTH]), 2)
        if SQUARE:
            whole = tl.max(tl.reshape(top, [BM // WIDTH, WIDTH, BN // WIDTH]), 1)[:, None, :]
            top = tl.reshape(tl.broadcast_to(whole, [BM // WIDTH, WIDTH, BN // WIDTH]), [BM, BN // WIDTH])
        _, e = shared_exponent(top, EMAX, TOP_MANTISSA)
        s = decode_scale(top, e, True)
        y = tl.reshape(v, [BM, BN // WIDTH, WIDTH]) * e[:, :, None]
        # Overflow of bf16 is clamped here, by a bound; a bound that itself overflows float32 clamps nothing.
        z = tl.minimum(rounded(y, MANTISSA, EMIN), (e * LARGEST)[:, :, None]) * s[:, :, None]
        z = tl.reshape(signed(z, y), [BM, BN]).to(tl.bfloat16)
        store_tile(along, z, r, c, rows, columns, columns, EVEN)
    if down is not None or codes is not None:
        top = tl.max(tl.reshape(m, [BM // WIDTH, WIDTH, BN]), 1)
        code, e = shared_exponent(top, EMAX, TOP_MANTISSA)
        y = tl.reshape(v, [BM // WIDTH, WIDTH, BN]) * e[:, None, :]
        z = rounded(y, MANTISSA, EMIN)
        if down is not None:
            s = decode_scale(top, e, True)
            z = tl.minimum(z, (e * LARGEST)[:, None, :]) * s[:, None, :]
            z = tl.reshape(signed(z, y), [BM, BN]).to(tl.bfloat16)
            store_tile(down, z, r, c, slots, columns, columns, EVEN)
        if codes is not None:
            q = encode(tl.reshape(signed(z, y), [BM, BN]), CODES, INTEGERS)
            store_tile(codes, q.to(codes.dtype.element_ty, bitcast=True), r, c, slots, columns, columns, EVEN)
            blocks = pm * (BM // WIDTH) + tl.arange(0, BM // WIDTH)
            store_tile(scales, code.to(tl.uint8), blocks, c, tl.cdiv(slots, WIDTH), columns, columns, EVEN)


@triton.jit
def cached_values_of_blocks(
    codes, scales, out, rows, columns,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr, WIDTH: tl.constexpr,
    CODES: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Decode codes and scales written by `values_of_blocks` to its `down`, bf16 [rows, columns]. Exact."""
    pm, pn = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    r = pm * BM + tl.arange(0, BM)
    c = pn * BN + tl.arange(0, BN)
    at = codes + r[:, None].to(tl.int64) * columns + c[None, :]
    blocks = pm * (BM // WIDTH) + tl.arange(0, BM // WIDTH)
    of_blocks = scales + blocks[:, None].to(tl.int64) * columns + c[None, :]
    if EVEN:
        q, s = tl.load(at), tl.load(of_blocks)
    else:
        inside = c[None, :] < columns
        q = tl.load(at, mask=inside & (r[:, None] < rows), other=0.0)
        s = tl.load(of_blocks, mask=inside & (blocks[:, None] < tl.cdiv(rows, WIDTH)), other=0)
    v = tl.reshape(decoded(q.to(tl.uint8, bitcast=True), CODES, INTEGERS), [BM // WIDTH, WIDTH, BN])
    v = v * decoded_scale(s, None, "e8m0", True, INTEGERS)[:, None, :]
    store_tile(out, saturated(tl.reshape(v, [BM, BN]), tl.bfloat16), r, c, rows, columns, columns, EVEN)


# ---- finishing float32 products: scales, bias and one rounding ----


@triton.jit
def halves(scale):
    """Split a scale into two factors of similar size, the first a power of two; NaN goes to the second."""
    field = (((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF) + 127) >> 1
    first = (field << 23).to(tl.float32, bitcast=True)
    return first, scale * ((254 - field) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fold(
    y, of_rows, of_columns, bias, out, rows, columns,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    ONE_ROW: tl.constexpr, ONE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Multiply y [rows, columns] float32 by a scale per row and per column, add a bias [columns], in out's dtype.

    of_rows, of_columns: float32 [rows] and [columns], or [1] if ONE_ROW and ONE_COLUMN, or None. Scales are applied in
    halves, because one scale may overflow where the product does not. Exact except for the sum with the bias and the
    rounding of products with scales that are no powers of two.
    """
    pm, pn = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    r = pm * BM + tl.arange(0, BM)
    c = pn * BN + tl.arange(0, BN)
    v = load_tile(y, r, c, rows, columns, columns, EVEN)
    if of_rows is not None:
        a0, a1 = halves(tl.load(of_rows + (r * 0 if ONE_ROW else r), mask=r < rows, other=1.0))
        v = v * a0[:, None]
    if of_columns is not None:
        b0, b1 = halves(tl.load(of_columns + (c * 0 if ONE_COLUMN else c), mask=c < columns, other=1.0))
        v = v * b0[None, :]
    if of_rows is not None:
        v = v * a1[:, None]
    if of_columns is not None:
        v = v * b1[None, :]
    if bias is not None:
        v = v + tl.load(bias + c, mask=c < columns, other=0.0).to(tl.float32)[None, :]
    store_tile(out, v.to(out.dtype.element_ty), r, c, rows, columns, columns, EVEN)


@triton.jit
def round_two(a, b, a_out, b_out, size_a, size_b, first, B: tl.constexpr, EVEN: tl.constexpr):
    """Round two flat float32 products to their results' dtypes: the `first` programs process a, the others b."""
    p = tl.program_id(0)
    if p < first:
        round_block(a, a_out, p, size_a, B, EVEN)
    else:
        round_block(b, b_out, p - first, size_b, B, EVEN)


@triton.jit
def round_block(x, out, p, size, B: tl.constexpr, EVEN: tl.constexpr):
    at = p.to(tl.int64) * B + tl.arange(0, B)
    if EVEN:
        tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))
    else:
        tl.store(out + at, tl.load(x + at, mask=at < size).to(out.dtype.element_ty), mask=at < size)


# ---- grouped products, and sums over each group's rows ----
# A program finds its group by the groups' ends on the device, so the host need not know the sizes of groups. The grid
# suffices for any distribution of rows.


@triton.jit
def multiply_groups(
    x, w, y, of_rows, of_columns, bias, ends,
    groups, n, k, x_stride, w_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute y[r] = x[r] @ w[g].T for row r of group g, times scales of rows and of the group's columns, plus its
    bias.

    x: [rows, k]; w: [groups · n, k], both bf16 or both float32. of_rows: float32 [rows]; of_columns: float32 [groups ·
    n]; bias: [groups · n]; each may be None. ends: int32 [groups]. y: [rows, n], not written for rows of no group. A
    program computes BM rows and BN columns of one group; EVEN: k is a multiple of BK and n of BN. Products are exact,
    sums are float32, and the result is rounded once.
    """
    tile, pn = tl.program_id(0), tl.program_id(1)
    first, last, group, start, tiles = 0, 0, -1, 0, 0
    for g in range(groups):
        end = tl.load(ends + g)
        own = tl.cdiv(end - start, BM)
        here = (tile >= tiles) & (tile < tiles + own)
        first = tl.where(here, start + (tile - tiles) * BM, first)
        last = tl.where(here, end, last)
        group = tl.where(here, g, group)
        tiles += own
        start = end
    if group >= 0:
        r = first + tl.arange(0, BM)
        c = pn * BN + tl.arange(0, BN)
        # Beyond a group's end its last row is read again instead of the next group's rows.
        clamped = tl.minimum(r, last - 1)
        column = tl.cast(group, tl.int64) * n + c
        xs = x + clamped.to(tl.int64)[:, None] * x_stride
        ws = w + column[None, :] * w_stride
        sums = tl.zeros([BM, BN], tl.float32)
        for at in range(0, k, BK):
            i = at + tl.arange(0, BK)
            if EVEN:
                a = tl.load(xs + i[None, :])
                b = tl.load(ws + i[:, None])
            else:
                a = tl.load(xs + i[None, :], (i < k)[None, :], 0.0)
                b = tl.load(ws + i[:, None], (i < k)[:, None] & (c < n)[None, :], 0.0)
            sums = tl.dot(a, b, sums, input_precision="ieee")
        if of_rows is not None:
            sums *= tl.load(of_rows + clamped)[:, None]
        if of_columns is not None:
            sums *= tl.load(of_columns + column, c < n, 0.0)[None, :]
        if bias is not None:
            sums += tl.load(bias + column, c < n, 0.0).to(tl.float32)[None, :]
        at = y + r.to(tl.int64)[:, None] * n + c[None, :]
        tl.store(at, sums.to(y.dtype.element_ty), (r < last)[:, None] & (c < n)[None, :])


@triton.jit
def sum_groups(
    x, w, y, of_rows, of_columns, ends,
    m, n, x_stride, w_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute y[g] = x[:, slots of g] @ w[:, slots of g].T, times scales of the group's rows and columns.

    x: [m, slots]; w: [n, slots], both bf16 or both float32. of_rows: float32 [groups, m]; of_columns: float32 [groups,
    n]; each may be None. ends: int32 [groups]. y: [groups, m, n], zeros for a group without slots. A program computes
    BM rows and BN columns of one group; EVEN: m is a multiple of BM, n of BN, and each group's slots of BK. Products
    are exact, sums are float32, and the result is rounded once.
    """
    pm, pn, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(ends + tl.maximum(group - 1, 0))
    start = tl.where(group == 0, 0, start)
    end = tl.load(ends + group)
    r = pm * BM + tl.arange(0, BM)
    c = pn * BN + tl.arange(0, BN)
    xs = x + r.to(tl.int64)[:, None] * x_stride
    ws = w + c.to(tl.int64)[None, :] * w_stride
    sums = tl.zeros([BM, BN], tl.float32)
    if EVEN:
        # Groups begin at block boundaries, which allows 16-byte loads.
        for block in range(start // BK, end // BK):
            i = block * BK + tl.arange(0, BK)
            sums = tl.dot(tl.load(xs + i[None, :]), tl.load(ws + i[:, None]), sums, input_precision="ieee")
    else:
        for at in range(start, end, BK):
            i = at + tl.arange(0, BK)
            a = tl.load(xs + i[None, :], (r < m)[:, None] & (i < end)[None, :], 0.0)
            b = tl.load(ws + i[:, None], (i < end)[:, None] & (c < n)[None, :], 0.0)
            sums = tl.dot(a, b, sums, input_precision="ieee")
    if of_rows is not None:
        # Nothing has written the scales of a group without slots.
        sums *= tl.load(of_rows + group * m + r, (r < m) & (end > start), 0.0)[:, None]
    if of_columns is not None:
        sums *= tl.load(of_columns + group * n + c, (c < n) & (end > start), 0.0)[None, :]
    at = y + (group.to(tl.int64) * m + r[:, None]) * n + c[None, :]
    tl.store(at, sums.to(y.dtype.element_ty), (r < m)[:, None] & (c < n)[None, :])


# ---- two-level scales: values of blocks of 16 with E4M3 scales and a power-of-two tensor factor ----
# The 2 bits of an E2M1 value times the 4 of an E4M3 scale give 6, so bf16 can represent the product, and a power of two
# only changes its exponent.


@triton.jit
def amaxes(
    x, top, transposed_top, work, count, drawn, rows, columns, stride, programs,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Compute the amax of x [rows, columns], and that after rotating groups of sixteen rows; each may be None. Exact.

    top, transposed_top: float32 [1]. work: int32 [4] of zeros, left as zeros. count int64 [2], or None: noise counts of
    an operand and its transpose, copied to drawn; FIRST and SECOND advance them.
    """
    down, right = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    g = down * (BM // 16) + tl.arange(0, BM // 16)
    c = right * BN + tl.arange(0, BN)
    v = load_down(x, g, c, rows, columns, stride, EVEN, True)
    if top is not None:
        bits = flushed(tl.max(largest(v), None))
        store_amax(work, bits, programs, top, None, None, False, False)
    if transposed_top is not None:
        bits = flushed(quarter(tl.max(largest(transposed(v)), None)))
        store_amax(work + 2, bits, programs, transposed_top, None, None, False, False)
    if count is not None:
        move_on(count, drawn, FIRST, SECOND)


@triton.jit
def move_on(count, drawn, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Let the first program copy two int64 counts to drawn, and increment each one that is requested."""
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
    """Return the tensor factor from its amax, float32 [1], and its reciprocal, NaN if the amax is not finite."""
    return level_of(flushed(tl.load(top).to(tl.int32, bitcast=True) & 0x7FFFFFFF))


@triton.jit
def level_of(bits):
    """Run `level` on the bits of an amax."""
    big = tensor_factor(bits, True)
    small = tl.where(bits < INFINITY_BITS, inverse(big).to(tl.int32, bitcast=True), NAN_BITS)
    return big, small.to(tl.float32, bitcast=True)


@triton.jit
def values_of(
    v, bits, big, small, place, upper, key,
    STOCHASTIC: tl.constexpr, FOUR: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Round blocks given as sixteen tensors with these amax bits to the bf16 values of their codes.

    FOUR: the tensors are four times too large.
    """
    scale, e = block_scale(bits, big, True, INTEGERS)
    s = decoded(scale, tl.float8e4nv, INTEGERS) * small
    TIMES: tl.constexpr = 4.0 if FOUR else 1.0
    # Clamp beyond 6 and beyond bf16. NaN comes from the scale.
    most = tl.minimum(e * LARGEST, 6.0 * TIMES)
    place = (place >> 2) + (bits >> 31)
    out = ()
    for i in tl.static_range(4):
        if STOCHASTIC:
            words = philox(place + i, upper, key)
            for j in tl.static_range(4):
                x = v[4 * i + j]
                # Exponent and mantissa bits at their positions, of a number that is 2**126 times too small.
                code = (stochastic(flush(x) * e, words[j // 2], j % 2) >> 6) & 0x01C00000
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
    """Join eight tensors [BM, BG], from v[FIRST] on, to one [BM, BG, 8]."""
    even = tl.join(tl.join(v[FIRST], v[FIRST + 4]), tl.join(v[FIRST + 2], v[FIRST + 6]))
    odd = tl.join(tl.join(v[FIRST + 1], v[FIRST + 5]), tl.join(v[FIRST + 3], v[FIRST + 7]))
    return tl.reshape(tl.join(tl.reshape(even, [BM, BG, 4]), tl.reshape(odd, [BM, BG, 4])), [BM, BG, 8])


@triton.jit
def values_in_two_levels(
    x, along, down, codes, scales, top, transposed_top, drawn,
    rows, columns, stride, a0, a1, b0, b1, seed0, seed1, seed2, seed3,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr, SQUARE: tl.constexpr,
    HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, TRANSPOSED_STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Round x [rows, columns] to the values of its codes, bf16 of the same shape; each result may be None.

    rows are whole blocks. along: in blocks of sixteen columns of a row, or 16 × 16 if SQUARE, with the amax `top`,
    float32 [1]. down: in blocks of sixteen rows of a column, rotated first if HADAMARD, with `transposed_top`. codes:
    codes of the same values, eight per int32, two int32 per block [blocks, 2, columns]; scales: E4M3 codes [blocks,
    columns], and one more element: the tensor factor as an E8M0 code. drawn: noise counts of both. a0 … seed3: halves
    of the tensor ids and of the seed, for `whole_word`. Exact, except that overflow of bf16 becomes its largest number.
    """
    pm, pn = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    if along is not None:
        big, small = level(top)
        key, upper = stream_at(drawn, a0, a1, seed0, seed1, seed2, seed3, STOCHASTIC)
        block_of_values_along(
            pm, pn, x, along, rows, columns, stride, big, small, key, upper, BM, BN, EVEN, SQUARE, STOCHASTIC, INTEGERS
        )
    if down is not None or codes is not None:
        big, small = level(transposed_top)
        count = drawn
        if TRANSPOSED_STOCHASTIC:
            count = drawn + 1
        key, upper = stream_at(count, b0, b1, seed0, seed1, seed2, seed3, TRANSPOSED_STOCHASTIC)
        block_of_values_down(
            pm, pn, x, down, codes, scales, rows, rows, columns, stride, big, small, key, upper,
            BM, BN, EVEN, True, HADAMARD, TRANSPOSED_STOCHASTIC, INTEGERS,
        )  # fmt: skip
        if codes is not None:
            at = scales + (rows // 16).to(tl.int64) * columns
            tl.store(at, exponent_of(small), mask=(pm == 0) & (pn == 0))


@triton.jit
def exponent_of(small):
    """Return the E8M0 code of a power of two, 255 for NaN."""
    return tl.minimum(small.to(tl.int32, bitcast=True) >> 23, 255).to(tl.uint8)


@triton.jit
def block_of_values_along(
    pm, pn, x, along, rows, columns, stride, big, small, key, upper,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, SQUARE: tl.constexpr,
    STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Write the block (pm, pn) of `values_in_two_levels` that has its scales along the rows."""
    BG: tl.constexpr = BN // 16
    r = pm * BM + tl.arange(0, BM)
    g = pn * BG + tl.arange(0, BG)
    v = load_along(x, r, g, rows, columns, stride, BM, BG, EVEN)
    bits = largest(v)
    if SQUARE:
        shared = tl.max(tl.reshape(bits, [BM // 16, 16, BG]), 1)[:, None, :]
        bits = tl.reshape(tl.broadcast_to(shared, [BM // 16, 16, BG]), [BM, BG])
    place = r[:, None].to(tl.int64) * columns + 16 * g[None, :]
    out = values_of(v, bits, big, small, place, upper, key, STOCHASTIC, False, INTEGERS)
    line = along + r[:, None, None].to(tl.int64) * columns
    for part in tl.static_range(2):
        c = (16 * g + 8 * part)[None, :, None] + tl.arange(0, 8)[None, None, :]
        eight = join8(out, 8 * part, BM, BG)
        if EVEN:
            tl.store(line + c, eight)
        else:
            tl.store(line + c, eight, mask=(r[:, None, None] < rows) & (c < columns))


@triton.jit
def block_of_values_down(
    pm, pn, x, down, codes, scales, rows, slots, columns, stride, big, small, key, upper,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Write the block (pm, pn) of `values_in_two_levels` that has its scales along the columns.

    slots: rows of the results, a multiple of 16; from `rows` on x counts as zeros. WHOLE: rows are a multiple of 16.
    """
    BD: tl.constexpr = BM // 16
    g = pm * BD + tl.arange(0, BD)
    c = pn * BN + tl.arange(0, BN)
    v = load_down(x, g, c, rows, columns, stride, EVEN, WHOLE)
    FOUR: tl.constexpr = HADAMARD and not STOCHASTIC
    if HADAMARD:
        v, bits = rotation(v, FOUR)
    else:
        bits = largest(v)
    place = c[None, :].to(tl.int64) * slots + 16 * g[:, None]
    inside = (16 * g[:, None] < slots) & (c[None, :] < columns)
    if down is not None:
        out = values_of(v, bits, big, small, place, upper, key, STOCHASTIC, FOUR, INTEGERS)
        for j in tl.static_range(16):
            at = down + (16 * g[:, None] + j).to(tl.int64) * columns + c[None, :]
            if EVEN:
                tl.store(at, out[j])
            else:
                tl.store(at, out[j], mask=inside)
    if codes is not None:
        scale, w0, w1 = quantized(v, bits, big, place, upper, key, STOCHASTIC, FOUR, True, INTEGERS)
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


@triton.jit
def cached_values_in_two_levels(
    codes, scales, out, rows, columns,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr, INTEGERS: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """Decode codes and scales written by `values_in_two_levels` to its `down`, bf16 [rows, columns]. Exact.

    EACH: an exponent of the tensor factor for each block of rows follows the scales, instead of one.
    """
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
    exponents = scales + (rows // 16).to(tl.int64) * columns
    if EACH:
        code = tl.load(exponents + g, mask=16 * g < rows, other=0).to(tl.int32)[:, None]
    else:
        code = tl.load(exponents).to(tl.int32)
    small = tl.where(code == 255, NAN_BITS, code << 23).to(tl.float32, bitcast=True)
    s = decoded(scale, tl.float8e4nv, INTEGERS) * small
    for j in tl.static_range(16):
        v = saturated(e2m1((words[j // 8] >> (4 * (j % 8))) & 15) * s, tl.bfloat16)
        to = out + (16 * g[:, None] + j).to(tl.int64) * columns + c[None, :]
        if EVEN:
            tl.store(to, v)
        else:
            tl.store(to, v, mask=inside)
