"""Launches that quantize the rows of several groups, or the weights of all groups, without copying sizes to the host.

One launch writes both operands of a matrix: rows as they are, summed over k, and transposes in slots, summed over rows
(see `quaver.torch.numerics.grouped`). A scale per group or per column of a group takes another launch for the amaxes.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from quaver.kernels import grouped as kernels
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu.block_scaled import halves
from quaver.torch.backends.gpu.buffers import BufferSpec, in_words, row_major, whole
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec, multiprocessors
from quaver.torch.backends.gpu.quantize import LONGEST_SIDE, READ
from quaver.torch.backends.gpu.rowwise import BLOCK, LONGEST, REGISTER_ELEMENTS, ROW_WARPS, WARPS
from quaver.torch.backends.gpu.tensorwise import DTYPES, format_constants
from quaver.torch.numerics.grouped import GroupedNoise, GroupedOperand, GroupOffsets, GroupSlots, numbers_on
from quaver.torch.numerics.quantized import FLOAT8, Quantized

#: Rows and columns of a program's block, and its warps.
AMAX_BLOCK, CAST_BLOCK, FINISH_BLOCK = (32, 512, 4), (128, 64, 4), (32, 256, 4)
#: Slots of a group are a multiple of this if one scale serves a row of the transpose.
SLOT_MULTIPLE = 16
#: Elements of a program that zeroes matrices.
FLAT = 4096


def reason(x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, *_: Any) -> str:
    """Return why no kernel quantizes rows x by `spec` and their transposes by `other`, or ""."""
    if x.dtype not in READ:
        return f"its kernels read float32, bfloat16 and float16, not {x.dtype}"
    if x.numel() == 0 or max(x.shape) > LONGEST_SIDE:
        return f"a matrix of shape {tuple(x.shape)} is empty or too long for its kernels"
    supported = _scale_kind(spec, other) and x.shape[1] % SLOT_MULTIPLE == 0
    return "" if supported else f"it has no kernel for {spec} and {other}"


def reason_weights(weight: Tensor, spec: QuantSpec | None, other: QuantSpec | None, *_: Any) -> str:
    """Return why no kernel quantizes matrices [groups, n, k] by `spec` and their transposes by `other`, or ""."""
    if not weight.is_contiguous():
        return "the weights are not contiguous"
    if weight.numel() and weight.shape[1] % SLOT_MULTIPLE:
        return f"rows of the transposes have {weight.shape[1]} codes; its kernels write multiples of {SLOT_MULTIPLE}"
    if _in_squares(spec, other):
        whole_squares = weight.shape[1] % BLOCK == weight.shape[2] % BLOCK == 0
        return "" if whole_squares else f"sides of {tuple(weight.shape)} are no multiples of {BLOCK}"
    if _scale_kind(spec, other) == "block":
        return f"it has no kernel for weights by {spec} and {other}"
    return reason(weight.flatten(0, 1), spec, other)


def _in_squares(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    """Return True if both operands, or the one that is not None, have a scale for each 128 × 128 elements."""
    specs = [one for one in (spec, other) if one is not None]
    square = all(s.block == (BLOCK, BLOCK) and s.scale in ("fp32", "power_of_two") for s in specs)
    return square and all(s.format.name in FLOAT8 and s.rounding == "nearest" and not s.hadamard for s in specs)


def _scale_kind(spec: QuantSpec | None, other: QuantSpec | None) -> str:
    """Return "tensor" for a scale per group, "row" for one per row, "block" for one per 128 of a row, or ""."""
    specs = [one for one in (spec, other) if one is not None]
    if not specs or any(s.format.name not in FLOAT8 or s.rounding != "nearest" or s.hadamard for s in specs):
        return ""
    if any(s.scale not in ("fp32", "power_of_two") for s in specs):
        return ""
    if all(s.per_tensor for s in specs) and specs[0] == specs[-1]:
        return "tensor"
    if all(s.block == (1, BLOCK) for s in specs) and specs[0] == specs[-1]:
        return "block"
    return "row" if all(s.block == (1, None) for s in specs) and other is not None else ""


# ---- rows of groups ----


def quantize(
    x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, offsets: GroupOffsets, factors: Tensor | None = None,
    _: None = None, __: None = None, newest: Tensor | None = None,
) -> tuple[GroupedOperand | None, GroupedOperand | None]:  # fmt: skip
    """Quantize rows x [T, k] of all groups by `spec`, and their transposes by `other`; either may be None.

    Args:
        factors: encode factors of delayed scaling, float32 [groups] with any stride; 0 is unset.
        newest: newest amaxes of the groups' histories, float32 [groups] with any stride, to raise to these amaxes; the
            operands then have none to record.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    if _scale_kind(spec, other) == "block":
        return _in_blocks(x, spec, other, offsets)
    slots = padded_slots(offsets, SLOT_MULTIPLE) if other is not None else offsets.slots(SLOT_MULTIPLE)
    count = slots.count if other is not None else 0
    launched = _launch(x, spec, other, offsets.ends, (factors, newest), count, stacked=False)
    q, scale, qt, transposed_scale, amax = launched
    amax = amax if newest is None else None
    rows = columns = None
    if spec is not None:
        row_spec, places = replace(spec, block=(1, None)), offsets.slots(1)
        rows = GroupedOperand(q, scale, None, row_spec, False, places, x.shape[1], amax)
    if other is not None:
        row_spec = replace(other, block=(1, None))
        columns = GroupedOperand(qt, transposed_scale, None, row_spec, True, slots, slots.count, amax)
        if rows is not None:
            rows.transpose = columns
    return rows, columns


def _in_blocks(
    x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, offsets: GroupOffsets
) -> tuple[GroupedOperand | None, GroupedOperand | None]:
    slots = padded_slots(offsets, BLOCK) if other is not None else offsets.slots(BLOCK)
    count = slots.count if other is not None else 0
    q, scale, qt, transposed_scale = _with_block_scales((x, offsets.ends), spec, other, count)
    rows = columns = None
    if spec is not None:
        rows = GroupedOperand(q, scale.t(), None, spec, False, offsets.slots(1), x.shape[1])
    if other is not None:
        columns = GroupedOperand(qt, transposed_scale, None, other, True, slots, slots.count)
        if rows is not None:
            rows.transpose = columns
    return rows, columns


def noise_arguments(
    specs: Sequence[QuantSpec | None], noise: Sequence[GroupedNoise | None], device: torch.device
) -> tuple[list[Tensor | None], tuple[int, ...]]:
    """Return the noise of rows and of transposes as kernels take it.

    Returns:
        Stream and count of each group of both, int64 [groups], None where nothing is drawn; and the halves of the seed,
        which both share.
    """
    tensors: list[Tensor | None] = []
    seed = 0
    for spec, drawn in zip(specs, noise, strict=True):
        if spec is None or drawn is None or spec.rounding == "nearest":
            tensors += [None, None]
        else:
            tensors += [numbers_on(drawn.streams, device), numbers_on(drawn.counts, device)]
            seed = drawn.seed
    return tensors, (*halves(seed), *halves(seed >> 32))


def padded_slots(offsets: GroupOffsets, multiple: int) -> GroupSlots:
    """Return `offsets.slots`, whose ends one launch computes instead of several operations."""
    slots = offsets.slots(multiple)
    if "ends" not in vars(slots):
        slots.ends = slot_ends(offsets.ends, multiple)
    return slots


def quantize_weights(
    weight: Tensor, spec: QuantSpec | None, other: QuantSpec | None, factors: Tensor | None = None
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize matrices [groups, n, k] by `spec`, and their transposes by `other`; either may be None.

    Returns:
        Operands [groups · n, k] and [groups · k, n], each row with its own scale, or each 128 × 128 elements.
    """
    groups, n, k = weight.shape
    if _in_squares(spec, other):
        q, scale, qt, transposed_scale = _with_square_scales((weight.detach(),), spec, other)
        return (
            None if spec is None else Quantized(q, scale, spec, (groups * n, k)),
            None if other is None else Quantized(qt, transposed_scale, other, (groups * k, n)),
        )
    x = weight.detach().view(groups * n, k)
    ends = equal_ends(groups, n, weight.device)
    q, scale, qt, transposed_scale, amax = _launch(x, spec, other, ends, (factors, None), n, stacked=True)
    fprop = dgrad = None
    if spec is not None:
        row_spec = replace(spec, block=(1, None))
        fprop = Quantized(q, scale, row_spec, (groups * n, k), amax=amax)
    if other is not None:
        row_spec = replace(other, block=(1, None))
        dgrad = Quantized(qt.view(groups * k, n), transposed_scale.view(-1, 1), row_spec, (groups * k, n), amax=amax)
    return fprop, dgrad


@lru_cache(1024)
def equal_ends(groups: int, n: int, device: torch.device) -> Tensor:
    """Return the ends of groups of n rows each, int32 [groups], cached."""
    with torch.inference_mode(False):
        return torch.arange(n, n * groups + 1, n, dtype=torch.int32, device=device)


def _launch(
    x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, ends: Tensor,
    history: tuple[Tensor | None, Tensor | None], slots: int, *, stacked: bool,
) -> Sequence[Any]:  # fmt: skip
    """Return codes, scales, transposed codes, their scales [groups, k], and the groups' amaxes; absent ones are None.

    Args:
        history: encode factors, and newest amaxes.
    """
    if _scale_kind(spec, other) == "tensor":
        steps = tuple(0 if t is None else t.stride(0) for t in history)
        *operands, amax = _with_one_scale((x, ends), spec, other, slots, stacked, steps, own=history)
        return *operands, amax.view(torch.float32)
    return *_with_row_scales((x, ends), spec, other, slots, stacked), None


@LaunchPlanCache
def _with_one_scale(
    tensors_in: Sequence[Any], spec: QuantSpec | None, other: QuantSpec | None, slots: int, stacked: bool,
    steps: tuple[int, int],
) -> LaunchPlan:  # fmt: skip
    x, ends, *history = tensors_in
    one = spec or other
    assert one is not None
    amaxes = whole((ends.shape[0],), torch.int32)._replace(zeros=True)
    rows, columns = _buffers(x, spec), _transposed_buffers(x, other, slots, ends.shape[0], stacked)
    launches = [
        _amaxes(x, amaxes, ends, each_column=False),
        _cast((x, rows, columns, amaxes, history, ends), one, slots, steps, each_column=False, stacked=stacked),
    ]
    return LaunchPlan(tensors_in, (*rows, *columns, amaxes), launches)


@LaunchPlanCache
def _with_row_scales(
    tensors_in: Sequence[Any], spec: QuantSpec | None, other: QuantSpec, slots: int, stacked: bool
) -> LaunchPlan:
    x, ends = tensors_in
    amaxes = whole((ends.shape[0], x.shape[1]), torch.int32)._replace(zeros=True)
    rows, columns = _buffers(x, spec), _transposed_buffers(x, other, slots, ends.shape[0], stacked)
    if spec is None or x.shape[1] > LONGEST:
        launches = [_amaxes(x, amaxes, ends, each_column=True)]
    else:
        launches = [_rows((x, *rows, amaxes, ends), spec)]
    tensors = (x, NONE, columns, amaxes, NONE, ends)
    launches.append(_cast(tensors, other, slots, (0, 0), each_column=True, stacked=stacked))
    return LaunchPlan(tensors_in, (*rows, *columns), launches)


@LaunchPlanCache
def _with_block_scales(
    tensors_in: Sequence[Any], spec: QuantSpec | None, other: QuantSpec | None, slots: int
) -> LaunchPlan:
    x, ends = tensors_in
    (rows, k), groups, one = x.shape, ends.shape[0], spec or other
    assert one is not None
    q, scale = _buffers(x, spec)[0], None if spec is None else whole((-(-k // BLOCK), rows), torch.float32)
    qt = _transposed_buffers(x, other, slots, groups, stacked=False)[0]
    transposed_scale = None if other is None else whole((slots // BLOCK, k), torch.float32)
    grid, across = programs(x, groups, BLOCK, BLOCK)
    numbers = (groups, k, x.stride(0), k, slots // SLOT_MULTIPLE, rows, across)
    tensors = (x, q, qt, scale, transposed_scale, ends)
    constants = _block_constants(spec, other, x.device)
    warps = ROW_WARPS if qt is None else WARPS
    launch = LaunchSpec(kernels.group_blocks, grid, tensors, numbers, constants, warps)
    return LaunchPlan(tensors_in, (q, scale, qt, transposed_scale), [launch])


@LaunchPlanCache
def _with_square_scales(tensors_in: Sequence[Any], spec: QuantSpec | None, other: QuantSpec | None) -> LaunchPlan:
    (weight,) = tensors_in
    groups, n, k = weight.shape
    down, across = n // BLOCK, k // BLOCK
    q = qt = scale = transposed_scale = None
    if spec is not None:
        q = row_major((groups * n, k), FLOAT8[spec.format.name])
        scale = whole((groups * down, across), torch.float32)
    if other is not None:
        qt = in_words(row_major((groups * k, n), FLOAT8[other.format.name]))
        transposed_scale = whole((groups * across, down), torch.float32)
    tensors, numbers = (weight, q, qt, scale, transposed_scale), (n, k, k, down, across)
    constants = _block_constants(spec, other, weight.device)
    grid = (groups * down * across,)
    launch = LaunchSpec(kernels.stacked_squares, grid, tensors, numbers, constants, ROW_WARPS if qt is None else WARPS)
    return LaunchPlan(tensors_in, (q, scale, qt, transposed_scale), [launch])


def _block_constants(spec: QuantSpec | None, other: QuantSpec | None, device: torch.device) -> dict[str, Any]:
    one = spec or other
    assert one is not None
    wanted = {"BM": BLOCK, "BN": BLOCK, "ROWS": spec is not None, "COLUMNS": other is not None}
    return {**wanted, "dtype": DTYPES[one.format.name], **format_constants(one, device)}


#: Buffers of an operand that is not requested.
NONE: tuple[None, None] = None, None
Buffers = tuple[BufferSpec | None, BufferSpec | None]


def _buffers(x: Tensor, spec: QuantSpec | None) -> Buffers:
    """Return the specs of the codes and scales of rows."""
    if spec is None:
        return NONE
    return row_major((x.shape[0], x.shape[1]), FLOAT8[spec.format.name]), whole((x.shape[0], 1), torch.float32)


def _transposed_buffers(x: Tensor, spec: QuantSpec | None, slots: int, groups: int, stacked: bool) -> Buffers:
    """Return the specs of the codes of transposes, written as int32, and of their scales."""
    if spec is None:
        return NONE
    k = x.shape[1]
    codes = row_major((groups * k if stacked else k, slots), FLOAT8[spec.format.name])
    return in_words(codes), whole((groups, k), torch.float32)


def programs(x: Tensor, groups: int, bm: int, bn: int) -> tuple[tuple[int], int]:
    """Return a grid that suffices for any sizes of the groups, and the number of blocks side by side."""
    across = -(-x.shape[1] // bn)
    return ((-(-x.shape[0] // bm) + groups) * across,), across


def _amaxes(x: Tensor, amaxes: BufferSpec, ends: Tensor, *, each_column: bool) -> LaunchSpec:
    (bm, bn, warps), groups = AMAX_BLOCK, ends.shape[0]
    grid, across = programs(x, groups, bm, bn)
    numbers = (groups, x.shape[1], x.stride(0), across)
    constants = {"BM": bm, "BN": bn, "EACH_COLUMN": each_column}
    return LaunchSpec(kernels.group_amaxes, grid, (x, amaxes, ends), numbers, constants, warps)


def _cast(
    tensors: tuple[Any, ...], spec: QuantSpec, slots: int, steps: tuple[int, int], *, each_column: bool, stacked: bool
) -> LaunchSpec:
    """Return the launch that casts with known amaxes.

    Tensors are x, buffers of rows, buffers of transposes, amaxes, factors and newest amaxes or None, and ends; `steps`
    are the strides of factors and newest amaxes.
    """
    x, (q, scale), (qt, transposed_scale), amaxes, (factors, newest), ends = tensors
    (bm, bn, warps), groups, k = CAST_BLOCK, ends.shape[0], x.shape[1]
    grid, across = programs(x, groups, bm, bn)
    lines = slots // SLOT_MULTIPLE
    numbers = (groups, k, x.stride(0), k, lines, lines * k, *steps, across)
    constants = {
        "BM": bm,
        "BN": bn,
        "EACH_COLUMN": each_column,
        "STACKED": stacked,
        "dtype": DTYPES[spec.format.name],
        **format_constants(spec, x.device),
    }
    arguments = (x, q, qt, scale, transposed_scale, amaxes, factors, newest, ends)
    return LaunchSpec(kernels.group_cast, grid, arguments, numbers, constants, warps)


def _rows(tensors: tuple[Any, ...], spec: QuantSpec) -> LaunchSpec:
    """Return the launch that quantizes rows and measures columns; tensors are x, codes, scales, amaxes, ends."""
    x, *_, ends = tensors
    (rows, k), groups = x.shape, ends.shape[0]
    bn = max(triton.next_power_of_2(k), 16)
    bm = max(REGISTER_ELEMENTS // bn, 1)
    # Fewer programs send fewer column maxima, but every multiprocessor must have some.
    steps = triton.next_power_of_2(max(rows // (bm * 4 * multiprocessors(x.device)), 1))
    constants = {
        "BM": bm,
        "BN": bn,
        "STEPS": steps,
        "dtype": DTYPES[spec.format.name],
        **format_constants(spec, x.device),
    }
    numbers = (groups, k, x.stride(0), k)
    grid = (-(-rows // (bm * steps)) + groups,)
    return LaunchSpec(kernels.group_rows, grid, tensors, numbers, constants, 8 if bn < LONGEST else 32)


# ---- finishing products ----


def finish_rows(y: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Zero the rows of y [T, n] that belong to no group, and add each group's bias [groups, n] if given, in place."""
    _finish_rows((y, None if bias is None else bias.contiguous(), ends))
    return y


@LaunchPlanCache
def _finish_rows(tensors_in: Sequence[Any]) -> LaunchPlan:
    y, bias, ends = tensors_in
    bm, bn, warps = FINISH_BLOCK
    grid, across = programs(y, 0, bm, bn)
    numbers = (ends.shape[0], *y.shape, across)
    launch = LaunchSpec(kernels.finish_rows, grid, (y, bias, ends), numbers, {"BM": bm, "BN": bn}, warps)
    return LaunchPlan(tensors_in, (), [launch])


def finish_groups(y: Tensor, ends: Tensor) -> Tensor:
    """Zero the matrices of y [groups, n, k] whose groups have no rows, in place."""
    _finish_groups((y, ends))
    return y


@LaunchPlanCache
def _finish_groups(tensors_in: Sequence[Any]) -> LaunchPlan:
    y, ends = tensors_in
    size = y[0].numel()
    grid = (-(-size // FLAT), y.shape[0])
    return LaunchPlan(tensors_in, (), [LaunchSpec(kernels.finish_groups, grid, (y, ends), (size,), {"B": FLAT}, 4)])


def record_amaxes(newest: Tensor, amaxes: Tensor, ends: Tensor) -> None:
    """Raise the newest amaxes of the groups' histories, float32 [groups], to these, of groups that have rows."""
    _records((amaxes, ends), newest.stride(0), own=(newest,))


@LaunchPlanCache
def _records(tensors_in: Sequence[Any], step: int) -> LaunchPlan:
    amaxes, ends, newest = tensors_in
    launch = LaunchSpec(kernels.note_groups, ends.shape, (newest, amaxes, ends), (step,), {}, 1)
    return LaunchPlan(tensors_in, (), [launch])


def slot_ends(ends: Tensor, multiple: int) -> Tensor:
    """Return the end of each group's slots, a multiple of `multiple`, int32 [groups]."""
    out: Tensor = _slot_ends((ends,), multiple)[0]
    return out


@LaunchPlanCache
def _slot_ends(tensors_in: Sequence[Any], multiple: int) -> LaunchPlan:
    (ends,) = tensors_in
    out = whole(tuple(ends.shape), torch.int32)
    return LaunchPlan(
        tensors_in, (out,), [LaunchSpec(kernels.slot_ends, (1,), (ends, out), (ends.shape[0], multiple), {}, 1)]
    )
