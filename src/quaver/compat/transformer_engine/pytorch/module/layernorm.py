"""Transformer Engine's `LayerNorm` and `RMSNorm`."""

from typing import Any

import torch
from torch import Tensor

from quaver.compat.transformer_engine.pytorch.module.parameters import Stateless, cast_to_autocast, place
from quaver.options import checks
from quaver.torch.nn import norm
from quaver.torch.operations.ops import DTYPES, autocast_device


class _Norm(Stateless, norm.NormKind):
    """A Quaver norm with Transformer Engine's arguments."""

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

    def forward(self, x: Tensor) -> Tensor:
        """Apply the norm in torch.autocast's dtype if enabled, else in the weight's dtype."""
        weight, _ = self.affine()
        if weight is not None and x.dtype in DTYPES and not torch.is_autocast_enabled(autocast_device(x)):
            x = x.to(weight.dtype)
        return super().forward(cast_to_autocast(x))


class LayerNorm(_Norm):
    """Transformer Engine's `LayerNorm`."""

    kind = "LayerNorm"


class RMSNorm(_Norm):
    """Transformer Engine's `RMSNorm`."""

    kind = "RMSNorm"
