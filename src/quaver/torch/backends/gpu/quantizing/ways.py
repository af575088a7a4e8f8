"""How a matrix becomes two operands, its own and its transpose's: what is written, and by which launches.

A family of kernels says so for a shape, before there is a matrix: see `both_ways`. Two matrices of which the same
kernels make operands may share their launches.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.kernels.quantizing import amax, cast, rowwise

#: Up to so many elements codes that no layer keeps are written to a place of their own; larger ones take memory for as
#: long as they are needed, and their launches wait for the GPU anyway.
SMALL = 1 << 16
#: Two matrices of up to so many elements share their launches. A cast reads what was measured from a GPU's second-level
#: cache, which holds both; of larger ones it would read the first from memory, for longer than a launch takes.
TOGETHER = 1 << 23

#: What a matrix [rows, columns] became, as scaled GEMMs take it: codes [rows, columns] and their scales; codes of the
#: transpose and their scales, of the right side of a GEMM where they are kept: [rows, columns], lying as [columns,
#: rows], or None and None where no GEMM takes them; and sums over the rows (float32 of blocks of them, unless launches
#: of the way have added them up), or the amax of what is kept, or None.
Decided = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class Room(NamedTuple):
    """What a launch writes, as a GEMM reads it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    #: As a kernel is told of it: one that is interpreted looks at more than an address.
    told: Callable[[Tensor], Tensor] = torch.Tensor.detach
    #: Whether each call makes a new one; else a thread writes to one place on a stream, again and again.
    fresh: bool = False
    #: Whether launches take it for zeros, and leave it so.
    zeros: bool = False


def row_major(shape: tuple[int, int], dtype: torch.dtype, turned: bool = False, fresh: bool = False) -> Room:
    """Room for a matrix whose rows lie one after the other; `turned` gives its transpose, lying so."""
    if turned:
        return Room(shape[::-1], (1, shape[1]), dtype, torch.Tensor.t, fresh)
    return Room(shape, (shape[1], 1), dtype, fresh=fresh)


def codes_in_words(shape: tuple[int, int], dtype: torch.dtype, turned: bool, fresh: bool) -> Room:
    """As `row_major`, of codes that a kernel writes four to an int32."""
    return row_major(shape, dtype, turned, fresh)._replace(told=_in_words)


def _in_words(codes: Tensor) -> Tensor:
    """Codes that lie row by row, or their transpose, as they lie: four to an int32."""
    return (codes if codes.is_contiguous() else codes.t()).view(torch.int32)


def zeros(n: int) -> Room:
    """Where the programs of a launch, or of one and the next, meet: int32."""
    return Room((n,), (1,), torch.int32, zeros=True)


def empty(room: Room, device: torch.device) -> Tensor:
    if room.zeros:
        return torch.zeros(room.shape, dtype=room.dtype, device=device)
    return torch.empty_strided(room.shape, room.strides, dtype=room.dtype, device=device)


def pattern(room: Room, device: torch.device) -> Tensor:
    """What `torch.empty_like` makes such rooms of, in two thirds of the time that their shape and dtype take: a tensor
    without memory."""
    with torch.inference_mode(False):
        tensor = empty(room, device)
    tensor.untyped_storage().resize_(0)
    return tensor


def told_of(room: Room | None, device: torch.device) -> Tensor | None:
    """What a kernel is told of a room, without memory: to compile its launch by."""
    if room is None:
        return None
    told = room.told(empty(room, device))
    told.untyped_storage().resize_(0)
    return told


def without_memory(x: Tensor) -> Tensor:
    """What stands for a matrix while it is found out how to launch on such."""
    return pattern(row_major((x.shape[0], x.shape[1]), x.dtype), x.device)


class Job(NamedTuple):
    """A kernel and what it is launched with, as `launch.launcher` takes it."""

    fn: Any
    grid: tuple[int, ...]
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    warps: int


#: What does for two matrices, in one launch, what a kernel does for one.
OF_TWO = {
    amax.amax: amax.amax_of_two,
    cast.cast: cast.cast_two,
    rowwise.rowwise: rowwise.rowwise_two,
    rowwise.columnwise: rowwise.columnwise_two,
}


def both_jobs(a: Job, b: Job) -> Job | None:
    """Two launches as one; None where no kernel does both."""
    fn = OF_TWO.get(a.fn)
    if fn is None or a.fn is not b.fn or a.warps != b.warps:
        return None
    # One axis of programs, of which the kernel itself finds rows and columns.
    constants = {name: value for name, value in a.constants.items() if name in fn.arg_names}
    for name, value in b.constants.items():
        if f"{name}_2" in fn.arg_names:
            constants[f"{name}_2"] = value
        elif name in constants and value != constants[name]:
            return None
    first, second = math.prod(a.grid), math.prod(b.grid)
    return Job(fn, (first + second,), (*a.tensors, *b.tensors), (*a.numbers, *b.numbers, first), constants, a.warps)


class Launch(NamedTuple):
    """One launch on a matrix."""

    job: Job
    #: What it takes of the matrix, 0, the rooms from 1 on, and `FACTOR`, `NEWEST` or `NOTHING`.
    takes: tuple[int, ...]


FACTOR, NEWEST, NOTHING = -3, -2, -1


class Delayed(NamedTuple):
    """What delayed scaling gives for a matrix."""

    #: Whether its encode factor is known to be set, so that one pass is enough, and whether its amax is noted.
    known: bool
    notes: bool
    #: Encode factors of a layer's operands, and which of them is the matrix's.
    factors: Tensor
    column: int
    #: The newest amax of its history, float32 of one element, which is raised to this one; or None.
    newest: Tensor | None
    #: The addresses of both.
    factor_at: int
    newest_at: int | None


def of_matrix(factors: Tensor, column: int, known: bool, newest: Tensor | None) -> Delayed:
    address = None if newest is None else newest.data_ptr()
    return Delayed(known, newest is not None, factors, column, newest, factors.data_ptr() + 4 * column, address)


class Wanted(NamedTuple):
    """What is asked of a `Way`."""

    #: Whether the transpose is kept, so that each call must write a new one; and the codes themselves, as of a weight.
    transpose: bool = False
    codes: bool = False
    #: Whether blocks of rows are summed where that costs no read, for the gradient of a bias.
    sums: bool = False
    #: Whether GEMMs read either direction, so that where one scale serves both the transpose is a view.
    views: bool = False


class Way(NamedTuple):
    """How a matrix becomes its operands."""

    #: [rows, columns], contiguous.
    shape: torch.Size
    #: For codes, scales, codes of the transpose, its scales (None where nothing writes them), sums of blocks of rows,
    #: and for what launches need among themselves.
    rooms: tuple[Room | None, ...]
    #: Whether delayed scaling knows the factor, and whether it notes the amax (both None without), to the launches.
    launches: Callable[[bool | None, bool | None], Sequence[Launch]]
    #: Rooms, counted from 1 on, that become `Decided`; where nothing writes them, those that serve.
    results: tuple[int, ...] = (1, 2, 3, 4, 5)
    #: Whether the transpose is a view of the codes, in the place of the third room.
    turned: bool = False


def share(a: Way, b: Way) -> bool:
    """True if one launch does for two matrices what one does for each, throughout."""
    return shared_launches([way.launches(None, None) for way in (a, b)]) is not None


def shared_launches(by_way: Sequence[Sequence[Launch]]) -> list[Launch] | None:
    """The launches of two matrices, each as one with the other's; None where that cannot be."""
    if len(by_way[0]) != len(by_way[1]):
        return None
    shared = []
    for a, b in zip(*by_way, strict=True):
        job = both_jobs(a.job, b.job)
        if job is None:
            return None
        shared.append(Launch(job, (*a.takes, *b.takes)))
    return shared
