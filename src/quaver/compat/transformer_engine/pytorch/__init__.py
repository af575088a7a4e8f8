"""Transformer Engine's names for PyTorch, each in the file that it has them in; no class of tensors and no kernel."""

from quaver.compat.missing import PYTORCH, unknown
from quaver.compat.transformer_engine.pytorch import optimizers, quantization
from quaver.compat.transformer_engine.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from quaver.compat.transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
from quaver.compat.transformer_engine.pytorch.distributed import checkpoint
from quaver.compat.transformer_engine.pytorch.module.grouped_linear import Fp8Padding, Fp8Unpadding, GroupedLinear
from quaver.compat.transformer_engine.pytorch.module.layernorm import LayerNorm, RMSNorm
from quaver.compat.transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from quaver.compat.transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from quaver.compat.transformer_engine.pytorch.module.linear import Linear
from quaver.compat.transformer_engine.pytorch.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from quaver.compat.transformer_engine.pytorch.quantization import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from quaver.compat.transformer_engine.pytorch.transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "optimizers",
    "parallel_cross_entropy",
    "quantization",
    "quantized_model_init",
]

__getattr__ = unknown(__name__, __all__, PYTORCH)
