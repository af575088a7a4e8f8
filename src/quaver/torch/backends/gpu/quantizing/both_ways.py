"""A matrix to two operands, its own and its transpose's, with everything decided beforehand: for `linear.plans.on_gpu`.

Which kernels run, what they write and where is found out once for a shape. A call then makes room for what is kept, and
launches; codes that the next GEMMs read and no layer keeps are written to a place of their own, again and again.
"""

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.torch.backends.gpu.launching import launch

#: Up to so many elements codes that no layer keeps are written to a place of their own; larger ones take memory for as
#: long as they are needed, and their launches wait for the GPU anyway.
SMALL = 1 << 16

#: What a matrix [rows, columns] became, as scaled GEMMs take it: codes [rows, columns] and their scales; codes of the
#: transpose and their scales, of the right side of a GEMM where they are kept: [rows, columns], lying as [columns,
#: rows], or None and None where no GEMM takes them; and float32 sums of blocks of rows, to be added up before anything
#: else is quantized, or None.
Decided = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class Room(NamedTuple):
    """What a launch writes, as a GEMM reads it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    #: As a kernel is told of it: one that is interpreted looks at more than an address.
    told: Callable[[Tensor], Tensor] = torch.Tensor.detach


def row_major(shape: tuple[int, int], dtype: torch.dtype, turned: bool = False) -> Room:
    """Room for a matrix whose rows lie one after the other; `turned` gives its transpose, lying so."""
    if turned:
        return Room(shape[::-1], (1, shape[1]), dtype, torch.Tensor.t)
    return Room(shape, (shape[1], 1), dtype)


def empty_like_told(room: Room, device: torch.device) -> Tensor:
    """What a kernel is told of a room: to compile its launch by."""
    return room.told(_empty(room, device))


def _empty(room: Room, device: torch.device) -> Tensor:
    return torch.empty_strided(room.shape, room.strides, dtype=room.dtype, device=device)


def pattern(room: Room, device: torch.device) -> Tensor:
    """What `torch.empty_like` makes such rooms of, in two thirds of the time that their shape and dtype take: a tensor
    without memory."""
    with torch.inference_mode(False):
        tensor = _empty(room, device)
    tensor.untyped_storage().resize_(0)
    return tensor


class Launch(NamedTuple):
    """One launch on the matrix and some of the rooms."""

    run: launch.Run
    #: Which rooms it takes after the matrix; -1 where it takes None.
    takes: tuple[int, ...]


class BothWays:
    """What writes both operands of a matrix like x.

    Args:
        x: [rows, columns], contiguous.
        rooms: for codes, scales, codes of the transpose, its scales (None where nothing writes them), and for what
            launches need among themselves.
        kept: whether the transpose and its scales are kept, so that each call must write new ones.
        zeroed: index of the room that must hold zeros at first, or None.
        launches: in their order.
    """

    __slots__ = ("card", "device", "fresh", "launches", "parts", "places", "rooms", "shape", "zeroed")

    def __init__(
        self, x: Tensor, rooms: Sequence[Room | None], kept: bool, zeroed: int | None, launches: Sequence[Launch]
    ) -> None:
        self.shape, self.device, self.rooms, self.zeroed = x.shape, x.device, tuple(rooms), zeroed
        self.card = launch.card(x.device)[:3]
        small = x.numel() <= SMALL
        fresh = [(i < 4 and not small) or (i in (2, 3) and kept) for i in range(len(rooms))]
        #: Rooms that each call makes, and their patterns.
        self.fresh = [(i, pattern(room, x.device)) for i, room in enumerate(rooms) if room is not None and fresh[i]]
        self.launches = tuple(launches)
        #: What starts them with addresses; None where one is interpreted.
        self.parts: Any = None
        if all(hasattr(run, "parts") for run, _ in launches):
            self.parts = [(*run.parts, takes) for run, takes in launches]  # type: ignore[attr-defined]
        #: Tensors and addresses of the other rooms by thread and stream.
        self.places: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}

    def __call__(self, x: Tensor, _: None = None) -> Decided:
        index, current, stream_of = self.card
        stream = stream_of(index)
        tensors, addresses = self.places.get((get_ident(), stream)) or self._place(stream)
        if self.fresh:
            tensors, addresses = tensors.copy(), addresses.copy()
            for i, like in self.fresh:
                tensor = tensors[i] = torch.empty_like(like)
                addresses[i] = tensor.data_ptr()
        if self.zeroed is not None:
            tensors[self.zeroed].zero_()
        if self.parts is None or current() != index:
            self._run(x, tensors)
        else:
            at = x.data_ptr()
            for start, grid, middle, tail, takes in self.parts:
                start(*grid, stream, *middle, at, *[addresses[i] for i in takes], *tail)
        return tensors[0], tensors[1], tensors[2], tensors[3], None

    def _run(self, x: Tensor, tensors: list[Any]) -> None:
        told = [None if room is None else room.told(t) for room, t in zip((*self.rooms, None), tensors, strict=True)]
        for run, takes in self.launches:
            run(x.detach().view(self.shape), *[told[i] for i in takes])

    def _place(self, stream: int) -> tuple[list[Any], list[Any]]:
        thread_and_stream = get_ident(), stream
        fresh = {i for i, *_ in self.fresh}
        rooms = tuple(None if i in fresh else room for i, room in enumerate(self.rooms))
        shared = *thread_and_stream, self.device, rooms
        if shared not in _places:
            with torch.inference_mode(False):
                tensors = [None if room is None else _empty(room, self.device) for room in rooms]
            # The last one stands for what a kernel does not take.
            _places[shared] = [*tensors, None], [*[None if t is None else t.data_ptr() for t in tensors], None]
        place = self.places[thread_and_stream] = _places[shared]
        return place


#: By thread, stream, device and rooms: layers share them.
_places: dict[Any, tuple[list[Any], list[Any]]] = {}
