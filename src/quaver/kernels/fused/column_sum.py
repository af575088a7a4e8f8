"""Sums over rows, such as the partial sums of another kernel's programs: deterministic, always in the same order."""

import triton
import triton.language as tl


@triton.jit
def column_sums(
    x, out, second, rows, columns, stride, rows_each, split,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x [rows, columns] to out [programs along 1, columns]: program j sums rows_each rows from j · rows_each on.

    rows_each: a multiple of BM. out is float32 where a second pass follows, else of any dtype, rounded once.
    second: None; or of any dtype: columns from `split` on go there, and no second pass follows.
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
    summed = tl.sum(total, 0)
    at = out + tl.program_id(1).to(tl.int64) * columns + c
    if second is None:
        tl.store(at, summed.to(out.dtype.element_ty), mask=c < columns)
    else:
        tl.store(at, summed.to(out.dtype.element_ty), mask=c < split)
        tl.store(second + c - split, summed.to(second.dtype.element_ty), mask=(c >= split) & (c < columns))
