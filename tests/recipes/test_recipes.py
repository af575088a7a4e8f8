"""The recipes are the table of the design, row by row; a misspelt name or option suggests the nearest."""

import dataclasses
import inspect
import itertools
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import quaver
from quaver.recipes import RECIPES, get, override
from quaver.recipes.formats import E2M1, E2M3, E3M2, E4M3, E5M2
from quaver.recipes.spec import AttentionSpec, Delayed, GemmSpec, QuantSpec, Recipe
from tests.operands import variants

VARIANTS = variants()

TENSOR = QuantSpec(E4M3, (None, None), "power_of_two")
TENSOR_GRADIENT = QuantSpec(E5M2, (None, None), "power_of_two")
ROW = QuantSpec(E4M3, (1, None), "power_of_two")
LINE = QuantSpec(E4M3, (1, 128), "power_of_two")
SQUARE = QuantSpec(E4M3, (128, 128), "power_of_two")
MX = QuantSpec(E4M3, (1, 32), "e8m0")
MX6 = QuantSpec(E2M3, (1, 32), "e8m0")
MX6_GRADIENT = QuantSpec(E3M2, (1, 32), "e8m0")
MX4 = QuantSpec(E2M1, (1, 32), "e8m0")
NV = QuantSpec(E2M1, (1, 16), "two_level")
NV_WEIGHT = QuantSpec(E2M1, (16, 16), "two_level")
NV_GRADIENT = QuantSpec(E2M1, (1, 16), "two_level", "stochastic")
NV_ROTATED = QuantSpec(E2M1, (1, 16), "two_level", "nearest", True)
NV_ROTATED_GRADIENT = QuantSpec(E2M1, (1, 16), "two_level", "stochastic", True)

#: fprop (input, weight), dgrad (grad_output, weight.T), wgrad (grad_output.T, input.T) of the design's recipes.
TABLE = {
    "bf16": ((None, None), (None, None), (None, None)),
    "delayed": ((TENSOR, TENSOR), (TENSOR_GRADIENT, TENSOR), (TENSOR_GRADIENT, TENSOR)),
    "tensorwise": ((TENSOR, TENSOR), (TENSOR_GRADIENT, TENSOR), (TENSOR_GRADIENT, TENSOR)),
    "rowwise": ((ROW, ROW), (ROW, ROW), (ROW, ROW)),
    "rowwise_bf16_wgrad": ((ROW, ROW), (ROW, TENSOR), (None, None)),
    "blockwise": ((LINE, SQUARE), (LINE, SQUARE), (LINE, LINE)),
    "mxfp8": ((MX, MX), (MX, MX), (MX, MX)),
    "mxfp6": ((MX6, MX6), (MX6_GRADIENT, MX6), (MX6_GRADIENT, MX6)),
    "mxfp4": ((MX4, MX4), (MX4, MX4), (MX4, MX4)),
    "nvfp4": ((NV, NV_WEIGHT), (NV_GRADIENT, NV_WEIGHT), (NV_ROTATED_GRADIENT, NV_ROTATED)),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_recipe_is_its_row_of_the_table(name: str) -> None:
    recipe = get(name)
    got = tuple((gemm.a, gemm.b) for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    assert got == TABLE[name]
    assert recipe.name == name == str(recipe)
    assert recipe.quantizes == (name != "bf16")
    assert recipe.delayed == (Delayed(length=1024, margin=0, algorithm="max") if name == "delayed" else None)


@pytest.mark.parametrize("name", RECIPES)
def test_fast_accumulation_is_fprops_only(name: str) -> None:
    recipe = get(name)
    assert not recipe.dgrad.fast_accum and not recipe.wgrad.fast_accum
    option = inspect.signature(RECIPES[name]).parameters.get("fast_accum")
    assert recipe.fprop.fast_accum == (option is not None and option.default)


@pytest.mark.parametrize("name", [n for n, f in RECIPES.items() if "power_of_two" in inspect.signature(f).parameters])
def test_power_of_two_false_divides_everywhere(name: str) -> None:
    scales = {spec.scale for spec in get(name, power_of_two=False).operands().values() if spec}
    assert scales == ({"two_level_fp32"} if name == "nvfp4" else {"fp32"})


#: Recipes whose gradients are E4M3 or E5M2.
FORMAT_IS_AN_OPTION = ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]


@pytest.mark.parametrize("name", FORMAT_IS_AN_OPTION)
def test_format_e4m3_makes_gradients_e4m3(name: str) -> None:
    assert {spec.format for spec in get(name, format="e4m3").operands().values() if spec} == {E4M3}


@pytest.mark.parametrize("name", FORMAT_IS_AN_OPTION)
def test_format_hybrid_makes_gradients_e5m2(name: str) -> None:
    recipe, plain = get(name, format="hybrid", attention=True), get(name, format="e4m3", attention=True)
    for operand, spec in recipe.operands().items():
        same = plain.operands()[operand]
        assert spec is not None and same is not None
        assert spec == (replace(same, format=E5M2) if operand in ("dgrad.a", "wgrad.a") else same)
    assert recipe.attention is not None and recipe.attention.grad_output.format == E5M2


def test_override_replaces_single_gemms() -> None:
    base, hybrid = get("mxfp8"), get("mxfp8(format='hybrid')")
    recipe = override("mxfp8", dgrad=hybrid.dgrad, wgrad=None)
    assert recipe.gemms == {"fprop": base.fprop, "dgrad": hybrid.dgrad, "wgrad": GemmSpec(None, None)}
    assert recipe is override(base, dgrad=hybrid.dgrad, wgrad=None)
    assert str(recipe) == "mxfp8 with high-precision wgrad, another dgrad"
    again = override(override(base, wgrad=None), dgrad=hybrid.dgrad)
    assert again is recipe
    assert str(override(recipe, fprop=None)) == "mxfp8 with high-precision fprop and wgrad, another dgrad"
    assert str(override(recipe, dgrad=None)) == "mxfp8 with high-precision dgrad and wgrad"


def test_override_without_a_difference_is_the_recipe() -> None:
    base = get("mxfp8")
    assert override("mxfp8") is base is override(base, fprop=base.fprop)


@pytest.mark.parametrize(
    ("gemms", "words"),
    [
        ({"wgrad": "bf16"}, "wgrad is 'bf16'; give a GemmSpec"),
        ({"fprop": get("mxfp8")}, "give a GemmSpec"),
        ({"dgrad": None}, "delayed scaling"),
    ],
)
def test_override_refuses(gemms: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        override("delayed", **gemms)


#: input and grad_output of attention's products.
ATTENTION = {
    "delayed": (TENSOR, TENSOR_GRADIENT),
    "tensorwise": (TENSOR, TENSOR_GRADIENT),
    "rowwise": (ROW, ROW),
    "rowwise_bf16_wgrad": (ROW, ROW),
    "blockwise": (LINE, LINE),
    "mxfp8": (MX, MX),
    "mxfp6": (MX, MX),
    "mxfp4": (MX, MX),
    "nvfp4": (MX, MX),
}


@pytest.mark.parametrize("name", RECIPES)
def test_attention_is_a_choice_that_leaves_the_gemms_alone(name: str) -> None:
    assert get(name).attention is None
    if "attention" not in inspect.signature(RECIPES[name]).parameters:
        with pytest.raises(ValueError, match="no option 'attention'"):
            get(name, attention=True)
        return
    recipe = get(name, attention=True)
    assert recipe.attention == (AttentionSpec(*ATTENTION[name]) if name in ATTENTION else recipe.attention)
    assert recipe.operands() == get(name).operands() and recipe.delayed == get(name).delayed
    assert recipe != get(name) and get(name, attention=False) is get(name) and str(recipe) == name


def test_attention_follows_the_other_options() -> None:
    spec = get("tensorwise", format="e4m3", power_of_two=False, attention=True).attention
    assert spec is not None and spec.input == spec.grad_output == QuantSpec(E4M3, scale="fp32")


def test_options_of_delayed_arrive() -> None:
    recipe = quaver.recipes.delayed(margin=1, history=16, algorithm="most_recent")
    assert recipe.delayed == Delayed(length=16, margin=1, algorithm="most_recent")


def test_options_of_mxfp8_and_nvfp4_arrive() -> None:
    square = get("mxfp8", weight_2d=True)
    assert square.fprop.b == square.dgrad.b == QuantSpec(E4M3, (32, 32), "e8m0") and square.fprop.a == MX
    plain = get("nvfp4", stochastic_rounding=False, hadamard=False, weight_2d=False)
    assert set(plain.operands().values()) == {NV}


def test_options_of_mxfp6_and_mxfp4_arrive() -> None:
    assert set(get("mxfp6", format="e3m2").operands().values()) == {MX6_GRADIENT}
    assert set(get("mxfp6", format="e2m3").operands().values()) == {MX6}
    noisy = get("mxfp4", stochastic_rounding=True, hadamard=True)
    rotated = QuantSpec(E2M1, (1, 32), "e8m0", "nearest", True)
    noise = QuantSpec(E2M1, (1, 32), "e8m0", "stochastic", True)
    assert (noisy.fprop, noisy.dgrad, noisy.wgrad) == (GemmSpec(MX4, MX4), *[GemmSpec(noise, rotated)] * 2)


@pytest.mark.parametrize("label", VARIANTS)
def test_equal_recipes_are_one_object(label: str) -> None:
    recipe = VARIANTS[label]
    assert variants()[label] is recipe
    assert get(recipe) is recipe
    copied = pickle.loads(pickle.dumps(recipe))
    assert copied is not recipe and get(copied) is recipe


def test_recipes_with_other_values_are_other_objects() -> None:
    assert len(set(VARIANTS.values())) == len(VARIANTS)


def test_each_text_names_one_recipe() -> None:
    """Recipes are interned by their text: it contains each of their fields."""
    high, rows = GemmSpec(None, None), GemmSpec(ROW, ROW)
    scaled = GemmSpec(QuantSpec(E4M3), QuantSpec(E4M3))
    attention = [AttentionSpec(ROW, ROW), AttentionSpec(ROW, QuantSpec(E5M2)), AttentionSpec(QuantSpec(E5M2), ROW)]
    histories = [Delayed(), Delayed(length=3), Delayed(margin=3), Delayed(algorithm="most_recent")]
    recipes = [
        *(
            Recipe(name, *gemms)
            for name in ("a", "a fast;", "b")
            for gemms in itertools.product((high, rows), repeat=3)
        ),
        *(Recipe("a", dataclasses.replace(rows, fast_accum=True), rows, rows), Recipe("a", scaled, scaled, scaled)),
        *(
            Recipe("a", rows, rows, GemmSpec(ROW, QuantSpec(E5M2))),
            Recipe("a", rows, rows, GemmSpec(QuantSpec(E5M2), ROW)),
        ),
        *(Recipe("a", rows, rows, rows, attention=one) for one in attention),
        *(Recipe("a", scaled, scaled, scaled, delayed=one) for one in histories),
        Recipe("a", scaled, scaled, scaled, delayed=histories[0], attention=attention[0]),
        *VARIANTS.values(),
    ]
    assert len(set(recipes)) == len({recipe.text for recipe in recipes}) == len(recipes)
    assert all(get(recipe) == recipe for recipe in recipes)


def test_an_invalid_flag_is_refused_after_a_valid_one() -> None:
    """The recipes that a recipe function has cached, by arguments."""
    assert get("mxfp8", weight_2d=True) is get("mxfp8", weight_2d=True)
    for other in (1, 1.0, np.True_, "True"):
        with pytest.raises(ValueError, match="weight_2d is"):
            get("mxfp8", weight_2d=other)


def test_a_custom_recipe_is_used_unchanged_and_interned() -> None:
    def one_of_its_own() -> Recipe:
        return Recipe("mine", GemmSpec(ROW, ROW), GemmSpec(None, None), GemmSpec(None, None))

    assert get(one_of_its_own()) is get(one_of_its_own())
    assert get(one_of_its_own()) == one_of_its_own()


@pytest.mark.parametrize("name", RECIPES)
def test_a_name_is_a_function_of_the_package_and_of_get(name: str) -> None:
    assert getattr(quaver.recipes, name)() is get(name)


@pytest.mark.parametrize("wrong, right", [("mxpf8", "mxfp8"), ("tensorwize", "tensorwise"), ("row_wise", "rowwise")])
def test_a_misspelt_name_suggests_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"no recipe '{wrong}'; did you mean '{right}'"):
        get(wrong)


@pytest.mark.parametrize(
    "typed, right",
    [("FP8", "tensorwise"), ("float8", "tensorwise"), ("fp4", "nvfp4"), ("MXFP8", "mxfp8"), ("NVFP4()", "nvfp4")],
)
def test_a_name_in_other_case_or_of_another_library_suggests_ours(typed: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{right}'"):
        get(typed)


def test_a_name_with_options_is_accepted_wherever_a_recipe_is() -> None:
    assert get("delayed(history=16, margin=1)") is get("delayed", history=16, margin=1)
    assert get("delayed(history=16)", margin=1) is get("delayed", history=16, margin=1)
    for wrong in ("delayed(16)", "delayed(history=)", "delayed(history=16", "a b", "__import__('os')"):
        with pytest.raises(ValueError, match="NAME or NAME"):
            get(wrong)
    with pytest.raises(ValueError, match="gives history in its text and as an argument"):
        get("delayed(history=16)", history=8)
    with pytest.raises(ValueError, match=r"histroy.*did you mean 'history'"):
        get("delayed(histroy=16)")


def test_a_name_like_no_other_lists_all() -> None:
    with pytest.raises(ValueError, match="known: bf16, delayed") as error:
        get("zzz")
    assert all(name in str(error.value) for name in RECIPES)


@pytest.mark.parametrize("name", [n for n, f in RECIPES.items() if inspect.signature(f).parameters])
def test_a_misspelt_option_suggests_the_nearest(name: str) -> None:
    right = next(iter(inspect.signature(RECIPES[name]).parameters))
    with pytest.raises(ValueError, match=f"'{name}' has no option '{right}z'; did you mean '{right}'"):
        get(name, **{right + "z": True})


def test_an_option_for_a_recipe_without_options_is_refused() -> None:
    with pytest.raises(ValueError, match="it takes no options"):
        get("bf16", margin=1)


@pytest.mark.parametrize("label", VARIANTS)
def test_a_switch_takes_true_or_false_only(label: str) -> None:
    name = label.partition("(")[0]
    for option in inspect.signature(RECIPES[name]).parameters.values():
        if isinstance(option.default, bool):
            with pytest.raises(ValueError, match=f"{option.name} is 'false'; give True or False"):
                get(name, **{option.name: "false"})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"history": 0}, "history=1 or more"),
        ({"history": "16"}, "history of '16'"),
        ({"margin": 0.5}, "whole number"),
        ({"algorithm": "mean"}, "'max' or 'most_recent'"),
        ({"format": "e5m2"}, "'hybrid'"),
    ],
)
def test_a_wrong_value_says_what_to_give(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        get("delayed", **options)


def test_options_are_keyword_only() -> None:
    with pytest.raises(ValueError, match="by name: format"):
        quaver.recipes.tensorwise("e4m3")  # type: ignore[misc]


def test_a_built_recipe_takes_no_options_and_a_number_is_no_recipe() -> None:
    with pytest.raises(ValueError, match=r"already built; pass its options \['margin'\]"):
        get(get("delayed"), margin=1)
    with pytest.raises(ValueError, match=r"a name or a quaver\.Recipe, not 8"):
        get(8)  # type: ignore[arg-type]
