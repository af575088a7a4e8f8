"""Transformer Engine's `LayerNormMLP`."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor

from quaver.compat.transformer_engine.pytorch.module.layernorm_linear import OF_NORM
from quaver.compat.transformer_engine.pytorch.module.linear import only
from quaver.compat.transformer_engine.pytorch.module.parameters import Common, Module, fill
from quaver.core.options import takes
from quaver.core.text.spelling import check_name
from quaver.torch.blocks.mlp import LayerNormMLP as Ours
from quaver.torch.linear.layer import Linear

#: Ours by Transformer Engine's names.
ACTIVATIONS = {name: name for name in ("gelu", "geglu", "glu", "relu", "reglu", "silu", "swiglu", "clamped_swiglu")}
ACTIVATIONS |= {"qgelu": "quick_gelu", "qgeglu": "quick_geglu", "srelu": "squared_relu", "sreglu": "squared_reglu"}


@dataclass
class LayerNormMLPArguments(Common):
    """The arguments of `LayerNormMLP`."""

    hidden_size: int
    ffn_hidden_size: int
    eps: float = 1e-5
    _: KW_ONLY
    normalization: str = "LayerNorm"
    activation: str = "gelu"
    activation_params: Mapping[str, float] | None = None
    output_layer_init_method: Callable[[Tensor], Any] | None = None
    zero_centered_gamma: bool = False
    return_layernorm_output: bool = False
    return_layernorm_output_gathered: bool = False
    set_parallel_mode: bool = False
    checkpoint: bool = False


class LayerNormMLP(Module, Ours):
    """Transformer Engine's `LayerNormMLP`: (output, bias, the norm's output), as much of it as is asked for."""

    @takes(LayerNormMLPArguments)
    def __init__(self, options: LayerNormMLPArguments) -> None:
        check_name("activation", options.activation, ACTIVATIONS)
        super().__init__(
            options.hidden_size,
            options.ffn_hidden_size,
            ACTIVATIONS[options.activation],
            activation_options=options.activation_params,
            normalization=options.normalization,
            eps=options.eps,
            zero_centered=options.zero_centered_gamma,
            bias=options.bias,
            recompute=options.checkpoint,
            return_normalized=options.return_layernorm_output,
            **options.like,
        )
        self.__dict__["output_layer_init_method"] = options.output_layer_init_method
        entrance = self._entrance[0]
        apart = self.beside(options, "fc2_bias", options.hidden_size)
        if apart:
            self.down_proj.register_parameter("bias", None)
        layers: Any = {"fc1": entrance, "fc2": "down_proj"}
        own = {f"{name}_{key}": (part, key) for name, part in layers.items() for key in ("weight", "bias")}
        self.lend(options, (entrance, "down_proj"), OF_NORM | own | apart)

    def fill(self) -> None:
        super().fill()
        if self.__dict__["output_layer_init_method"] is not None:
            layer: Linear = self.down_proj
            fill(layer, self.__dict__["output_layer_init_method"])

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        with self.takes:
            y = super().forward(inp)
        y, *normalized = y if self.return_normalized else (y,)
        return only((*self.with_bias(y), *normalized))
