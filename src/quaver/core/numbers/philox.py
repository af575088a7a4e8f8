"""Philox4x32-10 and Philox2x32-10: random words as a pure function of counter and key, the same bits on every backend.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from typing import Any

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
#: Of Philox2x32, whose keys go up by the first number of `WEYL`.
MULTIPLIER = 0xD256D193
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox4x32(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> np.ndarray:
    """Ten rounds of Philox.

    Args:
        counter: four arrays of one shape [...], values below 2**32.
        key: two words below 2**32.
    Returns:
        uint32 [..., 4].
    Exact.
    """
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in np.broadcast_arrays(*counter))
    return np.stack(_rounds(c0, c1, c2, c3, *key), -1).astype(np.uint32)


def one_philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """`philox4x32` of one counter, in Python's numbers: a quarter of the time that arrays take."""
    return _rounds(*counter, *key)


def _rounds(c0: Any, c1: Any, c2: Any, c3: Any, k0: int, k1: int) -> tuple[Any, Any, Any, Any]:
    """Four words, arrays of uint64 or numbers, after ten rounds."""
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & _LOW, p0 >> 32 ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def philox2x32(counter: tuple[np.ndarray, ...], key: int) -> np.ndarray:
    """Ten rounds of Philox of two words: half the products for as many counters.

    Args:
        counter: two arrays of one shape [...], values below 2**32.
        key: below 2**32.
    Returns:
        uint32 [..., 2].
    Exact.
    """
    c0, c1 = (np.asarray(c, np.uint64) for c in np.broadcast_arrays(*counter))
    for round_key in round_keys(key):
        wide: Any = c0 * MULTIPLIER
        c0, c1 = wide >> 32 ^ c1 ^ round_key, wide & _LOW
    return np.stack([c0, c1], -1).astype(np.uint32)


def round_keys(key: int) -> list[int]:
    """The keys of all rounds of `philox2x32`, whose first is this one."""
    return [(key + i * WEYL[0]) & _LOW for i in range(ROUNDS)]


def uniform(rows: int, k: int, seed: int, tensor_id: int, count: int) -> np.ndarray:
    """The number in [0, 1) that each element of an operand [rows, k] is rounded with.

    The counter depends on the element's place in the whole operand, so a shard draws what the whole would have drawn.

    Args:
        rows, k: shape of the operand as it is quantized.
        seed: 64 bits, the key.
        tensor_id: which tensor, 32 bits.
        count: how often this tensor was quantized before; its low 32 bits.
    Returns:
        float32 [rows, k], multiples of 2**-24.
    Exact.
    """
    groups = np.arange(-(-rows * k // 4), dtype=np.uint64)
    zero = np.zeros_like(groups)
    stream = (zero + np.uint64(tensor_id), zero + np.uint64(count & 0xFFFFFFFF))
    counter = (groups & _LOW, groups >> 32, *stream)
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)).reshape(-1)[: rows * k]
    return ((words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)).reshape(rows, k)
