"""Transformer Engine's linen modules: its fields, parameter names and initial values for Quaver's functions."""

from quaver.compat.stand_in import FLAX, unknown
from quaver.compat.transformer_engine.jax.flax.attention import (
    DotProductAttention,
    MultiHeadAttention,
    RelativePositionBiases,
)
from quaver.compat.transformer_engine.jax.flax.module import (
    DenseGeneral,
    LayerNorm,
    LayerNormDenseGeneral,
    LayerNormMLP,
    make_dot_general_cls,
)
from quaver.compat.transformer_engine.jax.flax.transformer import TransformerLayer, TransformerLayerType
from quaver.compat.transformer_engine.jax.sharding import extend_logical_axis_rules

__all__ = ["DenseGeneral", "DotProductAttention", "LayerNorm", "LayerNormDenseGeneral", "LayerNormMLP"]
__all__ += ["MultiHeadAttention", "RelativePositionBiases", "TransformerLayer", "TransformerLayerType"]
__all__ += ["extend_logical_axis_rules", "make_dot_general_cls"]

__getattr__ = unknown(__name__, __all__, FLAX)
