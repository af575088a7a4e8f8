"""Transformer Engine's `LayerNorm` and `RMSNorm`."""

from typing import Any

import torch

from quaver.compat.transformer_engine.pytorch.module.parameters import Stateless, place
from quaver.core.options import checks
from quaver.torch.blocks.prologues import norm


class _Norm(Stateless, norm.Norm):
    """A norm of ours with Transformer Engine's arguments."""

    kind: str

    @checks
    def __init__(
        self, normalized_shape: Any = None, eps: float = 1e-5, sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None, zero_centered_gamma: bool = False, hidden_size: int | None = None, *,
        device: Any = "cuda", dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        shape: Any = hidden_size if normalized_shape is None else normalized_shape
        (features,) = (shape,) if isinstance(shape, int) else tuple(shape)
        like = {"device": place(device), "dtype": dtype or params_dtype}
        super().__init__(self.kind, features, eps, zero_centered=zero_centered_gamma, **like)


class LayerNorm(_Norm):
    """Transformer Engine's `LayerNorm`."""

    kind = "LayerNorm"


class RMSNorm(_Norm):
    """Transformer Engine's `RMSNorm`."""

    kind = "RMSNorm"
