"""What transformers calls around the loading and the saving of a model whose config is a `QuaverConfig`.

A folder holds the state dict. Codes lie in it as bytes [N, K, 1] under the weight's own name: a class that does not
know them refuses the shape, where it would have taken codes for weights.
"""

from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from quaver.integrations.huggingface.config import METHOD, QuaverConfig
from quaver.torch.linear.layer import Quantizable
from quaver.torch.linear.stored import storing
from quaver.torch.model.conversion import convert, revert
from quaver.torch.model.weights.quantized import quantize_weights


@register_quantizer(METHOD)
class QuaverQuantizer(HfQuantizer):
    """Converts the model that `from_pretrained` makes, and gives `save_pretrained` all of its state.

    A folder of the unconverted model is loaded and then converted. One that was saved from here has histories, counts
    and codes, which come back bit for bit.
    """

    requires_calibration = False
    quantization_config: QuaverConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            self._convert(model)
            self._held = _as_bytes(model)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            _as_codes(self._held)
            self._held = {}
            _column_by_column(model)
        else:
            self._convert(model)
        return model

    def _convert(self, model: nn.Module) -> None:
        config = self.quantization_config
        if config.weights == "stored":
            quantize_weights(model, config.rules(), skip=config.skip, head=config.head)
        report = convert(
            model, config.rules(), skip=config.skip, seed=config.seed, head=config.head, blocks=config.blocks
        )
        if not report.converted and not report.attention and not any(row.block for row in report.blocks):
            why = next((f" ({row.name}: {row.why})" for row in report.rows if row.why), "")
            raise ValueError(
                f"QuaverConfig converted nothing of {type(model).__name__}{why}, and its folder would say that it did: "
                "load it without device_map, whose hooks replace forwards, and move it by model.to(device), or give a "
                "recipe and a skip that name its layers"
            )

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        revert(model)
        return model

    def is_serializable(self, *_: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _as_bytes(model: nn.Module) -> dict[Quantizable, nn.Parameter]:
    """Give stored weights the form that they have in a folder. Returns those that they had, of no values yet."""
    held: dict[Quantizable, nn.Parameter] = {}
    for layer in model.modules():
        if isinstance(layer, Quantizable) and layer.weight_spec is not None:
            weight = layer._parameters["weight"]
            assert weight is not None
            held[layer] = weight
            empty = torch.empty((*weight.shape, 1), dtype=torch.uint8, device=weight.device)
            layer._parameters["weight"] = nn.Parameter(empty, requires_grad=False)
    return held


def _as_codes(held: dict[Quantizable, nn.Parameter]) -> None:
    """Make parameters of codes of what was loaded."""
    for layer, weight in held.items():
        codes = layer._parameters["weight"].detach().squeeze(-1).view(weight.dtype)  # type: ignore[union-attr]
        layer._parameters["weight"] = nn.Parameter(codes, requires_grad=weight.requires_grad)
        storing.settle(layer)


def _column_by_column(model: nn.Module) -> None:
    """Lay histories out as layers make them."""
    for layer in model.modules():
        history = layer._buffers.get("history") if isinstance(layer, Quantizable) else None
        if history is not None:
            layer._buffers["history"] = history.mT.contiguous().mT
