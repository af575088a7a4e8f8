"""One random word of 32 bits for each element of a parameter and each step, whose bits its codes share.

The counter of Philox is the element's place in the whole parameter, so ranks that have parts draw what one would.
"""

import torch
from torch import Tensor

from quaver.core.states.reference import NOISE_BITS
from quaver.torch.numerics.philox import philox4x32

_LOW = 0xFFFFFFFF


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
    if isinstance(step, Tensor):
        count = torch.empty_like(g).copy_(step.reshape(()).to(torch.int64).bitwise_and(_LOW))
    else:
        count = torch.full_like(g, step & _LOW)
    drawn = philox4x32(g & _LOW, g >> 32, torch.full_like(g, parameter), count, seed)
    return torch.stack(drawn, -1).view(-1)[first - 4 * begin :][:number]


def shares(word: Tensor, number: int) -> list[Tensor]:
    """Noise for a number of codes, at most three, each int32 below 2**15 of the words' shape.

    One or two have 15 bits of their own; three have 10 each, in the middle of their 32nd.
    """
    if number <= 2:
        return [((word >> (17, 1)[i]) & (2**NOISE_BITS - 1)).to(torch.int32) for i in range(number)]
    return [(((word >> (22, 12, 2)[i]) & 0x3FF) << 5 | 16).to(torch.int32) for i in range(number)]
