"""Transformer Engine's `LayerNormLinear`."""

from typing import Any

from quaver.compat.transformer_engine.pytorch.module.parameters import Common, Module
from quaver.options import spreads
from quaver.torch.linear.linear import Split, divide
from quaver.torch.nn.mlp import LayerNormLinear as Ours

#: Transformer Engine's names of the norm's parameters, and their locations.
OF_NORM = {"layer_norm_weight": ("norm", "weight"), "layer_norm_bias": ("norm", "bias")}


class LayerNormLinear(Module, Ours):
    """Transformer Engine's `LayerNormLinear`."""

    @spreads(Common)
    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, *, parallel_mode: str | None = None,
        parameters_split: Split = None, normalization: str = "LayerNorm", zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False, return_layernorm_output_gathered: bool = False, **others: Any,
    ) -> None:  # fmt: skip
        self.in_features, self.out_features, options = in_features, out_features, Common(**others)
        norm: Any = {"normalization": normalization, "eps": eps, "zero_centered": zero_centered_gamma}
        norm["return_normalized"] = return_layernorm_output
        super().__init__(in_features, out_features, options.added, **norm, **options.like)
        own = OF_NORM | {name: ("linear", name) for name in divide(self.linear, parameters_split)}
        self.lend(options, ("linear",), own, "bias", out_features)
