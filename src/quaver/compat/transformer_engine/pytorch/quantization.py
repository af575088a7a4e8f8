"""Transformer Engine's contexts, and what it says of a device: everything is available, since it is emulated."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from quaver.compat.transformer_engine.common import recipe as recipes
from quaver.torch.conversion.quantized_weights import quantized_init
from quaver.torch.linear.stored_weight import CODES
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
    """Transformer Engine's `autocast`; a recipe of ours, or its name, is taken too.

    Raises:
        ValueError: calibrating without quantizing; an unknown recipe, or an option of one that is not there.
    """

    def __init__(
        self, enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:  # fmt: skip
        if calibrating and not enabled:
            raise ValueError("calibrating is not there: histories record what runs quantized; give enabled=True")
        given = recipes.recipe_of(get_default_recipe() if recipe is None else recipe) if enabled else None
        super().__init__(given, enabled=enabled, group=amax_reduction_group)

    def _recreate_cm(self) -> "autocast":
        return autocast(self.enabled, recipe=self.recipe, amax_reduction_group=self.group)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:  # fmt: skip
    """`autocast` by its earlier name and arguments."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def quantized_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> AbstractContextManager[Any]:
    """Layers made inside have weights that exist only as codes; `quaver.torch.initial_value(weight)` is the value kept.

    Raises:
        ValueError: an unknown recipe, or an option of one that is not there.
    """
    if not enabled:
        return nullcontext()
    kept = "cpu" if preserve_high_precision_init_val else None
    return quantized_init(recipes.recipe_of(get_default_recipe() if recipe is None else recipe), keep_initial=kept)


fp8_model_init = quantized_model_init


def get_default_recipe() -> recipes.Recipe:
    """The recipe where none is given: of a GPU, that for its kind; of a CPU, `DelayedScaling`."""
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    if major >= 12:
        return recipes.Float8CurrentScaling()
    return recipes.MXFP8BlockScaling() if major >= 10 else recipes.DelayedScaling()


get_default_fp8_recipe = get_default_recipe


def check_fp8_support() -> tuple[bool, str]:
    """(True, ""): what a device lacks is emulated; `quaver doctor` says what runs."""
    return True, ""


check_mxfp8_support = check_nvfp4_support = check_fp8_block_scaling_support = check_fp8_support


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """True, with the reason why not, "", if it is asked for."""
    return check_fp8_support() if return_reason else True


is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_bf16_available = is_fp8_available


def get_align_size_for_quantization(recipe: Any) -> int:
    """The number of rows that Transformer Engine pads each group of tokens to: 32 (MXFP8), 128 (NVFP4) or 16.

    Groups of any size are taken here, so that padding to it is allowed and not needed.
    """
    spec = recipes.recipe_of(recipe).fprop.a
    return 16 if spec is None else 128 if spec.two_level else 32 if spec.scale == "e8m0" else 16


class FP8GlobalStateManager:
    """What Transformer Engine's process-wide state says, read only: the innermost `autocast` has all of it here."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        recipe = in_force(None)
        return recipe is not None and recipe.quantizes

    @staticmethod
    def get_fp8_recipe() -> Any:
        """The recipe in force, a `quaver.Recipe`, else the device's default."""
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
        return isinstance(value, Quantized) or (isinstance(value, torch.Tensor) and value.dtype in CODES)


class QuantizedTensor(metaclass=_AnyOfCodes):
    """For `isinstance`: true of an operand and of a weight that exists only as codes; it makes nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("QuantizedTensor is for isinstance alone; quaver.torch.quantize(x, spec) makes an operand")
