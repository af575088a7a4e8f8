"""What is left to do to a product in float32: scales that no operand took in, a bias, one rounding."""

import triton
import triton.language as tl

from quaver.kernels.bits.tiles import load_tile, store_tile


@triton.jit
def halves(scale):
    """Two factors of about the same size, the first a power of two; NaN in the second."""
    field = (((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF) + 127) >> 1
    first = (field << 23).to(tl.float32, bitcast=True)
    return first, scale * ((254 - field) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fold(
    y, of_rows, of_columns, bias, out, rows, columns,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    ONE_ROW: tl.constexpr, ONE_COLUMN: tl.constexpr,
):  # fmt: skip
    """y [rows, columns] float32 times a scale for each row and each column, plus a bias [columns], in out's dtype.

    of_rows, of_columns: float32 [rows] and [columns], or [1] if ONE_ROW and ONE_COLUMN, or None. In halves, since one
    scale may take a value out of the range where both do not. Exact but for the bias's sum and the rounding of each
    product of scales that are no powers of two.
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
    """Two products in float32, flat, each to its result's dtype: the `first` programs take a, the others b. Exact: one
    rounding."""
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
