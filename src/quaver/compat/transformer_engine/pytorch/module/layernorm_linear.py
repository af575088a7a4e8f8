"""Transformer Engine's `LayerNormLinear`."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor

from quaver.compat.transformer_engine.pytorch.module.linear import LinearArguments, divided, only, refuse_codes
from quaver.compat.transformer_engine.pytorch.module.parameters import Module
from quaver.core.options import takes
from quaver.torch.blocks.norm_linear import LayerNormLinear as Ours

#: Parameters of the norm, by Transformer Engine's names.
OF_NORM = {"layer_norm_weight": ("norm", "weight"), "layer_norm_bias": ("norm", "bias")}


@dataclass
class LayerNormLinearArguments(LinearArguments):
    """The arguments of `LayerNormLinear`."""

    eps: float = 1e-5
    _: KW_ONLY
    normalization: str = "LayerNorm"
    zero_centered_gamma: bool = False
    return_layernorm_output: bool = False
    return_layernorm_output_gathered: bool = False


class LayerNormLinear(Module, Ours):
    """Transformer Engine's `LayerNormLinear`: (output, bias, the norm's output), as much of it as is asked for."""

    @takes(LayerNormLinearArguments)
    def __init__(self, options: LayerNormLinearArguments) -> None:
        features = self.in_features, self.out_features = options.in_features, options.out_features
        super().__init__(
            *features,
            options.bias and not options.return_bias,
            normalization=options.normalization,
            eps=options.eps,
            zero_centered=options.zero_centered_gamma,
            return_normalized=options.return_layernorm_output,
            **options.like,
        )
        names = divided(self.linear, options.parameters_split)
        own = OF_NORM | {name: ("linear", name) for name in names}
        self.lend(options, ("linear",), own | self.beside(options, "bias", options.out_features))

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Any:
        refuse_codes(fp8_output, fp8_grad)
        with self.takes:
            y: Any = super().forward(inp)
        y, *normalized = y if self.return_normalized else (y,)
        return only((*self.with_bias(y), *normalized))
