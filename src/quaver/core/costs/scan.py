"""What the scan of a state-space layer multiplies and moves, which no recipe quantizes."""

from typing import NamedTuple

from quaver.core.costs import gpus
from quaver.core.costs.gpus import Gpu

#: Tokens of a chunk in the published kernels.
CHUNK = 256
#: Bytes of a value in bf16, and of a step in float32.
WIDE, STEP = 2, 4


class Scan(NamedTuple):
    """A scan's forward pass."""

    flops: float
    bytes: float
    seconds: float


def priced(tokens: int, heads: int, head_dim: int, groups: int, state: int, gpu: str | Gpu, chunk: int = CHUNK) -> Scan:
    """The chunked scan of Mamba-2 over so many tokens: forward, with its products in bf16.

    Args:
        heads, head_dim, groups, state: H, P, G and N.
        gpu: a name from `quaver.core.costs.gpus.GPUS`, or a Gpu.
        chunk: Q, tokens of a chunk.
    Returns:
        Of a token: products of C and B within a chunk, 2 Q G N; of those with x, 2 Q H P; states of chunks and what
        comes of them, 2 N H P each. Bytes of x, B, C and steps read and y written once. Seconds are the longer of both
        at the GPU's rates: a bound from below.
    Source: Dao and Gu 2024, arXiv:2405.21060, section 6.
    """
    card = gpus.get(gpu)
    inner = heads * head_dim
    flops = 2.0 * tokens * (chunk * (groups * state + inner) + 2 * state * inner)
    moved = float(tokens * (WIDE * (2 * inner + 2 * groups * state) + STEP * heads))
    rate, copy = card.rates["bf16"].value * 1e12, card.copy.value * 1e12
    return Scan(flops, moved, max(flops / rate, moved / copy))
