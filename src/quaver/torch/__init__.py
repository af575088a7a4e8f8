"""The PyTorch front end: `Linear`, `autocast`, `convert`, and the operations they are made of."""

from importlib.util import find_spec

if find_spec("torch") is None:
    sentence = "quaver.torch needs PyTorch, which is not installed: pip install 'quaver[torch]'"
    raise ModuleNotFoundError(sentence, name="torch")

from quaver.core.conversion import Report
from quaver.torch.activation import ACTIVATIONS, activate
from quaver.torch.attention import DotProductAttention
from quaver.torch.autocast import autocast
from quaver.torch.checkpoint import checkpoint
from quaver.torch.convert import convert, revert
from quaver.torch.counters import count
from quaver.torch.cross_entropy import linear_cross_entropy
from quaver.torch.explain import explain
from quaver.torch.frozen import frozen
from quaver.torch.functional import dequantize, matmul, quantize
from quaver.torch.grouped import grouped_matmul
from quaver.torch.kv_cache import KVCache
from quaver.torch.linear import Linear
from quaver.torch.mlp import MLP, LayerNormMLP
from quaver.torch.multihead import MultiheadAttention
from quaver.torch.norm import LayerNorm, RMSNorm
from quaver.torch.norm_linear import LayerNormLinear
from quaver.torch.ops import only
from quaver.torch.paged_kv_cache import PagedKVCache
from quaver.torch.quantized import Quantized
from quaver.torch.quantized_init import (
    dequantize_weights,
    drop_initial_value,
    initial_value,
    quantize_weights,
    quantized_init,
)
from quaver.torch.rope import RotaryEmbedding
from quaver.torch.rotary import apply_rotary
from quaver.torch.transformer import TransformerLayer
from quaver.torch.weights import refresh

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "DotProductAttention",
    "KVCache",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "PagedKVCache",
    "Quantized",
    "RMSNorm",
    "Report",
    "RotaryEmbedding",
    "TransformerLayer",
    "activate",
    "apply_rotary",
    "autocast",
    "checkpoint",
    "convert",
    "count",
    "dequantize",
    "dequantize_weights",
    "drop_initial_value",
    "explain",
    "frozen",
    "grouped_matmul",
    "initial_value",
    "linear_cross_entropy",
    "matmul",
    "only",
    "quantize",
    "quantize_weights",
    "quantized_init",
    "refresh",
    "revert",
]


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
