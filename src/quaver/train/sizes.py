"""What a model is made of, in no framework's terms: its sizes, its parameters' shapes and their initial values.

Both frameworks train the same decoder from the same weights, under the same names: a checkpoint of one is the other's.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder; every feature size is a multiple of 32, the block of MXFP8."""

    # Number of blocks of attention and MLP.
    layers: int
    # Width of the residual stream.
    dim: int
    # Heads of the queries; a head is dim // heads wide.
    heads: int
    # Heads of keys and values, each shared by heads // kv_heads query heads.
    kv_heads: int
    # Width of the MLP.
    hidden: int
    # Learning rate that suits the size.
    lr: float
    # The head is the embedding's matrix.
    tied: bool = False
    # Base of the rotary frequencies.
    theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


MODELS = {
    "nano": ModelConfig(layers=1, dim=64, heads=2, kv_heads=1, hidden=128, lr=5e-3),
    "tiny": ModelConfig(layers=4, dim=128, heads=4, kv_heads=2, hidden=384, lr=2e-3),
    "small": ModelConfig(layers=6, dim=256, heads=8, kv_heads=4, hidden=768, lr=2e-3),
    "125m": ModelConfig(layers=12, dim=768, heads=12, kv_heads=4, hidden=2048, lr=6e-4, tied=True),
    "350m": ModelConfig(layers=24, dim=1024, heads=16, kv_heads=8, hidden=2816, lr=3e-4, tied=True),
    "1b": ModelConfig(layers=16, dim=2048, heads=32, kv_heads=8, hidden=8192, lr=3e-4, tied=True, theta=5e5),
    "3b": ModelConfig(layers=28, dim=3072, heads=24, kv_heads=8, hidden=8192, lr=3e-4, tied=True, theta=5e5),
    "8b": ModelConfig(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, lr=3e-4, theta=5e5),
}

#: epsilon of every RMSNorm.
EPS = 1e-5


def padded(vocab: int) -> int:
    """Rows of the embedding for so many tokens: a multiple of 32."""
    return math.ceil(vocab / 32) * 32


def projections(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The matrices between embedding and head, which recipes quantize: [out, in] by name, in order of computation."""
    kv_dim = config.kv_heads * config.head_dim
    shapes = {
        "attention.q_proj": (config.dim, config.dim),
        "attention.k_proj": (kv_dim, config.dim),
        "attention.v_proj": (kv_dim, config.dim),
        "attention.o_proj": (config.dim, config.dim),
        "mlp.gate_proj": (config.hidden, config.dim),
        "mlp.up_proj": (config.hidden, config.dim),
        "mlp.down_proj": (config.dim, config.hidden),
    }
    return {f"layers.{layer}.{name}": shape for layer in range(config.layers) for name, shape in shapes.items()}


def parameters(config: ModelConfig, vocab: int) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape by name, in order of computation."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (padded(vocab), config.dim)}
    for name, shape in projections(config).items():
        block, _, projection = name.rpartition(".")
        if projection in ("q_proj", "gate_proj"):
            shapes[f"{block}_norm.weight"] = (config.dim,)
        shapes[f"{name}.weight"] = shape
    shapes["norm.weight"] = (config.dim,)
    if not config.tied:
        shapes["head.weight"] = (padded(vocab), config.dim)
    return shapes


def initial(config: ModelConfig, vocab: int, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Every parameter's first value in float32: of the sizes and the seed, and of nothing else.

    Norms are 1. Matrices are normal with variance 1 / dim; what writes to the residual stream is sqrt(2 layers)
    smaller, and an embedding that is not the head as well has variance 1: the stream then begins as large as the norms
    make it, and what a quantized layer adds to it, error included, is small beside it.
    """
    random = np.random.default_rng(seed)
    for name, shape in parameters(config, vocab).items():
        if len(shape) == 1:
            yield name, np.ones(shape, np.float32)
        else:
            yield name, random.standard_normal(shape, np.float32) * np.float32(deviation(name, config))


def deviation(name: str, config: ModelConfig) -> float:
    """The standard deviation of a matrix's first values."""
    if name == "embedding.weight" and not config.tied:
        return 1.0
    std = config.dim**-0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * config.layers)
    return std
