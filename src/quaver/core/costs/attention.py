"""What attention's forward and backward cost on a GPU with quantized products, beside bf16's, before anything has run.

    attention    products of all queries with the keys that they see / bf16's rate, and what quantizes its operands

The kernels multiply as exactly as bf16 does, and so at its rate. They round P once its sum is known and dS once its
amax is, and make the scores again for each: forward takes 3 products where bf16 takes 2, backward 9 to 13 where bf16
takes 5 (Dao, arXiv:2307.08691). As a layer's cost this is a roofline: it counts no exponentials, no decoding and no
launches' ends, and takes no more for what a tile sees in part.
"""

from typing import NamedTuple

from quaver.core.costs import gpus
from quaver.core.costs.gpus import Gpu
from quaver.core.costs.ledger import LAUNCH, WIDE, moving
from quaver.core.spec import AttentionSpec, QuantSpec

#: Keys of a tile that dQ's sweep takes at a time, and queries of one that dK's and dV's takes: as in
#: `quaver.torch.backends.gpu.mixing.attention`. Of wider blocks dS takes a sweep for its amax.
KEYS, QUERIES = 64, 32
#: Products forward and backward in bf16.
PLAIN = 2, 5


class Products(NamedTuple):
    """Products of all queries with all keys, by the kernel that takes them."""

    forward: int
    rows: int
    columns: int


class Attention(NamedTuple):
    """Attention, forward and backward."""

    products: Products
    #: Bytes that quantizing its operands moves.
    bytes: float
    seconds: float
    bf16_seconds: float

    @property
    def speedup(self) -> float:
        """How many times as fast as the same attention in bf16."""
        return self.bf16_seconds / self.seconds


def products(spec: AttentionSpec) -> Products:
    """P takes a sweep for its sums. Δ takes one, and so does an amax of dS that a tile does not hold; where one scale
    serves a head, queries find it for keys too."""
    block = spec.grad_output.block[1]
    rows = 2 + 3 + 2 * (block is None or block > KEYS)
    columns = 4 + 2 * (not spec.grad_output.per_tensor and (block is None or block > QUERIES))
    return Products(1 + PLAIN[0], rows, columns)


def cost(
    spec: AttentionSpec,
    tokens: int,
    heads: int,
    groups: int,
    features: int,
    gpu: str | Gpu,
    *,
    batch: int = 1,
    causal: bool = True,
) -> Attention:
    """The cost of attention from bf16 queries, keys and values of `tokens` each.

    Args:
        heads: of queries.
        groups: heads of keys and values.
        features: of a head, the same for queries, keys and values.
        gpu: a name from `quaver.core.costs.gpus.GPUS`, or a Gpu.
        causal: whether a query sees the keys up to its own alone.
    Raises:
        ValueError: an unknown GPU, a size below 1, or heads that groups do not share alike.
    """
    sizes = {"tokens": tokens, "heads": heads, "groups": groups, "features": features, "batch": batch}
    for label, size in sizes.items():
        if size < 1:
            raise ValueError(f"{label} is {size}; attention has at least 1")
    if heads % groups:
        raise ValueError(f"{heads} heads cannot share {groups} groups of keys alike; give a divisor of {heads}")
    card = gpus.get(gpu)
    seen = tokens * (tokens + 1) / 2 if causal else tokens**2
    each = 2.0 * batch * heads * features * seen / (card.rates["bf16"].value * 1e12)
    counts = products(spec)
    queries, keys = (batch * n * tokens * features for n in (heads, groups))
    # q, k and v are quantized, and the gradient of the output.
    moved = _moved(spec.input, queries, 2 * keys) + _moved(spec.grad_output, queries)
    quantizing = moving(moved, 4, card)
    # A head's amax is known once all programs of a launch have met.
    launches = 3 + spec.grad_output.per_tensor
    return Attention(
        counts,
        moved,
        each * sum(counts) + launches * LAUNCH + quantizing.seconds,
        each * sum(PLAIN) + len(PLAIN) * LAUNCH,
    )


def _moved(spec: QuantSpec, *elements: int) -> float:
    """Bytes: read, twice where one scale serves a head, and written in codes; what is no transpose of its codes is
    copied for its transpose's besides."""
    codes, turned = spec.format.stored_bits / 8, not spec.transposable
    each = WIDE * (2 if spec.per_tensor else 1) + codes + turned * (3 * WIDE + codes)
    return float(each * sum(elements))
