"""Flax NNX modules whose GEMMs use their own recipe, else the innermost `autocast`'s, else none."""

from importlib.util import find_spec

if find_spec("flax") is None:
    sentence = "quaver.jax.nnx needs Flax, which is not installed: pip install 'quaver[flax]'"
    raise ModuleNotFoundError(sentence, name="flax")

from quaver.jax.blocks.options import Rope
from quaver.jax.nnx.conversion import convert, plain_state, revert
from quaver.jax.nnx.dense import DenseGeneral, DotGeneral, Einsum, OverwriteWithGradient, value_and_grad
from quaver.jax.nnx.mlp import MLP, LayerNorm, LayerNormDenseGeneral, LayerNormMLP, RMSNorm
from quaver.jax.nnx.moe import GroupedDense, MoE
from quaver.jax.nnx.ssm import Mamba2
from quaver.jax.nnx.transformer import (
    DotProductAttention,
    KVCache,
    MultiHeadAttention,
    RelativePositionBias,
    TransformerLayer,
)
from quaver.recipes.conversion import ConversionReport

__all__ = [
    "MLP",
    "ConversionReport",
    "DenseGeneral",
    "DotGeneral",
    "DotProductAttention",
    "Einsum",
    "GroupedDense",
    "KVCache",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "Mamba2",
    "MoE",
    "MultiHeadAttention",
    "OverwriteWithGradient",
    "RMSNorm",
    "RelativePositionBias",
    "Rope",
    "TransformerLayer",
    "convert",
    "plain_state",
    "revert",
    "value_and_grad",
]


def __dir__() -> list[str]:
    """Return only the public names."""
    return sorted(__all__)
