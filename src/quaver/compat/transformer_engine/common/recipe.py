"""Transformer Engine's recipes, each converted to a `quaver.Recipe`; scales per tensor are float32 as there.

Fields and defaults are those of version 2.20 (transformer_engine/common/recipe). Environment variables are not read.
"""

import enum
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from quaver import recipes
from quaver.compat.stand_in import RECIPE, unknown
from quaver.options import suggests
from quaver.recipes import spec as specs
from quaver.recipes.formats import E4M3, E5M2
from quaver.recipes.spec import GemmSpec, QuantSpec


class _Range(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """Number formats; HYBRID is E4M3 with E5M2 for gradients."""

    E2M1 = _Range(6, 6)
    E4M3 = _Range(448, 448)
    E5M2 = _Range(57344, 57344)
    HYBRID = _Range(448, 57344)


@suggests
@dataclass(frozen=True)
class MMParams:
    """Accumulation mode of one GEMM."""

    #: False allows fast accumulation.
    use_split_accumulator: bool = True


@suggests
@dataclass(frozen=True)
class QParams:
    """Quantization options of one tensor."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@dataclass(kw_only=True)
class Recipe:
    """Options common to all recipes.

    Args:
        fp8_dpa, fp8_mha: either quantizes attention; values between layers stay in high precision.
        backward_override: "high_precision" or "dequantized" operands for the GEMMs of backward, instead of codes.
    """

    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def recipe(self) -> specs.Recipe:
        """Return the equivalent `quaver.Recipe`.

        Raises:
            ValueError: an unsupported option, by its name.
        """
        override = self.backward_override
        if override not in (None, "high_precision", "dequantized"):
            raise ValueError(f"backward_override is {override!r}; give None, 'high_precision' or 'dequantized'")
        if override is not None and self.delayed():
            raise ValueError(
                "DelayedScaling does not support backward_override, as in Transformer Engine: leave it out"
            )
        built = replace(self._built(self.fp8_dpa or self.fp8_mha), name=f"transformer_engine.{type(self).__name__}")
        if override is not None:
            high = GemmSpec(None, None)
            built = replace(built, dgrad=high, wgrad=high, dequantized_backward=override == "dequantized")
        return recipes.get(built)

    def _built(self, attention: bool) -> specs.Recipe:
        raise NotImplementedError

    def _hybrid(self) -> bool:
        self._refuse(fp8_format=(Format.HYBRID, Format.E4M3))
        return self.fp8_format is Format.HYBRID  # type: ignore[attr-defined]

    def _refuse(self, **usual: Any) -> None:
        """Raise a ValueError for options without one of the supported values."""
        for name, values in usual.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{type(self).__name__}.{name}={getattr(self, name)!r} is not supported: give "
                    f"{' or '.join(map(repr, values))}"
                )

    delayed = classmethod(lambda cls: issubclass(cls, DelayedScaling))
    mxfp8 = classmethod(lambda cls: issubclass(cls, MXFP8BlockScaling))
    nvfp4 = classmethod(lambda cls: issubclass(cls, NVFP4BlockScaling))
    float8_current_scaling = classmethod(lambda cls: issubclass(cls, Float8CurrentScaling))
    float8_block_scaling = classmethod(lambda cls: issubclass(cls, Float8BlockScaling))
    float8_per_tensor_scaling = classmethod(lambda cls: issubclass(cls, (DelayedScaling, Float8CurrentScaling)))
    custom = classmethod(lambda cls: False)


@suggests
@dataclass
class DelayedScaling(Recipe):
    """Scales from the amaxes of earlier steps.

    `interval` and `override_linear_precision`, supported for wgrad only, come from 1.x.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    interval: int = 1
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)

    def _built(self, attention: bool) -> specs.Recipe:
        self._refuse(amax_compute_algo=("max", "most_recent"), scaling_factor_compute_algo=(None,), reduce_amax=(True,))
        self._refuse(interval=(1, -1), override_linear_precision=((False,) * 3, (False, False, True)))
        built = recipes.delayed(
            margin=self.margin,
            history=self.amax_history_len,
            algorithm=self.amax_compute_algo,
            format="hybrid" if self._hybrid() else "e4m3",
            power_of_two=False,
            attention=attention,
        )
        return recipes.override(built, wgrad=None) if self.override_linear_precision[2] else built


@suggests
@dataclass
class Float8CurrentScaling(Recipe):
    """One scale per tensor, from its own amax."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(False)
    fp8_gemm_dgrad: MMParams = MMParams(True)
    fp8_gemm_wgrad: MMParams = MMParams(True)

    def _built(self, attention: bool) -> specs.Recipe:
        built = recipes.tensorwise(
            format="hybrid" if self._hybrid() else "e4m3",
            power_of_two=self.use_power_2_scales,
            attention=attention,
        )
        return _accumulating(self, built)


@suggests
@dataclass
class MXFP8BlockScaling(Recipe):
    """A power-of-two scale for 32 elements along the contraction axis."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False

    def _built(self, attention: bool) -> specs.Recipe:
        self._refuse(margin=(0,))
        return recipes.mxfp8(
            format="hybrid" if self._hybrid() else "e4m3",
            weight_2d=self.enable_2d_quantization,
            attention=attention,
        )


@suggests
@dataclass
class Float8BlockScaling(Recipe):
    """A scale for 128 elements (dimension 1) or 128 by 128 elements (dimension 2)."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(True)
    fp8_gemm_dgrad: MMParams = MMParams(True)
    fp8_gemm_wgrad: MMParams = MMParams(True)

    def _built(self, attention: bool) -> specs.Recipe:
        self._refuse(**{f"{name}_block_scaling_dim": (1, 2) for name in ("x", "w", "grad")})
        gradient = E5M2 if self._hybrid() else E4M3
        plain = recipes.blockwise(power_of_two=not self.use_f32_scales, attention=attention)
        dims = self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim
        x, w, g = (
            QuantSpec(fmt, (1, 128) if dim == 1 else (128, 128), "fp32" if self.use_f32_scales else "power_of_two")
            for fmt, dim in zip((E4M3, E4M3, gradient), dims, strict=True)
        )
        built = replace(plain, fprop=GemmSpec(x, w), dgrad=GemmSpec(g, w), wgrad=GemmSpec(g, x))
        return _accumulating(self, built)


@suggests
@dataclass
class NVFP4BlockScaling(Recipe):
    """Four bits, with an E4M3 scale for 16 elements and one factor per tensor."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3

    def _built(self, attention: bool) -> specs.Recipe:
        self._refuse(row_scaled_activation=(False,), nvfp4_4over6=("none",), fp4_format=(Format.E2M1,))
        return recipes.nvfp4(
            hadamard=not self.disable_rht,
            stochastic_rounding=not self.disable_stochastic_rounding,
            weight_2d=not self.disable_2d_quantization,
            power_of_two=False,
            attention=attention,
        )


RECIPES = {
    kind.__name__: kind
    for kind in (DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling, NVFP4BlockScaling)
}

__getattr__ = unknown(__name__, (*RECIPES, "Format", "MMParams", "QParams", "Recipe"), RECIPE)


def _accumulating(own_recipe: Float8CurrentScaling | Float8BlockScaling, built: specs.Recipe) -> specs.Recipe:
    fast = {n: not getattr(own_recipe, f"fp8_gemm_{n}").use_split_accumulator for n in built.gemms}
    return replace(built, **{n: replace(gemm, fast_accum=fast[n]) for n, gemm in built.gemms.items()})  # type: ignore[arg-type]


def recipe_of(own_recipe: Any) -> specs.Recipe:
    """Convert a recipe of Transformer Engine, from here or from the package itself, or any argument of
    `quaver.recipes.get`.

    Raises:
        ValueError: none of these; the message says what to pass.
    """
    kind = RECIPES.get(type(own_recipe).__name__)
    if kind is not None and not isinstance(own_recipe, kind):
        own_recipe = kind(
            **{f.name: _own(getattr(own_recipe, f.name)) for f in fields(kind) if hasattr(own_recipe, f.name)}
        )
    if isinstance(own_recipe, Recipe):
        return own_recipe.recipe()
    if type(own_recipe).__name__ == "CustomRecipe":
        raise ValueError(
            "CustomRecipe is not supported, because Quaver has no quantizer objects: give a quaver.Recipe instead"
        )
    return recipes.get(own_recipe)


def _own(value: Any) -> Any:
    """Convert a field's value from the package's own classes."""
    if type(value).__name__ == "Format":
        return Format[value.name]
    return MMParams(value.use_split_accumulator) if type(value).__name__ == "MMParams" else value
