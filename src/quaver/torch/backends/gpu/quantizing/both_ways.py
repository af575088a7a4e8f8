"""A matrix to two operands, its own and its transpose's, with everything decided beforehand: for `linear.plans.on_gpu`.

Which kernels run, what they write and where is found out once for a shape. A call then makes room for what is kept, and
launches; codes that the next GEMMs read and no layer keeps are written to a place of their own, again and again.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from quaver.torch.backends.gpu.launching import capture, launch
from quaver.torch.backends.gpu.launching.rooms import FOURS, Room, empty, pattern
from quaver.torch.backends.gpu.quantizing.ways import Delayed, Drawn, Way, shared_launches


class BothWays:
    """What writes both operands of a matrix, or of each of two by launches that they share.

    Args:
        device: theirs.
        ways: one a matrix; of two, such as `share`.
    """

    __slots__ = (
        "again",
        "card",
        "device",
        "fours",
        "fresh",
        "parts",
        "places",
        "results",
        "rooms",
        "second",
        "turned",
        "ways",
    )

    def __init__(self, device: torch.device, *ways: Way) -> None:
        self.device, self.ways = device, ways
        self.card = launch.card(device)[:3]
        #: By matrix: itself, its rooms, its factor, its newest amax, and nothing.
        self.rooms: list[Room | None] = []
        results: list[int] = []
        #: Where those begin whose transposes are views of their codes; of these, where each call makes new codes.
        self.turned: list[int] = []
        self.again: list[int] = []
        for way in ways:
            #: Where the last one begins.
            self.second = len(self.rooms)
            self.turned += [self.second] if way.turned else []
            self.again += [self.second] if way.turned and way.rooms[0] and way.rooms[0].fresh else []
            results += [self.second + i for i in way.results]
            self.rooms += [None, *way.rooms, None, None, None]
        self.results: Callable[[list[Any]], Any] = itemgetter(*results)
        #: What each call makes, and patterns of it.
        self.fresh = [(i, pattern(room, device)) for i, room in enumerate(self.rooms) if room and room.fresh]
        #: Whether codes of four bits are among them.
        self.fours = any(like.dtype is FOURS for _, like in self.fresh)
        #: The launches, by what delayed scaling gives and by stream.
        self.parts: dict[Any, list[Part]] = {}
        #: Tensors and addresses of the other rooms by thread and stream.
        self.places: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}

    def __call__(self, x: Tensor, given: Delayed | Drawn | None = None, *second: Any) -> Any:
        """`Decided` of a matrix like that of the first way; and, one after the other, of the `second` (matrix, what
        delayed scaling gives for it or None)."""
        index, current, stream_of = self.card
        stream = stream_of(index)
        tensors, addresses = self.places.get((get_ident(), stream)) or self._place(stream)
        if self.fresh:
            tensors = tensors.copy()
            fills = self.fours and torch.are_deterministic_algorithms_enabled()
            for i, like in self.fresh:
                tensor = tensors[i] = empty(self.rooms[i], self.device) if fills else torch.empty_like(like)  # type: ignore[arg-type]
                addresses[i] = tensor.data_ptr()
            if self.again:
                self._turn(tensors, self.again)
        addresses[0] = x.data_ptr()
        key: Any = None
        if given is not None:
            key = given.known_and_noted
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
            for room, tensor in zip(self.rooms, tensors, strict=True):
                if room is not None and room.zeros:
                    tensor.zero_()
            raise
        return self.results(tensors)

    def _address_second(self, addresses: list[Any], x: Tensor, given: Delayed | None) -> Any:
        addresses[self.second] = x.data_ptr()
        if given is None:
            return None
        addresses[-3], addresses[-2] = given.factor_at, given.newest_at
        return given.known_and_noted

    def _turn(self, tensors: list[Any], ways: list[int]) -> None:
        for at in ways:
            codes = tensors[at + 1]
            tensors[at + 3] = None if codes is None else codes.t()

    def _decide(self, key: Any, stream: int) -> "list[Part]":
        by_way, takes, at = [], [], 0
        for way, one in zip(self.ways, (key,) if len(self.ways) == 1 else key, strict=True):
            # What no kernel takes is found in the last place, where nothing is.
            whose = (way.x, *way.rooms, *way.given, None)
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
        told = [None if room is None else room.told(t) for room, t in zip(self.rooms, tensors, strict=True)]
        ends = (self.second, len(told)) if len(self.ways) == 2 else (len(told),)
        for number, (way, end) in enumerate(zip(self.ways, ends, strict=True)):
            x, given = taken[2 * number : 2 * number + 2]
            told[number * self.second] = x.detach().view(way.x.shape)
            if given is not None:
                told[end - 3], told[end - 2] = given.factors[given.column], given.newest
        for part in parts:
            part[-1](*part[2](told))

    def _place(self, stream: int) -> tuple[list[Any], list[Any]]:
        thread_and_stream = get_ident(), stream
        rooms = tuple(None if room is None or room.fresh else room for room in self.rooms)
        shared = *thread_and_stream, self.device, rooms, *self.turned
        if shared not in _places:
            with torch.inference_mode(False):
                tensors = [None if room is None else empty(room, self.device) for room in rooms]
                self._turn(tensors, self.turned)
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
