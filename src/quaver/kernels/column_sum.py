"""Sums over rows: of a gradient, for a bias, and of what each program of another kernel found.

Deterministic: every program writes what it has summed, and the second pass adds that in a fixed order.
"""

import triton
import triton.language as tl


@triton.jit
def column_sums(
    x, out, rows, columns, stride, rows_each,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x [rows, columns] to out [programs along 1, columns]: program j sums rows_each rows from j · rows_each on.

    rows_each: a multiple of BM. out is float32 where a second pass follows, else of any dtype, rounded once.
    Bounded: a float32 sum in a fixed order.
    """
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    begin = tl.program_id(1) * rows_each
    total = tl.zeros([BM, BN], tl.float32)
    for offset in range(0, rows_each, BM):
        r = begin + offset + tl.arange(0, BM)
        at = x + r[:, None].to(tl.int64) * stride + c[None, :]  # [BM, BN]
        if EVEN:
            total += tl.load(at).to(tl.float32)
        else:
            total += tl.load(at, mask=(r[:, None] < rows) & (c[None, :] < columns), other=0.0).to(tl.float32)
    found = tl.sum(total, 0).to(out.dtype.element_ty)
    tl.store(out + tl.program_id(1).to(tl.int64) * columns + c, found, mask=c < columns)


@triton.jit
def partial_sums(out, x0, x1, x2, x3, c, columns, EVEN: tl.constexpr):
    """A tile that lies in four parts [BM / 4, BN] summed over its rows into out [programs along 1, columns]: what a
    kernel that reads a gradient anyway calls for the bias."""
    found = tl.sum((x0 + x1) + (x2 + x3), 0)
    at = out + tl.program_id(1).to(tl.int64) * columns + c
    if EVEN:
        tl.store(at, found)
    else:
        tl.store(at, found, mask=c < columns)
