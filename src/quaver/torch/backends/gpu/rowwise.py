"""Launches for one scale per row, and for blocks of 128 elements or 128 × 128 squares.

Each quantizes rows, the rows of the transpose, or both.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from quaver.kernels import rowwise as kernels
from quaver.kernels.rowwise import blockwise as blockwise_kernel
from quaver.kernels.rowwise import squares as squares_kernel
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu.buffers import BufferSpec, row_major
from quaver.torch.backends.gpu.device import architecture
from quaver.torch.backends.gpu.launch import LaunchSpec, multiprocessors
from quaver.torch.backends.gpu.quantize_launch import QuantizeLaunch, RequestedOperands, without_memory, zeros
from quaver.torch.backends.gpu.tensorwise import (
    DTYPES,
    buffer_for_codes,
    codes_in_words,
    format_constants,
    padded,
    quantize_by,
    tiles,
)
from quaver.torch.numerics.quantized import Quantized

# ---- one scale per row ----

#: Longest row that a program keeps in registers.
LONGEST = 16384
#: Elements of a program's block, without and with amaxes of columns.
REGISTER_ELEMENTS, REGISTER_ELEMENTS_BOTH = 8192, 16384
#: Rows and columns of a program's block, and its warps.
LONG_BLOCK = 1, 4096, 8
AMAX_BLOCK = 32, 256, 4
COLUMN_BLOCK = 128, 64, 4


def by_rows(
    x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, amax: Tensor | None = None
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize x [rows, k] in storage order by `spec`, and its transpose by `other`; either may be None.

    Args:
        x: matrix with contiguous last axis.
        amax: float32 in the shape of the scales of the single requested operand, or of one element.
    """
    rows, k = x.shape
    known_amax = None if amax is None else amax.expand(k if spec is None else rows, 1).contiguous()
    return quantize_by(_row_launches, x, spec, other, known_amax)


def plan_launch(
    x: Tensor, spec: QuantSpec, other: QuantSpec | None, wanted: RequestedOperands
) -> QuantizeLaunch | None:
    """Plan `by_rows` for contiguous matrices like x with sides that are multiples of 16; `other` may be None.

    Returns None if the rows are too long.
    """
    return None if x.shape[1] > LONGEST else _row_launches(without_memory(x), spec, other, wanted)


def _row_launches(
    x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, wanted: RequestedOperands, amax: Tensor | None = None
) -> QuantizeLaunch:
    rows, k = x.shape
    q = scale = qt = transposed_scale = amax_values = None
    launches = []
    if other is not None:
        qt = codes_in_words(k, rows, other, wanted.transpose)
        transposed_scale = row_major((k, 1), torch.float32, wanted.transpose)
        amax_values = zeros(buffer_for_amax_values(k))
    if spec is not None:
        q, scale = buffer_for_codes(rows, k, spec), row_major((rows, 1), torch.float32)
        launches.append(_rows((x, q, scale, amax_values, amax), spec))
    if other is not None:
        if spec is None or k > LONGEST:
            launches.append(_column_amaxes(x, amax_values))
        launches.append(_columns((x, qt, transposed_scale, amax_values, amax), other))
    reused = () if amax_values is None else (amax_values,)
    return QuantizeLaunch((x, None, None), (q, scale, qt, transposed_scale, None), reused, lambda _: launches)


def _rows(tensors: tuple[Any, ...], spec: QuantSpec) -> LaunchSpec:
    """Return the launch that quantizes rows; tensors are x, codes, scales, amaxes of columns, and given amaxes."""
    x, q, scale, amax_values, known_amax = tensors
    rows, k = x.shape
    if k > LONGEST:
        return _long_rows((x, q, scale, known_amax), spec)
    bn = max(triton.next_power_of_2(padded(k)), 16)
    bm, steps = _heights(
        x, bn, REGISTER_ELEMENTS if amax_values is None else REGISTER_ELEMENTS_BOTH, amax_values is not None
    )
    even = rows % (bm * steps) == 0 and k == bn
    if not even:
        # Masks and column amaxes together need too many registers for two programs per multiprocessor.
        bm, steps = _heights(x, bn, REGISTER_ELEMENTS, amax_values is not None)
    constants = {
        "BM": bm,
        "BN": bn,
        "STEPS": steps,
        "EVEN": even,
        "AMAX_VALUES": amax_values is not None,
        "KNOWN_AMAX": known_amax is not None,
        "dtype": DTYPES[spec.format.name],
        **format_constants(spec, x.device),
    }
    # A program that also measures columns occupies half of a multiprocessor.
    warps = 8 if bn < LONGEST else 16 if amax_values is None else 32
    numbers = (rows, k, x.stride(0), padded(k))
    return LaunchSpec(kernels.rowwise, (-(-rows // (bm * steps)),), tensors, numbers, constants, warps)


def _heights(x: Tensor, bn: int, elements: int, amax_values: bool) -> tuple[int, int]:
    """Return rows of a program's block, and how many blocks a program processes in turn.

    Fewer programs send fewer column maxima, but every multiprocessor must have some.
    """
    bm = max(elements // bn, 1)
    if not amax_values:
        return bm, 1
    return bm, triton.next_power_of_2(max(x.shape[0] // (bm * 4 * multiprocessors(x.device)), 1))


def _long_rows(tensors: tuple[Any, ...], spec: QuantSpec) -> LaunchSpec:
    x, _, _, known_amax = tensors
    rows, k = x.shape
    bm, bn, warps = LONG_BLOCK
    constants = {
        "BM": bm,
        "BN": bn,
        "EVEN": rows % bm == 0 and k % bn == 0,
        "KNOWN_AMAX": known_amax is not None,
        "dtype": DTYPES[spec.format.name],
        **format_constants(spec, x.device),
    }
    numbers = (rows, k, x.stride(0), padded(k))
    return LaunchSpec(kernels.long_rowwise, (-(-rows // bm),), tensors, numbers, constants, warps)


def _column_amaxes(x: Tensor, amax_values: BufferSpec | None) -> LaunchSpec:
    """Return the launch that measures the amax bits of each column."""
    rows, k = x.shape
    bm, bn, warps = AMAX_BLOCK
    steps = triton.next_power_of_2(max(rows * -(-k // bn) // (bm * 8 * multiprocessors(x.device)), 1))
    programs, constants, warps = tiles(x.shape, (bm * steps, bn, warps))
    constants |= {"BM": bm, "STEPS": steps}
    return LaunchSpec(kernels.column_amax, programs, (x, amax_values), (rows, k, x.stride(0)), constants, warps)


def _columns(tensors: tuple[Any, ...], spec: QuantSpec) -> LaunchSpec:
    """Return the launch that writes the transpose; tensors are x, codes as int32, scales, column amaxes, and given
    amaxes.
    """
    x, _, _, _, known_amax = tensors
    rows, k = x.shape
    programs, constants, warps = tiles(x.shape, COLUMN_BLOCK, (padded(rows), k))
    constants |= {
        "KNOWN_AMAX": known_amax is not None,
        "dtype": DTYPES[spec.format.name],
        **format_constants(spec, x.device),
    }
    numbers = (rows, k, x.stride(0), padded(rows) // 16, -(-padded(rows) // COLUMN_BLOCK[0]))
    return LaunchSpec(kernels.columnwise, programs, tensors, numbers, constants, warps)


def buffer_for_amax_values(k: int) -> int:
    """Return the number of int32 for the amaxes of k columns and the counters of their readers."""
    return k + -(-k // COLUMN_BLOCK[1])


# ---- one scale per 128 elements of a row, or per 128 × 128 square ----
# Scales are in cuBLAS's layout. Those of 1 × 128 blocks are [blocks, rows]; those of squares are [blocks of rows,
# blocks of k], padded to a multiple of four blocks of k.
# Source: torch's aten/src/ATen/native/cuda/ScaledBlas.cpp for the strides.

BLOCK = 128
#: Warps of a program with and without the transpose.
WARPS, ROW_WARPS = 8, 4
#: Registers per thread with which three programs that write both operands share a multiprocessor: one computes while
#: two load.
REGISTERS = 80


def by_blocks(
    x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, amax: Tensor | None = None
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize x [rows, k] in storage order by `spec`, and its transpose by `other`, from one read; either may be None.

    Args:
        x: matrix with contiguous last axis.
        amax: float32 in the shape of the requested scales, or of one element; None measures it.
    """
    rows, k = x.shape
    known = spec or other
    assert known is not None
    square = known.block[0] == BLOCK
    scales = _shape(*((k, rows) if spec is None else (rows, k)), square)
    known_amax = None if amax is None else _as_scales(amax, scales, square)
    return quantize_by(_blockwise_launches, x, spec, other, known_amax)


def plan_launch_blockwise(
    x: Tensor, spec: QuantSpec, other: QuantSpec | None, wanted: RequestedOperands
) -> QuantizeLaunch | None:
    """Plan `by_blocks` for contiguous matrices like x with sides that are multiples of 16; needs both operands, 1 ×
    128.
    """
    return (
        None if other is None or spec.block[0] == BLOCK else _blockwise_launches(without_memory(x), spec, other, wanted)
    )


def _blockwise_launches(
    x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, wanted: RequestedOperands, amax: Tensor | None = None
) -> QuantizeLaunch:
    rows, k = x.shape
    q = scale = qt = transposed_scale = None
    if spec is not None:
        q, scale = buffer_for_codes(rows, k, spec), _buffer(rows, k, spec)
    if other is not None:
        qt, transposed_scale = codes_in_words(k, rows, other, wanted.transpose), _buffer(k, rows, other)
    one = spec or other
    assert one is not None
    launches = [_launch((x, q, qt, scale, transposed_scale, amax), one)]
    return QuantizeLaunch((x, None, None), (q, scale, qt, transposed_scale, None), (), lambda _: launches)


def _shape(rows: int, k: int, square: bool) -> tuple[int, int]:
    """Return the stored shape of the scales of an operand [rows, k]; those of 1 × 128 blocks are stored transposed."""
    blocks = -(-k // BLOCK)
    return (-(-rows // BLOCK), -(-blocks // 4) * 4) if square else (blocks, rows)


def _buffer(rows: int, k: int, spec: QuantSpec) -> BufferSpec:
    """Return the buffer spec of these scales; those of squares are padded with zeros."""
    square = spec.block[0] == BLOCK
    buffer = row_major(_shape(rows, k, square), torch.float32, not square)
    return buffer._replace(zeros=square and -(-k // BLOCK) % 4 != 0)


def _as_scales(amax: Tensor, shape: tuple[int, int], square: bool) -> Tensor:
    """Bring a given amax into the layout of the scales."""
    if amax.numel() == 1:
        return amax.reshape(1, 1).expand(shape).contiguous()
    if not square:
        return amax.t().contiguous()
    return torch.nn.functional.pad(amax, (0, shape[1] - amax.shape[1])).contiguous()


def _launch(tensors: tuple[Any, ...], spec: QuantSpec) -> LaunchSpec:
    """Return the launch for x, codes, transposed codes as int32, both scales, given amaxes; absent ones are None."""
    x, q, qt, _, _, known_amax = tensors
    rows, k = x.shape
    programs, constants, warps = tiles(x.shape, (BLOCK, BLOCK, ROW_WARPS if qt is None else WARPS))
    constants |= {
        "ROWS": q is not None,
        "COLUMNS": qt is not None,
        "KNOWN_AMAX": known_amax is not None,
        "dtype": DTYPES[spec.format.name],
        **format_constants(spec, x.device),
    }
    square = spec.block[0] == BLOCK
    strides = 0 if q is None else _shape(rows, k, square)[1], 0 if qt is None else _shape(k, rows, square)[1]
    numbers = (rows, k, x.stride(0), 0 if q is None else padded(k), 0 if qt is None else padded(rows) // 16, *strides)
    kernel = squares_kernel if square else blockwise_kernel
    # Divisions for other scales need more registers, and so do float32 inputs and codes rounded on their bits.
    few = spec.power_of_two and constants["EVEN"] and x.element_size() == 2 and architecture(x.device) >= 90
    both = q is not None and qt is not None and not square
    return LaunchSpec(kernel, programs, tensors, numbers, constants, warps, REGISTERS if both and few else None)
