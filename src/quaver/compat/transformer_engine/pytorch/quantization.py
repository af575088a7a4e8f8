"""Transformer Engine's contexts and availability checks; everything is available, because missing GEMMs are
emulated.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from quaver.compat.transformer_engine.common import recipe as recipes
from quaver.torch import quantized_tensor
from quaver.torch.conversion.quantized_weights import quantized_init
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.state.context import autocast as ours
from quaver.torch.state.context import in_force

__all__ = [
    "FP8GlobalStateManager",
    "QuantizedTensor",
    "autocast",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_bf16_available",
]
__all__ += ["is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available"]
__all__ += ["quantized_model_init"]
__all__ += ["get_align_size_for_quantization"]


class autocast(ours):
    """Transformer Engine's `autocast`; also accepts a `quaver.Recipe` or its name.

    Raises:
        ValueError: calibrating without quantizing, an unknown recipe, or an unsupported option of one.
    """

    def __init__(
        self, enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:  # fmt: skip
        if calibrating and not enabled:
            raise ValueError(
                "calibrating without quantizing is not supported: histories record the amaxes of quantized "
                "tensors; give enabled=True"
            )
        resolved = recipes.recipe_of(get_default_recipe() if recipe is None else recipe) if enabled else None
        super().__init__(resolved, enabled=enabled, group=amax_reduction_group)

    def _recreate_cm(self) -> "autocast":
        return autocast(self.enabled, recipe=self.recipe, amax_reduction_group=self.group)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:  # fmt: skip
    """`autocast` under its earlier name and arguments."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def quantized_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> AbstractContextManager[Any]:
    """Context in which new layers store their weights only as codes; `quaver.torch.initial_value(weight)` returns the
    original.

    Raises:
        ValueError: an unknown recipe, or an unsupported option of one.
    """
    if not enabled:
        return nullcontext()
    keep_initial = "cpu" if preserve_high_precision_init_val else None
    return quantized_init(
        recipes.recipe_of(get_default_recipe() if recipe is None else recipe), keep_initial=keep_initial
    )


fp8_model_init = quantized_model_init


def get_default_recipe() -> recipes.Recipe:
    """Return the default recipe: that of the GPU's architecture, or `DelayedScaling` on a CPU."""
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    if major >= 12:
        return recipes.Float8CurrentScaling()
    return recipes.MXFP8BlockScaling() if major >= 10 else recipes.DelayedScaling()


get_default_fp8_recipe = get_default_recipe


def check_fp8_support() -> tuple[bool, str]:
    """Return (True, ""): missing GEMMs are emulated; `quaver doctor` shows which run natively."""
    return True, ""


check_mxfp8_support = check_nvfp4_support = check_fp8_block_scaling_support = check_fp8_support


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True, or (True, "") with the empty reason if requested."""
    return check_fp8_support() if return_reason else True


is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_bf16_available = is_fp8_available


def get_align_size_for_quantization(recipe: Any) -> int:
    """Return the row multiple to which Transformer Engine pads groups of tokens: 32 (MXFP8), 128 (NVFP4) or 16.

    Quaver supports groups of any size, so this padding is allowed but not needed.
    """
    spec = recipes.recipe_of(recipe).fprop.a
    return 16 if spec is None else 128 if spec.two_level else 32 if spec.scale == "e8m0" else 16


class FP8GlobalStateManager:
    """Read-only view of Transformer Engine's global state, taken from the innermost `autocast`."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        recipe = in_force(None)
        return recipe is not None and recipe.quantizes

    @staticmethod
    def get_fp8_recipe() -> Any:
        """Return the active `quaver.Recipe`, or the device's default."""
        return in_force(None) or recipes.recipe_of(get_default_recipe())

    @staticmethod
    def is_fp8_calibration() -> bool:
        return False

    @staticmethod
    def fp8_graph_capturing() -> bool:
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = is_nvfp4_available = is_fp8_block_scaling_available = is_fp8_available


class _AnyOfCodes(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Quantized | quantized_tensor.QuantizedTensor)


class QuantizedTensor(metaclass=_AnyOfCodes):
    """For isinstance only: true for a quantized operand and for a weight stored as codes; cannot be created."""

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("QuantizedTensor is only for isinstance; create an operand by quaver.torch.quantize(x, spec)")
