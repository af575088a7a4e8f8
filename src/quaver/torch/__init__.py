"""PyTorch front end: `Linear`, `autocast`, `convert`, and the operations they are made of; imports no JAX."""

import importlib
from importlib.util import find_spec
from types import ModuleType

if find_spec("torch") is None:
    sentence = "quaver.torch needs PyTorch, which is not installed: pip install 'quaver[torch]'"
    raise ModuleNotFoundError(sentence, name="torch")

from quaver.torch.compare import compare
from quaver.torch.conversion.convert import convert, revert
from quaver.torch.conversion.explain import explain
from quaver.torch.conversion.export.export import export
from quaver.torch.conversion.huggingface.layer import from_huggingface
from quaver.torch.conversion.onnx import onnx_export
from quaver.torch.conversion.quantized_weights import (
    cache_compiled_weights,
    dequantize_weights,
    drop_initial_value,
    frozen,
    initial_value,
    load_scaling_state_dict,
    plain_state_dict,
    quantize_weights,
    quantized_init,
    scaling_state_dict,
)
from quaver.torch.conversion.replace.blocks import Blocks
from quaver.torch.conversion.report import Report
from quaver.torch.conversion.weight_gradients import weight_gradients
from quaver.torch.cuda_graph import CapturedStep
from quaver.torch.inspection.bisect import Bisection, bisect
from quaver.torch.inspection.counting import count
from quaver.torch.inspection.fallback import Fallback
from quaver.torch.inspection.first_difference import first_difference
from quaver.torch.inspection.inspector import Inspector, inspect
from quaver.torch.inspection.what_if import WhatIf, what_if
from quaver.torch.linear.grouped.layer import GroupedLinear, grouped_matmul
from quaver.torch.linear.linear import Linear
from quaver.torch.nn.activation import ACTIVATIONS, activate
from quaver.torch.nn.attention import DotProductAttention
from quaver.torch.nn.attention.kv_cache import KVCache, PagedKVCache
from quaver.torch.nn.attention.latent import LatentAttention, LatentConfig
from quaver.torch.nn.attention.multihead import MultiheadAttention
from quaver.torch.nn.attention.relative_bias import RelativePositionBias
from quaver.torch.nn.attention.rope import RotaryEmbedding, apply_rotary
from quaver.torch.nn.loss import linear_cross_entropy
from quaver.torch.nn.mlp import MLP, LayerNormLinear, LayerNormMLP
from quaver.torch.nn.moe.layers import Experts, MixtureConfig, MoE
from quaver.torch.nn.moe.permutation import permute, unpermute
from quaver.torch.nn.moe.routing import Router, Routing, balance_loss, route, token_counts, update_bias, z_loss
from quaver.torch.nn.norm import LayerNorm, RMSNorm
from quaver.torch.nn.ssm.causal_conv import CausalConv1d, causal_conv1d
from quaver.torch.nn.ssm.gated_norm import GatedRMSNorm
from quaver.torch.nn.ssm.mamba2 import Mamba2, Mamba2Layer, StateCache
from quaver.torch.nn.ssm.scan import ssd
from quaver.torch.nn.transformer import TransformerLayer
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.offload import offload
from quaver.torch.operations.functional import dequantize, matmul, quantize
from quaver.torch.operations.ops import only
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.serving.stream import serving_stream
from quaver.torch.state.context import autocast, checkpoint
from quaver.torch.state.weight_cache import refresh

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Bisection",
    "Blocks",
    "CapturedStep",
    "CausalConv1d",
    "DotProductAttention",
    "Experts",
    "Fallback",
    "GatedRMSNorm",
    "GroupedLinear",
    "Inspector",
    "KVCache",
    "LatentAttention",
    "LatentConfig",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "Mamba2",
    "Mamba2Layer",
    "MixtureConfig",
    "MoE",
    "MultiheadAttention",
    "PagedKVCache",
    "Quantized",
    "QuantizedTensor",
    "RMSNorm",
    "RelativePositionBias",
    "Report",
    "RotaryEmbedding",
    "Router",
    "Routing",
    "StateCache",
    "TransformerLayer",
    "WhatIf",
    "activate",
    "apply_rotary",
    "autocast",
    "balance_loss",
    "bisect",
    "cache_compiled_weights",
    "causal_conv1d",
    "checkpoint",
    "compare",
    "convert",
    "count",
    "dequantize",
    "dequantize_weights",
    "drop_initial_value",
    "explain",
    "export",
    "first_difference",
    "from_huggingface",
    "frozen",
    "grouped_matmul",
    "initial_value",
    "inspect",
    "linear_cross_entropy",
    "load_scaling_state_dict",
    "matmul",
    "offload",
    "only",
    "onnx_export",
    "permute",
    "plain_state_dict",
    "quantize",
    "quantize_weights",
    "quantized_init",
    "refresh",
    "revert",
    "route",
    "scaling_state_dict",
    "serving_stream",
    "ssd",
    "token_counts",
    "unpermute",
    "update_bias",
    "weight_gradients",
    "what_if",
    "z_loss",
]


#: Subpackages that are imported at their first use, as attributes.
_LAZY = ("optim", "parallel")


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return only the public names."""
    return sorted([*__all__, *_LAZY])
