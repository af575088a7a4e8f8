"""Cost model of quantized attention and state-space scans, and the shape of a decoder.

    attention    max(GEMMs of all queries with their visible keys / their rate, exponentials / theirs) for each kernel,
                 and the quantization of its operands

Where one scale covers a row or a head, the kernels multiply FP8 codes on GPUs with FP8 GEMMs; otherwise bf16 values.
They round P after its sum is known and dS after its amax is known, and recompute the scores for each. Forward takes 3
GEMMs instead of bf16's 2, backward 9 to 13 instead of bf16's 5 (Dao, arXiv:2307.08691). Like that of a layer this is a
roofline model: it ignores all other instructions, partial waves, and the masked part of tiles.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from quaver.costs import hardware
from quaver.costs.hardware import Gpu
from quaver.costs.ledger import LAUNCH, WIDE, moving
from quaver.recipes.spec import AttentionSpec, QuantSpec

# ---- attention ----

#: Keys per tile in the sweep for dQ, and queries per tile in that for dK and dV, as in
#: `quaver.torch.backends.gpu.attention`. Wider blocks of dS need another sweep for its amax.
KEYS, QUERIES = 64, 32
#: Number of GEMMs forward and backward in bf16.
PLAIN = 2, 5
#: Oldest compute capability with FP8 products of attention, as in `quaver.torch.backends.gpu.device`.
FP8_SINCE = 8, 9


class AttentionGemms(NamedTuple):
    """Number of GEMMs of all queries with all keys, by kernel: forward, dQ (rows), and dK and dV (columns)."""

    forward: int
    rows: int
    columns: int


class Attention(NamedTuple):
    """Cost of attention, forward and backward."""

    products: AttentionGemms
    #: Kind of their rate, in `Gpu.rates`.
    kind: str
    #: Bytes moved to quantize the operands.
    bytes: float
    seconds: float
    bf16_seconds: float
    #: Seconds of the kernels forward and backward, without quantization.
    forward: float
    backward: float

    @property
    def speedup(self) -> float:
        """Speed relative to the same attention in bf16."""
        return self.bf16_seconds / self.seconds


def kind(spec: AttentionSpec, features: int, gpu: Gpu) -> str:
    """Return the kind of rate of the products, in `Gpu.rates`, for heads of this width."""
    both = spec.input, spec.grad_output
    if gpu.capability < FP8_SINCE:
        return "bf16"
    if all(one.per_tensor for one in both):
        return "tensor"
    wide = all(one.block[1] is None or one.block[1] >= max(features, KEYS) for one in both)
    return "row" if wide else "bf16"


def sweeps(counts: AttentionGemms) -> AttentionGemms:
    """Return the number of exponentials per score of each kernel.

    A sweep that only measures sums or amaxes takes one GEMM forward and two backward; the last sweep takes two forward,
    three for dQ, and four for dK and dV.
    """
    return AttentionGemms(counts.forward - 1, (counts.rows - 1) // 2, (counts.columns - 2) // 2)


def products(spec: AttentionSpec) -> AttentionGemms:
    """Return the number of GEMMs of each kernel.

    P takes a sweep for its sums. Δ takes one, and so does an amax of dS beyond one tile. With one scale per head, the
    kernel for dQ finds the amax for dK too.
    """
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
    """Predict the cost of attention from bf16 queries, keys and values of `tokens` each.

    Args:
        spec: how attention is quantized.
        tokens: sequence length.
        heads: number of query heads.
        groups: number of key and value heads.
        features: width of a head, the same for queries, keys and values.
        gpu: a name from `quaver.costs.hardware.GPUS`, or a Gpu.
        batch: number of sequences.
        causal: a query sees only keys up to its own position.
    Raises:
        ValueError: an unknown GPU, a size below 1, or heads that are no multiple of groups.
    """
    sizes = {"tokens": tokens, "heads": heads, "groups": groups, "features": features, "batch": batch}
    for label, size in sizes.items():
        if size < 1:
            raise ValueError(f"{label} is {size}; it must be at least 1")
    if heads % groups:
        raise ValueError(f"{heads} heads are no multiple of {groups} groups of keys; give a divisor of {heads}")
    card = hardware.get(gpu)
    seen = tokens * (tokens + 1) / 2 if causal else tokens**2
    scores = batch * heads * seen
    counts, rate = products(spec), kind(spec, features, card)

    def seconds(gemms: int, exponentials: int, rate: str) -> float:
        bound = 2.0 * gemms * features * scores / (card.rates[rate].value * 1e12)
        if card.exponentials is not None:
            bound = max(bound, exponentials * scores / (card.exponentials.value * 1e12))
        return bound

    times = [seconds(gemms, sweep, rate) for gemms, sweep in zip(counts, sweeps(counts), strict=True)]
    plain = [seconds(gemms, 1, "bf16") for gemms in PLAIN]
    queries, keys = (batch * n * tokens * features for n in (heads, groups))
    # q, k and v are quantized, and the gradient of the output.
    moved = _moved(spec.input, queries, 2 * keys) + _moved(spec.grad_output, queries)
    copies = 4
    if rate == "tensor":
        # Sums over tokens take transposed codes of q, k, v and the gradient.
        moved += 2 * (queries + 2 * keys + queries)
        copies += 4
    quantizing = moving(moved, copies, card)
    # An amax per head needs another launch, because all programs must finish first.
    launches = 3 + spec.grad_output.per_tensor
    return Attention(
        counts,
        rate,
        moved,
        sum(times) + launches * LAUNCH + quantizing.seconds,
        sum(plain) + len(PLAIN) * LAUNCH,
        times[0],
        sum(times[1:]),
    )


def _moved(spec: QuantSpec, *elements: int) -> float:
    """Return the bytes read (twice for one scale per head) and written; codes that cannot be transposed need
    another copy.
    """
    codes, transposed = spec.format.stored_bits / 8, not spec.transposable
    each = WIDE * (2 if spec.per_tensor else 1) + codes + transposed * (3 * WIDE + codes)
    return float(each * sum(elements))


# ---- decoder ----
# Shape of a decoder: matrices of a block and how they are sharded, sizes of attention, and number of blocks.
#
# Independent of frameworks and classes: `quaver plan` builds it from a model's configuration.


@dataclass(frozen=True, kw_only=True)
class WeightMatrix:
    """A weight [out_features, in_features] of a block, or one such weight per expert."""

    out_features: int
    in_features: int
    #: Axis that tensor parallelism shards: "column" for outputs, "row" for inputs, None for none.
    cut: Literal["column", "row"] | None = "column"
    #: Number of experts, and number of experts per token.
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
    """Shape of a decoder block: attention, then an MLP or experts."""

    dim: int
    matrices: tuple[WeightMatrix, ...]
    heads: int
    #: Width of a head for scores, and width of its values.
    score_features: int
    value_features: int
    #: Total width of queries, keys and values, which rope and attention read.
    attended: int
    #: Width of the MLP, summed over the experts of a token.
    hidden: int

    @property
    def parameters(self) -> int:
        return sum(matrix.parameters for matrix in self.matrices)

    @property
    def routed_parameters(self) -> int:
        return sum(matrix.parameters for matrix in self.matrices if matrix.routed)

    @property
    def chosen(self) -> int:
        """Number of experts per token."""
        return max((matrix.chosen for matrix in self.matrices if matrix.routed), default=0)


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Shape of a decoder: blocks with their counts, and an embedding and a head with `vocab` rows."""

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
    """Return a decoder with grouped queries and a gated MLP."""
    return DecoderShape(
        name=name, blocks=((layers, dense(dim, heads, groups, head_dim, hidden)),), dim=dim, vocab=vocab
    )


def dense(dim: int, heads: int, groups: int, head_dim: int, hidden: int, *, gated: bool = True) -> DecoderBlock:
    """Return a block with grouped queries and one MLP."""
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
    """Return the matrices of latent attention, with low-rank queries, keys and values.

    Args:
        dim: width of the residual stream.
        heads: number of heads.
        q_rank, kv_rank: ranks of queries, and of keys and values.
        plain_dim, rope_dim: features of a head without and with rotary embedding.
        value_dim: width of a head's values.
    """
    return (
        WeightMatrix(out_features=q_rank, in_features=dim, cut=None),
        WeightMatrix(out_features=heads * (plain_dim + rope_dim), in_features=q_rank),
        WeightMatrix(out_features=kv_rank + rope_dim, in_features=dim, cut=None),
        WeightMatrix(out_features=heads * (plain_dim + value_dim), in_features=kv_rank),
        WeightMatrix(out_features=dim, in_features=heads * value_dim, cut="row"),
    )


def deepseek_v3_like() -> DecoderShape:
    """Return the shape of DeepSeek-V3 without multi-token prediction (its config.json and arXiv:2412.19437, section
    4.2).

    61 blocks of width 7168 and latent attention with 128 heads. 3 blocks are dense, the others have a shared expert and
    256 routed ones of width 2048, 8 per token.
    """
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


# ---- state-space scan ----
# FLOPs and bytes of a state-space layer's scan, which no recipe quantizes.

#: Tokens per chunk in the published kernels.
CHUNK = 256
#: Bytes of a bf16 value, and of a float32 step.
SCAN_WIDE, STEP = 2, 4


class Scan(NamedTuple):
    """Cost of a scan's forward pass."""

    flops: float
    bytes: float
    seconds: float


def priced(tokens: int, heads: int, head_dim: int, groups: int, state: int, gpu: str | Gpu, chunk: int = CHUNK) -> Scan:
    """Predict the cost of Mamba-2's chunked scan over `tokens` tokens: forward, with bf16 GEMMs.

    Args:
        tokens: number of tokens.
        heads, head_dim, groups, state: H, P, G and N.
        gpu: a name from `quaver.costs.hardware.GPUS`, or a Gpu.
        chunk: Q, tokens per chunk.
    Returns:
        FLOPs per token: 2 Q G N for products of C and B within a chunk, 2 Q H P for those with x, and 2 N H P each for
            computing and using chunk states. Bytes: x, B, C and steps read and y written once. Seconds: the longer of
            both at the GPU's rates, a lower bound.
    Source: Dao and Gu 2024, arXiv:2405.21060, section 6.
    """
    card = hardware.get(gpu)
    inner = heads * head_dim
    flops = 2.0 * tokens * (chunk * (groups * state + inner) + 2 * state * inner)
    moved = float(tokens * (SCAN_WIDE * (2 * inner + 2 * groups * state) + STEP * heads))
    rate, copy = card.rates["bf16"].value * 1e12, card.copy.value * 1e12
    return Scan(flops, moved, max(flops / rate, moved / copy))
