"""GEMMs of FP8 codes for groups of rows: rows times their group's matrix, and sums over the rows of each group.

Tensor cores multiply the codes themselves. Scales of whole rows are applied to the float32 sums; scales of blocks to
the sums over each block of k. Programs are persistent: each computes every `number of programs`-th tile, in an order in
which neighbours share operands in the L2 cache.
"""

import triton
import triton.language as tl

from quaver.kernels.grouped import group_at


@triton.jit
def tile_at(p, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the row and column of tile p of `tiles_m` by `tiles_n`, ordered in bands of GROUP_M rows of tiles."""
    band = p // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - band, GROUP_M)
    inside = p % (GROUP_M * tiles_n)
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
    x, w, y, x_scale, w_scale, bias, ends,
    groups, n, k, x_stride, w_stride, tiles_m, tiles_n, row_step, block_step,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_SCALES: tl.constexpr, MAX_IMPRECISE_ACC: tl.constexpr,
):  # fmt: skip
    """Compute y[r] = x[r] @ w[g].T for row r of group g, with scales and the group's bias or None.

    x: FP8 codes [rows, k]; w: [groups · n, k]; y: [rows, n], not written for rows of no group. ends: int32 [groups].
    x_scale, w_scale: float32 [rows] and [groups · n]; or if BLOCK_SCALES, with blocks of BK codes, [rows, blocks of k]
    with strides `row_step` and `block_step`, and for squares of BN × BK [groups · n / BN, blocks of k].
    tiles_m: tiles of rows for any sizes of the groups; tiles_n: tiles of columns.
    MAX_IMPRECISE_ACC: as in `tl.dot`, the products after which sums in the tensor cores, which have fewer bits on
    Hopper, are added in float32; None: never. The result is rounded once.
    """
    blocks = tl.cdiv(k, BK)
    for p in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile, pn = tile_at(p, tiles_m, tiles_n, GROUP_M)
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
            if BLOCK_SCALES:
                row_scales = x_scale + row * row_step
                square_scales = w_scale + (group * (n // BN) + pn).to(tl.int64) * blocks
            for block in range(blocks):
                at = block * BK
                a = load_codes(xs + at, at + i, k, EVEN, 1)
                b = load_codes(ws + at, at + i, k, EVEN, 0)
                if BLOCK_SCALES:
                    part = tl.dot(a, b, max_num_imprecise_acc=MAX_IMPRECISE_ACC)
                    # One after the other: the product of two large scales may overflow where the result is zero.
                    part *= tl.load(row_scales + block * block_step)[:, None]
                    # Multiplying by a power of two is exact, so this equals a multiplication and an addition.
                    sums = tl.fma(part, tl.load(square_scales + block), sums)
                else:
                    sums = tl.dot(a, b, sums, max_num_imprecise_acc=MAX_IMPRECISE_ACC)
            if not BLOCK_SCALES:
                sums *= tl.load(x_scale + row)[:, None]
                sums *= tl.load(w_scale + column)[None, :]
            if bias is not None:
                sums += tl.load(bias + column).to(tl.float32)[None, :]
            to = y + (first + r)[:, None] * n + c[None, :]
            tl.store(to, sums.to(y.dtype.element_ty), mask=(r < rows)[:, None] & (c < n)[None, :])


@triton.jit
def sum_codes(
    x, w, y, x_scale, w_scale, ends,
    groups, m, n, x_stride, w_stride, tiles_m, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_SCALES: tl.constexpr, MAX_IMPRECISE_ACC: tl.constexpr,
):  # fmt: skip
    """Compute y[g] = x[:, slots of g] @ w[:, slots of g].T, with scales; zeros for a group without slots.

    x: FP8 codes [m, slots]; w: [n, slots]; y: [groups, m, n]. x_scale, w_scale: float32 [groups, m] and [groups, n]; or
    if BLOCK_SCALES, with blocks of BK codes, [blocks of slots, m] and [blocks of slots, n]. ends: int32 [groups],
    multiples of 16, and of BK if EVEN or BLOCK_SCALES. Otherwise as `multiply_codes`.
    """
    tiles = tiles_m * tiles_n
    for p in range(tl.program_id(0), groups * tiles, tl.num_programs(0)):
        group = p // tiles
        pm, pn = tile_at(p % tiles, tiles_m, tiles_n, GROUP_M)
        # Ends are multiples of 16; said here, so that the compiler loads 16 bytes at once.
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
            if BLOCK_SCALES:
                block = ((start + at) // BK).to(tl.int64)
                part = tl.dot(a, b, max_num_imprecise_acc=MAX_IMPRECISE_ACC)
                part *= tl.load(x_scale + block * m + row)[:, None]
                sums = tl.fma(part, tl.load(w_scale + block * n + column)[None, :], sums)
            else:
                sums = tl.dot(a, b, sums, max_num_imprecise_acc=MAX_IMPRECISE_ACC)
        if not BLOCK_SCALES:
            # Nothing has written the scales of a group without slots.
            has_slots = end > start
            sums *= tl.load(x_scale + group * m + row, mask=has_slots, other=0.0)[:, None]
            sums *= tl.load(w_scale + group * n + column, mask=has_slots, other=0.0)[None, :]
        to = y + (group.to(tl.int64) * m + r[:, None]) * n + c[None, :]
        tl.store(to, sums.to(y.dtype.element_ty), mask=(r < m)[:, None] & (c < n)[None, :])
