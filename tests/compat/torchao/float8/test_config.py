"""Each configuration of torchao's is six operands."""

import itertools

import pytest
import torch
from torchao.float8 import config as theirs

from quaver import recipes
from quaver.compat.torchao.float8 import config as ours
from quaver.compat.torchao.float8.config import CastConfig, Float8GemmConfig, Float8LinearConfig, recipe_of
from quaver.recipes.spec import GemmSpec

ROW = ours.ScalingGranularity.AXISWISE


def same_table(recipe, other):
    return recipe.operands() == other.operands()


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("tensorwise", recipes.tensorwise(power_of_two=False)),
        ("rowwise", recipes.rowwise()),
        ("rowwise_with_gw_hp", recipes.rowwise_bf16_wgrad()),
    ],
)
def test_torchao_recipes_map_to_our_recipes(name, recipe):
    assert same_table(recipe_of(Float8LinearConfig.from_recipe_name(name)), recipe)
    assert recipe_of(Float8LinearConfig.from_recipe_name(name)).fprop.fast_accum
    assert str(recipe_of(Float8LinearConfig.from_recipe_name(name))) == f"torchao.{name}"


def casts(module):
    """Of one operand: every kind of cast that there is, with and without a dtype."""
    kinds = itertools.product(module.ScalingGranularity, (None, torch.float8_e4m3fn, torch.float8_e5m2))
    yield from (module.CastConfig(scaling_granularity=g, target_dtype=d) for g, d in kinds)
    yield module.CastConfig(module.ScalingType.DISABLED)


def test_every_pair_of_casts_is_accepted_or_refused_as_by_torchao():
    """Of an input and a weight, for both GEMMs of each: 49 pairs by two roundings of scales."""
    for (i, input_cast), (w, weight_cast) in itertools.product(enumerate(casts(ours)), enumerate(casts(ours))):
        for power in (False, True):
            fields = {"cast_config_input": input_cast, "cast_config_weight": weight_cast}
            other = {"cast_config_input": [*casts(theirs)][i], "cast_config_weight": [*casts(theirs)][w]}
            if input_cast.scaling_type is ours.ScalingType.DISABLED:
                fields["cast_config_grad_output"] = input_cast
                other["cast_config_grad_output"] = [*casts(theirs)][i]
            try:
                theirs.Float8LinearConfig(**other, round_scales_to_power_of_2=power)
            except AssertionError:
                with pytest.raises(ValueError, match=r"cast both, or disable both"):
                    Float8LinearConfig(**fields, round_scales_to_power_of_2=power)
                continue
            recipe = recipe_of(Float8LinearConfig(**fields, round_scales_to_power_of_2=power))
            for operand, cast in ((recipe.fprop.a, input_cast), (recipe.fprop.b, weight_cast)):
                if cast.scaling_type is ours.ScalingType.DISABLED:
                    assert operand is None
                    continue
                assert operand.scale == ("power_of_two" if power else "fp32")
                assert operand.block == ((1, None) if cast.scaling_granularity is ROW else (None, None))
                assert operand.format.name == ("e5m2" if cast.target_dtype is torch.float8_e5m2 else "e4m3")
            assert (recipe.wgrad.b, recipe.dgrad.b) == (recipe.fprop.a, recipe.fprop.b)


def test_gemms_follow_the_configured_accumulation():
    slow = Float8LinearConfig(
        gemm_config_output=Float8GemmConfig(), gemm_config_grad_input=Float8GemmConfig(use_fast_accum=True)
    )
    recipe = recipe_of(slow)
    assert (recipe.fprop.fast_accum, recipe.dgrad.fast_accum, recipe.wgrad.fast_accum) == (False, True, False)


def test_one_cast_config_for_all_operands_stays_unchanged():
    """torchao writes a dtype into a cast that it is given, so that gradients become E4M3 with the inputs."""
    shared = CastConfig()
    recipe = recipe_of(
        Float8LinearConfig(cast_config_input=shared, cast_config_weight=shared, cast_config_grad_output=shared)
    )
    assert shared == CastConfig()
    assert recipe.dgrad.a.format.name == "e5m2"


def test_wgrad_alone_may_stay_in_high_precision():
    high = CastConfig(ours.ScalingType.DISABLED)
    config = Float8LinearConfig(cast_config_input_for_grad_weight=high, cast_config_grad_output_for_grad_weight=high)
    assert recipe_of(config).wgrad == GemmSpec(None, None)


def test_torchao_enums_are_accepted():
    cast = CastConfig(scaling_granularity=theirs.ScalingGranularity.AXISWISE)
    assert cast.scaling_granularity is ROW
    by_name = Float8LinearConfig.from_recipe_name(theirs.Float8LinearRecipeName.ROWWISE)
    assert by_name == Float8LinearConfig.from_recipe_name("rowwise")


def test_a_configuration_has_the_dtypes_that_torchaos_has():
    assert (ours.e4m3_dtype, ours.e5m2_dtype) == (theirs.e4m3_dtype, theirs.e5m2_dtype)
    for name in (None, *(name.value for name in theirs.Float8LinearRecipeName)):
        one, other = (
            module.Float8LinearConfig() if name is None else module.Float8LinearConfig.from_recipe_name(name)
            for module in (ours, theirs)
        )
        for field in (*ours.SECOND, *ours.SECOND.values()):
            assert getattr(one, field).short_str() == getattr(other, field).short_str(), (name, field)
            assert getattr(one, field).target_dtype is getattr(other, field).target_dtype


def test_layers_print_casts_as_torchao_does():
    kinds = [(c, d) for c, d in zip(casts(ours), casts(theirs), strict=True) if c.target_dtype is not None]
    assert [c.short_str() for c, _ in kinds] == [d.short_str() for _, d in kinds]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: CastConfig("static"), r"CastConfig.scaling_type is 'static'; give one of"),
        (lambda: CastConfig(ours.ScalingType.DISABLED, ROW), r"has no scales: leave scaling_granularity out"),
        (lambda: CastConfig(target_dtype=torch.float8_e4m3fnuz), r"AMD's fnuz formats are not supported"),
        (lambda: Float8LinearConfig.from_recipe_name("row_wise"), r"torchao has no recipe 'row_wise'; .*rowwise"),
        (
            lambda: Float8LinearConfig(cast_config_weight=CastConfig(ours.ScalingType.DISABLED)),
            r"gemm_config_output multiplies the operands of cast_config_input and cast_config_weight; cast both",
        ),
        (
            lambda: Float8LinearConfig(
                cast_config_input=CastConfig(target_dtype=torch.float8_e4m3fn),
                cast_config_input_for_grad_weight=CastConfig(target_dtype=torch.float8_e5m2),
            ),
            r"give both the same target_dtype",
        ),
        (
            lambda: Float8LinearConfig(
                cast_config_weight=CastConfig(scaling_granularity=ROW), enable_fsdp_float8_all_gather=True
            ),
            r"call quaver.torch.parallel.gather_quantized\(model\), which supports every recipe",
        ),
    ],
)
def test_invalid_arguments_give_a_clear_error(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_an_option_that_torchao_ignores_gives_a_warning():
    with pytest.warns(UserWarning, match="has no effect, as in torchao"):
        Float8LinearConfig(force_recompute_fp8_weight_in_bwd=True)
