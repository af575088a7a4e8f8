"""The largest magnitude of a tensor."""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import flushed, magnitude_bits, meet, widened


@triton.jit
def amax(
    x, out, work, rows, columns, stride, programs,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """x [rows, columns], its rows `stride` apart, to out float32 [1]; one pass and no initialization.

    work: int32 [2] of zeros, left as zeros. TALL: rows are the grid's first axis.
    Exact: the bits of |x|, NaN above infinity, subnormals 0.
    """
    r = tl.program_id(0 if TALL else 1) * BM + tl.arange(0, BM)
    c = tl.program_id(1 if TALL else 0) * BN + tl.arange(0, BN)
    at = x + r[:, None].to(tl.int64) * stride + c[None, :]  # [BM, BN]
    if EVEN:
        v = tl.load(at)
    else:
        v = tl.load(at, mask=(r[:, None] < rows) & (c[None, :] < columns), other=0.0)
    bits = flushed(tl.max(magnitude_bits(widened(v)), None))
    last, top = meet(work, bits, programs)
    if last:
        tl.store(out, top.to(tl.float32, bitcast=True))
