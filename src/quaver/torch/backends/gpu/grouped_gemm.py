"""Launches of FP8 GEMMs for groups of rows, where torch has none: E5M2 operands, and blocks of 128.

Not measured on a GPU. By instruction count they reach more than the rate of bf16; docs/performance.md has the figures.
Source of the scheme for blocks: DeepGEMM, which multiplies codes and adds sums of 128 products in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.kernels import grouped_gemm as kernels
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu.buffers import whole
from quaver.torch.backends.gpu.device import architecture, traits
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec, multiprocessors
from quaver.torch.numerics.grouped import GroupedOperand, GroupOffsets, row_scales
from quaver.torch.numerics.quantized import FLOAT8, Quantized

#: Rows, columns and depth of a program's tile, and its warps. Sums that are added apart need registers of their own;
#: outside of Hopper and datacenter Blackwell there is less shared memory.
WIDE, PRECISE_TILE, NARROW = (128, 256, 128, 8), (128, 128, 128, 8), (128, 128, 64, 8)
#: For sums in blocks, whose scales also need registers, but on Hopper.
SMALL = 64, 128, 128, 4
#: Width of a block.
WIDTH = 128
#: Rows of tiles in a band that shares its columns in the L2 cache.
GROUP_M = 8
#: First architecture whose tensor cores multiply FP8 codes.
FIRST = 89
#: Products that are added with fewer bits before they are added in float32 (Hopper's tensor cores keep 13); None: all.
FAST, PRECISE = None, 128


def scale_kind(a: QuantSpec | None, b: QuantSpec | None, device: torch.device) -> str:
    """Return "row" for scales of rows or groups, "block" for blocks of 128, or "" if no kernel multiplies these."""
    if a is None or b is None or architecture(device) < FIRST:
        return ""
    if any(spec.format.name not in FLOAT8 or spec.scale not in ("fp32", "power_of_two") for spec in (a, b)):
        return ""
    if a.block[1] is None and b.block[1] is None:
        return "row" if all(spec.block[0] in (None, 1) for spec in (a, b)) else ""
    lines = a.block == (1, WIDTH) and b.block in ((1, WIDTH), (WIDTH, WIDTH))
    return "block" if lines and a.power_of_two and b.power_of_two else ""


def reason(a: GroupedOperand, b: Quantized, offsets: GroupOffsets, n: int, *_: Any) -> str:
    """Return why no kernel multiplies these codes, or ""; the caller has checked that the device runs kernels."""
    which = scale_kind(a.spec, b.spec, a.data.device)
    if not which or (which == "block") is not (b.spec.block[0] == WIDTH):
        return f"no kernel multiplies codes of {a.spec} by {b.spec} on this GPU"
    if which == "block" and n % WIDTH:
        return f"the output has {n} columns; squares of {WIDTH} would span two groups"
    return "there is nothing to add up" if 0 in (*a.shape, *b.shape) or a.shape[1] % 16 else ""


def reason_sums(a: GroupedOperand, b: GroupedOperand, *_: Any) -> str:
    """Return why no kernel sums these codes over the rows of groups, or ""."""
    if not scale_kind(a.spec, b.spec, a.data.device):
        return f"no kernel multiplies codes of {a.spec} by {b.spec} on this GPU"
    return "there is nothing to add up" if 0 in (*a.shape, *b.shape) or not a.slots.groups else ""


def matmul(
    a: GroupedOperand, b: Quantized, offsets: GroupOffsets, n: int, dtype: torch.dtype, bias: Tensor | None,
    fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply a [T, k] by each group's transposed matrix of b [groups · n, k]; rows of no group give zeros."""
    from quaver.torch.backends.gpu.grouped_quantize import finish_rows

    blocks = a.spec.block[1] is not None
    scales = row_scales(a, offsets)[0], b.plain_scale()
    if not blocks:
        rows, columns = a.shape[0], b.shape[0]
        scales = scales[0].expand(rows, 1).reshape(-1), scales[1].expand(columns, 1).reshape(-1)
    bias = None if bias is None else bias.contiguous()
    y: Tensor = _multiplies((a.data, b.data, *scales, bias, offsets.ends), n, dtype, blocks, fast_accum)[0]
    return finish_rows(y, None, offsets.ends)


def sums(a: GroupedOperand, b: GroupedOperand, dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """Multiply a [n, slots] by transposed b [k, slots], summed over each group's slots; returns [groups, n, k]."""
    blocks, groups = a.spec.block[1] is not None, a.slots.groups
    scales = [one.scale if blocks else one.scale.expand(groups, one.shape[0]).contiguous() for one in (a, b)]
    y: Tensor = _sums((a.data, b.data, *scales, a.slots.ends), a.slots.multiple, dtype, blocks, fast_accum)[0]
    return y


def on_hopper(device: torch.device) -> bool:
    return traits(device).groups and architecture(device) < 100


def _tile(device: torch.device, blocks: bool, fast_accum: bool) -> tuple[int, int, int, int]:
    large = traits(device).groups
    return PRECISE_TILE if blocks or (large and not fast_accum) else WIDE if large else NARROW


@LaunchPlanCache
def _multiplies(tensors_in: Sequence[Any], n: int, dtype: torch.dtype, blocks: bool, fast_accum: bool) -> LaunchPlan:
    x, w, of_rows, of_columns, bias, ends = tensors_in
    (rows, k), groups = x.shape, ends.shape[0]
    bm, bn, bk, warps = _tile(x.device, blocks, fast_accum)
    down, across = -(-rows // bm) + groups, -(-n // bn)
    y = whole((rows, n), dtype)
    steps = of_rows.stride() if blocks else (1, 1)
    constants = _constants(bm, bn, bk, k % bk == 0, blocks, fast_accum)
    numbers = (groups, n, k, x.stride(0), w.stride(0), down, across, *steps)
    grid = (min(down * across, multiprocessors(x.device)),)
    tensors = (x, w, y, of_rows, of_columns, bias, ends)
    launch = LaunchSpec(kernels.multiply_codes, grid, tensors, numbers, constants, warps)
    return LaunchPlan(tensors_in, (y,), [launch])


@LaunchPlanCache
def _sums(tensors_in: Sequence[Any], unit: int, dtype: torch.dtype, blocks: bool, fast_accum: bool) -> LaunchPlan:
    x, w, of_rows, of_columns, ends = tensors_in
    m, n, groups = x.shape[0], w.shape[0], ends.shape[0]
    bm, bn, bk, warps = SMALL if blocks and not on_hopper(x.device) else _tile(x.device, blocks, fast_accum)
    down, across = -(-m // bm), -(-n // bn)
    y = whole((groups, m, n), dtype)
    constants = _constants(bm, bn, bk, unit % bk == 0, blocks, fast_accum)
    numbers = (groups, m, n, x.stride(0), w.stride(0), down, across)
    grid = (min(groups * down * across, multiprocessors(x.device)),)
    tensors = (x, w, y, of_rows, of_columns, ends)
    return LaunchPlan(tensors_in, (y,), [LaunchSpec(kernels.sum_codes, grid, tensors, numbers, constants, warps)])


def _constants(bm: int, bn: int, bk: int, even: bool, blocks: bool, fast_accum: bool) -> dict[str, Any]:
    imprecise = FAST if fast_accum and not blocks else min(PRECISE, bk)
    tile = {"BM": bm, "BN": bn, "BK": bk, "EVEN": even, "GROUP_M": GROUP_M}
    return {**tile, "BLOCK_SCALES": blocks, "MAX_IMPRECISE_ACC": imprecise}
