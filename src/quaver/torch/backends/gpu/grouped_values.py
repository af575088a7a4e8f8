"""Emulated operands of groups: bf16 values of the codes that each group alone would have, without copying sizes.

The counterpart of `emulation` for many matrices in one launch. Values of rows stay where the rows are. Those of
transposes, or their codes, are in slots: each group begins at a whole block of rows, and zeros follow its last row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.kernels import grouped as kernels
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu import emulation
from quaver.torch.backends.gpu.buffers import BufferSpec, whole
from quaver.torch.backends.gpu.emulation import WIDTH, saved_format
from quaver.torch.backends.gpu.grouped_quantize import noise_arguments, padded_slots, programs
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec
from quaver.torch.backends.gpu.quantize import LONGEST_SIDE
from quaver.torch.backends.gpu.tensorwise import integers
from quaver.torch.numerics.grouped import GroupedNoise, GroupOffsets, slots
from quaver.torch.numerics.quantized import FLOAT8

#: Values of rows, values of transposes in slots, and codes with scales for `saved_values`; each may be None.
Values = tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None]


def serves(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    """Return True if kernels round rows of groups by `spec` and their transposes by `other` to bf16 values."""
    if spec is None or other is None:
        return False
    if emulation.serves_two_level(spec, other):
        # Kernels draw noise for whole blocks of rows, and only a rotated transpose is padded to whole blocks.
        return other.rounding == "nearest" or other.hadamard
    return emulation.serves(spec, other) and saved_format(spec.format) is not None


def slot_multiple(spec: QuantSpec) -> int:
    """Return the number of rows to whose multiple slots of a group are padded."""
    width = spec.block[1]
    assert width is not None
    return width


def fits(*sides: int) -> bool:
    """Return True if the kernels support matrices of these sides."""
    return min(sides) > 0 and max(sides) <= LONGEST_SIDE and all(side % WIDTH == 0 for side in sides[1:])


def values(
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    offsets: GroupOffsets,
    *,
    want_rows: bool = True,
    want_transposes: bool = True,
    saves_codes: bool = False,
    noise: GroupedNoise | None = None,
    other_noise: GroupedNoise | None = None,
) -> Values:
    """Round rows x [T, k] of groups to the bf16 values of their codes.

    Args:
        spec, other: specs of the rows and of their transposes, which `serves` supports.
        want_rows, want_transposes: which of the two are needed.
        saves_codes: True to return codes and scales of the transposes instead of values.
        noise, other_noise: for stochastic rounding.

    Returns:
        Values of rows [T, k]; those of the transposes in the layout of x, [slots, k] (None if saved as codes, or if
        blocks are square, so that both are the same); and saved codes and scales.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    square = spec.block[0] != 1
    wanted = want_rows or square, want_transposes and not square, saves_codes
    if wanted[1]:
        padded_slots(offsets, slot_multiple(other))
    if not spec.two_level:
        row_values, slot_values, codes, scales = _values_of_blocks((x, offsets.ends), spec, wanted)
    else:
        own, key_words = noise_arguments((spec, other), (noise, other_noise), x.device)
        row_values, slot_values, codes, scales = _values_in_two_levels(
            (x, offsets.ends), spec, other, wanted, key_words, own=own
        )
    return row_values, slot_values, None if codes is None else (codes, scales)


def saved_values(codes: Tensor, scales: Tensor, spec: QuantSpec) -> Tensor:
    """Decode saved codes of transposes to bf16 values [slots, k]."""
    if not spec.two_level:
        return emulation.saved_values(codes, scales, spec)
    out: Tensor = emulation.cached_two_level((codes, scales), True)[0]
    return out


def saved_shapes(spec: QuantSpec, rows: Any, groups: Any, k: Any) -> tuple[tuple[Any, ...], tuple[torch.dtype, ...]]:
    """Return the shapes and dtypes of saved codes and scales; they depend only on these numbers."""
    count = slots(rows, groups, slot_multiple(spec))
    blocks = count // slot_multiple(spec)
    if spec.two_level:
        return ((blocks, 2, k), (blocks + -(-blocks // k), k)), (torch.int32, torch.uint8)
    stored = saved_format(spec.format)
    assert stored is not None
    return ((count, k), (blocks, k)), (FLOAT8[stored.name], torch.uint8)


def _buffers(x: Tensor, groups: int, spec: QuantSpec, wanted: tuple[bool, bool, bool]) -> tuple[BufferSpec | None, ...]:
    """Return the buffers of both values, codes and scales; None if not wanted."""
    want_rows, want_transposes, saves_codes = wanted
    rows, columns = x.shape
    row_values = whole((rows, columns), torch.bfloat16) if want_rows else None
    if not want_transposes:
        return row_values, None, None, None
    if not saves_codes:
        return row_values, whole((slots(rows, groups, slot_multiple(spec)), columns), torch.bfloat16), None, None
    shapes, dtypes = saved_shapes(spec, rows, groups, columns)
    return row_values, None, *(whole(*pair) for pair in zip(shapes, dtypes, strict=True))


@LaunchPlanCache
def _values_of_blocks(tensors_in: Sequence[Any], spec: QuantSpec, wanted: tuple[bool, bool, bool]) -> LaunchPlan:
    x, ends = tensors_in
    buffers = _buffers(x, ends.shape[0], spec, wanted)
    bm, bn, warps = emulation.TALL_BLOCK if slot_multiple(spec) == emulation.TALL_BLOCK[0] else emulation.BLOCK
    grid, across = programs(x, ends.shape[0], bm, bn)
    constants = {"BM": bm, "BN": bn, **emulation.values_constants(spec, buffers[2] is not None, x.device)}
    numbers = (ends.shape[0], x.shape[1], x.stride(0), across)
    launch = LaunchSpec(kernels.group_values_of_blocks, grid, (x, *buffers, ends), numbers, constants, warps)
    return LaunchPlan(tensors_in, buffers, [launch])


@LaunchPlanCache
def _values_in_two_levels(
    tensors_in: Sequence[Any], spec: QuantSpec, other: QuantSpec, wanted: tuple[bool, bool, bool],
    key_words: tuple[int, ...],
) -> LaunchPlan:  # fmt: skip
    x, ends, *noise = tensors_in
    groups, columns = ends.shape[0], x.shape[1]
    buffers = _buffers(x, groups, other, wanted)
    amaxes = whole((groups,), torch.int32)._replace(zeros=True)
    rotated = whole((groups,), torch.int32)._replace(zeros=True) if wanted[1] and other.hadamard else None
    plain = wanted[0] or rotated is None
    bm, bn, warps = emulation.TWO_LEVEL_BLOCK
    grid, across = programs(x, groups, bm, bn)
    measured = (x, amaxes if plain else None, rotated, ends)
    numbers = (groups, columns, x.stride(0), across)
    first = LaunchSpec(kernels.group_two_level_amaxes, grid, measured, numbers, {"BM": bm, "BN": bn}, warps)
    random = any(tensor is not None for tensor in noise)
    bm, bn, warps = (
        emulation.RANDOM_BLOCK if random else emulation.TWO_LEVEL_BLOCK if buffers[1] is None else emulation.BOTH_BLOCK
    )
    grid, across = programs(x, groups, bm, bn)
    constants = {
        "BM": bm,
        "BN": bn,
        "SQUARE": spec.block[0] == WIDTH,
        "HADAMARD": other.hadamard,
        "STOCHASTIC": noise[0] is not None,
        "TRANSPOSED_STOCHASTIC": noise[2] is not None,
        "INTEGERS": integers(x.device),
    }
    blocks = 0 if buffers[2] is None else buffers[2].shape[0]
    tensors = (x, *buffers, amaxes, amaxes if rotated is None else rotated, *noise, ends)
    second = LaunchSpec(
        kernels.group_values_in_two_levels, grid, tensors, (*numbers[:3], blocks, across, *key_words), constants, warps
    )
    return LaunchPlan(tensors_in, buffers, [first, second])
