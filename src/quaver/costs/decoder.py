"""What attention's forward and backward cost on a GPU with quantized products, beside bf16's, before anything has run.

    attention    products of all queries with the keys that they see / bf16's rate, and what quantizes its operands

The kernels multiply as exactly as bf16 does, and so at its rate. They round P once its sum is known and dS once its
amax is, and make the scores again for each: forward takes 3 products where bf16 takes 2, backward 9 to 13 where bf16
takes 5 (Dao, arXiv:2307.08691). As a layer's cost this is a roofline: it counts no exponentials, no decoding and no
launches' ends, and takes no more for what a tile sees in part.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from quaver.costs import hardware
from quaver.costs.hardware import Gpu
from quaver.costs.ledger import LAUNCH, WIDE, moving
from quaver.recipes.spec import AttentionSpec, QuantSpec

# ---- attention -------------------------------------------------------------------------------------------

#: Keys of a tile that dQ's sweep takes at a time, and queries of one that dK's and dV's takes: as in
#: `quaver.torch.backends.gpu.attention`. Of wider blocks dS takes a sweep for its amax.
KEYS, QUERIES = 64, 32
#: Products forward and backward in bf16.
PLAIN = 2, 5


class AttentionGemms(NamedTuple):
    """Products of all queries with all keys, by the kernel that takes them."""

    forward: int
    rows: int
    columns: int


class Attention(NamedTuple):
    """Attention, forward and backward."""

    products: AttentionGemms
    #: Bytes that quantizing its operands moves.
    bytes: float
    seconds: float
    bf16_seconds: float

    @property
    def speedup(self) -> float:
        """How many times as fast as the same attention in bf16."""
        return self.bf16_seconds / self.seconds


def products(spec: AttentionSpec) -> AttentionGemms:
    """P takes a sweep for its sums. Δ takes one, and so does an amax of dS that a tile does not hold; where one scale
    serves a head, queries find it for keys too."""
    block = spec.grad_output.block[1]
    rows = 2 + 3 + 2 * (block is None or block > KEYS)
    columns = 4 + 2 * (not spec.grad_output.per_tensor and (block is None or block > QUERIES))
    return AttentionGemms(1 + PLAIN[0], rows, columns)


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
        gpu: a name from `quaver.costs.hardware.GPUS`, or a Gpu.
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
    card = hardware.get(gpu)
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
    codes, transposed = spec.format.stored_bits / 8, not spec.transposable
    each = WIDE * (2 if spec.per_tensor else 1) + codes + transposed * (3 * WIDE + codes)
    return float(each * sum(elements))


# ---- decoder ---------------------------------------------------------------------------------------------
# A decoder as the costs see it: matrices of a block and how they are cut, attention's sizes, and the number of blocks.
#
# No framework and no names of a library's classes: `quaver plan` makes one of a model's configuration.


@dataclass(frozen=True, kw_only=True)
class WeightMatrix:
    """A weight [out_features, in_features] of a block, or one such weight of each expert."""

    out_features: int
    in_features: int
    #: What tensor parallelism divides: "column" the outputs, "row" the inputs, None nothing.
    cut: Literal["column", "row"] | None = "column"
    #: How many there are, and how many of them a token meets.
    experts: int = 1
    chosen: int = 1

    @property
    def parameters(self) -> int:
        return self.out_features * self.in_features * self.experts

    @property
    def routed(self) -> bool:
        return self.experts > 1


@dataclass(frozen=True, kw_only=True)
class DecoderBlock:
    """A block of a decoder: attention, then an MLP or experts."""

    dim: int
    matrices: tuple[WeightMatrix, ...]
    heads: int
    #: Features of a head that scores are made of, and of a head's values.
    score_features: int
    value_features: int
    #: Features of queries, keys and values together, which rope and attention read.
    attended: int
    #: Features between the matrices of the MLP that a token meets.
    hidden: int

    @property
    def parameters(self) -> int:
        return sum(matrix.parameters for matrix in self.matrices)

    @property
    def routed_parameters(self) -> int:
        return sum(matrix.parameters for matrix in self.matrices if matrix.routed)

    @property
    def chosen(self) -> int:
        """Experts that a token meets."""
        return max((matrix.chosen for matrix in self.matrices if matrix.routed), default=0)


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Blocks with how often each stands, an embedding and a head of `vocab` rows."""

    name: str
    blocks: tuple[tuple[int, DecoderBlock], ...]
    dim: int
    vocab: int
    tied: bool = False

    @property
    def layers(self) -> int:
        return sum(count for count, _ in self.blocks)

    @property
    def parameters(self) -> int:
        rows = self.vocab * self.dim * (1 if self.tied else 2)
        return rows + sum(count * block.parameters for count, block in self.blocks)


def llama(
    name: str, layers: int, dim: int, heads: int, groups: int, head_dim: int, hidden: int, vocab: int = 128_256
) -> DecoderShape:
    """A decoder with grouped queries and a gated MLP."""
    return DecoderShape(
        name=name, blocks=((layers, dense(dim, heads, groups, head_dim, hidden)),), dim=dim, vocab=vocab
    )


def dense(dim: int, heads: int, groups: int, head_dim: int, hidden: int, *, gated: bool = True) -> DecoderBlock:
    """A block with grouped queries and one MLP."""
    q, kv = heads * head_dim, groups * head_dim
    wide = WeightMatrix(out_features=hidden, in_features=dim)
    matrices = (
        WeightMatrix(out_features=q, in_features=dim),
        *(WeightMatrix(out_features=kv, in_features=dim),) * 2,
        WeightMatrix(out_features=dim, in_features=q, cut="row"),
        *(wide,) * (2 if gated else 1),
        WeightMatrix(out_features=dim, in_features=hidden, cut="row"),
    )
    return DecoderBlock(
        dim=dim,
        matrices=matrices,
        heads=heads,
        score_features=head_dim,
        value_features=head_dim,
        attended=q + 2 * kv,
        hidden=hidden,
    )


def latent(
    dim: int, heads: int, q_rank: int, kv_rank: int, plain_dim: int, rope_dim: int, value_dim: int
) -> tuple[WeightMatrix, ...]:
    """Latent attention: queries from q_rank features, keys and values from kv_rank, rope_dim of a head turned."""
    return (
        WeightMatrix(out_features=q_rank, in_features=dim, cut=None),
        WeightMatrix(out_features=heads * (plain_dim + rope_dim), in_features=q_rank),
        WeightMatrix(out_features=kv_rank + rope_dim, in_features=dim, cut=None),
        WeightMatrix(out_features=heads * (plain_dim + value_dim), in_features=kv_rank),
        WeightMatrix(out_features=dim, in_features=heads * value_dim, cut="row"),
    )


def deepseek_v3_like() -> DecoderShape:
    """The sizes of DeepSeek-V3 (its config.json and arXiv:2412.19437, section 4.2): 61 blocks of 7168 features, latent
    attention of 128 heads, 3 dense blocks, then a shared expert and 256 routed ones of 2048 features, 8 for a token.
    Its prediction of a second token is left out."""
    dim, heads, width = 7168, 128, 2048
    attention = {"dim": dim, "heads": heads, "score_features": 192, "value_features": 128, "attended": heads * 448}

    def mlp(hidden: int, experts: int = 1, chosen: int = 1) -> tuple[WeightMatrix, ...]:
        wide = WeightMatrix(out_features=hidden, in_features=dim, experts=experts, chosen=chosen)
        down = WeightMatrix(out_features=dim, in_features=hidden, cut="row", experts=experts, chosen=chosen)
        return wide, wide, down

    own = latent(dim, heads, 1536, 512, 128, 64, 128)
    first = DecoderBlock(matrices=(*own, *mlp(18_432)), hidden=18_432, **attention)
    routed = (*own, *mlp(width), *mlp(width, 256, 8))
    rest = DecoderBlock(matrices=routed, hidden=9 * width, **attention)
    return DecoderShape(name="deepseek-v3-like", blocks=((3, first), (58, rest)), dim=dim, vocab=129_280)


# ---- scan ------------------------------------------------------------------------------------------------
# What the scan of a state-space layer multiplies and moves, which no recipe quantizes.

#: Tokens of a chunk in the published kernels.
CHUNK = 256
#: Bytes of a value in bf16, and of a step in float32.
SCAN_WIDE, STEP = 2, 4


class Scan(NamedTuple):
    """A scan's forward pass."""

    flops: float
    bytes: float
    seconds: float


def priced(tokens: int, heads: int, head_dim: int, groups: int, state: int, gpu: str | Gpu, chunk: int = CHUNK) -> Scan:
    """The chunked scan of Mamba-2 over so many tokens: forward, with its products in bf16.

    Args:
        heads, head_dim, groups, state: H, P, G and N.
        gpu: a name from `quaver.costs.hardware.GPUS`, or a Gpu.
        chunk: Q, tokens of a chunk.
    Returns:
        Of a token: products of C and B within a chunk, 2 Q G N; of those with x, 2 Q H P; states of chunks and what
        comes of them, 2 N H P each. Bytes of x, B, C and steps read and y written once. Seconds are the longer of both
        at the GPU's rates: a bound from below.
    Source: Dao and Gu 2024, arXiv:2405.21060, section 6.
    """
    card = hardware.get(gpu)
    inner = heads * head_dim
    flops = 2.0 * tokens * (chunk * (groups * state + inner) + 2 * state * inner)
    moved = float(tokens * (SCAN_WIDE * (2 * inner + 2 * groups * state) + STEP * heads))
    rate, copy = card.rates["bf16"].value * 1e12, card.copy.value * 1e12
    return Scan(flops, moved, max(flops / rate, moved / copy))
