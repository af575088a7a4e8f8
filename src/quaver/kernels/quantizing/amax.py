"""The largest magnitude of a tensor, or of each of two in one launch."""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import flushed, magnitude_bits, note_amax
from quaver.kernels.bits.tiles import load_tile


@triton.jit
def block_amax(
    pm, pn, x, out, work, rows, columns, stride, programs,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What the program of block (pm, pn) does for `amax`."""
    r = pm * BM + tl.arange(0, BM)
    c = pn * BN + tl.arange(0, BN)
    bits = flushed(tl.max(magnitude_bits(load_tile(x, r, c, rows, columns, stride, EVEN)), None))
    note_amax(work, bits, programs, out, None, None, False, False)


@triton.jit
def amax(
    x, out, work, rows, columns, stride, programs,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """x [rows, columns], its rows `stride` apart, to out float32 [1]; one pass and no initialization.

    work: int32 [2] of zeros, left as zeros. TALL: rows are the grid's first axis.
    Exact: the bits of |x|, NaN above infinity, subnormals 0.
    """
    pm, pn = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    block_amax(pm, pn, x, out, work, rows, columns, stride, programs, BM, BN, EVEN)


@triton.jit
def amax_of_two(
    x, out, work, x_2, out_2, work_2, rows, columns, stride, programs, rows_2, columns_2, stride_2, programs_2, first,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, BM_2: tl.constexpr, EVEN_2: tl.constexpr,
):  # fmt: skip
    """`amax` of two matrices: the `first` programs take x, the others x_2. Exact."""
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
