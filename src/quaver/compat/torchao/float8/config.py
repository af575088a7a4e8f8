"""torchao's `Float8LinearConfig`, and its conversion to a `quaver.Recipe`.

Fields, names and defaults are those of torchao 0.18 (torchao/float8/config.py). A cast describes one operand, with a
scale per tensor or per row along the GEMM's contraction axis.
"""

import enum
import warnings
from dataclasses import dataclass, replace
from functools import cache

import torch

from quaver.compat.stand_in import TORCHAO, unknown
from quaver.recipes.formats import E4M3, E5M2
from quaver.recipes.spec import GemmSpec, QuantSpec, Recipe, ScaleKind
from quaver.recipes.text import suggest

#: torchao's names of the two formats on all GPUs except AMD's MI300.
e4m3_dtype, e5m2_dtype = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {e4m3_dtype: E4M3, e5m2_dtype: E5M2}


class ScalingType(enum.Enum):
    """DYNAMIC if a tensor is cast to float8, DISABLED if not."""

    DYNAMIC = "dynamic"
    DISABLED = "disabled"

    def short_str(self) -> str:
        """Return the first three letters of the value."""
        return self.value[:3]


class ScalingGranularity(enum.Enum):
    """TENSORWISE for one scale per tensor, AXISWISE for one per row along the contraction axis."""

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"

    def short_str(self) -> str:
        """Return a three-letter name."""
        return "ten" if self is ScalingGranularity.TENSORWISE else "axs"


@dataclass(frozen=True)
class CastConfig:
    """How one tensor is cast to float8.

    Raises:
        ValueError: an unknown scaling_type, granularity or dtype; row scales for a tensor that is not cast.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    #: float8 dtype; None means the operand's default: E4M3 for inputs and weights, E5M2 for gradients.
    target_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field, kind in (("scaling_type", ScalingType), ("scaling_granularity", ScalingGranularity)):
            value = getattr(self, field)
            # Also accept torchao's own enums, which have the same values.
            if not isinstance(value, kind):
                try:
                    object.__setattr__(self, field, kind(getattr(value, "value", value)))
                except ValueError:
                    raise ValueError(f"CastConfig.{field} is {value!r}; give one of {[*kind]}") from None
        if self.scaling_granularity is ScalingGranularity.AXISWISE and self.scaling_type is ScalingType.DISABLED:
            raise ValueError("a tensor that is not cast has no scales: leave scaling_granularity out of CastConfig")
        if self.target_dtype is not None and self.target_dtype not in FORMATS:
            raise ValueError(
                f"CastConfig.target_dtype is {self.target_dtype}; give torch.float8_e4m3fn or "
                "torch.float8_e5m2 (AMD's fnuz formats are not supported)"
            )

    def short_str(self) -> str:
        """Return the cast as torchao's layers print it."""
        dtype = "e5m2" if self.target_dtype is e5m2_dtype else "e4m3"
        return f"{self.scaling_type.short_str()}_{self.scaling_granularity.short_str()}_{dtype}"


@dataclass(frozen=True)
class Float8GemmConfig:
    """Accumulation mode of one GEMM."""

    use_fast_accum: bool = False


class Float8LinearRecipeName(enum.Enum):
    """Names of torchao's three recipes."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


@dataclass(frozen=True)
class Float8LinearConfig:
    """How linear layers are converted.

    Three options are accepted without effect. `pad_inner_dim`: sizes are always padded if a GEMM needs it. `emulate`:
    GEMMs that a device lacks are always emulated. `force_recompute_fp8_weight_in_bwd`: torchao ignores it too. Casts
    passed in are not modified; the configuration stores copies with the operand's `target_dtype`.

    Raises:
        ValueError: only one operand of a GEMM is cast, one tensor has two dtypes, or weights with row scales should be
            gathered in float8.
    """

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None

    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()

    #: True if fully_shard should all-gather weights as codes.
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    #: True if scales are powers of two.
    round_scales_to_power_of_2: bool = False

    def __post_init__(self) -> None:
        for operand, other in SECOND.items():
            first: CastConfig = getattr(self, operand)
            second: CastConfig = getattr(self, other) or first
            default = e5m2_dtype if operand == "cast_config_grad_output" else e4m3_dtype
            dtype = first.target_dtype or second.target_dtype or default
            if second.target_dtype not in (None, dtype):
                raise ValueError(
                    f"{operand} casts to {first.target_dtype} and {other} to {second.target_dtype}; give both "
                    "the same target_dtype"
                )
            for name, cast in ((operand, first), (other, second)):
                object.__setattr__(self, name, replace(cast, target_dtype=dtype))
        for gemm, (a, b) in GEMMS.items():
            if getattr(self, a).scaling_type is not getattr(self, b).scaling_type:
                raise ValueError(f"{gemm} multiplies the operands of {a} and {b}; cast both, or disable both")
        granularity = self.cast_config_weight.scaling_granularity
        if self.enable_fsdp_float8_all_gather and granularity is not ScalingGranularity.TENSORWISE:
            raise ValueError(
                "enable_fsdp_float8_all_gather gathers weights with one scale per tensor, and "
                "cast_config_weight has one per row: leave one of the two out, or call "
                "quaver.torch.parallel.gather_quantized(model), which supports every recipe"
            )
        if self.force_recompute_fp8_weight_in_bwd:
            warnings.warn(
                "force_recompute_fp8_weight_in_bwd has no effect, as in torchao: weights are quantized once "
                "per optimizer step",
                stacklevel=3,
            )

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> "Float8LinearConfig":
        """Return the configuration of one of torchao's recipes.

        Raises:
            ValueError: an unknown name.
        """
        name = getattr(recipe_name, "value", recipe_name)
        known = [recipe.value for recipe in Float8LinearRecipeName]
        if name not in known:
            hint = suggest(name, known) if isinstance(name, str) else f"known: {', '.join(known)}"
            raise ValueError(f"torchao has no recipe {recipe_name!r}; {hint}")
        if name == "tensorwise":
            return Float8LinearConfig()
        row = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e4m3fn)
        tensor = CastConfig(target_dtype=torch.float8_e4m3fn)
        high = CastConfig(ScalingType.DISABLED, target_dtype=torch.float8_e4m3fn)
        in_high = name == "rowwise_with_gw_hp"
        return Float8LinearConfig(
            cast_config_input=row,
            cast_config_input_for_grad_weight=high if in_high else None,
            cast_config_weight=row,
            cast_config_weight_for_grad_input=tensor if in_high else None,
            cast_config_grad_output=row,
            cast_config_grad_output_for_grad_weight=high if in_high else None,
            round_scales_to_power_of_2=True,
        )


#: For the cast of each operand in one GEMM, the cast of the same tensor in its other GEMM.
SECOND = {
    "cast_config_input": "cast_config_input_for_grad_weight",
    "cast_config_weight": "cast_config_weight_for_grad_input",
    "cast_config_grad_output": "cast_config_grad_output_for_grad_weight",
}
#: Operands of each GEMM in NT layout: fprop, dgrad, wgrad.
GEMMS = {
    "gemm_config_output": ("cast_config_input", "cast_config_weight"),
    "gemm_config_grad_input": ("cast_config_grad_output", "cast_config_weight_for_grad_input"),
    "gemm_config_grad_weight": ("cast_config_grad_output_for_grad_weight", "cast_config_input_for_grad_weight"),
}


@cache
def recipe_of(config: Float8LinearConfig) -> Recipe:
    """Convert a configuration to a recipe with the same six operands."""
    scale: ScaleKind = "power_of_two" if config.round_scales_to_power_of_2 else "fp32"

    def spec(name: str) -> QuantSpec | None:
        cast: CastConfig = getattr(config, name)
        if cast.scaling_type is ScalingType.DISABLED:
            return None
        assert cast.target_dtype is not None
        rows = 1 if cast.scaling_granularity is ScalingGranularity.AXISWISE else None
        return QuantSpec(FORMATS[cast.target_dtype], (rows, None), scale)

    def gemm(name: str) -> GemmSpec:
        a, b = GEMMS[name]
        return GemmSpec(spec(a), spec(b), getattr(config, name).use_fast_accum)

    fprop, dgrad, wgrad = map(gemm, GEMMS)
    return Recipe(f"torchao.{_name(config)}", fprop, dgrad, wgrad)


def _name(config: Float8LinearConfig) -> str:
    for recipe in Float8LinearRecipeName:
        if config == Float8LinearConfig.from_recipe_name(recipe):
            return recipe.value
    return "float8"


__all__ = ["CastConfig", "Float8GemmConfig", "Float8LinearConfig", "Float8LinearRecipeName"]
__all__ += ["ScalingGranularity", "ScalingType"]

__getattr__ = unknown(__name__, (*__all__, "e4m3_dtype", "e5m2_dtype"), TORCHAO)
