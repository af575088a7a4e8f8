"""Philox4x32-10 in torch tensors: the twin of `quaver.core.philox`, the same words on any device."""

import torch
from torch import Tensor

from quaver.core.philox import MULTIPLIERS, ROUNDS, WEYL

_LOW = 0xFFFFFFFF
#: Counters worked on at once: their arrays stay in a CPU's second-level cache.
_CHUNK = 1 << 14


def uniform(
    rows: int, k: int, seed: int, tensor_id: int, count: Tensor | int, device: torch.device
) -> Tensor:
    """The number in [0, 1) that each element of an operand is rounded with, float32 [rows, k]; see `quaver.core.philox`.

    `count` may be an int64 tensor of one element, so that it can stay on the device. Exact.
    """
    groups = -(-rows * k // 4)
    low = count.reshape(()).bitwise_and(_LOW) if isinstance(count, Tensor) else count & _LOW
    out = torch.empty((groups, 4), dtype=torch.float32, device=device)
    chunk = _CHUNK if device.type == "cpu" else max(groups, 1)
    for start in range(0, groups, chunk):
        g = torch.arange(start, min(start + chunk, groups), device=device)
        words = philox(g & _LOW, g >> 32, g * 0 + tensor_id, g * 0 + low, seed)
        for word, column in zip(words, range(4), strict=True):
            out[start : start + chunk, column] = (word >> 8).to(torch.float32) * 2.0**-24
    return out.view(-1)[: rows * k].view(rows, k)


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds on four int64 tensors of 32-bit words. Products wrap in int64, whose bits are those of uint64."""
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = (p1 >> 32).bitwise_and_(_LOW).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (p0 >> 32).bitwise_and_(_LOW).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = p1.bitwise_and_(_LOW), p0.bitwise_and_(_LOW)
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3
