"""MXFP8: FP8 codes with an E8M0 scale per 32 elements along k or per 32 × 32, for a matrix and its transpose.

Also decodes FP8, MXFP8 and NVFP4 operands. A block of 128 × 128 elements has one tile of 512 scales in either
direction; zeros beyond the data give the zeros that pad a tile.
"""

import triton
import triton.language as tl

from quaver.kernels.numerics import (
    NAN_BITS,
    decoded,
    encode,
    encode4,
    largest_of_runs,
    magnitude_bits,
    pack4,
    saturated,
    shared_exponent,
    swizzled,
    widened,
)
from quaver.kernels.tensorwise import load4, store4, store_transposed

# ---- MXFP8 ----


@triton.jit
def block_at(p, down, right, stride, BM: tl.constexpr, BN: tl.constexpr, NEAR: tl.constexpr):
    """Return pointers to a block [BM, BN] of a matrix at p; NEAR: offsets within the block fit 32 bits.

    Column offsets are added before row offsets, so that adjacent elements of a row share an address computation.
    """
    line = tl.arange(0, BM)[:, None]
    if NEAR:
        at = p + (down.to(tl.int64) * (BM * stride) + right * BN) + tl.arange(0, BN)[None, :]
        return at + line * stride
    at = p + (down.to(tl.int64) * BM * stride + right * BN) + tl.arange(0, BN)[None, :]
    return at + line.to(tl.int64) * stride


@triton.jit
def mxfp8_rows(
    x, q, s4,
    rows, columns, stride, q_stride, across,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    NEAR: tl.constexpr, SQUARE: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Quantize x [rows, columns] to q of the same shape and swizzled scales s4, in blocks of 1 × 32, or 32 × 32 if
    SQUARE.

    s4: scale bytes as int32. q_stride: bytes of a row of q; padding is zero. across: tiles of scales side by side.
    dtype: of the codes. Exact.
    """
    down, right = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    r = down * BM + tl.arange(0, BM)
    c = right * BN + tl.arange(0, BN)
    at = block_at(x, down, right, stride, BM, BN, NEAR)
    if EVEN:
        v = widened(tl.load(at))
    else:
        v = widened(tl.load(at, mask=(r[:, None] < rows) & (c[None, :] < columns), other=0.0))
    v = tl.reshape(v, [BM, BN // 32, 32])
    top = tl.max(tl.reshape(largest_of_runs(v, 4), [BM, BN // 32, 2]), 2)  # [BM, BN / 32]
    if SQUARE:
        top = tl.max(tl.reshape(top, [BM // 32, 32, BN // 32]), 1)[:, None, :]
        top = tl.reshape(tl.broadcast_to(top, [BM // 32, 32, BN // 32]), [BM, BN // 32])
    code, e = shared_exponent(top, EMAX, TOP_MANTISSA)
    if SQUARE and not EVEN:
        code = tl.where(r[:, None] < rows, code, 0)
    # Whole tiles: only the offset of the first depends on the position of the block.
    tile = ((down * (BM // 128)).to(tl.int64) * across + right * (BN // 128)) * 128
    # The four blocks of a row in a tile are adjacent: one word, so that no byte changes threads.
    word = tl.sum(tl.reshape(code, [BM, BN // 128, 4]) << 8 * tl.arange(0, 4)[None, None, :], 2)
    tl.store(s4 + tile + swizzled(tl.arange(0, BM), 4 * tl.arange(0, BN // 128), across) // 4, word)
    codes = tl.reshape(encode(v * e[:, :, None], dtype, INTEGERS), [BM, BN]).to(q.dtype.element_ty, bitcast=True)
    at = block_at(q, down, right, q_stride, BM, BN, NEAR)
    if EVEN:
        tl.store(at, codes)
    else:
        tl.store(at, codes, mask=(r[:, None] < rows) & (c[None, :] < q_stride))


@triton.jit
def across_rows(v, BR: tl.constexpr, BN: tl.constexpr):
    """Reduce magnitudes [BR, BN], each of four rows, to the maximum of 8 × 4 rows: [BR / 8, BN]."""
    return tl.max(tl.reshape(v, [BR // 8, 8, BN]), 1)


@triton.jit
def across_columns(v, BR: tl.constexpr, BN: tl.constexpr):
    """Reduce [BR, BN] to the maximum of 32 columns: [BR, BN / 32]."""
    return tl.max(tl.reshape(v, [BR, BN // 32, 32]), 2)


@triton.jit
def each_row(v, BR: tl.constexpr, BK: tl.constexpr):
    """Expand values shared by 32 rows [BR / 8, BK] to each four of them: [BR, BK]."""
    return tl.reshape(tl.broadcast_to(v[:, None, :], [BR // 8, 8, BK]), [BR, BK])


@triton.jit
def each_column(v, BR: tl.constexpr, BN: tl.constexpr):
    """Expand values shared by 32 columns [BR, BN / 32] to each of them: [BR, BN]."""
    return tl.reshape(tl.broadcast_to(v[:, :, None], [BR, BN // 32, 32]), [BR, BN])


@triton.jit
def scaled_row(v, m, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr):
    """Return rows v [BR, BN] with magnitudes m times the factors of their 1 × 32 blocks, and the scale codes."""
    code, e = shared_exponent(across_columns(m, BR, BN), EMAX, TOP_MANTISSA)
    return v * each_column(e, BR, BN), code


@triton.jit
def mxfp8_columns(
    x, q, s, qt, st,
    rows, columns, stride, q_stride, qt_stride4, across, across_t,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    ROWS: tl.constexpr, SQUARE: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Quantize the transpose of x [rows, columns] to qt as int32 and st, in blocks of 32 rows of x; if ROWS also x
    itself.

    SQUARE: blocks are 32 × 32, so that both have the same codes. q, across: as in `mxfp8_rows`. s: swizzled bytes; st,
    across_t: the same of the transpose. qt_stride4: int32 per row of qt. dtype: of the codes. Exact.
    """
    mxfp8_columns_at(
        tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0),
        x, q, s, qt, st, rows, columns, stride, q_stride, qt_stride4, across, across_t,
        BM, BN, EVEN, ROWS, SQUARE, EMAX, TOP_MANTISSA, INTEGERS, dtype,
    )  # fmt: skip


@triton.jit
def mxfp8_columns_at(
    down, right, x, q, s, qt, st,
    rows, columns, stride, q_stride, qt_stride4, across, across_t,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, SQUARE: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Run the program of block (down, right) of `mxfp8_columns`."""
    BR: tl.constexpr = BM // 4
    BK: tl.constexpr = BN // 32
    r = down * BM + 4 * tl.arange(0, BR)
    r4 = down * BR + tl.arange(0, BR)
    c = right * BN + tl.arange(0, BN)
    blocks_down = down * (BM // 32) + tl.arange(0, BM // 32)
    blocks_right = right * BK + tl.arange(0, BK)
    x0, x1, x2, x3 = load4(x, r, c, rows, columns, stride, EVEN)
    m0, m1, m2, m3 = magnitude_bits(x0), magnitude_bits(x1), magnitude_bits(x2), magnitude_bits(x3)
    m = across_rows(tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3)), BR, BN)  # [BM / 32, BN]
    if SQUARE:
        m = across_columns(m, BM // 32, BN)  # [BM / 32, BK]
        code, _ = shared_exponent(m, EMAX, TOP_MANTISSA)
        m = each_column(m, BM // 32, BN)
    transposed_code, e = shared_exponent(m, EMAX, TOP_MANTISSA)  # [BM / 32, BN]
    if SQUARE and not EVEN:
        transposed_code = tl.where(c[None, :] < columns, transposed_code, 0)
    tl.store(st + swizzled(c, blocks_down, across_t), tl.trans(transposed_code.to(tl.uint8)))
    e = each_row(e, BR, BN)
    c0, c1, c2, c3 = encode4(x0 * e, x1 * e, x2 * e, x3 * e, dtype, INTEGERS)
    store_transposed(qt, r4, c, columns, qt_stride4, pack4(c0, c1, c2, c3), EVEN)
    if ROWS:
        if SQUARE:
            s0 = each_row(code, BR, BK)
            s1, s2, s3 = s0, s0, s0
            if not EVEN:
                s0 = tl.where(r[:, None] < rows, s0, 0)
                s1 = tl.where(r[:, None] + 1 < rows, s1, 0)
                s2 = tl.where(r[:, None] + 2 < rows, s2, 0)
                s3 = tl.where(r[:, None] + 3 < rows, s3, 0)
        else:
            y0, s0 = scaled_row(x0, m0, EMAX, TOP_MANTISSA, BR, BN)
            y1, s1 = scaled_row(x1, m1, EMAX, TOP_MANTISSA, BR, BN)
            y2, s2 = scaled_row(x2, m2, EMAX, TOP_MANTISSA, BR, BN)
            y3, s3 = scaled_row(x3, m3, EMAX, TOP_MANTISSA, BR, BN)
            c0, c1, c2, c3 = encode4(y0, y1, y2, y3, dtype, INTEGERS)
        store4(q, r, c, rows, q_stride, c0, c1, c2, c3, EVEN)
        tl.store(s + swizzled(r, blocks_right, across), s0.to(tl.uint8))
        tl.store(s + swizzled(r + 1, blocks_right, across), s1.to(tl.uint8))
        tl.store(s + swizzled(r + 2, blocks_right, across), s2.to(tl.uint8))
        tl.store(s + swizzled(r + 3, blocks_right, across), s3.to(tl.uint8))


# ---- decode: codes and scales to values, for operands without a native GEMM ----


@triton.jit
def e2m1(code):
    """Return the float32 values of E2M1 codes 0 … 15, int32."""
    m = code & 7
    # 0 and 1/2, or exponent and mantissa bits at their positions.
    bits = tl.where(m < 2, m * 0x3F000000, (m << 22) + (126 << 23))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def load_codes(
    q, r, c, columns, rows, stride,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Load float32 values [BM, BN] of eight-bit codes, or of four-bit codes, two per byte (CODES None)."""
    PAIRS: tl.constexpr = CODES is None
    at = q + r[:, None].to(tl.int64) * stride + c[None, :]
    if EVEN:
        codes = tl.load(at)
    else:
        wide: tl.constexpr = 2 if PAIRS else 1
        codes = tl.load(at, mask=(r[:, None] < rows) & (wide * c[None, :] < columns), other=0.0)
    codes = codes.to(tl.uint8, bitcast=True)
    if PAIRS:
        byte = codes.to(tl.int32)
        values = tl.reshape(tl.join(e2m1(byte & 15), e2m1(byte >> 4)), [BM, BN])
    else:
        values = decoded(codes, CODES, INTEGERS)
    return values


@triton.jit
def decoded_scale(scale, factor, KIND: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTEGERS: tl.constexpr):
    """Convert stored scales to float32: unchanged, from E8M0 codes, or from E4M3 codes over the tensor's factor."""
    if KIND == "e8m0":
        bits = scale.to(tl.int32)
        bits = tl.where(bits == 0, 0x00400000, tl.where(bits == 255, NAN_BITS, bits << 23))
        value = bits.to(tl.float32, bitcast=True)
    elif KIND == "two_level":
        value = decoded(scale, tl.float8e4nv, INTEGERS)
        if factor is not None:
            whole = tl.load(factor)
            if POWER_OF_TWO:
                bits = whole.to(tl.int32, bitcast=True)
                bits = tl.where(whole == whole, 0x7F000000 - bits, NAN_BITS)
                value = value * bits.to(tl.float32, bitcast=True)
            else:
                value = tl.div_rn(value, value * 0.0 + whole)
    else:
        value = scale
    return value


@triton.jit
def decode(
    q, scale, factor, out,
    rows, columns, stride, scale_stride, scale_step, out_stride, across,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    KIND: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, SWIZZLED: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    CODES: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Write q [rows, columns] times its scales to out of the same shape, in out's dtype; both in storage order.

    scale: None to omit it; of blocks of BR × BC (0: the whole axis) with strides `scale_stride` and `scale_step`, or
    SWIZZLED with `across` tiles side by side. factor float32 [1]: of two-level scales, or None to omit it. KIND:
    "float32", "e8m0", "two_level". CODES: format of q; None: E2M1, two per byte. A NaN scale makes its block NaN. Exact
    if out's dtype can represent the products; overflow becomes its largest number.
    """
    down, right = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    r = down * BM + tl.arange(0, BM)
    c = right * BN + tl.arange(0, BN)
    if CODES is None:
        p = right * (BN // 2) + tl.arange(0, BN // 2)
        v = load_codes(q, r, p, columns, rows, stride, BM, BN, EVEN, CODES, INTEGERS)
    else:
        v = load_codes(q, r, c, columns, rows, stride, BM, BN, EVEN, CODES, INTEGERS)
    if scale is not None:
        # Scales of a row of this program, and elements that share one.
        WIDTH: tl.constexpr = BN if BC == 0 or BC > BN else BC
        block = (right * (BN // WIDTH) + tl.arange(0, BN // WIDTH)) * WIDTH // (columns if BC == 0 else BC)
        line = r * 0 if BR == 0 else r // BR
        if SWIZZLED:
            at = scale + swizzled(r, block, across)
        else:
            at = scale + line[:, None].to(tl.int64) * scale_stride + block[None, :].to(tl.int64) * scale_step
        if EVEN:
            stored = tl.load(at)
        else:
            first = (right * (BN // WIDTH) + tl.arange(0, BN // WIDTH)) * WIDTH
            stored = tl.load(at, mask=(r[:, None] < rows) & (first[None, :] < columns), other=0)
        s = decoded_scale(stored, factor, KIND, POWER_OF_TWO, INTEGERS)
        v = tl.reshape(tl.reshape(v, [BM, BN // WIDTH, WIDTH]) * s[:, :, None], [BM, BN])
    at = out + r[:, None].to(tl.int64) * out_stride + c[None, :]
    values = saturated(v, out.dtype.element_ty)
    if EVEN:
        tl.store(at, values)
    else:
        tl.store(at, values, mask=(r[:, None] < rows) & (c[None, :] < columns))
