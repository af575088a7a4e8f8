"""The PyTorch front end: `Linear`, `autocast`, `convert`, and the operations they are made of; no JAX."""

import importlib
from importlib.util import find_spec
from types import ModuleType

if find_spec("torch") is None:
    sentence = "quaver.torch needs PyTorch, which is not installed: pip install 'quaver[torch]'"
    raise ModuleNotFoundError(sentence, name="torch")

from quaver.torch.blocks.attention import DotProductAttention
from quaver.torch.blocks.attention.cache.contiguous import KVCache
from quaver.torch.blocks.attention.cache.paged import PagedKVCache
from quaver.torch.blocks.attention.latent import Latent, LatentAttention
from quaver.torch.blocks.attention.multihead import MultiheadAttention
from quaver.torch.blocks.attention.rope.embedding import RotaryEmbedding
from quaver.torch.blocks.attention.rope.relative import RelativePositionBias
from quaver.torch.blocks.attention.rope.rotary import apply_rotary
from quaver.torch.blocks.experts.balancing import balance_loss, token_counts, update_bias, z_loss
from quaver.torch.blocks.experts.mixture import Mixture, MoE
from quaver.torch.blocks.experts.permutation import permute, unpermute
from quaver.torch.blocks.experts.router import Router
from quaver.torch.blocks.experts.routing import Routing, route
from quaver.torch.blocks.experts.stack import Experts
from quaver.torch.blocks.loss.cross_entropy import linear_cross_entropy
from quaver.torch.blocks.mlp import MLP, LayerNormMLP
from quaver.torch.blocks.norm_linear import LayerNormLinear
from quaver.torch.blocks.prologues.activation import ACTIVATIONS, activate
from quaver.torch.blocks.prologues.norm import LayerNorm, RMSNorm
from quaver.torch.blocks.state_space.cache import StateCache
from quaver.torch.blocks.state_space.convolution import CausalConv1d, causal_conv1d
from quaver.torch.blocks.state_space.gated_norm import GatedRMSNorm
from quaver.torch.blocks.state_space.layer import Mamba2Layer
from quaver.torch.blocks.state_space.mamba2 import Mamba2
from quaver.torch.blocks.state_space.scan.op import ssd
from quaver.torch.blocks.transformer import TransformerLayer
from quaver.torch.linear.grouped.layer import GroupedLinear
from quaver.torch.linear.grouped.matmul import grouped_matmul
from quaver.torch.linear.layer import Linear
from quaver.torch.model.conversion import convert, revert
from quaver.torch.model.fusing.placing import Blocks
from quaver.torch.model.huggingface.layer import from_huggingface
from quaver.torch.model.programs.onnx import onnx_export
from quaver.torch.model.report.explanation import explain
from quaver.torch.model.report.report import Report
from quaver.torch.model.weights.freezing import frozen
from quaver.torch.model.weights.gradients import weight_gradients
from quaver.torch.model.weights.quantized import (
    dequantize_weights,
    drop_initial_value,
    initial_value,
    quantize_weights,
    quantized_init,
)
from quaver.torch.model.weights.serving.exporting import export
from quaver.torch.model.weights.state_dicts import load_scaling_state_dict, plain_state_dict, scaling_state_dict
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations.functional import dequantize, matmul, quantize
from quaver.torch.operations.ops import only
from quaver.torch.state.checkpointing import checkpoint
from quaver.torch.state.context import autocast
from quaver.torch.state.counters import count
from quaver.torch.state.kept_weights import refresh

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Blocks",
    "CausalConv1d",
    "DotProductAttention",
    "Experts",
    "GatedRMSNorm",
    "GroupedLinear",
    "KVCache",
    "Latent",
    "LatentAttention",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "Mamba2",
    "Mamba2Layer",
    "Mixture",
    "MoE",
    "MultiheadAttention",
    "PagedKVCache",
    "Quantized",
    "RMSNorm",
    "RelativePositionBias",
    "Report",
    "RotaryEmbedding",
    "Router",
    "Routing",
    "StateCache",
    "TransformerLayer",
    "activate",
    "apply_rotary",
    "autocast",
    "balance_loss",
    "causal_conv1d",
    "checkpoint",
    "convert",
    "count",
    "dequantize",
    "dequantize_weights",
    "drop_initial_value",
    "explain",
    "export",
    "from_huggingface",
    "frozen",
    "grouped_matmul",
    "initial_value",
    "linear_cross_entropy",
    "load_scaling_state_dict",
    "matmul",
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
    "ssd",
    "token_counts",
    "unpermute",
    "update_bias",
    "weight_gradients",
    "z_loss",
]


#: Packages that are imported at their first use, as attributes.
_LAZY = ("optim", "parallel")


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted([*__all__, *_LAZY])
