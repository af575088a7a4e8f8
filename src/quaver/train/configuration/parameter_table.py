"""A model's parameters in no framework's terms: names, shapes, order and initial values.

Both frameworks train the same decoder from the same weights, under the same names: a checkpoint of one is the other's.
"""

import math
from collections.abc import Iterator

import numpy as np

from quaver.train.configuration.sizes import ModelConfig

#: Rows of the embedding are a multiple of it.
WORDS = 32


def padded(vocab: int) -> int:
    """Rows of the embedding for so many tokens."""
    return math.ceil(vocab / WORDS) * WORDS


def matrices(config: ModelConfig) -> dict[str, dict[str, tuple[int, int]]]:
    """The matrices of a layer by its two parts: [out, in] by name, in order of computation."""
    q_dim, kv_dim = config.heads * config.head_dim, config.groups * config.head_dim
    wide = ("gate_proj", "up_proj") if config.gated else ("up_proj",)
    return {
        "attention": {
            "q_proj": (q_dim, config.dim),
            "k_proj": (kv_dim, config.dim),
            "v_proj": (kv_dim, config.dim),
            "o_proj": (config.dim, q_dim),
        },
        "mlp": {**dict.fromkeys(wide, (config.hidden, config.dim)), "down_proj": (config.dim, config.hidden)},
    }


def projections(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The matrices between embedding and head, which recipes quantize: [out, in] by name, in order of computation."""
    return {
        f"layers.{layer}.{part}.{name}": shape
        for layer in range(config.layers)
        for part, own in matrices(config).items()
        for name, shape in own.items()
    }


def parameters(config: ModelConfig, vocab: int) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape by name, in PyTorch's order."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (padded(vocab), config.dim)}
    for layer in range(config.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer(config).items()}
    shapes |= _norm(config, "norm")
    if not config.tied:
        shapes["head.weight"] = (padded(vocab), config.dim)
    return shapes


def _layer(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes = _norm(config, "norm") if config.parallel is True else {}
    for part, own in matrices(config).items():
        if config.parallel is not True:
            shapes |= _norm(config, f"{part}.norm")
        for name, shape in own.items():
            shapes[f"{part}.{name}.weight"] = shape
            if config.bias:
                shapes[f"{part}.{name}.bias"] = shape[:1]
            if name == "v_proj" and config.qk_norm:
                shapes |= {f"{part}.{which}.weight": (config.head_dim,) for which in ("q_norm", "k_norm")}
    if config.norm_position == "sandwich":
        shapes |= _norm(config, "attention_post_norm") | _norm(config, "mlp_post_norm")
    return shapes


def _norm(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
    names = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
    return {f"{name}.{part}": (config.dim,) for part in names}


def initial(config: ModelConfig, vocab: int, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Every parameter's first value in float32: of the sizes and the seed, and of nothing else.

    Norms do nothing and biases are 0. Matrices are normal with variance 1 / dim; what writes to the residual stream is
    sqrt(2 layers) smaller, and an embedding that is not the head as well has variance 1: the stream then begins as
    large as the norms make it, and what a quantized layer adds to it, error included, is small beside it.
    """
    random = np.random.default_rng(seed)
    for name, shape in parameters(config, vocab).items():
        if len(shape) > 1:
            yield name, random.standard_normal(shape, np.float32) * np.float32(deviation(name, config))
        else:
            zero = config.zero_centered or name.endswith(".bias")
            yield name, np.full(shape, 0.0 if zero else 1.0, np.float32)


def deviation(name: str, config: ModelConfig) -> float:
    """The standard deviation of a matrix's first values."""
    if name == "embedding.weight" and not config.tied:
        return 1.0
    std = config.dim**-0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * config.layers)
    return std
