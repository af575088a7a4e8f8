"""PEFT integration: LoRA over weights that are stored only as codes. With high-precision weights PEFT works unchanged.

PEFT gives an adapter the dtype of the base's weight and merges into that weight directly. Both would be wrong for
codes. Here adapters have the weight's original dtype, and merging dequantizes it first. All private names of PEFT are
in this file; `over_codes` raises for a version that lacks one.
"""

from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

if find_spec("peft") is None:
    raise ModuleNotFoundError(f"{__name__} needs peft, which is not installed: pip install peft", name="peft")

import peft
from peft import LoraConfig
from peft.tuners import lora

from quaver.torch.linear import stored_weight
from quaver.torch.linear.linear import Linear

__all__ = ["LoraOverCodes", "over_codes"]

#: PEFT's config method that registers layer classes (experimental), and layer method that returns device and dtype of
#: adapters.
REGISTER, DTYPE = "_register_custom_module", "_get_base_layer_device_and_dtype"
#: Values of init_lora_weights that do not read or write the base's weight.
INDEPENDENT_INITS = (True, False, "gaussian", "eva")


class LoraOverCodes(lora.Linear):
    """PEFT's LoRA layer over a `quaver.torch.Linear` whose weight may be stored only as codes.

    Merging replaces the base's codes by a weight in its original dtype, adds the adapter in float32 and removes the
    base's recipe. Quantizing the sum again, now or in each forward, would lose most of the adapter, since dequantized
    values are the centres of their rounding intervals. `unmerge` restores the identical codes and the recipe.
    `quaver.torch.quantize_weights(merged, recipe)` quantizes the merged weight.
    """

    #: Checked by `quaver.torch.quantize_weights` before it quantizes the base.
    merges_codes = True

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, *args: Any, **kwargs: Any) -> None:
        if _is_stored(base_layer):
            _check_config(config)
        super().__init__(base_layer, adapter_name, config, *args, **kwargs)
        #: The base's state before the first merge: its weight, scales, and attributes with its recipe; else None.
        self._codes: tuple[nn.Parameter, dict[str, Any]] | None = None

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        """Add or update an adapter as PEFT does, after checking its config."""
        if _is_stored(self.get_base_layer()):
            for config in (value for value in (*args, *kwargs.values()) if isinstance(value, LoraConfig)):
                _check_config(config)
        super().update_layer(*args, **kwargs)

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> Any:
        if not _is_stored(base_layer):
            return super()._get_base_layer_device_and_dtype(base_layer)
        return base_layer.weight.device, base_layer.weight_dtype

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters as PEFT does, into a dequantized weight if the base has codes."""
        base: Any = self.get_base_layer()
        if not _is_stored(base):
            super().merge(safe_merge, adapter_names)
            return
        merged = len(self.merged_adapters)
        self._codes = _state_of_base(base)
        stored_weight.restore(base)
        base.recipe = None
        try:
            super().merge(safe_merge, adapter_names)
        finally:
            if len(self.merged_adapters) == merged:
                self._restore_codes()

    def unmerge(self) -> None:
        """Unmerge adapters as PEFT does; codes are restored bit for bit."""
        if self._codes is None:
            super().unmerge()
            return
        base: Any = self.get_base_layer()
        for name in reversed(self.merged_adapters):
            if self.lora_bias.get(name):
                base.bias.data -= self.lora_B[name].bias * self.scaling[name]
        self.merged_adapters.clear()
        self._restore_codes()

    def _restore_codes(self) -> None:
        assert self._codes is not None
        base: Any = self.get_base_layer()
        weight, attributes = self._codes
        self._codes = None
        # The module may have been moved or cast in the meantime.
        device, dtype = base.weight.device, base.weight.dtype
        if weight.device != device or weight.dtype is not dtype:
            weight = nn.Parameter(weight.detach().to(device, dtype), requires_grad=weight.requires_grad)
        base.__dict__.update(attributes, weight_dtype=dtype)
        base._parameters["weight"] = weight
        stored_weight.register_stored_weight(base)

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return the adapter's weight update in float32; rounding to the weight's dtype then happens once (twice
        with `safe_merge`).
        """
        down: Any = self.lora_A[adapter]
        up: Any = self.lora_B[adapter]
        delta: Tensor = (up.weight.float() @ down.weight.float()) * self.scaling[adapter]
        return delta


def over_codes(config: LoraConfig) -> LoraConfig:
    """Make a LoRA config use `LoraOverCodes` for the layers whose weights `quaver.torch.quantize_weights` has
    quantized.

    Call it before `get_peft_model`. To load an adapter, pass its config through this function to
    `PeftModel.from_pretrained(..., config=)`. Layers with high-precision weights are allowed too; PEFT handles layers
    that are not `quaver.torch.Linear`.

    Args:
        config: a LoRA config.
    Returns:
        The same config, modified; PEFT does not write the change into its files.
    Raises:
        TypeError: a config of another method than LoRA, which does not support codes.
        ValueError: a version of PEFT without the required methods.
    """
    if not isinstance(config, LoraConfig):
        raise TypeError(
            f"{type(config).__name__} does not support weights that are stored as codes; give a peft.LoraConfig, "
            "or call quaver.torch.dequantize_weights(model) before get_peft_model"
        )
    register = getattr(config, REGISTER, None)
    if register is None or not hasattr(lora.Linear, DTYPE):
        raise ValueError(
            f"peft {peft.__version__} has no {REGISTER} or no {DTYPE} (0.21 has): call "
            "quaver.torch.dequantize_weights(model) and have PEFT adapt weights in high precision"
        )
    register({Linear: LoraOverCodes})
    return config


def _is_stored(layer: nn.Module) -> bool:
    return isinstance(layer, Linear) and layer.weight_spec is not None


def _state_of_base(base: Any) -> tuple[nn.Parameter, dict[str, Any]]:
    attributes = {name: base.__dict__[name] for name in stored_weight.ATTRIBUTES if name in base.__dict__}
    return base._parameters["weight"], attributes | {"recipe": base.recipe}


def _check_config(config: LoraConfig) -> None:
    """Raise if a config reads or writes the base's weight during initialization.

    Raises:
        ValueError: the message says what to use instead.
    """
    if config.init_lora_weights not in INDEPENDENT_INITS:
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} starts from the base's weight, which exists only as "
            "codes here; give True or 'gaussian', or quantize the weights after the adapter has been created and "
            "saved"
        )
    if getattr(config, "use_dora", False):
        raise ValueError(
            "use_dora reads the base's weight in every step, which exists only as codes here; leave it out, or call "
            "quaver.torch.dequantize_weights(model)"
        )
