"""One random word of 32 bits for each element of a parameter and each step, whose bits its codes share.

The counter of Philox is the element's place in the whole parameter, so ranks that have parts draw what one would.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.core.states.reference import NOISE_BITS
from quaver.torch.numerics.philox import philox4x32, traced

_LOW = 0xFFFFFFFF


class Place(NamedTuple):
    """Where a part of a parameter lies in the whole."""

    #: The part's first index along each dimension.
    start: tuple[int, ...]
    part: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def joined(self) -> bool:
        """Whether its elements follow one another in the whole."""
        return self.part[1:] == self.whole[1:]

    def narrowed(self, columns: slice) -> "Place":
        """Some of its columns."""
        if columns == slice(0, self.part[-1] if self.part else 1):
            return self
        start = (*self.start[:-1], self.start[-1] + columns.start)
        return Place(start, (*self.part[:-1], columns.stop - columns.start), self.whole)

    @property
    def first(self) -> int:
        """The number of its first element in the whole."""
        return sum(at * prod(self.whole[dim + 1 :]) for dim, at in enumerate(self.start))


def words_at(place: Place, rows: slice, seed: int, parameter: int, step: Tensor | int, device: torch.device) -> Tensor:
    """Words of some rows of a part, whose leading dimensions are rows: int64 [rows, K]. See `words`."""
    columns, number = place.part[-1] if place.part else 1, rows.stop - rows.start
    if place.joined:
        drawn = words(place.first + rows.start * columns, number * columns, seed, parameter, step, device)
        return drawn.view(number, columns)
    at = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device)
    firsts = torch.full_like(at, place.first)
    for dim in range(len(place.part) - 2, -1, -1):
        firsts += at % place.part[dim] * prod(place.whole[dim + 1 :])
        at = at // place.part[dim]
    # Groups of four that hold a row wherever it begins in its first one.
    g = firsts[:, None] // 4 + torch.arange((columns + 6) // 4, dtype=torch.int64, device=device)
    inside = firsts[:, None] % 4 + torch.arange(columns, dtype=torch.int64, device=device)
    return _drawn(g.view(-1), seed, parameter, step).view(g.shape[0], 4 * g.shape[1]).gather(1, inside)


def words(first: int, number: int, seed: int, parameter: int, step: Tensor | int, device: torch.device) -> Tensor:
    """Words of the elements first, first + 1, ... of a parameter: int64 [number], below 2**32.

    Args:
        seed: 64 bits.
        parameter: its number in the optimizer.
        step: which step; an int64 tensor of one element stays on its device.
    Exact: word e % 4 of Philox4x32-10 at (e / 4, its upper half, parameter, step), keyed by the seed.
    """
    begin, end = first // 4, -(-(first + number) // 4)
    g = torch.arange(begin, max(end, begin), dtype=torch.int64, device=device)
    return _drawn(g, seed, parameter, step)[first - 4 * begin :][:number]


def _drawn(g: Tensor, seed: int, parameter: int, step: Tensor | int) -> Tensor:
    """The words of groups of four elements: int64 [4 * groups]."""
    if isinstance(step, Tensor):
        count = torch.empty_like(g).copy_(step.reshape(()).to(torch.int64).bitwise_and(_LOW))
    else:
        count = torch.full_like(g, step & _LOW)
    drawn = philox4x32(g & _LOW, g >> 32, torch.full_like(g, parameter), count, seed)
    return torch.stack(drawn, -1).view(-1)


def traced_words(number: int, first: Tensor, parameter: Tensor, step: Tensor, keys: Tensor) -> Tensor:
    """`words` for a compiler: no number that changes is a constant of the program.

    Args:
        number: a multiple of four.
        first: int64 [], a multiple of four.
        parameter, step: int64 [].
        keys: of the seed, `philox.round_keys`.
    """
    g = torch.arange(number // 4, dtype=torch.int64, device=first.device) + first // 4
    drawn = traced(g & _LOW, g >> 32, parameter, step & _LOW, keys)
    # The lower 32 bits, whose shares are the same.
    return torch.stack([word.to(torch.int32) for word in drawn], -1).view(-1)


def traced_fours(
    shape: torch.Size, low: Tensor, high: Tensor, parameter: Tensor, step: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of elements 4 i, 4 i + 1, 4 i + 2 and 4 i + 3 apart: int32 of this shape, whose shares are the same.

    Args:
        low, high, parameter, step: int32 []; both words of the first counter, of whose successors none has another
            upper one.
        keys: int32.
    """
    c0 = (torch.arange(shape.numel(), dtype=torch.int32, device=low.device) + low).view(shape)
    return traced(c0, high.expand(shape), parameter.expand(shape), step.expand(shape), keys)


def shares(word: Tensor, number: int) -> list[Tensor]:
    """Noise for a number of codes, at most three, each int32 below 2**15 of the words' shape.

    One or two have 15 bits of their own; three have 10 each, in the middle of their 32nd.
    """
    if number <= 2:
        return [(word >> (17, 1)[i]).bitwise_and_(2**NOISE_BITS - 1).to(torch.int32) for i in range(number)]
    return [(((word >> (22, 12, 2)[i]) & 0x3FF) << 5 | 16).to(torch.int32) for i in range(number)]
