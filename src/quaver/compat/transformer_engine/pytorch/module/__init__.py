"""Transformer Engine's modules: Quaver's blocks with its arguments and parameter names."""

from quaver.compat.transformer_engine.pytorch.module.grouped_linear import Fp8Padding, Fp8Unpadding, GroupedLinear
from quaver.compat.transformer_engine.pytorch.module.layernorm import LayerNorm, RMSNorm
from quaver.compat.transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from quaver.compat.transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from quaver.compat.transformer_engine.pytorch.module.linear import Linear

__all__ = ["Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP"]
__all__ += ["Linear", "RMSNorm"]
