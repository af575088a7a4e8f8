"""Quantization on a GPU in narrow blocks, MXFP8 and NVFP4, with scales in the order that Blackwell's GEMMs read.

The operand of the transpose is written separately, in addition or instead: four-bit codes and swizzled scales cannot be
read in the other direction.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from quaver.kernels.emulation import amaxes
from quaver.kernels.mxfp8 import mxfp8_columns, mxfp8_rows
from quaver.kernels.nvfp4 import nvfp4_along, nvfp4_both, nvfp4_down, rotated_amax
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu.buffers import PACKED4, BufferSpec, in_words, row_major, whole
from quaver.torch.backends.gpu.device import architecture
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec, workspace
from quaver.torch.backends.gpu.quantize_launch import QuantizeLaunch, RequestedOperands, without_memory, zeros
from quaver.torch.backends.gpu.tensorwise import (
    DTYPES,
    buffer_for_codes,
    codes_in_words,
    integers,
    measure,
    quantize_by,
    tiles,
)
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import BLOCKS, FLOAT8, ROWS, Quantized

#: Rows and columns of a program's block, and its warps.
MX_ROWS_BLOCK = 128, 128, 4
MX_COLUMNS_BLOCK = 128, 128, 8
NV_BLOCK = 128, 128, 4
#: The same with noise in registers too: along rows, and down columns.
NV_STOCHASTIC_BLOCKS = (128, 64, 4), (64, 128, 4)


def with_exponents(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    """Return True if `by_exponents` supports these specs of a matrix and of its transpose."""
    one = spec or other
    assert one is not None
    kinds = one.scale == "e8m0" and one.block in ((1, 32), (32, 32)) and one.format.name in FLOAT8
    return kinds and one.rounding == "nearest" and not one.hadamard and (None in (spec, other) or spec == other)


def with_two_levels(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    """Return True if `by_two_levels` supports the specs; only one may be given, since noise and rotation have a
    direction.
    """
    one = spec or other
    assert one is not None
    return None in (spec, other) and one.two_level and one.block in ((1, 16), (16, 16))


def by_exponents(
    x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, amax: Tensor | None = None
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize x [rows, k] with contiguous last axis, and its transpose, in MX blocks of 32 or 32 × 32.

    Same bits as the reference, which runs if amaxes are given. The amaxes of blocks are not returned.
    """
    if amax is not None:
        transposed = None if other is None else reference.quantize(x.t(), other, amax.t() if spec else amax)
        return (None if spec is None else reference.quantize(x, spec, amax)), transposed
    return quantize_by(_mx_launches, x, spec, other)


def plan_launch(
    x: Tensor, spec: QuantSpec, other: QuantSpec | None, wanted: RequestedOperands
) -> QuantizeLaunch | None:
    """Plan `by_exponents` for contiguous matrices like x, sides multiples of 16; both operands, or None."""
    return None if other is None else _mx_launches(without_memory(x), spec, other, wanted)


def _mx_launches(
    x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, wanted: RequestedOperands, _: Tensor | None = None
) -> QuantizeLaunch:
    (rows, k), one = x.shape, spec or other
    assert one is not None
    two_launches = spec is not None and other is not None and _needs_two_launches(one, x.device)
    q = s = qt = st = None
    if spec is not None:
        q, s = buffer_for_codes(rows, k, one), _buffer(rows, k)
    if other is not None:
        qt, st = codes_in_words(k, rows, one, wanted.transpose), _buffer(k, rows)
    if s is not None and (two_launches or other is None):
        s = in_words(s)
    written = [(q, s, None, None), (None, None, qt, st)] if two_launches else [(q, s, qt, st)]
    launches = [_mx_launch((x, *buffers), one) for buffers in written]
    return QuantizeLaunch((x, None, None), (q, s, qt, st, None), (), lambda _: launches)


def _needs_two_launches(spec: QuantSpec, device: torch.device) -> bool:
    """Return True if squares need a launch per direction: ptxas 13.1 of Triton 3.7 crashes on Blackwell with one for
    both.
    """
    return spec.block[0] == 32 and architecture(device) >= 100 and triton.__version__.startswith("3.7.")


def _buffer(rows: int, k: int) -> BufferSpec:
    return BufferSpec((_scales(rows, k, 32),), (1,), torch.float8_e8m0fnu, _as_bytes)


def _as_bytes(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8)


def _scales(rows: int, k: int, width: int) -> int:
    """Return the number of swizzled scales for blocks of `width`: whole tiles, which a kernel fills."""
    return -(-rows // ROWS) * ROWS * across(k, width) * BLOCKS


def across(k: int, width: int) -> int:
    """Return the number of scale tiles along k."""
    return -(-k // (width * BLOCKS))


def _mx_launch(tensors: tuple[Any, ...], spec: QuantSpec) -> LaunchSpec:
    """Return the launch for x, codes, scales, transposed codes and their scales.

    Codes of the transpose are int32; without a transpose the scales are.
    """
    x, q, _, qt, _ = tensors
    rows, k = x.shape
    grid, constants, warps = tiles(x.shape, MX_ROWS_BLOCK if qt is None else MX_COLUMNS_BLOCK)
    q_stride = -(-k // 16) * 16
    constants |= {
        "SQUARE": spec.block[0] == 32,
        "EMAX": spec.format.emax,
        "TOP_MANTISSA": spec.format.max_mantissa,
        "INTEGERS": integers(x.device),
        "dtype": DTYPES[spec.format.name],
    }
    if qt is None:
        constants["NEAR"] = (MX_ROWS_BLOCK[0] + 1) * max(x.stride(0), q_stride) < 2**31
        alone = rows, k, x.stride(0), q_stride, across(k, 32)
        return LaunchSpec(mxfp8_rows, grid, tensors[:3], alone, constants, warps)
    constants["ROWS"] = q is not None
    numbers = rows, k, x.stride(0), q_stride, -(-rows // 16) * 4, across(k, 32), across(rows, 32)
    return LaunchSpec(mxfp8_columns, grid, tensors, numbers, constants, warps)


def by_two_levels(
    x: Tensor, spec: QuantSpec, amax: Tensor | None = None, noise: Any = (0, 0, 0), down: bool = False
) -> Quantized:
    """Quantize x with contiguous last axis, or its transpose if `down`, with two-level scales per 16 or 16 × 16.

    Same bits as the reference.

    Args:
        amax: amax of the tensor, float32 of one element, or None to measure it (after the rotation, if any).
        noise: (seed, tensor id, count); a count that is a tensor is not copied to the host.
    """
    rows, k = x.shape[::-1] if down else x.shape
    k = spec.padded(k)
    random = spec.rounding == "stochastic"
    if random and k % 4:
        # Kernels draw noise for four elements at once.
        return reference.quantize(x.t() if down else x, spec, amax, None, noise)
    measured = (rotated(x, down) if spec.hadamard else measure(x)) if amax is None else None
    count = _count(noise[2], x.device) if random else None
    key_words = (*halves(noise[1]), *halves(noise[0]), *halves(noise[0] >> 32)) if random else (1,) * 6
    q, s, factor = _nv((x,), spec, key_words, down, own=(measured if amax is None else amax, count))
    return Quantized(q[:, : -(-k // 2)], s, spec, (rows, k), tensor_factor=factor, amax=measured, swizzled=True)


def _count(count: Tensor | int, device: torch.device) -> Tensor:
    if isinstance(count, Tensor):
        return count.to(device, torch.int64)
    return torch.full((1,), count, dtype=torch.int64, device=device)


def halves(word: Tensor | int) -> tuple[int, int]:
    """Split the low 32 bits for `quaver.kernels.numerics.whole_word`, so that all layers share compiled kernels."""
    bits = int(word) & 0xFFFFFFFF
    return 2 * (bits & 0xFFFF) + 1, 2 * (bits >> 16) + 1


@LaunchPlanCache
def _nv(inputs: Sequence[Any], spec: QuantSpec, key_words: tuple[int, ...], down: bool) -> LaunchPlan:
    x, top, count = inputs
    height, k = (x.shape[1], spec.padded(x.shape[0])) if down else (x.shape[0], spec.padded(x.shape[1]))
    q = in_words(whole((height, -(-k // 32) * 16), torch.uint8))
    s, factor = whole((_scales(height, k, 16),), torch.uint8), whole((1, 1), torch.float32)
    return LaunchPlan(inputs, (q, s, factor), [_nv_launch((x, q, s, factor, top, count), spec, key_words, down)])


def _nv_launch(tensors: tuple[Any, ...], spec: QuantSpec, key_words: tuple[int, ...], down: bool) -> LaunchSpec:
    """Return the launch for x, codes and scales (of the transpose if `down`), tensor factor, amax, noise count."""
    x = tensors[0]
    rows, columns = x.shape
    k = spec.padded(rows if down else columns)
    grid, constants, warps = tiles(x.shape, NV_STOCHASTIC_BLOCKS[down] if spec.rounding == "stochastic" else NV_BLOCK)
    constants |= {
        "POWER_OF_TWO": spec.scale == "two_level",
        "SQUARE": spec.block[0] == 16,
        "HADAMARD": spec.hadamard,
        "STOCHASTIC": spec.rounding == "stochastic",
        "INTEGERS": integers(x.device),
    }
    numbers = (rows, columns, x.stride(0), k, -(-k // 32) * 4, across(k, 16), *key_words)
    return LaunchSpec(nvfp4_down if down else nvfp4_along, grid, tensors, numbers, constants, warps)


def plan_launch_two_level(
    x: Tensor, spec: QuantSpec, other: QuantSpec | None, wanted: RequestedOperands
) -> QuantizeLaunch | None:
    """Plan `by_two_levels` for contiguous matrices like x with sides that are multiples of 16, and for their
    transposes.

    One launch measures both and advances the noise counts, and one writes both. The last results are the inverse tensor
    factors, as GEMMs take them. Returns None if the specs are not supported.

    The launches get the noise keys (seed, tensor id, transpose's id), and which operands are needed.
    """
    if other is None or spec.hadamard or spec.scale != other.scale or not spec.block == other.block == (1, 16):
        return None
    moving = spec.rounding == "stochastic", other.rounding == "stochastic"
    if wanted.transpose and any(moving):
        return None
    x = without_memory(x)
    rows, k = x.shape
    along, down = _nv_buffers(rows, k, False), _nv_buffers(k, rows, wanted.transpose)
    top, transposed_top, work = whole((1, 1), torch.float32), whole((1, 1), torch.float32), zeros(4)
    # Counts may have any address, as a placeholder of one element says.
    counts, drawn = (whole((1,), torch.int64), whole((2,), torch.int64)) if any(moving) else (None, None)

    def launches(noise: Any) -> list[LaunchSpec]:
        (seed, *ids), (straight, transposed) = noise or ((0, 0, 0), (True, True))
        rotated = transposed and other.hadamard
        amax_values = top if straight or not rotated else None, transposed_top if rotated else None
        moves = straight and moving[0], transposed and moving[1]
        measured = amaxes_launch(x, (*amax_values, work, counts, drawn), moves)
        key_words = [half for word in (*ids, seed, seed >> 32) for half in halves(word)]
        tensors = x, *along, top, *down, transposed_top if other.hadamard else top, drawn
        return [measured, _nv_both_launch(tensors, (spec, other), (straight, transposed), key_words)]

    results = (*along[:2], *down[:2], None, along[2], down[2])
    reused = (top, transposed_top, work) if drawn is None else (top, transposed_top, work, drawn)
    return QuantizeLaunch((x, counts, None), results, reused, launches)


def _nv_buffers(rows: int, k: int, transposed: bool) -> tuple[BufferSpec, BufferSpec, BufferSpec]:
    """Return buffer specs for codes, scales, and the inverse of the tensor factor."""
    codes = in_words(row_major((rows, -(-k // 32) * 16), PACKED4, transposed))
    scales = BufferSpec((_scales(rows, k, 16),), (1,), torch.float8_e4m3fn, _as_bytes)
    return codes, scales, whole((1, 1), torch.float32)


def _nv_both_launch(
    tensors: tuple[Any, ...], specs: tuple[QuantSpec, QuantSpec], wanted: tuple[bool, bool], key_words: Sequence[int]
) -> LaunchSpec:
    """Return the launch for x, its codes, scales, inverse factor and amax, the same of the transpose, and the noise
    counts.

    An operand that is not needed gets no programs.
    """
    (rows, columns), (spec, other) = tensors[0].shape, specs
    constants: dict[str, Any] = {
        "POWER_OF_TWO": spec.scale == "two_level",
        "STOCHASTIC": spec.rounding == "stochastic",
        "HADAMARD": other.hadamard,
        "TRANSPOSED_STOCHASTIC": other.rounding == "stochastic",
        "INTEGERS": integers(tensors[0].device),
    }
    programs = []
    for down, one in enumerate(specs):
        bm, bn, warps = NV_STOCHASTIC_BLOCKS[down] if one.rounding == "stochastic" else NV_BLOCK
        end, even = "_2" * down, rows % bm == 0 and columns % bn == 0
        constants |= {f"BM{end}": bm, f"BN{end}": bn, f"EVEN{end}": even}
        programs.append(wanted[down] * -(-rows // bm) * -(-columns // bn))
    numbers = rows, columns, programs[0], *key_words
    return LaunchSpec(nvfp4_both, (sum(programs),), tensors, numbers, constants, warps)


def amaxes_launch(x: Tensor, own: Sequence[Tensor | BufferSpec | None], moves: tuple[bool, bool]) -> LaunchSpec:
    """Return the launch that measures a matrix, and the same after the rotation of groups of its rows.

    Args:
        own: both amaxes, workspace, noise counts, and a copy of the counts before the launch.
        moves: which of the counts advance.
    """
    grid, constants, warps = tiles(x.shape, NV_BLOCK)
    constants |= {"FIRST": moves[0], "SECOND": moves[1]}
    numbers = *x.shape, x.stride(0), grid[0] * grid[1]
    return LaunchSpec(amaxes, grid, (x, *own), numbers, constants, warps)


def rotated(x: Tensor, down: bool) -> Tensor:
    """Return the amax, float32 [1, 1], of x [rows, columns] rotated along its rows, or along its columns if `down`."""
    top: Tensor = _rotated((x,), down, own=(workspace(x.device),))[0]
    return top


@LaunchPlanCache
def _rotated(inputs: Sequence[Any], down: bool) -> LaunchPlan:
    x, work = inputs
    grid, constants, warps = tiles(x.shape, NV_BLOCK)
    constants["DOWN"] = down
    numbers = (*x.shape, x.stride(0), grid[0] * grid[1])
    top = whole((1, 1), torch.float32)
    return LaunchPlan(inputs, (top,), [LaunchSpec(rotated_amax, grid, (x, top, work), numbers, constants, warps)])
