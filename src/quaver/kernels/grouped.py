"""Quantize rows of several groups in one launch: a program finds its group and quantizes a block of its rows.

The groups' ends are on the device, so that the host need not know the sizes. Rows of an operand that a GEMM sums over k
stay where they are. An operand that a GEMM sums over rows has its rows in slots: each group begins at a multiple of
`unit` slots, and zeros fill its last unit. The blocks themselves are those of the kernels for one matrix.
"""

import triton
import triton.language as tl

from quaver.kernels.emulation import (
    block_of_values,
    block_of_values_along,
    block_of_values_down,
    exponent_of,
    level_of,
)
from quaver.kernels.mxfp8 import mxfp8_columns_at
from quaver.kernels.numerics import (
    decode_scale,
    encode4,
    encode_factor,
    flushed,
    load_tile,
    magnitude_bits,
    noise_stream,
    packed_codes,
    store_tile,
    swizzled,
    transposed,
    whole_word,
)
from quaver.kernels.nvfp4 import block_along, block_down, largest, load_down, quarter
from quaver.kernels.rowwise import blockwise_at, rows_at, squares_at
from quaver.kernels.tensorwise import keep_newest, load4, store4


@triton.jit
def group_at(tile, ends, groups, BM: tl.constexpr, unit: tl.constexpr):
    """Find the group of a tile of BM rows; tiles are counted through all groups.

    ends: int32 [groups]. Returns the group, or -1 behind the last; its first row and its number of rows; the index of
    the tile within the group; and the number of units of slots before the group.
    """
    start, tiles, units = 0, 0, 0
    group, first, rows, own_tile, before = -1, 0, 0, 0, 0
    for g in range(groups):
        size = tl.load(ends + g) - start
        here = (tile >= tiles) & (tile < tiles + tl.cdiv(size, BM))
        group = tl.where(here, g, group)
        first = tl.where(here, start, first)
        rows = tl.where(here, size, rows)
        own_tile = tl.where(here, tile - tiles, own_tile)
        before = tl.where(here, units, before)
        tiles += tl.cdiv(size, BM)
        units += tl.cdiv(size, unit)
        start += size
    return group, tl.cast(first, tl.int64), rows, own_tile, tl.cast(before, tl.int64)


# ---- amaxes ----


@triton.jit
def group_amaxes(
    x, amaxes, ends, groups, columns, stride, across,
    BM: tl.constexpr, BN: tl.constexpr, EACH_COLUMN: tl.constexpr,
):  # fmt: skip
    """Compute the amax bits of each group of rows of x into amaxes, int32 [groups], zero before.

    EACH_COLUMN: of each column of each group, int32 [groups, columns]. across: number of blocks side by side. Exact.
    """
    p = tl.program_id(0)
    group, first, rows, pm, _ = group_at(p // across, ends, groups, BM, BM)
    if group >= 0:
        r = pm * BM + tl.arange(0, BM)
        c = (p % across) * BN + tl.arange(0, BN)
        m = magnitude_bits(load_tile(x + first * stride, r, c, rows, columns, stride, False))
        if EACH_COLUMN:
            at = amaxes + group.to(tl.int64) * columns + c
            tl.atomic_max(at, tl.max(m, 0), mask=c < columns, sem="relaxed")
        else:
            tl.atomic_max(amaxes + group, flushed(tl.max(m, None)), sem="relaxed")


# ---- one scale per group, or one per column of a group ----


@triton.jit
def group_cast(
    x, q, qt, scale, transposed_scale, amaxes, factors, newest, ends,
    groups, columns, stride, q_stride, qt_lines, qt_group_lines, factor_step, newest_step, across,
    BM: tl.constexpr, BN: tl.constexpr, EACH_COLUMN: tl.constexpr, STACKED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Cast rows of x to q of the same shape, and to the transposes qt, as int32; q or qt may be None.

    amaxes: int32 bits, as `group_amaxes` writes them. factors: encode factors of the groups, `factor_step` apart, each
    used unless it is 0; or None. newest: newest amaxes of the groups' histories, `newest_step` apart, raised to these
    if they are finite; or None.
    scale: float32 [rows], and transposed_scale: float32 [groups, columns], as GEMMs with a scale per row read them.
    qt: [columns, slots] in units of 16 slots, or [groups, columns, slots of a group] if STACKED, where all groups are
    equal; lines of 16 bytes. across: number of blocks side by side. Exact.
    """
    p = tl.program_id(0)
    pn = p % across
    group, first, rows, pm, before = group_at(p // across, ends, groups, BM, 16)
    if group >= 0:
        r = pm * BM + 4 * tl.arange(0, BM // 4)
        c = pn * BN + tl.arange(0, BN)
        inside = c < columns
        if EACH_COLUMN:
            bits = flushed(tl.load(amaxes + group.to(tl.int64) * columns + c, mask=inside, other=0))
        else:
            bits = tl.load(amaxes + group)
        e = encode_factor(bits, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
        if factors is not None:
            known = tl.load(factors + group * factor_step)
            e = tl.where(known == 0.0, e, known)
        s = decode_scale(bits, e, POWER_OF_TWO)
        if newest is not None:  # noqa: SIM102
            if (pm == 0) & (pn == 0):
                keep_newest(newest + group * newest_step, bits)
        x0, x1, x2, x3 = load4(x + first * stride, r, c, rows, columns, stride, False)
        e4 = e[None, :] if EACH_COLUMN else e
        y0, y1, y2, y3 = x0 * e4, x1 * e4, x2 * e4, x3 * e4
        c0, c1, c2, c3 = encode4(y0, y1, y2, y3, dtype, INTEGERS)
        if q is not None:
            store4(q + first * q_stride, r, c, rows, q_stride, c0, c1, c2, c3, False)
            if pn == 0:
                line = pm * BM + tl.arange(0, BM)
                tl.store(scale + first + line, s, mask=line < rows)
        if qt is not None:
            if pm == 0:
                tl.store(transposed_scale + group.to(tl.int64) * columns + c, s, mask=inside)
            packed = packed_codes(y0, y1, y2, y3, c0, c1, c2, c3, dtype, INTEGERS)
            store_in_slots(
                qt, packed, group, before, pm * (BM // 4), c, rows, columns, qt_lines, qt_group_lines, STACKED
            )


@triton.jit
def store_in_slots(
    qt, packed, group, before, first4, c, rows, columns, qt_lines, qt_group_lines, STACKED: tl.constexpr
):
    """Store packed codes of four rows each, [BM / 4, BN], in a group's slots of the transposes, with zeros after its
    rows.

    first4: row of the first packed element in its group, divided by four.
    """
    r4 = first4 + tl.arange(0, packed.shape[0])
    if STACKED:
        line = group.to(tl.int64) * qt_group_lines
    else:
        line = before
    store_tile(qt + 4 * line, tl.trans(packed), c, r4, columns, 4 * tl.cdiv(rows, 16), 4 * qt_lines, False)


@triton.jit
def group_rows(
    x, q, scale, amaxes, ends, groups, columns, stride, q_stride,
    BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Quantize x by rows to q and scale float32 [rows], and measure the columns of each group as `group_amaxes` does.

    A program processes BM rows, STEPS times. Exact.
    """
    group, first, rows, p, _ = group_at(tl.program_id(0), ends, groups, BM * STEPS, BM * STEPS)
    if group >= 0:
        rows_at(
            p, x + first * stride, q + first * q_stride, scale + first, amaxes + group.to(tl.int64) * columns, None,
            rows, columns, stride, q_stride, BM, BN, STEPS, False, True, False,
            POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
        )  # fmt: skip


@triton.jit
def group_blocks(
    x, q, qt, scale, transposed_scale, ends,
    groups, columns, stride, q_stride, qt_lines, scale_stride, across,
    BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Run `quaver.kernels.rowwise.blockwise` on each group of rows of x, which one read quantizes in both directions.

    scale: float32 [blocks of columns, rows]. qt: [columns, slots] in units of BM slots. transposed_scale: float32
    [slots / BM, columns]. Exact.
    """
    p = tl.program_id(0)
    group, first, rows, pm, before = group_at(p // across, ends, groups, BM, BM)
    if group >= 0:
        own_q, own_qt, own_scale, own_transposed = q, qt, scale, transposed_scale
        if ROWS:
            own_q = q + first * q_stride
            own_scale = scale + first
        if COLUMNS:
            own_qt = qt + before * (BM // 4)
            own_transposed = transposed_scale + before * columns
        blockwise_at(
            pm, p % across, x + first * stride, own_q, own_qt, own_scale, own_transposed, None,
            rows, columns, stride, q_stride, qt_lines, scale_stride, columns,
            BM, BN, False, ROWS, COLUMNS, False, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
        )  # fmt: skip


@triton.jit
def stacked_squares(
    x, q, qt, scale, transposed_scale, rows, columns, stride, down, across,
    BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Run `quaver.kernels.rowwise.squares` on matrices x [groups, rows, columns], sides whole squares.

    qt: [groups, columns, rows]. scale: float32 [groups, down, across]; transposed_scale: [groups, across, down]. Exact.
    """
    p = tl.program_id(0)
    group = (p // (down * across)).to(tl.int64)
    pm, pn = p % (down * across) // across, p % across
    own_q, own_qt, own_scale, own_transposed = q, qt, scale, transposed_scale
    if ROWS:
        own_q = q + group * rows * columns
        own_scale = scale + group * down * across
    if COLUMNS:
        own_qt = qt + group * (rows // 4) * columns
        own_transposed = transposed_scale + group * down * across
    squares_at(
        pm, pn, x + group * rows * stride, own_q, own_qt, own_scale, own_transposed, None,
        rows, columns, stride, columns, rows // 16, across, down,
        BM, BN, True, ROWS, COLUMNS, False, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX, INTEGERS, dtype,
    )  # fmt: skip


@triton.jit
def group_stream(ids, counts, group, seed0, seed1, seed2, seed3, STOCHASTIC: tl.constexpr):
    """Return the key and upper counter word of a group's noise, from its id and count in memory; zeros unless
    STOCHASTIC.
    """
    if STOCHASTIC:
        low, high = whole_word(seed0, seed1), whole_word(seed2, seed3)
        key, upper = noise_stream(tl.load(ids + group), tl.load(counts + group), low, high)
    else:
        key, upper = group * 0, group * 0
    return key, upper


# ---- narrow blocks: codes with swizzled scales, those of each group by themselves ----
# A group's rows begin at a tile of 128 rows of scales, and its slots at a tile of four blocks.


@triton.jit
def group_mxfp8(
    x, q, s, qt, st, ends,
    groups, columns, stride, q_stride, qt_lines, qt_group_lines, across, programs_across,
    BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, SQUARE: tl.constexpr, STACKED: tl.constexpr,
    EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, INTEGERS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Run `quaver.kernels.mxfp8.mxfp8_columns` on each group of rows of x; BM is 128.

    qt: [columns, slots] in units of BM slots, or [groups, columns, slots of a group] if STACKED; lines of 16 bytes.
    across: tiles of s side by side. programs_across: number of blocks side by side. Exact.
    """
    p = tl.program_id(0)
    group, first, rows, pm, before = group_at(p // programs_across, ends, groups, BM, BM)
    if group >= 0:
        own_q, own_s = q, s
        if ROWS:
            own_q = q + first * q_stride
            own_s = s + before * across * 512
        line = before * (BM // 16)
        if STACKED:
            line = group.to(tl.int64) * qt_group_lines
        mxfp8_columns_at(
            pm, p % programs_across, x + first * stride, own_q, own_s, qt + 4 * line,
            st + before * tl.cdiv(columns, 128) * 512,
            rows, columns, stride, q_stride, 4 * qt_lines, across, tl.cdiv(rows, BM),
            BM, BN, False, ROWS, SQUARE, EMAX, TOP_MANTISSA, INTEGERS, dtype,
        )  # fmt: skip


@triton.jit
def group_swizzle(scale, out, ends, groups, blocks, stride, across, BM: tl.constexpr):
    """Reorder scale bytes [rows, blocks] of each group as `quaver.kernels.numerics.swizzled`, with zeros after its
    rows; BM is 128, and a program reorders a tile of four blocks.

    out: uint8 [tiles, 512], `across` of them side by side. Exact.
    """
    p = tl.program_id(0)
    group, first, rows, pm, before = group_at(p // across, ends, groups, BM, BM)
    if group >= 0:
        r = pm * BM + tl.arange(0, BM)
        c = (p % across) * 4 + tl.arange(0, 4)
        at = scale + (first + r)[:, None] * stride + c[None, :]
        v = tl.load(at, mask=(r[:, None] < rows) & (c[None, :] < blocks), other=0)
        tl.store(out + before * across * 512 + swizzled(r, c, across), v)


@triton.jit
def group_nvfp4_along(
    x, q, s, factor, amaxes, ids, counts, ends,
    groups, columns, stride, q_lines, across, programs_across, seed0, seed1, seed2, seed3,
    BM: tl.constexpr, BN: tl.constexpr, POWER_OF_TWO: tl.constexpr, SQUARE: tl.constexpr,
    HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Run `quaver.kernels.nvfp4.nvfp4_along` on each group of rows of x; BM is 128.

    amaxes: int32 [groups], bits of the groups' amaxes. factor: float32 [groups], tensor factors. ids, counts: int64
    [groups], noise, or None. q_lines: lines of 16 bytes of a row of q. Exact.
    """
    p = tl.program_id(0)
    group, first, rows, pm, before = group_at(p // programs_across, ends, groups, BM, 128)
    if group >= 0:
        key, upper = group_stream(ids, counts, group, seed0, seed1, seed2, seed3, STOCHASTIC)
        block_along(
            x + first * stride, q + first * 4 * q_lines, s + before * across * 512, factor + group, amaxes + group,
            pm, p % programs_across, rows, columns, stride, columns, 4 * q_lines, across, key, upper,
            BM, BN, False, False, POWER_OF_TWO, SQUARE, HADAMARD, STOCHASTIC, INTEGERS,
        )  # fmt: skip


@triton.jit
def group_nvfp4_down(
    x, qt, st, factor, amaxes, ids, counts, ends,
    groups, columns, stride, qt_lines, qt_group_lines, programs_across, seed0, seed1, seed2, seed3,
    BM: tl.constexpr, BN: tl.constexpr, STACKED: tl.constexpr, POWER_OF_TWO: tl.constexpr, SQUARE: tl.constexpr,
    HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Run `quaver.kernels.nvfp4.nvfp4_down` on each group of rows of x, with slots in units of 64; BM is 64 or 128.

    qt: as in `group_mxfp8`, with two codes to a byte. Exact.
    """
    p = tl.program_id(0)
    group, first, rows, pm, before = group_at(p // programs_across, ends, groups, BM, 64)
    if group >= 0:
        key, upper = group_stream(ids, counts, group, seed0, seed1, seed2, seed3, STOCHASTIC)
        line = before * 2
        if STACKED:
            line = group.to(tl.int64) * qt_group_lines
        own = tl.cdiv(rows, 64)
        k = rows
        if HADAMARD:
            k = tl.cdiv(rows, 16) * 16
        block_down(
            x + first * stride, qt + 4 * line, st + before * tl.cdiv(columns, 128) * 512, factor + group,
            amaxes + group, pm, p % programs_across, rows, columns, stride, k, 4 * qt_lines, own, key, upper, 8 * own,
            BM, BN, False, False, POWER_OF_TWO, SQUARE, HADAMARD, STOCHASTIC, INTEGERS,
        )  # fmt: skip


# ---- bf16 values of codes, for GEMMs that the GPU lacks ----


@triton.jit
def group_values_of_blocks(
    x, along, down, codes, scales, ends, groups, columns, stride, across,
    BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, SQUARE: tl.constexpr, CODES: tl.constexpr,
    INTEGERS: tl.constexpr,
    MANTISSA: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr,
):  # fmt: skip
    """Run `quaver.kernels.emulation.values_of_blocks` on each group of rows of x; each result may be None.

    along: bf16 [rows, columns]. down, codes: [slots, columns] in units of WIDTH slots. scales: [slots / WIDTH,
    columns].
    """
    p = tl.program_id(0)
    group, first, rows, pm, before = group_at(p // across, ends, groups, BM, WIDTH)
    if group >= 0:
        slot = before * WIDTH * columns
        own_along, own_down, own_codes, own_scales = along, down, codes, scales
        if along is not None:
            own_along = along + first * columns
        if down is not None:
            own_down = down + slot
        if codes is not None:
            own_codes = codes + slot
            own_scales = scales + before * columns
        slots = tl.cdiv(rows, WIDTH) * WIDTH
        block_of_values(
            pm, p % across, x + first * stride, own_along, own_down, own_codes, own_scales,
            rows, slots, columns, stride,
            BM, BN, False, WIDTH, SQUARE, CODES, INTEGERS, MANTISSA, EMIN, EMAX, TOP_MANTISSA,
        )  # fmt: skip


@triton.jit
def group_two_level_amaxes(
    x, amaxes, rotated_amaxes, ends, groups, columns, stride, across, BM: tl.constexpr, BN: tl.constexpr
):
    """Compute the amax bits of each group of rows of x, and those after rotating groups of sixteen rows.

    amaxes, rotated_amaxes: int32 [groups], zero before; either may be None. Exact.
    """
    p = tl.program_id(0)
    group, first, rows, pm, _ = group_at(p // across, ends, groups, BM, BM)
    if group >= 0:
        g = pm * (BM // 16) + tl.arange(0, BM // 16)
        c = (p % across) * BN + tl.arange(0, BN)
        v = load_down(x + first * stride, g, c, rows, columns, stride, False, False)
        if amaxes is not None:
            tl.atomic_max(amaxes + group, flushed(tl.max(largest(v), None)), sem="relaxed")
        if rotated_amaxes is not None:
            bits = flushed(quarter(tl.max(largest(transposed(v)), None)))
            tl.atomic_max(rotated_amaxes + group, bits, sem="relaxed")


@triton.jit
def group_values_in_two_levels(
    x, along, down, codes, scales, amaxes, rotated_amaxes, ids, counts, transposed_ids, transposed_counts, ends,
    groups, columns, stride, slot_blocks, across, seed0, seed1, seed2, seed3,
    BM: tl.constexpr, BN: tl.constexpr, SQUARE: tl.constexpr, HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr, TRANSPOSED_STOCHASTIC: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Run `quaver.kernels.emulation.values_in_two_levels` on each group of rows of x; each result may be None.

    along: bf16 [rows, columns]. down: bf16 [slots, columns] in units of sixteen slots. codes: int32 [slot_blocks, 2,
    columns]; scales: uint8 [slot_blocks, columns], followed by the exponent of each block's group. amaxes: bits of the
    groups' amaxes, and rotated_amaxes: of the transposes. ids, counts: int64 [groups], noise of the rows and of the
    transposes.
    """
    p = tl.program_id(0)
    pn = p % across
    group, first, rows, pm, before = group_at(p // across, ends, groups, BM, 16)
    if group >= 0:
        own = x + first * stride
        if along is not None:
            big, small = level_of(tl.load(amaxes + group))
            key, upper = group_stream(ids, counts, group, seed0, seed1, seed2, seed3, STOCHASTIC)
            block_of_values_along(
                pm, pn, own, along + first * columns, rows, columns, stride, big, small, key, upper,
                BM, BN, False, SQUARE, STOCHASTIC, INTEGERS,
            )  # fmt: skip
        if down is not None or codes is not None:
            big, small = level_of(tl.load(rotated_amaxes + group))
            key, upper = group_stream(
                transposed_ids, transposed_counts, group, seed0, seed1, seed2, seed3, TRANSPOSED_STOCHASTIC
            )
            own_down, own_codes, own_scales = down, codes, scales
            if down is not None:
                own_down = down + before * 16 * columns
            if codes is not None:
                own_codes = codes + before * 2 * columns
                own_scales = scales + before * columns
                if pn == 0:
                    block = pm * (BM // 16) + tl.arange(0, BM // 16)
                    at = scales + slot_blocks.to(tl.int64) * columns + before + block
                    tl.store(at, exponent_of(small) + tl.zeros([BM // 16], tl.uint8), mask=16 * block < rows)
            block_of_values_down(
                pm, pn, own, own_down, own_codes, own_scales, rows, tl.cdiv(rows, 16) * 16, columns, stride,
                big, small, key, upper, BM, BN, False, False, HADAMARD, TRANSPOSED_STOCHASTIC, INTEGERS,
            )  # fmt: skip


# ---- finishing products ----


@triton.jit
def finish_rows(y, bias, ends, groups, rows, columns, across, BM: tl.constexpr, BN: tl.constexpr):
    """Zero the rows of y [rows, columns] that belong to no group, and add each group's bias [groups, columns] or None.

    The sum with a bias is rounded to y's dtype, from a bias rounded to it.
    """
    p = tl.program_id(0)
    r = (p // across) * BM + tl.arange(0, BM)
    c = (p % across) * BN + tl.arange(0, BN)
    end = tl.load(ends + groups - 1)
    at = y + r[:, None].to(tl.int64) * columns + c[None, :]
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    if bias is not None:
        group = tl.zeros([BM], tl.int32)
        for g in range(groups):
            group += (r >= tl.load(ends + g)).to(tl.int32)
        mask = inside & (r[:, None] < end)
        own = tl.load(bias + group[:, None].to(tl.int64) * columns + c[None, :], mask=mask, other=0.0)
        own = own.to(y.dtype.element_ty).to(tl.float32)
        tl.store(at, (tl.load(at, mask=mask, other=0.0).to(tl.float32) + own).to(y.dtype.element_ty), mask=mask)
    if (p // across + 1) * BM > end:
        tl.store(at, tl.zeros([BM, BN], y.dtype.element_ty), mask=inside & (r[:, None] >= end))


@triton.jit
def finish_groups(y, ends, size, B: tl.constexpr):
    """Zero the matrices of y [groups, size] whose groups have no rows."""
    group = tl.program_id(1)
    start = tl.load(ends + tl.maximum(group - 1, 0))
    start = tl.where(group == 0, 0, start)
    if tl.load(ends + group) == start:
        at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
        tl.store(y + group.to(tl.int64) * size + at, tl.zeros([B], y.dtype.element_ty), mask=at < size)


@triton.jit
def note_groups(newest, amaxes, ends, newest_step):
    """Raise the newest amax of a group's history to its amax, float32 [groups], if it is finite and the group has rows.

    A program for each group.
    """
    group = tl.program_id(0)
    start = tl.load(ends + tl.maximum(group - 1, 0))
    start = tl.where(group == 0, 0, start)
    if tl.load(ends + group) > start:
        keep_newest(newest + group * newest_step, magnitude_bits(tl.load(amaxes + group)))


@triton.jit
def slot_ends(ends, out, groups, unit):
    """Compute the end of each group's slots in units of `unit`, int32 [groups]."""
    start, end = 0, 0
    for g in range(groups):
        last = tl.load(ends + g)
        end += tl.cdiv(last - start, unit) * unit
        tl.store(out + g, end)
        start = last
