"""Random bits for each element of a parameter and each step, which its codes share.

Two words of Philox serve four elements, 16 bits each. An element reads the word from its own half on, so that a code
has 15 bits to round with: the upper ones its own, the lower ones its neighbour's upper ones. The counter is the
element's place in the whole parameter, so ranks that have parts draw what one would.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.reference import numerics
from quaver.reference.optim import NOISE_BITS
from quaver.torch.numerics.rounding import philox2x32, philox4x32, round_keys, traced

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
    Exact: word e % 4 / 2 of Philox2x32-10 at (e / 4, its upper half xor the upper word of `stream`) under the key of
    `stream`; an odd e has its halves the other way round.
    """
    begin, end = first // 4, -(-(first + number) // 4)
    g = torch.arange(begin, max(end, begin), dtype=torch.int64, device=device)
    return _drawn(g, seed, parameter, step)[first - 4 * begin :][:number]


def stream(seed: int, parameter: int, step: Tensor | int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A key and an upper word of a parameter's step, int64 [] below 2**32: the first two words of Philox4x32-10 at
    (0, 0, parameter, step), keyed by the seed."""
    if not _read_here(step):
        zero = torch.zeros((), dtype=torch.int64, device=device)
        count = torch.empty_like(zero).copy_(step.reshape(()).to(torch.int64).bitwise_and(_LOW))  # type: ignore[union-attr]
        key, upper, _, _ = philox4x32(zero, zero.clone(), torch.full_like(zero, parameter), count, seed)
        return key, upper
    key, upper = (torch.tensor(word, dtype=torch.int64, device=device) for word in _one_stream(seed, parameter, step))
    return key, upper


def keyed(
    seed: int, parameter: int, step: Tensor | int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What `traced_words` and `traced_packed4` are given of a stream: its keys of all rounds and its upper word, of the
    dtype, int64 or int32."""
    if not _read_here(step):
        key, upper = stream(seed, parameter, step, device)
        return round_keys(key).to(dtype), upper.to(dtype)
    # Of one stream Python's numbers are quicker than tensors.
    first, last = _one_stream(seed, parameter, step)
    numbers = [*numerics.round_keys(first), last]
    if dtype is torch.int32:
        numbers = [(number ^ 1 << 31) - (1 << 31) for number in numbers]
    drawn = torch.tensor(numbers, dtype=dtype, device=device)
    return drawn[:-1], drawn[-1]


def _read_here(step: Tensor | int) -> bool:
    """Whether a step's number can be read without waiting for a device."""
    return not isinstance(step, Tensor) or (type(step) is Tensor and step.is_cpu)


def _one_stream(seed: int, parameter: int, step: Tensor | int) -> tuple[int, int]:
    of_seed = seed & _LOW, seed >> 32 & _LOW
    return numerics.one_philox4x32((0, 0, parameter, int(step) & _LOW), of_seed)[:2]


def _drawn(g: Tensor, seed: int, parameter: int, step: Tensor | int) -> Tensor:
    """The words of groups of four elements: int64 [4 * groups]."""
    key, upper = stream(seed, parameter, step, g.device)
    first, second = philox2x32(g & _LOW, (g >> 32).bitwise_xor_(upper), key)
    return torch.stack([first, _turned(first) & _LOW, second, _turned(second) & _LOW], -1).view(-1)


def _turned(word: Tensor) -> Tensor:
    """Its halves the other way round, in the lower 32 bits."""
    return word << 16 | (word >> 16) & 0xFFFF


def traced_words(number: int, first: Tensor, keys: Tensor, upper: Tensor) -> Tensor:
    """`words` for a compiler: no number that changes is a constant of the program.

    Args:
        number: a multiple of four.
        first: int64 [], a multiple of four.
        keys, upper: int64 or int32 [10] and [], of `stream`'s key and its upper word. For AVX-512 words of int64 take
            two thirds of the time of int32, for AVX2 one and a half.
    """
    g = torch.arange(number // 4, dtype=torch.int64, device=first.device) + first // 4
    drawn = traced((g & _LOW).to(keys.dtype), (g >> 32).to(keys.dtype) ^ upper, keys)
    # The lower 32 bits, whose shares are the same.
    low, high = (word.to(torch.int32) for word in drawn)
    return torch.stack([low, _turned(low), high, _turned(high)], -1).view(-1)


def traced_packed4(
    shape: torch.Size, first: Tensor, keys: Tensor, upper: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of elements 4 i, 4 i + 1, 4 i + 2 and 4 i + 3 apart: int32 of this shape, whose shares are the same.

    Args:
        first: of the dtype of the keys [], the lower word of the first counter, none of whose successors has another
            upper one.
        keys, upper: int64 or int32 [10] and []; the latter of these counters.
    """
    low, high = (in_memory(word.view(shape)) for word in _traced_from(first, shape.numel(), keys, upper))
    return low, _turned(low), high, _turned(high)


def traced_pairs(shape: torch.Size, first: Tensor, keys: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """As `traced_packed4`, of elements 2 i and 2 i + 1 apart."""
    drawn = _traced_from(first, shape.numel() // 2, keys, upper)
    word = in_memory(torch.stack([each.view(torch.float32) for each in drawn], -1).view(shape).view(torch.int32))
    return word, _turned(word)


def _traced_from(first: Tensor, number: int, keys: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Both words of so many counters: int32 [number]."""
    c0 = torch.arange(number, dtype=keys.dtype, device=first.device) + first
    if keys.dtype is torch.int64:
        c0 = c0 & _LOW
    low, high = traced(c0, upper.expand(c0.shape), keys)
    return low.to(torch.int32), high.to(torch.int32)


def in_memory(word: Tensor) -> Tensor:
    """The same int32, whose users do not compute it anew: a view by strides is one of memory, which is float32, as a
    compiler reads int32 by halves of vectors."""
    held = word.view(torch.float32)
    return held.as_strided(held.shape, held.stride()).view(torch.int32)


def shares(word: Tensor, number: int) -> list[Tensor]:
    """Noise for one or two codes, each int32 below 2**15 of the words' shape.

    Each is 15 bits; the second begins eight bits below the first. So each is uniform, and two are correlated by no more
    than 1/256.
    """
    return [(word >> (17 - 16 // number * i)).bitwise_and_(2**NOISE_BITS - 1).to(torch.int32) for i in range(number)]
