"""Model architectures, independent of the framework: configuration fields in which families differ, and a table of
models.

A family is a dict of fields, and a model is a family with sizes. Published sizes are those of Hugging Face's
config.json of the model named in the comment, with transformers' defaults for missing entries. Learning rates are the
papers' where they give one.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

#: Kind of a layer: attention and MLP; attention and experts; state space alone; state space and MLP.
Kind = Literal["attention", "experts", "state", "state-mlp"]


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of multi-head latent attention, with the names of `quaver.torch.LatentConfig`."""

    q_rank: int
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Sizes and routing of a mixture of experts."""

    # Number of experts, experts per token, and width of each expert.
    number: int
    chosen: int
    hidden: int
    # Width of a shared MLP that every token also uses; 0 for none.
    shared: int = 0
    # As in `quaver.torch.MixtureConfig`.
    scores: str = "softmax"
    groups: int | None = None
    top_groups: int | None = None
    best_of_group: int | None = None
    scale: float = 1.0
    # Expert capacity in multiples of an even share; 0 for unlimited.
    capacity: float = 0.0
    # Step size of the bias for balancing, which affects only the choice of experts; 0 for none.
    bias_rate: float = 0.0
    # Weights of the mean balance loss (per batch, or the mean over sequences) and of the mean z loss.
    balance: float = 0.0
    by_sequence: bool = False
    z: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """Sizes of a Mamba-2 mixer, with the names of `quaver.torch.Mamba2`; its inner width is heads times head_dim."""

    heads: int
    head_dim: int
    state: int
    groups: int
    taps: int = 4

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder; every feature size is a multiple of 32, the block of MXFP8."""

    # Number of layers.
    layers: int
    # Width of the residual stream.
    dim: int
    # Number of query heads.
    heads: int
    # Number of key and value heads, each shared by heads // groups query heads.
    groups: int
    # Width of a head.
    head_dim: int
    # Width of the MLP.
    hidden: int
    # Suitable learning rate.
    lr: float
    # Maximum number of tokens per sequence; a run with a longer --sequence raises it.
    positions: int = 2048
    # Size of the published vocabulary, for predicted costs; 0 if not published.
    vocab: int = 0
    # Kinds of the layers, a repeating pattern.
    pattern: tuple[Kind, ...] = ("attention",)
    # Sizes of latent attention, experts and state spaces; None if the model has none.
    latent: LatentSizes | None = None
    experts: ExpertSizes | None = None
    state: StateSizes | None = None

    # "LayerNorm" (with a bias) or "RMSNorm" (without), and the epsilon under its root.
    normalization: str = "RMSNorm"
    eps: float = 1e-5
    # True if norms multiply by 1 + weight.
    zero_centered: bool = False
    # "pre", or "sandwich": another norm after attention and MLP, before the residual sum.
    norm_position: str = "pre"
    # Attention and MLP in parallel: True for one shared norm, "two_norms" for one norm each.
    parallel: bool | str = False
    # Name in quaver.torch.ACTIVATIONS.
    activation: str = "swiglu"
    # True if every matrix of a layer has a bias.
    bias: bool = False

    # Number of earlier tokens that a query sees, -1 for all; a pattern repeated over layers.
    windows: tuple[int, ...] = (-1,)
    # Attention scores become cap * tanh(scores / cap).
    soft_cap: float | None = None
    # Factor of attention scores; None means head_dim**-0.5.
    scale: float | None = None
    # Norm of each head's queries and keys before rotary embedding, or None.
    qk_norm: str | None = None
    # True if queries and keys get rotary embeddings.
    rotates: bool = True
    # Base of the rotary frequencies, and the fraction of each head's features that are rotated.
    theta: float = 10_000.0
    fraction: float = 1.0
    # Entries of Hugging Face's rope_parameters for longer contexts.
    scaling: tuple[tuple[str, str | float], ...] = ()

    # True if the embedding is multiplied by the square root of `dim`.
    scaled_embedding: bool = False
    # True if the head shares the embedding's matrix.
    tied: bool = False
    # Logits become cap * tanh(logits / cap).
    logit_cap: float | None = None

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate: such activations have "glu" in their names."""
        return "glu" in self.activation

    @property
    def parts(self) -> int:
        """Number of blocks that add to the residual stream."""
        return sum(1 if self.kind(layer) == "state" else 2 for layer in range(self.layers))

    @property
    def unusual(self) -> list[str]:
        """Names of the model's features that some parts of the library do not support."""
        own = {"experts": self.experts, "latent attention": self.latent, "state-space layers": self.state}
        return [name for name, sizes in own.items() if sizes is not None]

    def kind(self, layer: int) -> Kind:
        """Return the kind of a layer."""
        return self.pattern[layer % len(self.pattern)]

    def numbers(self, *kinds: Kind) -> list[int]:
        """Return the indices of layers of the given kinds."""
        return [layer for layer in range(self.layers) if self.kind(layer) in kinds]

    def window(self, layer: int) -> tuple[int, int] | None:
        """Return the attention window of a layer as (left, right), or None."""
        left = self.windows[layer % len(self.windows)]
        return None if left < 0 else (left, 0)


#: Fields shared by the models of a family. A window of w includes the query's own token: it sees w - 1 before it.
LLAMA: dict[str, Any] = {}
LLAMA3: dict[str, Any] = LLAMA | {"theta": 5e5, "positions": 8192}
FALCON: dict[str, Any] = {"normalization": "LayerNorm", "parallel": True, "activation": "gelu_exact", "tied": True}
NEOX: dict[str, Any] = {
    "normalization": "LayerNorm",
    "parallel": "two_norms",
    "activation": "gelu",
    "bias": True,
    "fraction": 0.25,
}
GEMMA2: dict[str, Any] = {
    "eps": 1e-6,
    "zero_centered": True,
    "norm_position": "sandwich",
    "activation": "geglu",
    "soft_cap": 50.0,
    "logit_cap": 30.0,
    "scaled_embedding": True,
    "tied": True,
    "positions": 8192,
}
GEMMA2_WINDOWS = (4095, -1)
MISTRAL: dict[str, Any] = {"windows": (4095,), "positions": 32_768}
QWEN3: dict[str, Any] = {"eps": 1e-6, "qk_norm": "RMSNorm", "theta": 1e6, "positions": 40_960}
#: router_aux_loss_coef of Mixtral 8x7B's config.json, and the z loss of ST-MoE (arXiv:2202.08906).
MIXTRAL: dict[str, Any] = {"pattern": ("experts",), "theta": 1e6, "positions": 32_768}
MIXTRAL_ROUTER: dict[str, Any] = {"balance": 0.02, "z": 1e-3}
#: Step size of the bias and weight of the sequence-wise loss: arXiv:2412.19437, section 4.2.
DEEPSEEK: dict[str, Any] = {"eps": 1e-6, "positions": 4096}
DEEPSEEK_ROUTER: dict[str, Any] = {
    "scores": "sigmoid",
    "best_of_group": 2,
    "scale": 2.5,
    "bias_rate": 1e-3,
    "balance": 1e-4,
    "by_sequence": True,
}
#: State spaces encode token order themselves, and their state has a fixed size.
MAMBA2: dict[str, Any] = {"pattern": ("state",), "positions": 1 << 20, "tied": True}
NEMOTRON_H: dict[str, Any] = {"activation": "squared_relu", "rotates": False, "positions": 8192}
#: In the published pattern, "M-" is a state space with an MLP, "M" one alone, "*-" attention with an MLP.
NEMOTRON_H_8B: tuple[Kind, ...] = tuple(
    kind
    for before, last in ((3, True), (4, True), (4, True), (4, True), (5, False))
    for kind in (*("state-mlp",) * before, *(("state", "attention") if last else ()))
)
#: Llama 3.1's scaling of rotary frequencies beyond 8192 positions.
LLAMA31 = (
    ("rope_type", "llama3"),
    ("factor", 8.0),
    ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 8192),
)


def model(
    layers: int, dim: int, heads: int, groups: int, head_dim: int, hidden: int, lr: float, **parts: Any
) -> ModelConfig:
    """Create a row of the table: sizes in this order, then the fields of the family."""
    return ModelConfig(
        layers=layers, dim=dim, heads=heads, groups=groups, head_dim=head_dim, hidden=hidden, lr=lr, **parts
    )


MODELS = {
    # Llama (arXiv:2302.13971) with grouped queries, from test size to the size of Llama 3.
    "nano": model(1, 64, 2, 1, 32, 128, 5e-3, **LLAMA),
    "tiny": model(4, 128, 4, 2, 32, 384, 2e-3, **LLAMA),
    "small": model(6, 256, 8, 4, 32, 768, 2e-3, **LLAMA),
    "125m": model(12, 768, 12, 4, 64, 2048, 6e-4, tied=True, **LLAMA),
    "350m": model(24, 1024, 16, 8, 64, 2816, 3e-4, tied=True, **LLAMA),
    "1b": model(16, 2048, 32, 8, 64, 8192, 3e-4, tied=True, **LLAMA3),
    "3b": model(28, 3072, 24, 8, 128, 8192, 3e-4, tied=True, **LLAMA3),
    "8b": model(32, 4096, 32, 8, 128, 14_336, 3e-4, **LLAMA3),
    # One small model of each family.
    "llama-tiny": model(4, 128, 4, 2, 32, 384, 2e-3, **LLAMA),
    "falcon-tiny": model(4, 128, 4, 1, 32, 512, 2e-3, **FALCON),
    "gpt-neox-tiny": model(4, 128, 4, 4, 32, 512, 2e-3, **NEOX),
    "gemma2-tiny": model(4, 128, 4, 2, 64, 384, 2e-3, scale=32**-0.5, windows=(15, -1), **GEMMA2),
    "mistral-tiny": model(4, 128, 4, 2, 32, 384, 2e-3, **MISTRAL | {"windows": (15,)}),
    "qwen3-tiny": model(4, 128, 4, 2, 64, 384, 2e-3, tied=True, **QWEN3),
    "mixtral-tiny": model(
        *(4, 128, 4, 2, 32, 192, 2e-3),
        experts=ExpertSizes(number=8, chosen=2, hidden=192, **MIXTRAL_ROUTER),
        **MIXTRAL,
    ),
    "deepseek-tiny": model(
        *(4, 128, 4, 4, 64, 384, 2e-3),
        pattern=("attention", "experts", "experts", "experts"),
        latent=LatentSizes(q_rank=64, kv_rank=32, plain_dim=32, rope_dim=32, value_dim=32),
        experts=ExpertSizes(number=16, chosen=4, hidden=96, shared=96, groups=4, top_groups=2, **DEEPSEEK_ROUTER),
        **DEEPSEEK,
    ),
    "mamba2-tiny": model(
        *(4, 128, 4, 4, 32, 384, 2e-3), state=StateSizes(heads=32, head_dim=8, state=32, groups=1), **MAMBA2
    ),
    "nemotron-h-tiny": model(
        *(4, 128, 4, 2, 32, 512, 2e-3),
        pattern=("state-mlp", "state", "attention", "state-mlp"),
        state=StateSizes(heads=32, head_dim=8, state=16, groups=2),
        **NEMOTRON_H,
    ),
    # meta-llama/Meta-Llama-3-8B, Llama-3.1-8B, Meta-Llama-3-70B, Llama-3.1-405B.
    "llama3-8b": model(32, 4096, 32, 8, 128, 14_336, 3e-4, **LLAMA3),
    "llama3.1-8b": model(32, 4096, 32, 8, 128, 14_336, 3e-4, **LLAMA3 | {"scaling": LLAMA31, "positions": 131_072}),
    "llama3-70b": model(80, 8192, 64, 8, 128, 28_672, 1.5e-4, **LLAMA3),
    "llama3.1-405b": model(
        126, 16_384, 128, 8, 128, 53_248, 8e-5, **LLAMA3 | {"scaling": LLAMA31, "positions": 131_072}
    ),
    # tiiuae/falcon-7b.
    "falcon-7b": model(32, 4544, 71, 1, 64, 18_176, 6e-4, **FALCON),
    # EleutherAI/gpt-neox-20b.
    "gpt-neox-20b": model(44, 6144, 64, 64, 96, 24_576, 9.7e-5, **NEOX),
    # google/gemma-2-2b, gemma-2-9b, gemma-2-27b.
    "gemma2-2b": model(26, 2304, 8, 4, 256, 9216, 3e-4, windows=GEMMA2_WINDOWS, **GEMMA2),
    "gemma2-9b": model(42, 3584, 16, 8, 256, 14_336, 3e-4, windows=GEMMA2_WINDOWS, **GEMMA2),
    "gemma2-27b": model(46, 4608, 32, 16, 128, 36_864, 1.5e-4, scale=144**-0.5, windows=GEMMA2_WINDOWS, **GEMMA2),
    # mistralai/Mistral-7B-v0.1.
    "mistral-7b": model(32, 4096, 32, 8, 128, 14_336, 3e-4, **MISTRAL),
    # Qwen/Qwen3-0.6B, Qwen3-1.7B, Qwen3-4B, Qwen3-8B.
    "qwen3-0.6b": model(28, 1024, 16, 8, 128, 3072, 3e-4, tied=True, **QWEN3),
    "qwen3-1.7b": model(28, 2048, 16, 8, 128, 6144, 3e-4, tied=True, **QWEN3),
    "qwen3-4b": model(36, 2560, 32, 8, 128, 9728, 3e-4, tied=True, **QWEN3),
    "qwen3-8b": model(36, 4096, 32, 8, 128, 12_288, 3e-4, **QWEN3),
}

#: Models whose costs can be predicted but which the trainer does not train.
PLANNED = {
    # mistralai/Mixtral-8x7B-v0.1.
    "mixtral-8x7b": model(
        *(32, 4096, 32, 8, 128, 14_336, 0.0),
        vocab=32_000,
        experts=ExpertSizes(number=8, chosen=2, hidden=14_336, **MIXTRAL_ROUTER),
        **MIXTRAL,
    ),
    # deepseek-ai/DeepSeek-V3, and arXiv:2412.19437, section 4.2; without multi-token prediction.
    "deepseek-v3": model(
        *(61, 7168, 128, 128, 192, 18_432, 0.0),
        vocab=129_280,
        pattern=(*("attention",) * 3, *("experts",) * 58),
        latent=LatentSizes(q_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128),
        experts=ExpertSizes(number=256, chosen=8, hidden=2048, shared=2048, groups=8, top_groups=4, **DEEPSEEK_ROUTER),
        **DEEPSEEK,
    ),
    # state-spaces/mamba2-2.7b.
    "mamba2-2.7b": model(
        *(64, 2560, 80, 80, 64, 2560, 0.0),
        vocab=50_288,
        state=StateSizes(heads=80, head_dim=64, state=128, groups=1),
        **MAMBA2,
    ),
    # nvidia/Nemotron-H-8B-Base-8K.
    "nemotron-h-8b": model(
        *(28, 4096, 32, 8, 128, 21_504, 0.0),
        vocab=131_072,
        pattern=NEMOTRON_H_8B,
        state=StateSizes(heads=128, head_dim=64, state=128, groups=8),
        **NEMOTRON_H,
    ),
}

#: All known models.
KNOWN = MODELS | PLANNED


def with_capacity(config: ModelConfig, capacity: float) -> ModelConfig:
    """Return a model with the given expert capacity in multiples of an even share; 0 leaves it unchanged."""
    if config.experts is None or not capacity:
        return config
    return replace(config, experts=replace(config.experts, capacity=capacity))
