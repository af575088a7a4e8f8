"""Philox4x32-10 and Philox2x32-10 in torch tensors: the twins of `quaver.core.numbers.philox`, on any device."""

from functools import cache

import torch
from torch import Tensor

from quaver.core.numbers.philox import MULTIPLIER, MULTIPLIERS, ROUNDS, WEYL

#: (seed, tensor id, count) of stochastic rounding; count may be an int64 tensor of one element.
Noise = tuple[int, Tensor | int, Tensor | int]
#: The same outside of compiled code.
EagerNoise = tuple[int, int, Tensor | int]


QUIET: EagerNoise = (0, 0, 0)


_LOW = 0xFFFFFFFF
#: Counters worked on at once: their arrays stay in a CPU's second-level cache.
_CHUNK = 1 << 15


def uniform(
    rows: int, k: int, seed: int, tensor_id: int, count: Tensor | int, device: torch.device, first_row: int = 0
) -> Tensor:
    """The number in [0, 1) that each element of an operand is rounded with, float32 [rows, k]; see
    `quaver.core.numbers.philox`.

    Args:
        rows, k: shape of the operand, or of the piece of it that starts at `first_row`, a multiple of four.
        seed, tensor_id: of the stream.
        count: an int, or an int64 tensor of one element, which then stays on its device.
    Exact.
    """
    assert first_row % 4 == 0
    start, groups = first_row * k // 4, -(-rows * k // 4)
    out = torch.empty((groups, 4), dtype=torch.float32, device=device)
    chunk = _CHUNK if device.type == "cpu" else max(groups, 1)
    for at in range(0, groups, chunk):
        g = torch.arange(start + at, start + min(at + chunk, groups), dtype=torch.int64, device=device)
        piece = out[at : at + chunk]
        for column, word in enumerate(words(g, seed, tensor_id, count)):
            piece[:, column] = word
    return out.mul_(2.0**-24).view(-1)[: rows * k].view(rows, k)


def part_of_uniform(rows: Tensor, fours: Tensor, k: int, seed: int, tensor_id: int, count: Tensor | int) -> Tensor:
    """`uniform` of an operand with k columns, a multiple of four, where some rows and columns of it meet.

    Args:
        rows: the numbers of the rows, int64.
        fours: the numbers of the columns, each divided by four: of every four that begin at a multiple of four.
    Returns:
        float32 [rows, 4 × fours]. Exact.
    """
    assert k % 4 == 0
    out = torch.empty((len(rows), len(fours), 4), dtype=torch.float32, device=rows.device)
    g = rows[:, None] * (k // 4) + fours
    for column, word in enumerate(words(g, seed, tensor_id, count)):
        out[..., column] = word
    return out.mul_(2.0**-24).view(len(rows), 4 * len(fours))


def rows_of_uniform(rows: Tensor, k: int, seed: int, tensor_id: int, count: Tensor | int) -> Tensor:
    """Some rows of `uniform` of an operand with k columns, however many: float32 [rows, k]. Exact.

    Args:
        rows: their numbers, int64.
    """
    if k % 4 == 0:
        fours = torch.arange(k // 4, dtype=torch.int64, device=rows.device)
        return part_of_uniform(rows, fours, k, seed, tensor_id, count)
    # Groups of four that hold a row wherever it begins in its first one.
    first = rows[:, None] * k
    g = first // 4 + torch.arange((k + 6) // 4, dtype=torch.int64, device=rows.device)
    inside = first % 4 + torch.arange(k, dtype=torch.int64, device=rows.device)
    drawn = torch.stack(words(g, seed, tensor_id, count), -1).flatten(1).gather(1, inside)
    return drawn.to(torch.float32).mul_(2.0**-24)


def turned_uniform(
    rows: int, k: int, seed: int, tensor_id: int, count: Tensor | int, first: int, number: int
) -> Tensor:
    """Columns first … first + number of `uniform(rows, k, ...)`, transposed: float32 [number, rows].

    k, first and number are multiples of four, so that the four words of a counter belong to four lines of the result.
    """
    out = torch.empty((number // 4, 4, rows), dtype=torch.float32, device="cpu")
    g = torch.arange(first // 4, (first + number) // 4, dtype=torch.int64, device="cpu")[:, None]
    g = g + torch.arange(rows, dtype=torch.int64, device="cpu") * (k // 4)
    for line, word in enumerate(words(g, seed, tensor_id, count)):
        out[:, line] = word
    return out.mul_(2.0**-24).view(number, rows)


def words(g: Tensor, seed: int, tensor_id: int, count: Tensor | int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The upper 24 bits of the four words for counters g, int64 of any shape."""
    if isinstance(count, Tensor):
        c3 = torch.empty_like(g).copy_(count.reshape(()).bitwise_and(_LOW).to(g.device))
    else:
        c3 = torch.full_like(g, count & _LOW)
    drawn = philox4x32(g & _LOW, g >> 32, torch.full_like(g, tensor_id), c3, seed)
    return tuple(word.bitwise_right_shift_(8) for word in drawn)  # type: ignore[return-value]


def philox4x32(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds on four int64 tensors of 32-bit words, which it overwrites.

    Products wrap in int64, whose bits are those of uint64. Constants are tensors: torch wraps a Python number anew
    each time.
    """
    device = c0.device
    low, half, m0, m1 = (_word(v, device) for v in (_LOW, 32, *MULTIPLIERS))
    high = torch.empty_like(c0)
    # Fake tensors have keys of their own, which are kept for nothing else.
    keys = _keys if type(c0) is Tensor else _keys.__wrapped__
    for k0, k1 in keys(seed, device):
        c0.mul_(m0)
        c2.mul_(m1)
        torch.bitwise_right_shift(c2, half, out=high)
        c1.bitwise_xor_(high.bitwise_and_(low)).bitwise_xor_(k0)
        torch.bitwise_right_shift(c0, half, out=high)
        c3.bitwise_xor_(high.bitwise_and_(low)).bitwise_xor_(k1)
        c2.bitwise_and_(low)
        c0.bitwise_and_(low)
        c0, c1, c2, c3 = c1, c2, c3, c0
    return c0, c1, c2, c3


@cache
def _keys(seed: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """The round keys."""
    rounds = [((seed + i * WEYL[0]) & _LOW, ((seed >> 32) + i * WEYL[1]) & _LOW) for i in range(ROUNDS)]
    with torch.inference_mode(False):
        return [(_word(k0, device), _word(k1, device)) for k0, k1 in rounds]


def _word(v: int, device: torch.device) -> Tensor:
    return torch.tensor(v, dtype=torch.int64, device=device)


def philox2x32(c0: Tensor, c1: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Ten rounds of Philox of two words on int64 tensors of 32-bit words, the first two of which it overwrites.

    Args:
        key: int64 [], below 2**32.
    """
    device = c0.device
    low, half, multiplier = (_word(v, device) for v in (_LOW, 32, MULTIPLIER))
    high = torch.empty_like(c0)
    for round_key in round_keys(key).unbind():
        c0.mul_(multiplier)
        torch.bitwise_right_shift(c0, half, out=high)
        c1.bitwise_xor_(high.bitwise_and_(low)).bitwise_xor_(round_key)
        c0.bitwise_and_(low)
        c0, c1 = c1, c0
    return c0, c1


def round_keys(key: Tensor) -> Tensor:
    """The keys of all rounds of Philox of two words, int64 [10] below 2**32, whose first is this one, int64 []."""
    return (key + torch.arange(0, ROUNDS * WEYL[0], WEYL[0], dtype=torch.int64, device=key.device)).bitwise_and_(_LOW)


def traced(c0: Tensor, c1: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """`philox2x32` for a compiler, which fuses it: nothing is overwritten, and the keys are `round_keys`.

    Keys of int32 have words of int32, as their bits are: AVX2 has no product of vectors of int64.
    """
    if keys.dtype is torch.int32:
        return _traced_in_halves(c0, c1, keys)
    for i in range(ROUNDS):
        wide = c0 * MULTIPLIER
        c0, c1 = ((wide >> 32) & _LOW) ^ c1 ^ keys[i], wide & _LOW
    return c0, c1


def _traced_in_halves(c0: Tensor, c1: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Products by halves of words: the multiplier is 2**32 more than two signed numbers of 14 bits, by which halves are
    int32, and the two in the middle add up to one; they are the product of both sums less the outer two. Between rounds
    a word is float32 of its bits, which Inductor reads whole, int32 by halves of vectors."""
    upper, lower = (MULTIPLIER - (1 << 32)) + (1 << 15) >> 16, ((MULTIPLIER & 0xFFFF) ^ 0x8000) - 0x8000
    held = c0.view(torch.float32)
    for i in range(ROUNDS):
        word = held.view(torch.int32)
        a, b = (word >> 16) & 0xFFFF, word & 0xFFFF
        first, last = a * upper, b * lower
        middle = (a + b) * (upper + lower) - first - last + (last >> 16)
        high, low = first + (middle >> 16) + word, (middle << 16) + (last & 0xFFFF)
        held, c1 = (high ^ c1 ^ keys[i]).view(torch.float32), low
    return held.view(torch.int32), c1
