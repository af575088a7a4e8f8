"""Random bits of stochastic rounding on a CPU, computed in numpy.

numpy multiplies and shifts uint64 with vector instructions, which torch does not: its bits, those of
`quaver.torch.numerics.rounding.halves`, take a quarter of the time.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from quaver.reference.numerics import MULTIPLIER, noise_stream, round_keys
from quaver.torch.backends.cpu.quantize import buffer
from quaver.torch.numerics.rounding import EagerNoise

_HALF = np.uint64(32)


def bits_of_rows(start: int, count: int, noise: EagerNoise) -> Tensor:
    """Return the 16 random bits of elements number `start` (a multiple of four) and following: int32 [count].

    Overwritten by the next call.
    """
    groups = -(-count // 4)
    out = buffer("random bits", (groups, 4), torch.int32)
    counters = _array("counters", groups)
    np.add(_ascending(groups), np.uint64(start // 4), out=counters)
    halves = _philox(counters, noise)
    for i in range(4):
        np.copyto(out.numpy()[:, i], halves[:, i])
    return out.view(-1)[:count]


def bits_of_columns(shape: tuple[int, int], first: int, count: int, noise: EagerNoise) -> Tensor:
    """Return the random bits of columns `first` to `first + count` of an operand, transposed.

    Args:
        shape: (rows, k) of the operand; k, first and count are multiples of four.

    Returns:
        int32 [count, rows], overwritten by the next call.
    """
    rows, k = shape
    out = buffer("random bits", (count // 4, 4, rows), torch.int32)
    counters = _array("counters", count // 4 * rows)
    columns = _ascending(count // 4)[:, None] + np.uint64(first // 4)
    np.add(columns, _ascending(rows) * np.uint64(k // 4), out=counters.reshape(count // 4, rows))
    halves = _philox(counters, noise).reshape(count // 4, rows, 4)
    for i in range(4):
        np.copyto(out.numpy()[:, i], halves[:, :, i])
    return out.view(count, rows)


def _array(slot: str, size: int) -> np.ndarray:
    """Return a scratch array of uint64."""
    return buffer(slot, (size,), torch.int64).numpy().view(np.uint64)


@lru_cache(maxsize=8)
def _ascending(size: int) -> np.ndarray:
    return np.arange(size, dtype=np.uint64)


def _philox(counters: np.ndarray, noise: EagerNoise) -> np.ndarray:
    """Return the halves of both words of `quaver.reference.numerics.philox2x32`: uint16 [counters, 4].

    A word and the next lie in the upper and lower half of a uint64, so that a round is
    words = (words >> 32) × multiplier ^ words << 32 ^ key << 32. Every second round also gives the lower word the key
    of the next round, which then needs none.

    Args:
        counters: ascending, uint64; overwritten.
    """
    key, upper = noise_stream(noise[0], noise[1], int(noise[2]))
    keys, multiplier = [*round_keys(key), 0], np.uint64(MULTIPLIER)
    words, product = _array("words", len(counters)), counters
    high = counters >> _HALF << _HALF if int(counters[-1]) >> 32 else np.uint64(0)
    counters ^= high
    np.multiply(counters, multiplier, out=words)
    words ^= high ^ np.uint64((upper ^ keys[0]) << 32 | keys[1])
    for i in range(1, 10):
        np.right_shift(words, _HALF, out=product)
        product *= multiplier
        words <<= _HALF
        words ^= product
        if i % 2 == 0:
            words ^= np.uint64(keys[i] << 32 | keys[i + 1])
    # Little-endian: the upper half of the first word comes last.
    return words.view(np.uint16).reshape(-1, 4)[:, ::-1]
