"""GEMMs of FP8 codes for groups of rows: rows times their group's matrix, and sums over the rows of each group.

Tensor cores multiply the codes themselves. Scales of whole rows are applied to the float32 sums; scales of blocks to
the sums over each block of k. Programs are persistent: each computes every `number of programs`-th tile, in an order in
which neighbours share operands in the L2 cache.
"""

import triton
import triton.language as tl

from quaver.kernels.grouped import group_at


@triton.jit
def tile_at(p, down, across, TALL: tl.constexpr):
    """Return the row and column of tile p of `down` by `across`, ordered in bands of TALL rows of tiles."""
    band = p // (TALL * across) * TALL
    height = tl.minimum(down - band, TALL)
    inside = p % (TALL * across)
    return band + inside % height, inside // height


@triton.jit
def load_codes(at, i, end, EVEN: tl.constexpr, AXIS: tl.constexpr):
    """Load a tile whose contraction axis has the positions i; zeros from `end` on, unless EVEN."""
    if EVEN:
        codes = tl.load(at)
    else:
        inside = i < end
        codes = tl.load(at, mask=inside[None, :] if AXIS == 1 else inside[:, None], other=0.0)
    return codes


@triton.jit
def multiply_codes(
    x, w, y, of_rows, of_columns, bias, ends,
    groups, n, k, x_stride, w_stride, down, across, row_step, block_step,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    BLOCKS: tl.constexpr, IMPRECISE: tl.constexpr,
):  # fmt: skip
    """Compute y[r] = x[r] @ w[g].T for row r of group g, with scales and the group's bias or None.

    x: FP8 codes [rows, k]; w: [groups · n, k]; y: [rows, n], not written for rows of no group. Unless BLOCKS, of_rows
    float32 [rows] and of_columns [groups · n] are scales of rows. With BLOCKS, BK is the width of a block: of_rows are
    scales [rows, blocks of k] with strides `row_step` and `block_step`, of_columns those of BN × BK squares [groups · n
    / BN, blocks of k].
    ends: int32 [groups]. down, across: numbers of tiles. IMPRECISE: products that tensor cores add with fewer bits.
    Products are exact; a sum is float32, and rounded once.
    """
    blocks = tl.cdiv(k, BK)
    for p in range(tl.program_id(0), down * across, tl.num_programs(0)):
        tile, pn = tile_at(p, down, across, TALL)
        group, first, rows, pm, _ = group_at(tile, ends, groups, BM, BM)
        if group >= 0:
            r = pm * BM + tl.arange(0, BM)
            c = pn * BN + tl.arange(0, BN)
            # Beyond the end the last row or column is read again; its sums are not stored.
            row = first + tl.minimum(r, rows - 1)
            column = group.to(tl.int64) * n + tl.minimum(c, n - 1)
            i = tl.arange(0, BK)
            xs = x + row[:, None] * x_stride + i[None, :]
            ws = w + column[None, :] * w_stride + i[:, None]
            sums = tl.zeros([BM, BN], tl.float32)
            if BLOCKS:
                row_scales = of_rows + row * row_step
                square_scales = of_columns + (group * (n // BN) + pn).to(tl.int64) * blocks
            for block in range(blocks):
                at = block * BK
                a = load_codes(xs + at, at + i, k, EVEN, 1)
                b = load_codes(ws + at, at + i, k, EVEN, 0)
                if BLOCKS:
                    scale = tl.load(row_scales + block * block_step) * tl.load(square_scales + block)
                    # Scales are powers of two, so that the fused operation rounds as two would.
                    sums = tl.fma(tl.dot(a, b, max_num_imprecise_acc=IMPRECISE), scale[:, None], sums)
                else:
                    sums = tl.dot(a, b, sums, max_num_imprecise_acc=IMPRECISE)
            if not BLOCKS:
                sums *= tl.load(of_rows + row)[:, None]
                sums *= tl.load(of_columns + column)[None, :]
            if bias is not None:
                sums += tl.load(bias + column).to(tl.float32)[None, :]
            to = y + (first + r)[:, None] * n + c[None, :]
            tl.store(to, sums.to(y.dtype.element_ty), mask=(r < rows)[:, None] & (c < n)[None, :])


@triton.jit
def sum_codes(
    x, w, y, of_rows, of_columns, ends,
    groups, m, n, x_stride, w_stride, down, across,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    BLOCKS: tl.constexpr, IMPRECISE: tl.constexpr,
):  # fmt: skip
    """Compute y[g] = x[:, slots of g] @ w[:, slots of g].T, with scales; zeros for a group without slots.

    x: FP8 codes [m, slots]; w: [n, slots]; y: [groups, m, n]. Unless BLOCKS, of_rows float32 [groups, m] and of_columns
    [groups, n] are scales of rows. With BLOCKS, BK is the width of a block, and they are [blocks of slots, m] and
    [blocks of slots, n]. ends: int32 [groups], multiples of 16, or of BK if EVEN. Otherwise as `multiply_codes`.
    """
    tiles = down * across
    for p in range(tl.program_id(0), groups * tiles, tl.num_programs(0)):
        group = p // tiles
        pm, pn = tile_at(p % tiles, down, across, TALL)
        start = tl.load(ends + tl.maximum(group - 1, 0)) // 16 * 16
        start = tl.where(group == 0, 0, start)
        end = tl.load(ends + group) // 16 * 16
        r = pm * BM + tl.arange(0, BM)
        c = pn * BN + tl.arange(0, BN)
        row, column = tl.minimum(r, m - 1), tl.minimum(c, n - 1)
        i = tl.arange(0, BK)
        xs = x + row.to(tl.int64)[:, None] * x_stride + start + i[None, :]
        ws = w + column.to(tl.int64)[None, :] * w_stride + start + i[:, None]
        sums = tl.zeros([BM, BN], tl.float32)
        for at in range(0, end - start, BK):
            a = load_codes(xs + at, at + i, end - start, EVEN, 1)
            b = load_codes(ws + at, at + i, end - start, EVEN, 0)
            if BLOCKS:
                block = ((start + at) // BK).to(tl.int64)
                part = tl.dot(a, b, max_num_imprecise_acc=IMPRECISE) * tl.load(of_rows + block * m + row)[:, None]
                sums = tl.fma(part, tl.load(of_columns + block * n + column)[None, :], sums)
            else:
                sums = tl.dot(a, b, sums, max_num_imprecise_acc=IMPRECISE)
        if not BLOCKS:
            # Nothing has written the scales of a group without slots.
            has_slots = end > start
            sums *= tl.load(of_rows + group * m + row, mask=has_slots, other=0.0)[:, None]
            sums *= tl.load(of_columns + group * n + column, mask=has_slots, other=0.0)[None, :]
        to = y + (group.to(tl.int64) * m + r[:, None]) * n + c[None, :]
        tl.store(to, sums.to(y.dtype.element_ty), mask=(r < m)[:, None] & (c < n)[None, :])
