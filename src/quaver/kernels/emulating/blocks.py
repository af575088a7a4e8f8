"""Blocks that share a power of two: a matrix to the bf16 values of its codes, in any format, by one pass.

A bf16 GEMM reads either operand in either direction, so the transpose's values lie as the matrix lies.
"""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import decode_scale, decoded, encode, held, magnitude_bits, shared_exponent
from quaver.kernels.bits.tiles import load_tile, store_tile
from quaver.kernels.emulating.values import LARGEST, rounded, signed
from quaver.kernels.quantizing.decode import decoded_scale


@triton.jit
def values_of_blocks(
    x, along, down, codes, scales,
    rows, columns, stride,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    WIDTH: tl.constexpr, SQUARE: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
    MANTISSA: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr,
):  # fmt: skip
    """x [rows, columns] to what its codes stand for, bf16 of the same shape; each result may be None.

    along: in blocks of WIDTH columns of a row, or WIDTH by WIDTH if SQUARE. down: in blocks of WIDTH rows of a column.
    codes: FP8 codes of the same, of a format CODES that holds the values, and scales: uint8 exponents [blocks of rows,
    columns], 255 for a block that is not finite. Exact, but that 2**128,
    which bf16 has not, becomes its largest number.
    """
    pm, pn = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
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
        # What is beyond bf16 is held here, by a factor of two: one that is too large for float32 holds nothing.
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
            store_tile(down, z, r, c, rows, columns, columns, EVEN)
        if codes is not None:
            q = encode(tl.reshape(signed(z, y), [BM, BN]), CODES, INTEGERS)
            store_tile(codes, q.to(codes.dtype.element_ty, bitcast=True), r, c, rows, columns, columns, EVEN)
            blocks = pm * (BM // WIDTH) + tl.arange(0, BM // WIDTH)
            store_tile(scales, code.to(tl.uint8), blocks, c, tl.cdiv(rows, WIDTH), columns, columns, EVEN)


@triton.jit
def kept_values_of_blocks(
    codes, scales, out, rows, columns,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr, WIDTH: tl.constexpr,
    CODES: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """The codes and scales that `values_of_blocks` writes to its `down`, bf16 [rows, columns]. Exact."""
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
    store_tile(out, held(tl.reshape(v, [BM, BN]), tl.bfloat16), r, c, rows, columns, columns, EVEN)
