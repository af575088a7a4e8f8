import pytest

import quaver.recipes
from quaver.reference.optimizer_state import PRESETS
from quaver.train import config
from quaver.train.config import RULES, TrainConfig, check_optimizer, find_optimizer


def test_every_rule_and_preset_has_a_name() -> None:
    assert find_optimizer("adamw").preset is None
    for rule in RULES:
        for preset in PRESETS:
            assert find_optimizer(f"{rule}-{preset}") == config.OptimizerChoice(rule, PRESETS[preset])
        if rule != "adamw":
            assert find_optimizer(rule) == config.OptimizerChoice(rule, PRESETS["float32"])
    for preset in PRESETS:
        assert find_optimizer(preset) == find_optimizer(f"adamw-{preset}")


@pytest.mark.parametrize("text", ["", "-", "lion-", "-lean", "lean-lion", "adamw-", "lion-lean-", "Lean", "x" * 500])
def test_another_text_gives_one_clear_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"optimizer .* is not known"):
        TrainConfig(optimizer=text)


def test_a_misspelt_optimizer_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="lion-lean"):
        find_optimizer("lion-laen")


@pytest.mark.parametrize("name", sorted(quaver.recipes.RECIPES))
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_weights_are_codes_where_the_preset_and_the_recipe_have_them(preset: str, name: str) -> None:
    recipe = quaver.recipes.get(name)
    chosen = find_optimizer(preset)
    spec = recipe.fprop.b
    codes = PRESETS[preset].weights == "codes" and recipe.quantizes
    if codes and (spec is None or spec.format.name not in ("e4m3", "e5m2")):
        with pytest.raises(ValueError, match=r"stores weights as eight-bit codes, and recipe .* take a recipe with"):
            check_optimizer(preset, recipe)
        return
    check_optimizer(preset, recipe)
    assert (chosen.weights(recipe, "bfloat16") == "codes") is codes
    assert chosen.others("float32") == "float32"
    assert (chosen.others("bfloat16") == "bfloat16") is (PRESETS[preset].weights != "float32")
