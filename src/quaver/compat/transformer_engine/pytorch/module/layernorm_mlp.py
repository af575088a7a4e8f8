"""Transformer Engine's `LayerNormMLP`."""

from collections.abc import Mapping
from typing import Any

from quaver.compat.transformer_engine.pytorch.module.layernorm_linear import OF_NORM
from quaver.compat.transformer_engine.pytorch.module.parameters import Common, Init, Module
from quaver.options import spreads
from quaver.recipes.text import check_name
from quaver.torch.conversion.quantized_weights import fill
from quaver.torch.nn.mlp import LayerNormMLP as Ours

#: Quaver's activations by Transformer Engine's names.
ACTIVATIONS = {name: name for name in ("gelu", "geglu", "glu", "relu", "reglu", "silu", "swiglu", "clamped_swiglu")}
ACTIVATIONS |= {"qgelu": "quick_gelu", "qgeglu": "quick_geglu", "srelu": "squared_relu", "sreglu": "squared_reglu"}


class LayerNormMLP(Module, Ours):
    """Transformer Engine's `LayerNormMLP`."""

    @spreads(Common)
    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, *, normalization: str = "LayerNorm",
        activation: str = "gelu", activation_params: Mapping[str, float] | None = None,
        output_layer_init_method: Init = None, zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False, return_layernorm_output_gathered: bool = False,
        set_parallel_mode: bool = False, checkpoint: bool = False, **others: Any,
    ) -> None:  # fmt: skip
        check_name("activation", activation, ACTIVATIONS)
        options = Common(**others)
        norm: Any = {"normalization": normalization, "eps": eps, "zero_centered": zero_centered_gamma}
        norm |= {"return_normalized": return_layernorm_output, "recompute": checkpoint, "bias": options.bias}
        own = {"activation_options": activation_params, **norm, **options.like}
        super().__init__(hidden_size, ffn_hidden_size, ACTIVATIONS[activation], **own)
        self.__dict__["of_output"] = output_layer_init_method
        (up_name,) = self._first_projections
        if options.return_bias:
            self.down_proj.register_parameter("bias", None)
        layers = {"fc1": up_name, "fc2": "down_proj"}
        names = OF_NORM | {f"{name}_{key}": (part, key) for name, part in layers.items() for key in ("weight", "bias")}
        self.lend(options, (up_name, "down_proj"), names, "fc2_bias", hidden_size)

    def fill(self) -> None:
        super().fill()
        if self.__dict__["of_output"] is not None:
            fill(self.down_proj, self.__dict__["of_output"])
