"""One scale for each row: launches for rows, for the rows of the transpose, and for both."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.kernels.quantizing import rowwise as kernels
from quaver.torch.backends.gpu.launching.launch import multiprocessors
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
from quaver.torch.backends.gpu.quantizing.ways import SMALL, Wanted, Way, without_memory, zeros
from quaver.torch.numerics.quantized import Quantized

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
    given = None if amax is None else amax.expand(k if spec is None else rows, 1).contiguous()
    q, scale, qt, turned_scale, *_ = _passes((x, given), spec, other)
    straight = None if spec is None else Quantized(of(q, k), scale, spec, (rows, k))
    return straight, None if other is None else Quantized(of(qt, rows), turned_scale, other, (k, rows))


def _pass(given: Sequence[Any], spec: QuantSpec | None, other: QuantSpec | None) -> Pass:
    way = _way(given[0], spec, other, Wanted(), given[1])
    return Pass(given, way.rooms, way.launches(None, None))


_passes = Passes(_pass)


def decided(x: Tensor, spec: QuantSpec, other: QuantSpec | None, wanted: Wanted) -> Way | None:
    """`by_rows` of matrices like x, contiguous, whose sides are multiples of 16; without the transpose, or None."""
    return None if x.shape[1] > LONGEST else _way(without_memory(x), spec, other, wanted)


def _way(x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, wanted: Wanted, amax: Tensor | None = None) -> Way:
    (rows, k), large, kept = x.shape, x.numel() > SMALL, wanted.transpose
    q = scale = qt = turned_scale = tops = None
    launches = []
    if other is not None:
        qt = codes_in_words(k, rows, other, kept, large or kept)
        turned_scale, tops = row_major((k, 1), torch.float32, kept, large or kept), zeros(room_for_tops(k))
    if spec is not None:
        fresh = large or wanted.codes
        q, scale = room_for_codes(rows, k, spec, fresh), row_major((rows, 1), torch.float32, fresh=fresh)
        launches.append(_rows((x, q, scale, tops, amax), spec))
    if other is not None:
        if spec is None or k > LONGEST:
            launches.append(_column_amaxes(x, tops))
        launches.append(_columns((x, qt, turned_scale, tops, amax), other))
    return Way(x, (q, scale, qt, turned_scale, None, tops), lambda *_: launches)


def _rows(tensors: tuple[Any, ...], spec: QuantSpec) -> Launch:
    """What writes the operand: of x, its codes, their scales, the columns' amaxes and amaxes given."""
    x, q, scale, tops, given = tensors
    rows, k = x.shape
    if k > LONGEST:
        return _long_rows((x, q, scale, given), spec)
    bn = max(triton.next_power_of_2(padded(k)), 16)
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
    # A program that keeps maxima of columns too fills half of a multiprocessor by itself.
    warps = 8 if bn < LONGEST else 16 if tops is None else 32
    numbers = (rows, k, x.stride(0), padded(k))
    return Launch(kernels.rowwise, (-(-rows // (bm * steps)),), tensors, numbers, constants, warps)


def _heights(x: Tensor, bn: int, held: int, tops: bool) -> tuple[int, int]:
    """Rows of a program's block, and how many blocks it takes one after another.

    Fewer programs send fewer maxima of columns; there must be enough for every multiprocessor to have some.
    """
    bm = max(held // bn, 1)
    if not tops:
        return bm, 1
    return bm, triton.next_power_of_2(max(x.shape[0] // (bm * 4 * multiprocessors(x.device)), 1))


def _long_rows(tensors: tuple[Any, ...], spec: QuantSpec) -> Launch:
    x, _, _, given = tensors
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
    numbers = (rows, k, x.stride(0), padded(k))
    return Launch(kernels.long_rowwise, (-(-rows // bm),), tensors, numbers, constants, warps)


def _column_amaxes(x: Tensor, tops: Room | None) -> Launch:
    """Of the bits of the amax of each column."""
    rows, k = x.shape
    bm, bn, warps = AMAX_BLOCK
    across = -(-k // bn)
    steps = triton.next_power_of_2(max(rows * across // (bm * 8 * multiprocessors(x.device)), 1))
    programs, tall = grid(-(-rows // (bm * steps)), across)
    even = rows % (bm * steps) == 0 and k % bn == 0
    constants = {"BM": bm, "BN": bn, "STEPS": steps, "EVEN": even, "TALL": tall}
    return Launch(kernels.column_amax, programs, (x, tops), (rows, k, x.stride(0)), constants, warps)


def _columns(tensors: tuple[Any, ...], spec: QuantSpec) -> Launch:
    """What writes the transpose: of x, its codes as int32, their scales, the columns' amaxes and amaxes given."""
    x, _, _, _, given = tensors
    rows, k = x.shape
    bm, bn, warps = COLUMN_BLOCK
    down, across = -(-padded(rows) // bm), -(-k // bn)
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
    numbers = (rows, k, x.stride(0), padded(rows) // 16, down)
    return Launch(kernels.columnwise, programs, tensors, numbers, constants, warps)


def room_for_tops(k: int) -> int:
    """Numbers where the amaxes of k columns are collected, and those who read them counted."""
    return k + -(-k // COLUMN_BLOCK[1])
