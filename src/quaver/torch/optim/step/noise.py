"""Random bits for stochastic rounding in an optimizer step, one word per element and step, shared by its codes.

Two words of Philox serve four elements, 16 bits each. An element reads its word starting at its own half. A code then
has 15 bits of noise, the upper ones from its own half, the lower ones from its neighbour's. The counter is the
element's position in the whole parameter, so sharded parameters draw the same noise as unsharded ones.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.reference.optim import NOISE_BITS
from quaver.torch.numerics.rounding import noise_stream, philox2x32, round_keys, traced

_LOW = 0xFFFFFFFF


class ShardPosition(NamedTuple):
    """Position of a shard in the whole parameter."""

    #: First index of the shard along each dimension.
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """True if the shard's elements are consecutive in the whole parameter."""
        return self.local_shape[1:] == self.global_shape[1:]

    def narrowed(self, columns: slice) -> "ShardPosition":
        """Return the position of some columns of the shard."""
        if columns == slice(0, self.local_shape[-1] if self.local_shape else 1):
            return self
        offset = (*self.global_offset[:-1], self.global_offset[-1] + columns.start)
        return ShardPosition(offset, (*self.local_shape[:-1], columns.stop - columns.start), self.global_shape)

    @property
    def flat_offset(self) -> int:
        """Index of the shard's first element in the whole parameter."""
        return sum(at * prod(self.global_shape[dim + 1 :]) for dim, at in enumerate(self.global_offset))


def words_at(
    place: ShardPosition, rows: slice, seed: int, parameter: int, step: Tensor | int, device: torch.device
) -> Tensor:
    """Return the words of some rows of a shard, whose leading dimensions are flattened: int64 [rows, K]. See
    `words`.
    """
    columns, number = place.local_shape[-1] if place.local_shape else 1, rows.stop - rows.start
    if place.contiguous:
        drawn = words(place.flat_offset + rows.start * columns, number * columns, seed, parameter, step, device)
        return drawn.view(number, columns)
    at = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device)
    firsts = torch.full_like(at, place.flat_offset)
    for dim in range(len(place.local_shape) - 2, -1, -1):
        firsts += at % place.local_shape[dim] * prod(place.global_shape[dim + 1 :])
        at = at // place.local_shape[dim]
    # Groups of four that cover a row, wherever it starts within its first group.
    g = firsts[:, None] // 4 + torch.arange((columns + 6) // 4, dtype=torch.int64, device=device)
    inside = firsts[:, None] % 4 + torch.arange(columns, dtype=torch.int64, device=device)
    return _drawn(g.view(-1), seed, parameter, step).view(g.shape[0], 4 * g.shape[1]).gather(1, inside)


def words(first: int, number: int, seed: int, parameter: int, step: Tensor | int, device: torch.device) -> Tensor:
    """Return the random words of elements first, first + 1, ... of a parameter: int64 [number], below 2**32.

    Args:
        first: index of the first element.
        number: number of elements.
        seed: 64 bits.
        parameter: index of the parameter in the optimizer.
        step: step count; an int64 tensor of one element stays on its device.
        device: device of the result.
    Exact: word e % 4 / 2 of Philox2x32-10 at (e / 4, its upper half xor the upper word of `noise_stream`) under its
    key; for an odd e with its halves swapped.
    """
    begin, end = first // 4, -(-(first + number) // 4)
    g = torch.arange(begin, max(end, begin), dtype=torch.int64, device=device)
    return _drawn(g, seed, parameter, step)[first - 4 * begin :][:number]


def keyed(
    seed: int, parameter: int, step: Tensor | int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the round keys and upper counter word that `traced_words` and `traced_packed4` need, as int64 or int32."""
    key, upper = noise_stream(seed, parameter, step, device)
    return round_keys(key.view(())).to(dtype), upper.view(()).to(dtype)


def _drawn(g: Tensor, seed: int, parameter: int, step: Tensor | int) -> Tensor:
    """Return the words of groups of four elements: int64 [4 * groups]."""
    key, upper = noise_stream(seed, parameter, step, g.device)
    first, second = philox2x32(g & _LOW, (g >> 32).bitwise_xor_(upper), key)
    return torch.stack([first, _swap_halves(first) & _LOW, second, _swap_halves(second) & _LOW], -1).view(-1)


def _swap_halves(word: Tensor) -> Tensor:
    """Swap the 16-bit halves of a word, in the lower 32 bits."""
    return word << 16 | (word >> 16) & 0xFFFF


def traced_words(number: int, first: Tensor, keys: Tensor, upper: Tensor) -> Tensor:
    """`words` for compiled code: values that change are tensors, not constants of the program.

    Args:
        number: a multiple of four.
        first: int64 [], a multiple of four.
        keys, upper: int64 or int32 [10] and []: round keys and upper counter word of `noise_stream`. With AVX-512,
            int64 takes two thirds of the time of int32; with AVX2, one and a half times.
    """
    g = torch.arange(number // 4, dtype=torch.int64, device=first.device) + first // 4
    drawn = traced((g & _LOW).to(keys.dtype), (g >> 32).to(keys.dtype) ^ upper, keys)
    # The lower 32 bits are enough for `split_noise`.
    low, high = (word.to(torch.int32) for word in drawn)
    return torch.stack([low, _swap_halves(low), high, _swap_halves(high)], -1).view(-1)


def traced_packed4(
    shape: torch.Size, first: Tensor, keys: Tensor, upper: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like `traced_words`, but separate tensors for elements 4 i, 4 i + 1, 4 i + 2 and 4 i + 3: int32 of the given
    shape.

    Args:
        shape: shape of each result.
        first: [] in the dtype of the keys, lower word of the first counter; no later counter may have another upper
            word.
        keys, upper: int64 or int32 [10] and []: round keys, and the upper word of these counters.
    """
    low, high = (in_memory(word.view(shape)) for word in _traced_from(first, shape.numel(), keys, upper))
    return low, _swap_halves(low), high, _swap_halves(high)


def traced_pairs(shape: torch.Size, first: Tensor, keys: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Like `traced_packed4`, for elements 2 i and 2 i + 1."""
    drawn = _traced_from(first, shape.numel() // 2, keys, upper)
    word = in_memory(torch.stack([each.view(torch.float32) for each in drawn], -1).view(shape).view(torch.int32))
    return word, _swap_halves(word)


def _traced_from(first: Tensor, number: int, keys: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return both words of `number` consecutive counters: int32 [number]."""
    c0 = torch.arange(number, dtype=keys.dtype, device=first.device) + first
    if keys.dtype is torch.int64:
        c0 = c0 & _LOW
    low, high = traced(c0, upper.expand(c0.shape), keys)
    return low.to(torch.int32), high.to(torch.int32)


def in_memory(word: Tensor) -> Tensor:
    """Make a compiler materialize an int32 tensor, so that its users do not compute it again.

    A strided view forces a tensor into memory. It is viewed as float32, since compilers read int32 in half vectors.
    """
    bits = word.view(torch.float32)
    return bits.as_strided(bits.shape, bits.stride()).view(torch.int32)


def split_noise(word: Tensor, number: int) -> list[Tensor]:
    """Extract noise for `number` (one or two) codes from words: each int32 below 2**15, of the words' shape.

    Each is 15 bits, and the second starts eight bits below the first. So each is uniform, and their correlation is at
    most 1/256.
    """
    return [(word >> (17 - 16 // number * i)).bitwise_and_(2**NOISE_BITS - 1).to(torch.int32) for i in range(number)]
