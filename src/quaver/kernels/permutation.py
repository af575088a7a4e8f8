"""Sort the choices of tokens by expert, and move rows between both orders: gather, weighted sum, and dot products.

The sort is a counting sort in four launches, after zeroing the counts. Blocks of choices are counted by expert; the
counts are summed over blocks and experts; then each choice knows its row.

sources: int64 [rows], the choice (token · k + j) of each row, -1 for an empty row. places: integers [tokens · k], the
row of each choice, -1 for a dropped one.
"""

import triton
import triton.language as tl

# ---- sort by expert; rows of an expert follow the order of choices ----


@triton.jit
def count_choices(indices, ranks, counts, sources, choices, experts, total, B: tl.constexpr, CHUNK: tl.constexpr):
    """Count the choices of each expert in each block of B, and set sources [total] to -1, CHUNK elements a program.

    indices: integers [choices]. ranks: int32 [choices], number of earlier choices of the same expert in the block.
    counts: int32 [blocks, experts], zero before. A number outside [0, experts) is not counted.
    """
    p = tl.program_id(0)
    c = p * B + tl.arange(0, B)
    inside = c < choices
    expert = tl.load(indices + c, mask=inside, other=-1).to(tl.int64)
    # Lanes past the last choice match no lane.
    column = tl.load(indices + c, mask=inside, other=-2).to(tl.int64)
    same = (expert[:, None] == column[None, :]).to(tl.int32)  # [B, B]
    lane = tl.arange(0, B)
    rank = tl.sum(tl.where(lane[None, :] < lane[:, None], same, 0), 1)
    later = tl.sum(tl.where(lane[None, :] > lane[:, None], same, 0), 1)
    tl.store(ranks + c, rank, mask=inside)
    last = inside & (later == 0) & (expert >= 0) & (expert < experts)
    tl.store(counts + p.to(tl.int64) * experts + expert, rank + 1, mask=last)
    row = p.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    tl.store(sources + row, tl.full([CHUNK], -1, tl.int64), mask=row < total)


@triton.jit
def scan_counts(counts, totals, blocks, experts, B: tl.constexpr, BE: tl.constexpr):
    """Replace the counts of each expert by their sum over earlier blocks, and sum all to totals int32 [experts]."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    carried = tl.zeros([BE], tl.int32)
    for start in range(0, blocks, B):
        b = start + tl.arange(0, B)
        at = counts + b[:, None].to(tl.int64) * experts + e[None, :]
        mask = (b[:, None] < blocks) & (e[None, :] < experts)
        n = tl.load(at, mask=mask, other=0)
        tl.store(at, carried[None, :] + tl.cumsum(n, 0) - n, mask=mask)
        carried += tl.sum(n, 0)
    tl.store(totals + e, carried, mask=e < experts)


@triton.jit
def expert_ends(totals, starts, ends, experts, pad, capacity, BE: tl.constexpr):
    """Compute the first row and the end of each expert, int32 [experts], padded to a multiple of `pad` rows.

    capacity: maximum number of rows of an expert before padding. Runs in one program.
    """
    carried = tl.zeros([1], tl.int32)
    for start in range(0, experts, BE):
        e = start + tl.arange(0, BE)
        n = tl.minimum(tl.load(totals + e, mask=e < experts, other=0), capacity)
        size = tl.cdiv(n, pad) * pad
        end = carried + tl.cumsum(size, 0)
        tl.store(starts + e, end - size, mask=e < experts)
        tl.store(ends + e, end, mask=e < experts)
        carried += tl.sum(size, 0)


@triton.jit
def place_choices(
    indices, ranks, counts, starts, places, sources, choices, experts, capacity, B: tl.constexpr
):  # fmt: skip
    """Write the row of each choice to places, and its number to that row of sources; arguments as above."""
    p = tl.program_id(0)
    c = p * B + tl.arange(0, B)
    inside = c < choices
    expert = tl.load(indices + c, mask=inside, other=-1).to(tl.int64)
    there = (expert >= 0) & (expert < experts)
    number = tl.load(ranks + c, mask=inside, other=0)
    number += tl.load(counts + p.to(tl.int64) * experts + expert, mask=there, other=0)
    there = there & (number < capacity)
    row = (tl.load(starts + expert, mask=there, other=0) + number).to(tl.int64)
    tl.store(places + c, tl.where(there, row, -1), mask=inside)
    tl.store(sources + row, c.to(tl.int64), mask=there)


# ---- rows ----


@triton.jit
def gather_rows(
    x, weights, sources, y, rows, columns, stride, k, across, BM: tl.constexpr, BN: tl.constexpr, FILL: tl.constexpr
):
    """Copy row sources[r] // k of x to row r of y, multiplied by weights[sources[r]] in float32 if given.

    Empty rows get FILL. across: number of blocks side by side. Exact; products with weights are computed in float32 and
    rounded once.
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
def choice_rows(rows, weights, places, choice, c, inside, count, columns, stride):
    """Load the rows of choices [BM] as float32 [BM, BN], times their weights if given; zeros for dropped ones and
    for numbers beyond the `count` rows."""
    row = tl.load(places + choice, mask=inside, other=-1).to(tl.int64)
    there = (row >= 0) & (row < count)
    mask = there[:, None] & (c[None, :] < columns)
    v = tl.load(rows + row[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
    if weights is not None:
        factor = tl.load(weights + choice, mask=there, other=0.0).to(tl.float32)
        v = v * factor[:, None]
    return v


@triton.jit
def combine_rows(
    rows, weights, places, y, count, tokens, columns, stride, k, across, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Sum each token's k rows, times weights [tokens · k] if given, in float32 in the order of choices, rounded once.

    A dropped choice adds nothing. across: number of blocks side by side. Exact.
    """
    p = tl.program_id(0)
    t = (p // across).to(tl.int64) * BM + tl.arange(0, BM)
    c = (p % across) * BN + tl.arange(0, BN)
    inside = t < tokens
    # The sum begins with the first row, because 0 + -0 would lose the sign.
    total = choice_rows(rows, weights, places, t * k, c, inside, count, columns, stride)
    for j in range(1, k):
        total += choice_rows(rows, weights, places, t * k + j, c, inside, count, columns, stride)
    at = y + t[:, None] * columns + c[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=inside[:, None] & (c[None, :] < columns))


@triton.jit
def dot_rows(x, rows, places, y, count, choices, columns, x_stride, stride, k, BM: tl.constexpr, BN: tl.constexpr):
    """Compute the dot product of row choice // k of x and the choice's row, float32 [choices]; 0 for a dropped choice.

    Bounded: the sum over columns is computed in float32, in blocks of BN.
    """
    choice = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = choice < choices
    row = tl.load(places + choice, mask=inside, other=-1).to(tl.int64)
    there = ((row >= 0) & (row < count))[:, None]
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, columns, BN):
        c = start + tl.arange(0, BN)
        mask = there & (c[None, :] < columns)
        a = tl.load(x + (choice // k)[:, None] * x_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(rows + row[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        total += a * b
    tl.store(y + choice, tl.sum(total, 1), mask=inside)
