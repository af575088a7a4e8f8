"""Rules: patterns on names and sizes, the first match wins."""

from collections.abc import Callable

import pytest

from quaver.recipes.conversion import ModuleRule, Rules, matches

MATCHES = [
    ("*", "model.layers.0.mlp", True),
    ("lm_head", "lm_head", True),
    ("lm_head", "model.lm_head", True),
    ("lm_head", "model.lm_head.inner", False),
    ("lm_head", "xlm_head", False),
    ("*.k_proj", "model.layers.11.attn.k_proj", True),
    ("*.k_proj", "k_proj", False),
    ("layers.[23]?.*", "model.layers.25.mlp.up", True),
    ("layers.[23]?.*", "model.layers.5.mlp.up", False),
    ("layers.[23]?.*", "model.sublayers.25.mlp", False),
    ("K_proj", "k_proj", False),
    ("*", "", True),
]


@pytest.mark.parametrize("pattern, name, expected", MATCHES)
def test_a_pattern_fits_the_name_or_a_suffix_of_it_after_a_dot(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) == expected


def test_the_first_match_wins() -> None:
    rules = Rules({"*.k_proj": None, "layers.0.*": "bf16", "*": "nvfp4"})

    def recipe(name: str) -> object:
        rule = rules.match(name, 64, 64)
        assert rule is not None
        return rule.recipe

    assert recipe("model.layers.0.attn.k_proj") is None
    assert recipe("model.layers.0.attn.v_proj") == "bf16"
    assert recipe("model.layers.1.attn.v_proj") == "nvfp4"


def test_no_match_returns_none() -> None:
    assert Rules({"*.mlp": "mxfp8"}).match("model.attn", 64, 64) is None


@pytest.mark.parametrize(
    "sizes, in_features, out_features, expected",
    [
        ({"min_in_features": 64}, 64, 1, True),
        ({"min_in_features": 64}, 63, 99, False),
        ({"min_out_features": 64}, 99, 63, False),
        ({"min_out_features": 64}, 1, 64, True),
        ({"multiple_of": 16}, 32, 48, True),
        ({"multiple_of": 16}, 32, 40, False),
        ({"multiple_of": 16}, 40, 32, False),
    ],
)
def test_sizes_must_fit_too(sizes: dict[str, int], in_features: int, out_features: int, expected: bool) -> None:
    rule = ModuleRule(recipe="mxfp8", **sizes)  # type: ignore[arg-type]
    assert rule.fits("any.name", in_features, out_features) == expected
    assert (Rules([rule]).match("any.name", in_features, out_features) is rule) == expected


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Rules({}), "empty"),
    (lambda: Rules([]), "empty"),
    (lambda: Rules(["*"]), "iterable of Rule"),  # type: ignore[list-item]
    (lambda: ModuleRule(pattern="", recipe=None), "pattern"),
    (lambda: Rules({3: "mxfp8"}), "pattern"),  # type: ignore[dict-item]
    (lambda: ModuleRule(recipe="mxfp8", multiple_of=0), "multiple_of"),
]


@pytest.mark.parametrize("build, word", REFUSED, ids=[word for _, word in REFUSED])
def test_invalid_arguments_are_refused(build: Callable[[], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        build()
