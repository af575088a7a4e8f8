"""Philox4x32-10: random words as a pure function of a counter and a key, the same bits on every backend.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)


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
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], -1).astype(np.uint32)


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
    counter = (groups & _LOW, groups >> np.uint64(32), *stream)
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)).reshape(-1)[: rows * k]
    return ((words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)).reshape(rows, k)


def _product(a: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
    """High and low word of a 32 × 32 bit product."""
    p = a * np.uint64(m)
    return p >> np.uint64(32), p & _LOW
