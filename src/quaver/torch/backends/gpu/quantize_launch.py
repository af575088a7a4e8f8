"""How a matrix becomes two operands, its own and its transpose's: what is written, and by which launches.

A family of kernels says so for a shape, before there is a matrix: see `both_ways`. Two matrices of which the same
kernels make operands may share their launches.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.kernels import rowwise, tensorwise
from quaver.torch.backends.gpu import capture, launch
from quaver.torch.backends.gpu.buffers import PACKED4, BufferSpec, empty, pattern, row_major
from quaver.torch.backends.gpu.launch_plan import LaunchSpec

# ---- ways ------------------------------------------------------------------------------------------------

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


def zeros(n: int) -> BufferSpec:
    """Where the programs of a launch, or of one and the next, meet: int32."""
    return BufferSpec((n,), (1,), torch.int32, zeros=True)


def without_memory(x: Tensor) -> Tensor:
    """What stands for a matrix while it is found out how to launch on such."""
    return pattern(row_major((x.shape[0], x.shape[1]), x.dtype), x.device)


#: A kernel, and what does for two matrices, in one launch, what it does for one. A dict would hash its keys while this
#: is imported, before `hash_callees_first` can.
OF_TWO = (
    (tensorwise.amax, tensorwise.amax_of_two),
    (tensorwise.cast, tensorwise.cast_two),
    (rowwise.rowwise, rowwise.rowwise_two),
    (rowwise.columnwise, rowwise.columnwise_two),
)


def of_two(a: LaunchSpec, b: LaunchSpec) -> LaunchSpec | None:
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
    return LaunchSpec(
        fn, (first + second,), (*a.tensors, *b.tensors), (*a.numbers, *b.numbers, first), constants, a.warps
    )


#: In the place of tensors: the encode factor that delayed scaling gives for a matrix, and its history's newest amax.
FACTOR, NEWEST = row_major((1, 1), torch.float32), row_major((1, 1), torch.float32)
#: Or, where a matrix is rounded at random, how often it was, and its transpose: the first of two, which may lie
#: anywhere.
COUNTS = row_major((1, 1), torch.int64)


@dataclass(slots=True)
class DelayedInputs:
    """What delayed scaling gives for a matrix."""

    #: Whether its encode factor is known to be set, so that one pass is enough, and whether its amax is noted.
    known_and_recorded_amax: tuple[bool, bool]
    #: Encode factors of a layer's operands, and which of them is the matrix's.
    factors: Tensor
    column: int
    #: The newest amax of its history, float32 of one element, which is raised to this one; or None.
    newest: Tensor | None
    #: The addresses of both.
    factor_at: int
    newest_at: int | None


class RngInputs:
    """What a matrix that is rounded at random draws from, in the place of what delayed scaling gives: seed and streams,
    its own and its transpose's; which of the two are wanted; and how often each was rounded so."""

    __slots__ = ("factor_at", "factors", "known_and_recorded_amax")

    column = slice(None)
    newest = newest_at = None

    def __init__(self, streams: tuple[int, int, int], wanted: tuple[bool, bool], counts: Tensor) -> None:
        #: What the launches are chosen by.
        self.known_and_recorded_amax = streams, wanted
        self.factors, self.factor_at = counts, counts.data_ptr()


def of_matrix(factors: Tensor, column: int, known: bool, newest: Tensor | None) -> DelayedInputs:
    address = None if newest is None else newest.data_ptr()
    return DelayedInputs((known, newest is not None), factors, column, newest, factors.data_ptr() + 4 * column, address)


class RequestedOperands(NamedTuple):
    """What is asked of a `Way`."""

    #: Whether the transpose is kept, so that each call must write a new one; and the codes themselves, as of a weight.
    transpose: bool = False
    codes: bool = False
    #: Whether blocks of rows are summed where that costs no read, for the gradient of a bias.
    sums: bool = False
    #: Whether GEMMs read either direction, so that where one scale serves both the transpose is a view.
    views: bool = False


class QuantizeLaunch(NamedTuple):
    """How a matrix becomes its operands."""

    #: What stands for the matrix [rows, columns], which is contiguous.
    x: Tensor
    #: For codes, scales, codes of the transpose, its scales (None where nothing writes them), sums of blocks of rows,
    #: and for what launches need among themselves.
    buffers: tuple[BufferSpec | None, ...]
    #: Whether delayed scaling knows the factor, and whether it notes the amax (both None without), to the launches: of
    #: the matrix, the rooms, `FACTOR` and `NEWEST`. Of a matrix that is rounded at random, what `Drawn` has instead.
    launches: Callable[[Any, Any], Sequence[LaunchSpec]]
    #: Rooms, counted from 1 on, that become `Decided`; where nothing writes them, those that serve.
    results: tuple[int, ...] = (1, 2, 3, 4, 5)
    #: Whether the transpose is a view of the codes, in the place of the third room.
    transposed: bool = False
    #: What a call gives besides the matrix.
    given: tuple[BufferSpec, BufferSpec | None] = (FACTOR, NEWEST)


def share(a: QuantizeLaunch, b: QuantizeLaunch) -> bool:
    """True if one launch does for two matrices what one does for each, throughout."""
    return shared_launches([way.launches(None, None) for way in (a, b)]) is not None


def shared_launches(by_way: Sequence[Sequence[LaunchSpec]]) -> list[LaunchSpec] | None:
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


# ---- both ways -------------------------------------------------------------------------------------------
# A matrix to two operands, its own and its transpose's, with everything decided beforehand: for `linear.plan_gpu`.
#
# Which kernels run, what they write and where is found out once for a shape. A call then makes room for what is kept,
# and launches; codes that the next GEMMs read and no layer keeps are written to a place of their own, again and again.


class RowColQuantizer:
    """What writes both operands of a matrix, or of each of two by launches that they share.

    Args:
        device: theirs.
        ways: one a matrix; of two, such as `share`.
    """

    __slots__ = (
        "again",
        "buffers",
        "card",
        "device",
        "fresh",
        "packed4",
        "parts",
        "places",
        "results",
        "second",
        "transposed",
        "ways",
    )

    def __init__(self, device: torch.device, *ways: QuantizeLaunch) -> None:
        self.device, self.ways = device, ways
        self.card = launch.card(device)[:3]
        #: By matrix: itself, its rooms, its factor, its newest amax, and nothing.
        self.buffers: list[BufferSpec | None] = []
        results: list[int] = []
        #: Where those begin whose transposes are views of their codes; of these, where each call makes new codes.
        self.transposed: list[int] = []
        self.again: list[int] = []
        for way in ways:
            #: Where the last one begins.
            self.second = len(self.buffers)
            self.transposed += [self.second] if way.transposed else []
            self.again += [self.second] if way.transposed and way.buffers[0] and way.buffers[0].fresh else []
            results += [self.second + i for i in way.results]
            self.buffers += [None, *way.buffers, None, None, None]
        self.results: Callable[[list[Any]], Any] = itemgetter(*results)
        #: What each call makes, and patterns of it.
        self.fresh = [(i, pattern(buffer, device)) for i, buffer in enumerate(self.buffers) if buffer and buffer.fresh]
        #: Whether codes of four bits are among them.
        self.packed4 = any(like.dtype is PACKED4 for _, like in self.fresh)
        #: The launches, by what delayed scaling gives and by stream.
        self.parts: dict[Any, list[Part]] = {}
        #: Tensors and addresses of the other rooms by thread and stream.
        self.places: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}

    def __call__(self, x: Tensor, given: DelayedInputs | RngInputs | None = None, *second: Any) -> Any:
        """`Decided` of a matrix like that of the first way; and, one after the other, of the `second` (matrix, what
        delayed scaling gives for it or None)."""
        index, current, stream_of = self.card
        stream = stream_of(index)
        tensors, addresses = self.places.get((get_ident(), stream)) or self._place(stream)
        if self.fresh:
            tensors = tensors.copy()
            fills = self.packed4 and torch.are_deterministic_algorithms_enabled()
            for i, like in self.fresh:
                tensor = tensors[i] = empty(self.buffers[i], self.device) if fills else torch.empty_like(like)  # type: ignore[arg-type]
                addresses[i] = tensor.data_ptr()
            if self.again:
                self._turn(tensors, self.again)
        addresses[0] = x.data_ptr()
        key: Any = None
        if given is not None:
            key = given.known_and_recorded_amax
            addresses[self.second - 3], addresses[self.second - 2] = given.factor_at, given.newest_at
        if second:
            key = key, self._address_second(addresses, *second)
        parts = self.parts.get((key, stream)) or self._decide(key, stream)
        try:
            if parts[0][0] is None or current() != index:
                self._run(tensors, parts, (x, given, *second))
            else:
                for start, head, take, tail, _ in parts:
                    start(*(head + take(addresses) + tail))
        except BaseException:
            # Another matrix would meet what one launch has left for the next.
            for buffer, tensor in zip(self.buffers, tensors, strict=True):
                if buffer is not None and buffer.zeros:
                    tensor.zero_()
            raise
        return self.results(tensors)

    def _address_second(self, addresses: list[Any], x: Tensor, given: DelayedInputs | None) -> Any:
        addresses[self.second] = x.data_ptr()
        if given is None:
            return None
        addresses[-3], addresses[-2] = given.factor_at, given.newest_at
        return given.known_and_recorded_amax

    def _turn(self, tensors: list[Any], ways: list[int]) -> None:
        for at in ways:
            codes = tensors[at + 1]
            tensors[at + 3] = None if codes is None else codes.t()

    def _decide(self, key: Any, stream: int) -> "list[Part]":
        by_way, takes, at = [], [], 0
        for way, one in zip(self.ways, (key,) if len(self.ways) == 1 else key, strict=True):
            # What no kernel takes is found in the last place, where nothing is.
            whose = (way.x, *way.buffers, *way.given, None)
            places = {id(x): at + i for i, x in enumerate(whose)}
            launches = way.launches(*(one or (None, None)))
            by_way.append(launches)
            takes.append([[places[id(x)] for x in launch.tensors] for launch in launches])
            at += len(whose)
        shared = shared_launches(by_way) if len(by_way) == 2 else None
        if shared is None:
            pairs = zip(chain(*by_way), chain(*takes), strict=True)
        else:
            pairs = zip(shared, ([*a, *b] for a, b in zip(*takes, strict=True)), strict=True)
        parts = [_part(one.compiled(self.device), taken, stream) for one, taken in pairs]
        if len(self.parts) >= launch.MOST_KEPT:
            # Each layer that rounds at random has its own.
            self.parts.clear()
        self.parts[key, stream] = parts
        return parts

    def _run(self, tensors: list[Any], parts: "list[Part]", taken: Sequence[Any]) -> None:
        """Launches that take tensors and no addresses."""
        kernel_args = [
            None if buffer is None else buffer.kernel_args(t) for buffer, t in zip(self.buffers, tensors, strict=True)
        ]
        ends = (self.second, len(kernel_args)) if len(self.ways) == 2 else (len(kernel_args),)
        for number, (way, end) in enumerate(zip(self.ways, ends, strict=True)):
            x, given = taken[2 * number : 2 * number + 2]
            kernel_args[number * self.second] = x.detach().view(way.x.shape)
            if given is not None:
                kernel_args[end - 3], kernel_args[end - 2] = given.factors[given.column], given.newest
        for part in parts:
            part[-1](*part[2](kernel_args))

    def _place(self, stream: int) -> tuple[list[Any], list[Any]]:
        thread_and_stream = get_ident(), stream
        buffers = tuple(None if buffer is None or buffer.fresh else buffer for buffer in self.buffers)
        shared = *thread_and_stream, self.device, buffers, *self.transposed
        if shared not in _places:
            with torch.inference_mode(False):
                tensors = [None if buffer is None else empty(buffer, self.device) for buffer in buffers]
                self._turn(tensors, self.transposed)
            place = tensors, [None if t is None else t.data_ptr() for t in tensors]
            if capture.capturing(self.device):
                # Memory of the graph, filled at each replay: of no use to anything else.
                return place
            if len(_places) >= launch.MOST_KEPT:
                _places.clear()
            _places[shared] = place
        place = self.places[thread_and_stream] = _places[shared]
        return place


#: By thread, stream, device and rooms: layers share them.
_places: dict[Any, tuple[list[Any], list[Any]]] = {}

#: A launch as it is started: Triton's launcher (None where the kernel is interpreted), what goes before the addresses,
#: what picks those, what comes after them, and the launch as a function of tensors.
Part = tuple[Any, Any, Callable[[Sequence[Any]], tuple[Any, ...]], Any, launch.Run]


def _part(run: Any, takes: Sequence[int], stream: int) -> Part:
    start, head, tail = run.on(stream) if hasattr(run, "on") else (None, None, None)
    return start, head, itemgetter(*takes), tail, run
