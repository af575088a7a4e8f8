"""Flax linen modules whose GEMMs use their own recipe, else the innermost `autocast`'s, else none."""

from importlib.util import find_spec

if find_spec("flax") is None:
    sentence = "quaver.jax.linen needs Flax, which is not installed: pip install 'quaver[flax]'"
    raise ModuleNotFoundError(sentence, name="flax")

from quaver.jax.blocks.options import Rope
from quaver.jax.linen.conversion import ConvertedModule, convert
from quaver.jax.linen.dense import COLLECTION, DenseGeneral, DotGeneral, Einsum, dot_general_cls, einsum_cls
from quaver.jax.linen.mlp import MLP, LayerNorm, LayerNormDenseGeneral, LayerNormMLP, RMSNorm
from quaver.jax.linen.moe import GroupedDense, MoE
from quaver.jax.linen.ssm import Mamba2
from quaver.jax.linen.transformer import DotProductAttention, MultiHeadAttention, RelativePositionBias, TransformerLayer

__all__ = [
    "COLLECTION",
    "MLP",
    "ConvertedModule",
    "DenseGeneral",
    "DotGeneral",
    "DotProductAttention",
    "Einsum",
    "GroupedDense",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "Mamba2",
    "MoE",
    "MultiHeadAttention",
    "RMSNorm",
    "RelativePositionBias",
    "Rope",
    "TransformerLayer",
    "convert",
    "dot_general_cls",
    "einsum_cls",
]


def __dir__() -> list[str]:
    """Return only the public names."""
    return sorted(__all__)
