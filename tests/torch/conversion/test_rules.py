"""Patterns, sizes and order of rules."""

import pytest

from quaver import ModuleRule, Recipe, Rules, recipes
from quaver.recipes.conversion import matches


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("lm_head", "model.lm_head2", False),
        ("lm_head", "xlm_head", False),
        ("*.k_proj", "layers.0.k_proj", True),
        ("*.k_proj", "k_proj", False),
        ("layers.[23]?.*", "model.layers.21.mlp.up", True),
        ("layers.[23]?.*", "model.layers.2.mlp.up", False),
        ("attn", "layers.0.attn.q", False),
        ("*", "", True),
        ("LM_HEAD", "lm_head", False),
    ],
)
def test_a_pattern_fits_the_full_name_or_a_suffix_after_a_dot(pattern: str, name: str, fits: bool) -> None:
    assert matches(pattern, name) is fits


def test_the_first_match_wins() -> None:
    rules = Rules({"*.k_proj": None, "layers.1.*": "bf16", "*": "nvfp4"})
    chosen = [rules.match(name, 8, 8) for name in ("layers.1.k_proj", "layers.1.q_proj", "layers.2.q_proj")]
    assert [rule.recipe for rule in chosen if rule] == [None, "bf16", "nvfp4"]


def test_sizes_are_bounds_on_both_features() -> None:
    rule = ModuleRule(recipe="mxfp8", min_in_features=64, min_out_features=32, multiple_of=16)
    assert rule.fits("a", 64, 32)
    assert not rule.fits("a", 48, 32)
    assert not rule.fits("a", 64, 16)
    assert not rule.fits("a", 72, 32)
    assert not rule.fits("a", 64, 40)
    assert str(rule) == "* (min_in_features=64, min_out_features=32, multiple_of=16)"
    assert Rules([rule]).match("a", 1, 1) is None


def test_rules_take_recipes_as_objects_too() -> None:
    built = recipes.delayed(margin=1)
    rule = Rules({"*": built}).match("a", 1, 1)
    assert rule is not None and isinstance(rule.recipe, Recipe) and rule.recipe is built


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Rules({}), "are empty; give at least one"),
        (lambda: Rules("mxfp8"), r"a dict of patterns, such as Rules\(\{'\*': 'mxfp8'\}\)"),
        (lambda: Rules([("*", "mxfp8")]), "an iterable of Rule, and got"),
        (lambda: Rules({"": "mxfp8"}), "pattern is a module name"),
        (lambda: Rules({3: "mxfp8"}), "pattern is a module name"),
        (
            lambda: ModuleRule(recipe=None, multiple_of=0),
            "multiple_of of the rule '\\*' is 0; give a whole number, 1 or more",
        ),
        (lambda: ModuleRule(recipe=None, min_in_features="64"), "min_in_features of the rule '\\*' is '64'"),
        (lambda: ModuleRule(recipe=None, min_out_features=-1), "min_out_features of the rule '\\*' is -1"),
    ],
)
def test_bad_rules_are_refused(make, sentence: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=sentence):
        make()
