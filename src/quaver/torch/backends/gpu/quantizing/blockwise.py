"""One scale for 128 elements of a row, or for a square of 128 by 128: launches, and scales as cuBLAS reads them.

Scales of runs lie block by block, [blocks, rows], and those of squares row by row, [blocks of rows, blocks of k], each
row of them padded to a multiple of four.
Source: torch's aten/src/ATen/native/cuda/ScaledBlas.cpp for the strides.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.kernels.quantizing.blockwise import blockwise as blockwise_kernel
from quaver.kernels.quantizing.blockwise import squares as squares_kernel
from quaver.torch.backends.gpu.launching.device import architecture
from quaver.torch.backends.gpu.launching.passes import Launch, Pass, Passes
from quaver.torch.backends.gpu.launching.rooms import Room, row_major
from quaver.torch.backends.gpu.quantizing.codes import (
    DTYPES,
    codes_in_words,
    format_constants,
    grid,
    of,
    padded,
    room_for_codes,
)
from quaver.torch.backends.gpu.quantizing.ways import SMALL, Wanted, Way, without_memory
from quaver.torch.numerics.quantized import Quantized

BLOCK = 128
#: Warps of a program that writes the transpose, and of one that does not.
WARPS, ROW_WARPS = 8, 4
#: Registers of a thread with which three programs that write both share a multiprocessor: one computes while two load.
REGISTERS = 80


def by_blocks(
    x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, amax: Tensor | None = None
) -> tuple[Quantized | None, Quantized | None]:
    """x [rows, k] as it lies by `spec`, its transpose by `other`, each where it is not None, from one read of x.

    Args:
        x: its last axis contiguous.
        amax: float32 in the shape of the scales of what is asked for, or of one element; None measures it.
    """
    rows, k = x.shape
    known = spec or other
    assert known is not None
    square = known.block[0] == BLOCK
    scales = _shape(*((k, rows) if spec is None else (rows, k)), square)
    given = None if amax is None else _as_scales(amax, scales, square)
    q, scale, qt, turned_scale, _ = _passes((x, given), spec, other)
    return _operand_of(q, scale, spec, rows, k), _operand_of(qt, turned_scale, other, k, rows)


def _pass(given: Sequence[Any], spec: QuantSpec | None, other: QuantSpec | None) -> Pass:
    way = _way(given[0], spec, other, Wanted(), given[1])
    return Pass(given, way.rooms, way.launches(None, None))


_passes = Passes(_pass)


def decided(x: Tensor, spec: QuantSpec, other: QuantSpec | None, wanted: Wanted) -> Way | None:
    """`by_blocks` of matrices like x, contiguous, whose sides are multiples of 16; both operands, in runs, or None."""
    return None if other is None or spec.block[0] == BLOCK else _way(without_memory(x), spec, other, wanted)


def _way(x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, wanted: Wanted, amax: Tensor | None = None) -> Way:
    (rows, k), large, kept = x.shape, x.numel() > SMALL, wanted.transpose
    q = scale = qt = turned_scale = None
    if spec is not None:
        fresh = large or wanted.codes
        q, scale = room_for_codes(rows, k, spec, fresh), _room(rows, k, spec, fresh)
    if other is not None:
        qt = codes_in_words(k, rows, other, kept, large or kept)
        turned_scale = _room(k, rows, other, large or kept)
    one = spec or other
    assert one is not None
    launches = [_launch((x, q, qt, scale, turned_scale, amax), one)]
    return Way(x, (q, scale, qt, turned_scale, None), lambda *_: launches)


def _operand_of(q: Tensor | None, scale: Tensor | None, spec: QuantSpec | None, rows: int, k: int) -> Quantized | None:
    if q is None or spec is None or scale is None:
        return None
    return Quantized(of(q, k), scale[:, : -(-k // BLOCK)], spec, (rows, k))


def _shape(rows: int, k: int, square: bool) -> tuple[int, int]:
    """Of the scales of an operand [rows, k], as they lie: those of runs are read the other way round."""
    blocks = -(-k // BLOCK)
    return (-(-rows // BLOCK), -(-blocks // 4) * 4) if square else (blocks, rows)


def _room(rows: int, k: int, spec: QuantSpec, fresh: bool) -> Room:
    """Room for those scales; zeros fill the rows of squares'."""
    square = spec.block[0] == BLOCK
    room = row_major(_shape(rows, k, square), torch.float32, not square, fresh)
    return room._replace(zeros=square and -(-k // BLOCK) % 4 != 0)


def _as_scales(amax: Tensor, shape: tuple[int, int], square: bool) -> Tensor:
    """An amax that was given as the scales lie."""
    if amax.numel() == 1:
        return amax.reshape(1, 1).expand(shape).contiguous()
    if not square:
        return amax.t().contiguous()
    return torch.nn.functional.pad(amax, (0, shape[1] - amax.shape[1])).contiguous()


def _launch(tensors: tuple[Any, ...], spec: QuantSpec) -> Launch:
    """Of x, its codes, its transpose's as int32, the scales of both, and amaxes given; None where they are not."""
    x, q, qt, _, _, given = tensors
    rows, k = x.shape
    programs, tall = grid(-(-rows // BLOCK), -(-k // BLOCK))
    constants = {
        "BM": BLOCK,
        "BN": BLOCK,
        "EVEN": rows % BLOCK == 0 and k % BLOCK == 0,
        "ROWS": q is not None,
        "COLUMNS": qt is not None,
        "GIVEN": given is not None,
        "TALL": tall,
        "dtype": DTYPES[spec.format.name],
        **format_constants(spec, x.device),
    }
    square = spec.block[0] == BLOCK
    apart = 0 if q is None else _shape(rows, k, square)[1], 0 if qt is None else _shape(k, rows, square)[1]
    numbers = (rows, k, x.stride(0), 0 if q is None else padded(k), 0 if qt is None else padded(rows) // 16, *apart)
    kernel = squares_kernel if square else blockwise_kernel
    warps = ROW_WARPS if qt is None else WARPS
    # Divisions for scales that are no powers of two take more, and so do float32 and codes rounded on their bits.
    few = spec.power_of_two and constants["EVEN"] and x.element_size() == 2 and architecture(x.device) >= 90
    both = q is not None and qt is not None and not square
    return Launch(kernel, programs, tensors, numbers, constants, warps, REGISTERS if both and few else None)
