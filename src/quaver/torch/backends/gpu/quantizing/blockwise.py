"""One scale for 128 elements of a row, or for a square of 128 by 128: launches, and scales as cuBLAS reads them.

Scales of runs lie block by block, [blocks, rows], and those of squares row by row, [blocks of rows, blocks of k], each
row of them padded to a multiple of four.
Source: torch's aten/src/ATen/native/cuda/ScaledBlas.cpp for the strides.
"""

from typing import Any

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.kernels.quantizing.blockwise import blockwise as blockwise_kernel
from quaver.kernels.quantizing.blockwise import squares as squares_kernel
from quaver.torch.backends.gpu.launching.launch import Launches, Run, launcher
from quaver.torch.backends.gpu.quantizing.codes import (
    DTYPES,
    empty_codes,
    format_constants,
    grid,
    in_words,
    of,
    taking_words,
)
from quaver.torch.backends.gpu.quantizing.ways import (
    NOTHING,
    SMALL,
    Job,
    Launch,
    Wanted,
    Way,
    codes_in_words,
    row_major,
    told_of,
    without_memory,
)
from quaver.torch.numerics.quantized import FLOAT8, Quantized

BLOCK = 128
#: Warps of a program that writes the transpose, and of one that does not.
WARPS, ROW_WARPS = 8, 4


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
    q = None if spec is None else empty_codes(rows, k, spec, x.device)
    qt = None if other is None else empty_codes(k, rows, other, x.device)
    scale = None if spec is None else _room(rows, k, square, x.device)
    turned_scale = None if other is None else _room(k, rows, square, x.device)
    given = None if amax is None else _as_scales(amax, scale if scale is not None else turned_scale, square)
    tensors = (x, q, qt, scale, turned_scale, given)
    _launches(tensors, (x, given), known)
    return _operand_of(q, scale, spec, rows, k, square), _operand_of(qt, turned_scale, other, k, rows, square)


def _operand_of(
    q: Tensor | None, scale: Tensor | None, spec: QuantSpec | None, rows: int, k: int, square: bool
) -> Quantized | None:
    if q is None or spec is None or scale is None:
        return None
    scales = scale[:, : -(-k // BLOCK)] if square else scale.t()
    return Quantized(of(q, k), scales, spec, (rows, k))


def _room(rows: int, k: int, square: bool, device: torch.device) -> Tensor:
    """Room for the scales of an operand [rows, k], as they lie."""
    blocks = -(-k // BLOCK)
    if not square:
        return torch.empty((blocks, rows), dtype=torch.float32, device=device)
    scale = torch.empty((-(-rows // BLOCK), -(-blocks // 4) * 4), dtype=torch.float32, device=device)
    return scale.zero_() if blocks % 4 else scale


def _as_scales(amax: Tensor, scale: Tensor | None, square: bool) -> Tensor:
    """An amax that was given as the scales lie."""
    assert scale is not None
    if amax.numel() == 1:
        return amax.reshape(1, 1).expand(scale.shape).contiguous()
    if not square:
        return amax.t().contiguous()
    return torch.nn.functional.pad(amax, (0, scale.shape[1] - amax.shape[1])).contiguous()


def _job(tensors: tuple[Any, ...], spec: QuantSpec) -> Job:
    """Of x, its codes, its transpose's as int32, the scales of both, and amaxes given; None where they are not."""
    x, q, qt, scale, turned_scale, given = tensors
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
    apart = [0 if s is None else s.stride(0) for s in (scale, turned_scale)]
    lines = 0 if qt is None else qt.shape[1] // 4
    numbers = (rows, k, x.stride(0), 0 if q is None else q.shape[1], lines, *apart)
    kernel = squares_kernel if spec.block[0] == BLOCK else blockwise_kernel
    warps = ROW_WARPS if qt is None else WARPS
    return Job(kernel, programs, tensors, numbers, constants, warps)


def _launch(tensors: tuple[Any, ...], spec: QuantSpec) -> Run:
    job = _job((*tensors[:2], in_words(tensors[2]), *tensors[3:]), spec)
    return taking_words(launcher(*job), job.fn, 2)


_launches = Launches(_launch)


def decided(x: Tensor, spec: QuantSpec, other: QuantSpec | None, wanted: Wanted) -> Way | None:
    """`by_blocks` of matrices like x, contiguous, whose sides are multiples of 16; both operands, in runs, or None."""
    rows, k = x.shape
    if other is None or spec.block[0] == BLOCK:
        return None
    x = without_memory(x)
    codes, f32, down, across = FLOAT8[spec.format.name], torch.float32, -(-rows // BLOCK), -(-k // BLOCK)
    large, kept = x.numel() > SMALL, wanted.transpose
    fresh = large or wanted.codes
    # Scales of either side lie block by block, and are read the other way round.
    scale = row_major((across, rows), f32, turned=True, fresh=fresh)
    turned_scale = row_major((down, k), f32, turned=True, fresh=large or kept)
    turned = codes_in_words((k, rows), codes, kept, large or kept)
    rooms = (row_major((rows, k), codes, fresh=fresh), scale, turned, turned_scale, None)
    q, s, qt, st = (told_of(room, x.device) for room in rooms[:4])
    launches = [Launch(_job((x, q, qt, s, st, None), spec), (0, 1, 3, 2, 4, NOTHING))]
    return Way(x.shape, rooms, lambda *_: launches)
