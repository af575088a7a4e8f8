"""Sums over the rows of a matrix on a GPU, in a fixed order: the gradient of a bias, and of partial sums."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.kernels.fused.column_sum import column_sums
from quaver.torch.backends.gpu.launching.launch import aligned, multiprocessors
from quaver.torch.backends.gpu.launching.passes import Launch, Pass, Passes
from quaver.torch.backends.gpu.launching.rooms import Room, whole
from quaver.torch.backends.gpu.quantizing.ways import Way

#: Rows, columns and warps of a block that reads a matrix, and of one that adds partial sums up.
BLOCK, LAST_BLOCK = (32, 128, 4), (32, 32, 4)
#: Programs of a multiprocessor that keep enough reads in flight.
PROGRAMS = 8
#: Partial sums, one for so many rows of a matrix, that one launch adds up without taking long.
FEW = 1024


def reason(g: Tensor, dtype: torch.dtype) -> str:
    """Why the kernel does not sum a gradient [tokens, features] over its tokens, or ""; the device has been asked."""
    other = {g.dtype, dtype} - {torch.float32, torch.bfloat16, torch.float16}
    if other:
        return f"its kernel is for float32, bfloat16 and float16, not {other.pop()}"
    if not g.numel():
        return "there is nothing to sum"
    return f"a side of {max(g.shape)} elements is more than it counts" if max(g.shape) > 2**30 else ""


def column_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of x [rows, columns] over its rows, [columns], summed in float32 and rounded once.

    One launch for few rows, else a second one that adds up what the programs of the first have found.
    Bounded: relative RMS 1e-6 of float64 before that rounding; the same bits for the same values on the same GPU.
    """
    # The bits must not depend on an address.
    x = x if x.stride(1) == 1 and aligned(x) else x.clone(memory_format=torch.contiguous_format)
    out: Tensor = _sums((x,), dtype, False)[0]
    return out


def sum_rows(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """As `column_sum`, for few rows and in one launch; x lies row by row, aligned."""
    out: Tensor = _sums((x,), dtype, True)[0]
    return out


def add_up(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over rows of what another kernel summed by blocks of rows, float32 [blocks, columns]: [columns].

    Bounded: as `column_sum` of the matrix, in another order of float32 sums: not its bits, but the same at every run.
    """
    return sum_rows(partial, dtype) if partial.shape[0] <= FEW else column_sum(partial, dtype)


def _pass(given: Sequence[Any], dtype: torch.dtype, few: bool) -> Pass:
    return Pass(given, *_launches(given[0], given[0].device, dtype, few))


def _launches(
    x: Tensor | Room, device: torch.device, dtype: torch.dtype, few: bool
) -> tuple[tuple[Room, ...], list[Launch]]:
    """What is written, the sums first, and by which launches."""
    rows, columns = x.shape
    apart = x.strides[0] if isinstance(x, Room) else x.stride(0)
    bm, bn, _ = BLOCK
    out = whole((columns,), dtype)
    if few:
        return (out,), [sum_launch(x, out, rows, columns)]
    blocks, across = -(-rows // bm), -(-columns // bn)
    programs = max(1, min(blocks // 2, PROGRAMS * multiprocessors(device) // across))
    each = -(-blocks // programs) * bm
    down = -(-rows // each)
    if down == 1:
        return (out,), [_launch(x, out, (rows, columns, apart), each, BLOCK)]
    partial = whole((down, columns), torch.float32)
    first = _launch(x, partial, (rows, columns, apart), each, BLOCK)
    return (out, partial), [first, sum_launch(partial, out, down, columns)]


_sums = Passes(_pass)


def summed(way: Way, dtype: torch.dtype) -> Way:
    """A way that sums the matrix over its rows besides, as `column_sum` or `add_up`, in the place of sums of blocks."""
    partial = way.rooms[4]
    few = partial is not None and partial.shape[0] <= FEW
    rooms, launches = _launches(way.x if partial is None else partial, way.x.device, dtype, few)
    new = {id(room): room._replace(fresh=True) for room in rooms}
    sums = [each._replace(tensors=[new.get(id(t), t) for t in each.tensors]) for each in launches]
    return way._replace(
        rooms=(*way.rooms, *new.values()),
        launches=lambda known, notes: [*way.launches(known, notes), *sums],
        results=(*way.results[:4], len(way.rooms) + 1, *way.results[5:]),
    )


def sum_launch(partial: Tensor | Room, out: Room, rows: int, columns: int, second: Room | None = None) -> Launch:
    """The launch that adds up partial sums [rows, columns], which lie row by row; the last columns to a second room."""
    each = -(-rows // LAST_BLOCK[0]) * LAST_BLOCK[0]
    return _launch(partial, out, (rows, columns, columns), each, LAST_BLOCK, second)


def _launch(
    x: Tensor | Room,
    out: Room,
    extent: tuple[int, int, int],
    each: int,
    block: tuple[int, int, int],
    second: Room | None = None,
) -> Launch:
    """Rows of x, `each` of them at a time, to out [columns], or [down, columns]; to out and a second, side by side.

    Args:
        extent: rows, columns, and how far rows lie apart.
    """
    rows, columns, _ = extent
    bm, bn, warps = block
    down = -(-rows // each)
    # Whole blocks: the last program too has rows to the end of its share.
    constants = {"BM": bm, "BN": bn, "EVEN": rows == each * down and columns % bn == 0}
    numbers = (*extent, each, 0 if second is None else out.shape[0])
    return Launch(column_sums, (-(-columns // bn), down), (x, out, second), numbers, constants, warps)
