"""How a matrix becomes two operands, its own and its transpose's: what is written, and by which launches.

A family of kernels says so for a shape, before there is a matrix: see `both_ways`. Two matrices of which the same
kernels make operands may share their launches.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.kernels.quantizing import amax, cast, rowwise
from quaver.torch.backends.gpu.launching.passes import Launch
from quaver.torch.backends.gpu.launching.rooms import Room, pattern, row_major

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


def zeros(n: int) -> Room:
    """Where the programs of a launch, or of one and the next, meet: int32."""
    return Room((n,), (1,), torch.int32, zeros=True)


def without_memory(x: Tensor) -> Tensor:
    """What stands for a matrix while it is found out how to launch on such."""
    return pattern(row_major((x.shape[0], x.shape[1]), x.dtype), x.device)


#: A kernel, and what does for two matrices, in one launch, what it does for one. A dict would hash its keys while this
#: is imported, before `hash_callees_first` can.
OF_TWO = (
    (amax.amax, amax.amax_of_two),
    (cast.cast, cast.cast_two),
    (rowwise.rowwise, rowwise.rowwise_two),
    (rowwise.columnwise, rowwise.columnwise_two),
)


def of_two(a: Launch, b: Launch) -> Launch | None:
    """Two launches as one; None where no kernel does both."""
    fn = next((two for one, two in OF_TWO if one is a.kernel), None)
    if fn is None or a.kernel is not b.kernel or a.warps != b.warps:
        return None
    # One axis of programs, of which the kernel itself finds rows and columns.
    constants = {name: value for name, value in a.constants.items() if name in fn.arg_names}
    for name, value in b.constants.items():
        if f"{name}_2" in fn.arg_names:
            constants[f"{name}_2"] = value
        elif name in constants and value != constants[name]:
            return None
    first, second = math.prod(a.grid), math.prod(b.grid)
    return Launch(fn, (first + second,), (*a.tensors, *b.tensors), (*a.numbers, *b.numbers, first), constants, a.warps)


#: In the place of tensors: the encode factor that delayed scaling gives for a matrix, and its history's newest amax.
FACTOR, NEWEST = row_major((1, 1), torch.float32), row_major((1, 1), torch.float32)
#: Or, where a matrix is rounded at random, how often it was, and its transpose: the first of two, which may lie
#: anywhere.
COUNTS = row_major((1, 1), torch.int64)


@dataclass(slots=True)
class Delayed:
    """What delayed scaling gives for a matrix."""

    #: Whether its encode factor is known to be set, so that one pass is enough, and whether its amax is noted.
    known_and_noted: tuple[bool, bool]
    #: Encode factors of a layer's operands, and which of them is the matrix's.
    factors: Tensor
    column: int
    #: The newest amax of its history, float32 of one element, which is raised to this one; or None.
    newest: Tensor | None
    #: The addresses of both.
    factor_at: int
    newest_at: int | None


class Drawn:
    """What a matrix that is rounded at random draws from, in the place of what delayed scaling gives: seed and streams,
    its own and its transpose's; which of the two are wanted; and how often each was rounded so."""

    __slots__ = ("factor_at", "factors", "known_and_noted")

    column = slice(None)
    newest = newest_at = None

    def __init__(self, streams: tuple[int, int, int], wanted: tuple[bool, bool], counts: Tensor) -> None:
        #: What the launches are chosen by.
        self.known_and_noted = streams, wanted
        self.factors, self.factor_at = counts, counts.data_ptr()


def of_matrix(factors: Tensor, column: int, known: bool, newest: Tensor | None) -> Delayed:
    address = None if newest is None else newest.data_ptr()
    return Delayed((known, newest is not None), factors, column, newest, factors.data_ptr() + 4 * column, address)


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

    #: What stands for the matrix [rows, columns], which is contiguous.
    x: Tensor
    #: For codes, scales, codes of the transpose, its scales (None where nothing writes them), sums of blocks of rows,
    #: and for what launches need among themselves.
    rooms: tuple[Room | None, ...]
    #: Whether delayed scaling knows the factor, and whether it notes the amax (both None without), to the launches: of
    #: the matrix, the rooms, `FACTOR` and `NEWEST`. Of a matrix that is rounded at random, what `Drawn` has instead.
    launches: Callable[[Any, Any], Sequence[Launch]]
    #: Rooms, counted from 1 on, that become `Decided`; where nothing writes them, those that serve.
    results: tuple[int, ...] = (1, 2, 3, 4, 5)
    #: Whether the transpose is a view of the codes, in the place of the third room.
    turned: bool = False
    #: What a call gives besides the matrix.
    given: tuple[Room, Room | None] = (FACTOR, NEWEST)


def share(a: Way, b: Way) -> bool:
    """True if one launch does for two matrices what one does for each, throughout."""
    return shared_launches([way.launches(None, None) for way in (a, b)]) is not None


def shared_launches(by_way: Sequence[Sequence[Launch]]) -> list[Launch] | None:
    """The launches of two matrices, each as one with the other's; None where that cannot be."""
    if len(by_way[0]) != len(by_way[1]):
        return None
    shared = []
    for a, b in zip(*by_way, strict=True):
        one = of_two(a, b)
        if one is None:
            return None
        shared.append(one)
    return shared
