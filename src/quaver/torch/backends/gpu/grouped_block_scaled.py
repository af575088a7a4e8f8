"""Launches that quantize groups to MXFP8 and NVFP4, for Blackwell's grouped GEMMs.

Each group's scales are swizzled separately and padded to tiles of 128 rows by 4 blocks, as torch's GEMM reads them.
`quaver.torch.numerics.grouped.unswizzled` returns plain scales for other GEMMs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.kernels import grouped as kernels
from quaver.recipes.formats import E4M3
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu.block_scaled import (
    MX_COLUMNS_BLOCK,
    NV_BLOCK,
    NV_STOCHASTIC_BLOCKS,
    across,
)
from quaver.torch.backends.gpu.buffers import BufferSpec, in_words, whole
from quaver.torch.backends.gpu.device import architecture, traits
from quaver.torch.backends.gpu.grouped_quantize import equal_ends, noise_arguments, padded_slots, programs
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec
from quaver.torch.backends.gpu.quantize import LONGEST_SIDE, READ
from quaver.torch.backends.gpu.tensorwise import DTYPES, integers
from quaver.torch.numerics.grouped import GroupedNoise, GroupedOperand, GroupOffsets, multiple, slots
from quaver.torch.numerics.quantized import BLOCKS, FLOAT8, ROWS, Quantized

#: Columns of a matrix must be a multiple of this: a block of MXFP8, or 16 bytes of four-bit codes.
COLUMNS = 32
#: Maximum number of registers per thread, so that two programs fit on a multiprocessor.
MX_REGISTERS = 128


def family(spec: QuantSpec | None, other: QuantSpec | None) -> str:
    """Return "mx" or "nv" if a kernel writes such operands; either may be None."""
    specs = [one for one in (spec, other) if one is not None]
    if not specs:
        return ""
    if all(s.scale == "e8m0" and s.format == E4M3 and s.block in ((1, 32), (32, 32)) for s in specs):
        plain = all(s.rounding == "nearest" and not s.hadamard for s in specs)
        return "mx" if plain and specs[0] == specs[-1] else ""
    if all(s.two_level and s.block in ((1, 16), (16, 16)) for s in specs) and specs[0].scale == specs[-1].scale:
        # Kernels draw noise for whole blocks of rows, and only a rotated transpose is padded to whole blocks.
        indexed = other is None or other.rounding == "nearest" or other.hadamard
        return "nv" if indexed and specs[0].block == specs[-1].block else ""
    return ""


def serves(spec: QuantSpec | None, other: QuantSpec | None, device: torch.device, columns: Any) -> bool:
    """Return True if this device has a GEMM for rows of so many columns by static tables, which no probe changes."""
    return bool(family(spec, other)) and architecture(device) // 10 == 10 and columns % COLUMNS == 0


def reason(x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, *_: Any) -> str:
    """Return why no kernel quantizes rows x by `spec` and their transposes by `other`, or ""."""
    if x.dtype not in READ:
        return f"its kernels read float32, bfloat16 and float16, not {x.dtype}"
    if x.shape[1] == 0 or max(x.shape) > LONGEST_SIDE:
        return f"a matrix of shape {tuple(x.shape)} has no columns or is too long for its kernels"
    lines = all(one is None or one.block[0] == 1 for one in (spec, other))
    if not lines or not serves(spec, other, x.device, x.shape[1]):
        return f"it has no kernel for {spec} and {other} of {x.shape[1]} columns on this GPU"
    return ""


def reason_weights(weight: Tensor, spec: QuantSpec | None, other: QuantSpec | None, *_: Any) -> str:
    """Return why no kernel quantizes matrices [groups, n, k] by `spec` and their transposes by `other`, or ""."""
    if weight.dtype not in READ or not weight.is_contiguous() or weight.numel() == 0:
        return "the weights are empty, not contiguous, or of a dtype that its kernels do not read"
    if any(side % ROWS for side in weight.shape[1:]):
        return f"sides of {tuple(weight.shape)} are no multiples of {ROWS}"
    stochastic = any(one is not None and one.rounding != "nearest" for one in (spec, other))
    if stochastic or not serves(spec, other, weight.device, weight.shape[2]):
        return f"it has no kernel for weights by {spec} and {other} on this GPU"
    return ""


def quantize(
    x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, offsets: GroupOffsets, _: None = None,
    noise: GroupedNoise | None = None, other_noise: GroupedNoise | None = None, __: None = None,
) -> tuple[GroupedOperand | None, GroupedOperand | None]:  # fmt: skip
    """Quantize rows x [T, k] of all groups by `spec`, and their transposes by `other`; either may be None."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    places = padded_slots(offsets, multiple(other)) if other is not None else None
    count = 0 if places is None else places.count
    which, k = family(spec, other), x.shape[1]
    height = slots(x.shape[0], offsets.groups, ROWS)
    one = spec or other
    assert one is not None
    operands: Sequence[Any]
    factors: Sequence[Tensor | None] = None, None
    if which == "mx":
        operands = _mx((x, offsets.ends), one, height, count, spec is not None, False)
    else:
        operands, factors = _nv_operands(x, offsets.ends, (spec, other), (noise, other_noise), height, count, False)
    q, s, qt, st = operands
    rows = columns = None
    if spec is not None:
        rows = GroupedOperand(q, s, factors[0], spec, False, offsets.slots(1), k, swizzled=True)
    if other is not None:
        assert places is not None
        columns = GroupedOperand(qt, st, factors[1], other, True, places, count, swizzled=True)
        if rows is not None:
            rows.transpose = columns
    return rows, columns


def swizzle_groups(scale: Tensor, offsets: GroupOffsets) -> Tensor:
    """Return scales uint8 [T, blocks of k] of rows swizzled per group, as `quantize` writes them: [slots, ...]."""
    height = slots(scale.shape[0], offsets.groups, ROWS)
    out: Tensor = _swizzled((scale, offsets.ends), height)[0]
    return out.view(height, -1)


@LaunchPlanCache
def _swizzled(tensors_in: Sequence[Any], height: int) -> LaunchPlan:
    scale, ends = tensors_in
    groups, tiles = ends.shape[0], -(-scale.shape[1] // BLOCKS)
    out = whole((height // ROWS * tiles, ROWS * BLOCKS), torch.uint8)
    numbers = (groups, scale.shape[1], scale.stride(0), tiles)
    grid = (height // ROWS * tiles,)
    launch = LaunchSpec(kernels.group_swizzle, grid, (scale, out, ends), numbers, {"BM": ROWS}, 4)
    return LaunchPlan(tensors_in, (out,), [launch])


def quantize_weights(
    weight: Tensor, spec: QuantSpec | None, other: QuantSpec | None, _: None = None
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize matrices [groups, n, k] by `spec`, and their transposes by `other`; either may be None.

    Returns:
        Operands [groups · n, k] and [groups · k, n].
    """
    groups, n, k = weight.shape
    x, ends, one = weight.detach().view(groups * n, k), equal_ends(groups, n, weight.device), spec or other
    assert one is not None
    operands: Sequence[Any]
    factors: Sequence[Tensor | None] = None, None
    if family(spec, other) == "mx":
        operands = _mx((x, ends), one, groups * n, n, spec is not None, True)
    else:
        operands, factors = _nv_operands(x, ends, (spec, other), (None, None), groups * n, n, True)
    q, s, qt, st = operands
    return (
        _stacked(q, s, spec, (groups * n, k), factors[0], groups),
        _stacked(qt, st, other, (groups * k, n), factors[1], groups),
    )


def _stacked(
    codes: Any, scales: Any, spec: QuantSpec | None, shape: tuple[int, int], factor: Tensor | None, groups: int
) -> Quantized | None:
    """Return the operand of all groups' matrices, stacked by rows; None without a spec."""
    if spec is None:
        return None
    factors = None if factor is None else factor.repeat_interleave(shape[0] // groups, 0)
    return Quantized(codes, scales.view(-1), spec, shape, tensor_factor=factors, swizzled=True)


def transposed_scale_shape(spec: QuantSpec, rows: Any, groups: Any, k: Any) -> tuple[Any, Any]:
    """Return the shape of the scales of transposes [k, slots] of so many rows in groups; sizes may be symbolic."""
    return -(-k // ROWS) * ROWS, slots(rows, groups, multiple(spec)) // (spec.block[1] or 1)


def _scales(height: int, blocks: int) -> BufferSpec:
    """Return the buffer of swizzled scales: whole tiles of rows, and of blocks side by side."""
    return whole((-(-height // ROWS) * ROWS, -(-blocks // BLOCKS) * BLOCKS), torch.uint8)


# ---- MXFP8: one launch for both operands ----


@LaunchPlanCache
def _mx(
    tensors_in: Sequence[Any], spec: QuantSpec, height: int, count: int, want_rows: bool, stacked: bool
) -> LaunchPlan:
    """Plan codes, scales, transposed codes and their scales; the transposes are written even if not requested.

    Args:
        height: rows of the scales of rows.
        count: number of slots; of one group if stacked.
    """
    x, ends = tensors_in
    (rows, k), groups = x.shape, ends.shape[0]
    dtype, wide = FLOAT8[spec.format.name], across(k, 32)
    count = count or slots(rows, groups, multiple(spec))
    q, s = (whole((rows, k), dtype), _scales(height, k // 32)) if want_rows else (None, None)
    qt = in_words(whole((groups * k if stacked else k, count), dtype))
    st = _scales(groups * k if stacked else k, count // 32)
    bm, bn, warps = MX_COLUMNS_BLOCK
    grid, side_by_side = programs(x, groups, bm, bn)
    lines = count // 16
    numbers = (groups, k, x.stride(0), k, lines, lines * k, wide, side_by_side)
    constants = {
        "BM": bm,
        "BN": bn,
        "ROWS": want_rows,
        "SQUARE": spec.block[0] == 32,
        "STACKED": stacked,
        "EMAX": spec.format.emax,
        "TOP_MANTISSA": spec.format.max_mantissa,
        "INTEGERS": integers(x.device),
        "dtype": DTYPES[spec.format.name],
    }
    tensors, registers = (x, q, s, qt, st, ends), MX_REGISTERS if traits(x.device).groups else None
    launch = LaunchSpec(kernels.group_mxfp8, grid, tensors, numbers, constants, warps, registers)
    return LaunchPlan(tensors_in, (q, s, qt, st), [launch])


# ---- NVFP4: one launch for the amaxes, and one for each operand ----


def _nv_operands(
    x: Tensor, ends: Tensor, specs: tuple[QuantSpec | None, QuantSpec | None],
    noise: tuple[GroupedNoise | None, GroupedNoise | None], height: int, count: int, stacked: bool,
) -> tuple[list[Any], list[Tensor | None]]:  # fmt: skip
    """Return codes, scales, transposed codes and their scales, and both tensor factors [groups, 1]."""
    own, key_words = noise_arguments(specs, noise, x.device)
    *operands, factor, transposed_factor = _nv((x, ends), *specs, height, count, stacked, key_words, own=own)
    return operands, [None if f is None else f.view(-1, 1) for f in (factor, transposed_factor)]


@LaunchPlanCache
def _nv(
    tensors_in: Sequence[Any], spec: QuantSpec | None, other: QuantSpec | None, height: int, count: int, stacked: bool,
    key_words: tuple[int, ...],
) -> LaunchPlan:  # fmt: skip
    x, ends, *noise = tensors_in
    (rows, k), groups = x.shape, ends.shape[0]
    amaxes = whole((groups,), torch.int32)._replace(zeros=True)
    rotated = whole((groups,), torch.int32)._replace(zeros=True) if other is not None and other.hadamard else None
    plain = amaxes if spec is not None or rotated is None else None
    bm, bn, warps = NV_BLOCK
    grid, side_by_side = programs(x, groups, bm, bn)
    numbers = (groups, k, x.stride(0))
    measured = (x, plain, rotated, ends)
    constants: dict[str, Any] = {"BM": bm, "BN": bn}
    launches = [LaunchSpec(kernels.group_two_level_amaxes, grid, measured, (*numbers, side_by_side), constants, warps)]
    q = s = factor = qt = st = transposed_factor = None
    if spec is not None:
        q, s = in_words(whole((rows, k // 2), torch.uint8)), _scales(height, k // 16)
        factor = whole((groups,), torch.float32)
        grid, constants, warps, side_by_side = _nv_launch(x, groups, spec, down=False)
        tensors = (x, q, s, factor, amaxes, *noise[:2], ends)
        words = (*numbers, k // 32, across(k, 16), side_by_side, *key_words)
        launches.append(LaunchSpec(kernels.group_nvfp4_along, grid, tensors, words, constants, warps))
    if other is not None:
        qt = in_words(whole((groups * k if stacked else k, count // 2), torch.uint8))
        st = _scales(groups * k if stacked else k, count // 16)
        transposed_factor, lines = whole((groups,), torch.float32), count // 32
        grid, constants, warps, side_by_side = _nv_launch(x, groups, other, down=True)
        tensors = (x, qt, st, transposed_factor, amaxes if rotated is None else rotated, *noise[2:], ends)
        words = (*numbers, lines, lines * k, side_by_side, *key_words)
        constants["STACKED"] = stacked
        launches.append(LaunchSpec(kernels.group_nvfp4_down, grid, tensors, words, constants, warps))
    return LaunchPlan(tensors_in, (q, s, qt, st, factor, transposed_factor), launches)


def _nv_launch(x: Tensor, groups: int, spec: QuantSpec, *, down: bool) -> tuple[Any, dict[str, Any], int, int]:
    """Return grid, constants, warps, and the number of blocks side by side."""
    bm, bn, warps = NV_STOCHASTIC_BLOCKS[down] if spec.rounding == "stochastic" else NV_BLOCK
    grid, side_by_side = programs(x, groups, bm, bn)
    constants = {
        "BM": bm,
        "BN": bn,
        "POWER_OF_TWO": spec.scale == "two_level",
        "SQUARE": spec.block[0] == 16,
        "HADAMARD": spec.hadamard,
        "STOCHASTIC": spec.rounding == "stochastic",
        "INTEGERS": integers(x.device),
    }
    return grid, constants, warps, side_by_side
