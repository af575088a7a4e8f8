"""Attention with quantized products, its options by name."""

from typing import Any

from torch import Tensor

from quaver.recipes.spec import AttentionSpec
from quaver.torch.nn.attention import fp8
from quaver.torch.nn.attention.inputs import AttentionCall


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    hidden: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    mask_type: str = "none",
    **options: Any,
) -> Tensor:
    """`fp8.attention_fp8` with a mask of pairs where one is given; bias and mask broadcast to [B, H, Sq, Sk]."""
    bias = None if bias is None else bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    scale = max(q.shape[3], 1) ** -0.5 if scale is None else scale
    kind = mask_type if hidden is None else "arbitrary"
    return fp8.attention_fp8(q, k, v, AttentionCall(kind, hidden, bias=bias, scale=scale, **options), spec)
