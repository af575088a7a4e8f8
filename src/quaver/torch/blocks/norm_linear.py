"""A normalization and the linear layers that read its output: at the entrance of attention, of an MLP, of a head."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.core.options import checks
from quaver.core.spec import Recipe
from quaver.torch.blocks.prologues.norm import NormOptions, named, normalized_projections
from quaver.torch.linear.layer import Linear


@dataclass(frozen=True, kw_only=True)
class PartOptions(NormOptions):
    """Of a normalization and the linear layers behind it."""

    bias: bool = True
    # q, k and v are one matrix, and so are gate and up.
    fused: bool = True
    recipe: str | Recipe | None = None
    # Of stochastic rounding.
    seed: int = 0

    def linear(self, in_features: int, out_features: int, bias: bool | None = None) -> Linear:
        """One of the linear layers; bias: None is as the others'."""
        bias = self.bias if bias is None else bias
        return Linear(in_features, out_features, bias, recipe=self.recipe, seed=self.seed, **self.like)


class Parts(nn.Module):
    """A block that is made of modules and has no parameter of its own."""

    def reset_parameters(self) -> None:
        """Each part as it begins by itself."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]


class LayerNormLinear(Parts):
    """Linear(norm(x)), of whose normalized input only what the GEMM consumed is kept for backward.

    Args:
        in_features, out_features, bias: of the linear layer.
        normalization, eps, zero_centered, norm_bias: of the `Norm`.
        return_normalized: give (output, norm(x)) instead of the output.
        recipe, seed: as `quaver.torch.Linear`.
    Submodules: `norm` and `linear`; the same bits as calling one after the other.
    """

    @checks
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        eps: float = 1e-5,
        zero_centered: bool = False,
        norm_bias: bool = True,
        return_normalized: bool = False,
        recipe: str | Recipe | None = None,
        seed: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        like = {"device": device, "dtype": dtype}
        self.norm = named(normalization, in_features, eps, zero_centered=zero_centered, bias=norm_bias, **like)
        self.linear = Linear(in_features, out_features, bias, recipe=recipe, seed=seed, **like)
        self.return_normalized = return_normalized

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        parts: Any = self._modules
        outputs = normalized_projections(parts["norm"], x, (parts["linear"],), self.return_normalized)
        return (outputs[1], outputs[0]) if self.return_normalized else outputs[0]
