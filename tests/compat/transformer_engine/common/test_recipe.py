"""Test that each Transformer Engine recipe maps to six of our operands with its defaults, and that no option is
ignored.
"""

from dataclasses import make_dataclass
from typing import Any

import pytest

from quaver import recipes
from quaver.compat.transformer_engine.common import recipe as te
from quaver.compat.transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    recipe_of,
)
from quaver.recipes.formats import E4M3, E5M2
from quaver.recipes.spec import GemmSpec, QuantSpec

HIGH = GemmSpec(None, None)
DEFAULTS = {
    "DelayedScaling": recipes.delayed(power_of_two=False),
    "Float8CurrentScaling": recipes.tensorwise(power_of_two=False),
    "MXFP8BlockScaling": recipes.mxfp8(),
    "Float8BlockScaling": recipes.blockwise(),
    "NVFP4BlockScaling": recipes.nvfp4(power_of_two=False),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_map_to_our_recipe(name: str) -> None:
    built, ours = recipe_of(te.RECIPES[name]()), DEFAULTS[name]
    assert (built.gemms, built.delayed, built.attention) == (ours.gemms, ours.delayed, None)
    assert recipe_of(te.RECIPES[name]()) is built, "equal recipes are one object"
    assert str(built) == f"transformer_engine.{name}"


def test_each_option_has_its_effect() -> None:
    requested = DelayedScaling(1, Format.E4M3, 16, "most_recent", fp8_dpa=True)
    assert requested.recipe().delayed == recipes.delayed(margin=1, history=16, algorithm="most_recent").delayed
    assert requested.recipe().gemms == recipes.delayed(format="e4m3", power_of_two=False).gemms
    assert requested.recipe().attention is not None
    assert DelayedScaling(override_linear_precision=(False, False, True)).recipe().wgrad == HIGH
    current = Float8CurrentScaling(
        use_power_2_scales=True, fp8_gemm_dgrad=MMParams(use_split_accumulator=False)
    ).recipe()
    assert current.fprop == recipes.tensorwise().fprop
    assert (current.fprop.fast_accum, current.dgrad.fast_accum, current.wgrad.fast_accum) == (True, True, False)
    assert MXFP8BlockScaling(enable_2d_quantization=True).recipe().gemms == recipes.mxfp8(weight_2d=True).gemms
    hybrid = MXFP8BlockScaling(fp8_format=Format.HYBRID, fp8_mha=True).recipe()
    assert [g.a.format for g in hybrid.gemms.values()] == [E4M3, E5M2, E5M2]  # type: ignore[union-attr]
    assert hybrid.attention.grad_output == hybrid.dgrad.a  # type: ignore[union-attr]
    square = Float8BlockScaling(True, x_block_scaling_dim=2, grad_block_scaling_dim=2).recipe()
    assert set(square.operands().values()) == {QuantSpec(E4M3, (128, 128), "fp32")}
    plain = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True).recipe()
    right = recipes.nvfp4(hadamard=False, stochastic_rounding=False, weight_2d=False, power_of_two=False)
    assert plain.gemms == right.gemms


@pytest.mark.parametrize("kind", [Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling, NVFP4BlockScaling])
def test_backward_may_be_of_values(kind: Any) -> None:
    for override in ("high_precision", "dequantized"):
        built = kind(backward_override=override).recipe()
        assert (built.dgrad, built.wgrad) == (HIGH, HIGH) and built.fprop.a is not None
        assert built.dequantized_backward is (override == "dequantized")


def test_predicates_identify_the_recipe() -> None:
    queries = ("delayed", "mxfp8", "nvfp4", "float8_current_scaling", "float8_block_scaling", "custom")
    true = [[name for name in queries if getattr(kind, name)()] for kind in te.RECIPES.values()]
    assert true == [["delayed"], ["float8_current_scaling"], ["mxfp8"], ["float8_block_scaling"], ["nvfp4"]]
    assert [kind.float8_per_tensor_scaling() for kind in te.RECIPES.values()] == [True, True, False, False, False]


def test_objects_of_the_original_package_are_accepted() -> None:
    """Told by the names of their classes and fields, as those of the package are."""
    fmt = type("Format", (), {"name": "E4M3"})()
    gemm_params = make_dataclass("MMParams", ["use_split_accumulator"])(True)
    given = make_dataclass("Float8CurrentScaling", ["use_power_2_scales", "fp8_format", "fp8_gemm_fprop"])
    built = recipe_of(given(True, fmt, gemm_params))
    assert built.gemms == recipes.tensorwise(format="e4m3", fast_accum=False).gemms
    assert recipe_of("mxfp8") is recipes.mxfp8() and recipe_of(recipes.nvfp4()) is recipes.nvfp4()


REFUSED: list[tuple[Any, str]] = [
    (lambda: DelayedScaling(amax_history=16), "has no option 'amax_history'; did you mean 'amax_history_len'"),
    (lambda: Float8CurrentScaling(margin=5.0), "has no option 'margin'"),
    (lambda: DelayedScaling(amax_history_len=0).recipe(), "a delayed-scaling history of 0 steps"),
    (lambda: DelayedScaling(amax_compute_algo=max).recipe(), "give 'max' or 'most_recent'"),
    (
        lambda: DelayedScaling(scaling_factor_compute_algo=max).recipe(),
        "scaling_factor_compute_algo=.* is not supported",
    ),
    (lambda: DelayedScaling(reduce_amax=False).recipe(), "reduce_amax=False is not supported: give True"),
    (lambda: DelayedScaling(interval=5).recipe(), "interval=5 is not supported"),
    (lambda: DelayedScaling(override_linear_precision=(True, False, True)).recipe(), "override_linear_precision"),
    (
        lambda: DelayedScaling(backward_override="dequantized").recipe(),
        "DelayedScaling does not support backward_override",
    ),
    (lambda: MXFP8BlockScaling(backward_override="bf16").recipe(), "give None, 'high_precision' or 'dequantized'"),
    (lambda: MXFP8BlockScaling(fp8_format=Format.E5M2).recipe(), "fp8_format=<Format.E5M2.*is not supported: give"),
    (lambda: MXFP8BlockScaling(margin=1).recipe(), "margin=1 is not supported: give 0"),
    (lambda: NVFP4BlockScaling(nvfp4_4over6="all").recipe(), "nvfp4_4over6='all' is not supported"),
    (lambda: NVFP4BlockScaling(row_scaled_activation=True).recipe(), "row_scaled_activation=True is not supported"),
    (lambda: Float8BlockScaling(w_block_scaling_dim=3).recipe(), "w_block_scaling_dim=3 is not supported: give 1 or 2"),
    (lambda: recipe_of(type("CustomRecipe", (), {})()), "give a quaver.Recipe instead"),
    (lambda: recipe_of("mxpf8"), "did you mean 'mxfp8'"),
    (lambda: recipe_of(8), "a recipe is a name or a quaver.Recipe"),
]


@pytest.mark.parametrize(("build", "sentence"), REFUSED)
def test_missing_features_give_a_clear_error(build: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        build()
