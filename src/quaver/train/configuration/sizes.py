"""What a model is made of, in no framework's terms: the parts that families differ in, and a table of models.

A family is a dict of parts, a model is a family with sizes. The published sizes are those of the configurations that
Hugging Face's models come with (config.json of the model named beside the row, and transformers' defaults for what it
leaves out); learning rates are the papers' where they say one.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder; every feature size is a multiple of 32, the block of MXFP8."""

    # Number of layers, each of attention and MLP.
    layers: int
    # Width of the residual stream.
    dim: int
    # Heads of the queries.
    heads: int
    # Heads of keys and values, each shared by heads // groups query heads.
    groups: int
    # Width of a head.
    head_dim: int
    # Width of the MLP.
    hidden: int
    # Learning rate that suits the size.
    lr: float
    # Most tokens that the model is meant to see at once; a run with a longer --sequence raises it.
    positions: int = 2048

    # "LayerNorm" (with a bias) or "RMSNorm" (without), and what is added under its root.
    normalization: str = "RMSNorm"
    eps: float = 1e-5
    # Norms multiply by 1 + weight.
    zero_centered: bool = False
    # "pre", or "sandwich": a norm after attention and MLP too, before the sum.
    norm_position: str = "pre"
    # Attention and MLP side by side: after one norm (True), or each after its own ("two_norms").
    parallel: bool | str = False
    # A row of quaver.torch.ACTIVATIONS.
    activation: str = "swiglu"
    # Every matrix of a layer has a bias.
    bias: bool = False

    # How many tokens before its own a query sees, -1 for all: layer i takes the i-th, and the pattern repeats.
    windows: tuple[int, ...] = (-1,)
    # Attention's scores become cap * tanh(scores / cap).
    soft_cap: float | None = None
    # Of the scores; None is head_dim**-0.5.
    scale: float | None = None
    # The norm of each head's queries and keys before they are turned, or None.
    qk_norm: str | None = None
    # Base of the rotary frequencies, and which features turn: the first `fraction` of each head.
    theta: float = 10_000.0
    fraction: float = 1.0
    # Items of Hugging Face's rope_parameters for longer contexts.
    scaling: tuple[tuple[str, str | float], ...] = ()

    # The embedding is multiplied by the root of `dim`.
    scaled_embedding: bool = False
    # The head is the embedding's matrix.
    tied: bool = False
    # Logits become cap * tanh(logits / cap).
    logit_cap: float | None = None

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate: such activations have "glu" in their names."""
        return "glu" in self.activation

    def window(self, layer: int) -> tuple[int, int] | None:
        """The window of a layer, as attention takes it."""
        left = self.windows[layer % len(self.windows)]
        return None if left < 0 else (left, 0)


#: The same in every model of a family. A window of w counts the query's own token: it sees w - 1 before it.
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
#: Llama 3.1's stretching of its frequencies from 8192 positions.
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
    """A row of the table: the sizes in this order, then the family."""
    return ModelConfig(
        layers=layers, dim=dim, heads=heads, groups=groups, head_dim=head_dim, hidden=hidden, lr=lr, **parts
    )


MODELS = {
    # Llama (arXiv:2302.13971) with grouped queries, from a test's size to that of Llama 3.
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
