"""One scale for each row: launches for rows, for the rows of the transpose, and for both."""

from typing import Any

import torch
import triton
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.kernels.quantizing import rowwise as kernels
from quaver.torch.backends.gpu.launching.launch import Launches, Run, launcher, multiprocessors
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
    zeros,
)
from quaver.torch.numerics.quantized import FLOAT8, Quantized

#: The longest row that a program holds.
LONGEST = 16384
#: Elements of a program's block, and of one that takes the columns' amaxes too.
HELD, HELD_BOTH = 8192, 16384
#: Rows and columns of a program's block, and its warps.
LONG_BLOCK = 1, 4096, 8
AMAX_BLOCK = 32, 256, 4
COLUMN_BLOCK = 128, 64, 4


def by_rows(
    x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, amax: Tensor | None = None
) -> tuple[Quantized | None, Quantized | None]:
    """x [rows, k] as it lies by `spec`, its transpose by `other`, each where it is not None.

    Args:
        x: its last axis contiguous.
        amax: float32 in the shape of the scales of the one operand that is asked for, or of one element.
    """
    rows, k = x.shape
    q = tops = None
    if other is not None:
        tops = torch.zeros(room_for_tops(k), dtype=torch.int32, device=x.device)
    if spec is not None:
        q = _straight(x, spec, tops, None if amax is None else amax.expand(rows, 1).contiguous())
    if other is None or tops is None:
        return q, None
    if spec is None or k > LONGEST:
        _amaxes((x, tops), (x,))
    return q, _turned(x, other, tops, None if amax is None else amax.expand(k, 1).contiguous())


def _straight(x: Tensor, spec: QuantSpec, tops: Tensor | None, given: Tensor | None) -> Quantized:
    rows, k = x.shape
    q = empty_codes(rows, k, spec, x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if k > LONGEST:
        _long_rows((x, q, scale, given), (x, given), spec)
    else:
        _rows((x, q, scale, tops, given), (x, given), spec)
    return Quantized(of(q, k), scale, spec, (rows, k))


def _rows_job(tensors: tuple[Any, ...], spec: QuantSpec) -> Job:
    x, q, _, tops, given = tensors
    rows, k = x.shape
    bn = max(triton.next_power_of_2(q.shape[1]), 16)
    bm, steps = _heights(x, bn, HELD if tops is None else HELD_BOTH, tops is not None)
    even = rows % (bm * steps) == 0 and k == bn
    if not even:
        # Masks and the columns' amaxes together take more registers than let two programs share a multiprocessor.
        bm, steps = _heights(x, bn, HELD, tops is not None)
    constants = {
        "BM": bm,
        "BN": bn,
        "STEPS": steps,
        "EVEN": even,
        "TOPS": tops is not None,
        "GIVEN": given is not None,
        "dtype": DTYPES[spec.format.name],
        **format_constants(spec, x.device),
    }
    warps = 8 if bn < LONGEST else 16
    numbers = (rows, k, x.stride(0), q.shape[1])
    return Job(kernels.rowwise, (-(-rows // (bm * steps)),), tensors, numbers, constants, warps)


_rows = Launches(lambda tensors, spec: launcher(*_rows_job(tensors, spec)))


def _heights(x: Tensor, bn: int, held: int, tops: bool) -> tuple[int, int]:
    """Rows of a program's block, and how many blocks it takes one after another.

    Fewer programs send fewer maxima of columns; there must be enough for every multiprocessor to have some.
    """
    bm = max(held // bn, 1)
    if not tops:
        return bm, 1
    return bm, triton.next_power_of_2(max(x.shape[0] // (bm * 4 * multiprocessors(x.device)), 1))


def _long_launch(tensors: tuple[Any, ...], spec: QuantSpec) -> Run:
    x, q, _, given = tensors
    rows, k = x.shape
    bm, bn, warps = LONG_BLOCK
    constants = {
        "BM": bm,
        "BN": bn,
        "EVEN": rows % bm == 0 and k % bn == 0,
        "GIVEN": given is not None,
        "dtype": DTYPES[spec.format.name],
        **format_constants(spec, x.device),
    }
    numbers = (rows, k, x.stride(0), q.shape[1])
    return launcher(kernels.long_rowwise, (-(-rows // bm),), tensors, numbers, constants, warps)


_long_rows = Launches(_long_launch)


def _amax_launch(tensors: tuple[Tensor, Tensor]) -> Run:
    """Of the bits of the amax of each column."""
    x, _ = tensors
    rows, k = x.shape
    bm, bn, warps = AMAX_BLOCK
    across = -(-k // bn)
    steps = triton.next_power_of_2(max(rows * across // (bm * 8 * multiprocessors(x.device)), 1))
    programs, tall = grid(-(-rows // (bm * steps)), across)
    even = rows % (bm * steps) == 0 and k % bn == 0
    constants = {"BM": bm, "BN": bn, "STEPS": steps, "EVEN": even, "TALL": tall}
    return launcher(kernels.column_amax, programs, tensors, (rows, k, x.stride(0)), constants, warps)


_amaxes = Launches(_amax_launch)


def _turned(x: Tensor, spec: QuantSpec, tops: Tensor, given: Tensor | None) -> Quantized:
    rows, k = x.shape
    qt = empty_codes(k, rows, spec, x.device)
    scale = torch.empty((k, 1), dtype=torch.float32, device=x.device)
    _columns((x, qt, scale, tops, given), (x, given), spec)
    return Quantized(of(qt, rows), scale, spec, (k, rows))


def _columns_job(tensors: tuple[Any, ...], spec: QuantSpec) -> Job:
    """What writes the transpose: of x, its codes as int32, their scales, the columns' amaxes and amaxes given."""
    x, qt, _, _, given = tensors
    rows, k = x.shape
    bm, bn, warps = COLUMN_BLOCK
    down, across = -(-4 * qt.shape[1] // bm), -(-k // bn)
    programs, tall = grid(down, across)
    constants = {
        "BM": bm,
        "BN": bn,
        "EVEN": rows % bm == 0 and k % bn == 0,
        "GIVEN": given is not None,
        "TALL": tall,
        "dtype": DTYPES[spec.format.name],
        **format_constants(spec, x.device),
    }
    numbers = (rows, k, x.stride(0), qt.shape[1] // 4, down)
    return Job(kernels.columnwise, programs, tensors, numbers, constants, warps)


def _columns_launch(tensors: tuple[Any, ...], spec: QuantSpec) -> Run:
    run = launcher(*_columns_job((tensors[0], in_words(tensors[1]), *tensors[2:]), spec))
    return taking_words(run, kernels.columnwise, 1)


_columns = Launches(_columns_launch)


def room_for_tops(k: int) -> int:
    """Numbers where the amaxes of k columns are collected, and those who read them counted."""
    return k + -(-k // COLUMN_BLOCK[1])


def decided(x: Tensor, spec: QuantSpec, other: QuantSpec | None, wanted: Wanted) -> Way | None:
    """`by_rows` of matrices like x, contiguous, whose sides are multiples of 16; without the transpose, or None."""
    rows, k = x.shape
    if k > LONGEST:
        return None
    x = without_memory(x)
    large, kept, f32, device = x.numel() > SMALL, wanted.transpose, torch.float32, x.device
    fresh = large or wanted.codes
    straight = row_major((rows, k), FLOAT8[spec.format.name], fresh=fresh), row_major((rows, 1), f32, fresh=fresh)
    q, s = (told_of(room, device) for room in straight)
    if other is None:
        alone = Launch(_rows_job((x, q, s, None, None), spec), (0, 1, 2, NOTHING, NOTHING))
        return Way(x.shape, (*straight, None, None, None), lambda *_: [alone])
    turned = (
        codes_in_words((k, rows), FLOAT8[other.format.name], kept, large or kept),
        row_major((k, 1), f32, kept, large or kept),
    )
    tops = zeros(room_for_tops(k))
    qt, st, t = (told_of(room, device) for room in (*turned, tops))
    launches = [
        Launch(_rows_job((x, q, s, t, None), spec), (0, 1, 2, 6, NOTHING)),
        Launch(_columns_job((x, qt, st, t, None), other), (0, 3, 4, 6, NOTHING)),
    ]
    return Way(x.shape, (*straight, *turned, None, tops), lambda *_: launches)
