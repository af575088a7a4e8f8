"""Tiles of a matrix that lies row by row; EVEN: no tile reaches over its edges."""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import widened


@triton.jit
def load_tile(x, r, c, rows, columns, stride, EVEN: tl.constexpr):
    """Rows r and columns c of x [rows, columns], whose rows are `stride` apart: float32 [BM, BN], zero outside x."""
    at = x + r[:, None].to(tl.int64) * stride + c[None, :]
    if EVEN:
        return widened(tl.load(at))
    return widened(tl.load(at, mask=(r[:, None] < rows) & (c[None, :] < columns), other=0.0))


@triton.jit
def store_tile(y, v, r, c, rows, columns, stride, EVEN: tl.constexpr):
    """v [BM, BN] to the same place of y; nothing is written outside."""
    at = y + r[:, None].to(tl.int64) * stride + c[None, :]
    if EVEN:
        tl.store(at, v)
    else:
        tl.store(at, v, mask=(r[:, None] < rows) & (c[None, :] < columns))
