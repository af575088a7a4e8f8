"""Move rows between the order of tokens and that of their experts: gather, weighted sum, and dot products.

sources: int64 [rows], the choice (token · k + j) of each row, -1 for an empty row. places: integers [tokens · k], the
row of each choice, -1 for a dropped one.
"""

import triton
import triton.language as tl


@triton.jit
def gather_rows(
    x, weights, sources, y, rows, columns, stride, k, across, BM: tl.constexpr, BN: tl.constexpr, FILL: tl.constexpr
):
    """Copy row sources[r] // k of x to row r of y, multiplied by weights[sources[r]] in float32 if given.

    Empty rows get FILL. across: number of blocks side by side. Exact, with a weight rounded once.
    """
    p = tl.program_id(0)
    r = (p // across) * BM + tl.arange(0, BM)
    c = (p % across) * BN + tl.arange(0, BN)
    choice = tl.load(sources + r, mask=r < rows, other=-1).to(tl.int64)
    filled = choice >= 0
    inside = filled[:, None] & (c[None, :] < columns)
    v = tl.load(x + (choice // k)[:, None] * stride + c[None, :], mask=inside, other=0)
    if weights is not None:
        factor = tl.load(weights + choice, mask=filled, other=0.0).to(tl.float32)
        v = (v.to(tl.float32) * factor[:, None]).to(v.dtype)
    v = tl.where(filled[:, None], v, tl.full([BM, BN], FILL, v.dtype))
    tl.store(y + r[:, None].to(tl.int64) * columns + c[None, :], v, mask=(r[:, None] < rows) & (c[None, :] < columns))


@triton.jit
def choice_rows(rows, weights, places, choice, c, inside, columns, stride):
    """Load the rows of choices [BM] as float32 [BM, BN], times their weights if given; zeros for dropped ones."""
    row = tl.load(places + choice, mask=inside, other=-1).to(tl.int64)
    there = row >= 0
    mask = there[:, None] & (c[None, :] < columns)
    v = tl.load(rows + row[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
    if weights is not None:
        factor = tl.load(weights + choice, mask=there, other=0.0).to(tl.float32)
        v = v * factor[:, None]
    return v


@triton.jit
def combine_rows(
    rows, weights, places, y, tokens, columns, stride, k, across, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Sum each token's k rows, times weights [tokens · k] if given, in float32 in the order of choices, rounded once.

    A dropped choice adds nothing. across: number of blocks side by side. Exact.
    """
    p = tl.program_id(0)
    t = (p // across).to(tl.int64) * BM + tl.arange(0, BM)
    c = (p % across) * BN + tl.arange(0, BN)
    inside = t < tokens
    # The sum begins with the first row, because 0 + -0 would lose the sign.
    total = choice_rows(rows, weights, places, t * k, c, inside, columns, stride)
    for j in range(1, k):
        total += choice_rows(rows, weights, places, t * k + j, c, inside, columns, stride)
    at = y + t[:, None] * columns + c[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=inside[:, None] & (c[None, :] < columns))


@triton.jit
def dot_rows(x, rows, places, y, choices, columns, x_stride, stride, k, BM: tl.constexpr, BN: tl.constexpr):
    """Compute the dot product of row choice // k of x and the choice's row, float32 [choices]; 0 for a dropped choice.

    Bounded: the sum over columns is computed in float32, in blocks of BN.
    """
    choice = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = choice < choices
    row = tl.load(places + choice, mask=inside, other=-1).to(tl.int64)
    there = (row >= 0)[:, None]
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, columns, BN):
        c = start + tl.arange(0, BN)
        mask = there & (c[None, :] < columns)
        a = tl.load(x + (choice // k)[:, None] * x_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(rows + row[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        total += a * b
    tl.store(y + choice, tl.sum(total, 1), mask=inside)
