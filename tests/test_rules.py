"""Filters for `skip=`: which layers they skip, and why."""

import pytest

import quaver
from quaver.costs import ledger
from quaver.recipes import RECIPES, get
from quaver.recipes.conversion import ConversionRules


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sizes", [(64, 64), (4096, 1024), (4096, 14_336)])
def test_unprofitable_skips_layers_predicted_to_be_slower(name: str, sizes: tuple[int, int]) -> None:
    gain = ledger.layer(get(name), 512, *sizes, "h100").speedup
    why = quaver.rules.unprofitable("h100", tokens=512)("a.b", *sizes, get(name))
    assert bool(why) is (gain < 1)
    if why:
        assert f"predicted {gain:.2f} of bf16's speed as {name} on h100 with 512 tokens" in why


def test_least_and_recipe_decide_where_they_are_given() -> None:
    rowwise = get("rowwise")
    assert not quaver.rules.unprofitable("h100")("a", 4096, 4096, rowwise)
    assert "less than 1.5" in quaver.rules.unprofitable("h100", least=1.5)("a", 4096, 4096, rowwise)
    assert "as mxfp8" in quaver.rules.unprofitable("h100", recipe="mxfp8")("a", 4096, 4096, rowwise)


def test_unquantized_layers_are_never_unprofitable() -> None:
    assert not quaver.rules.unprofitable("h100", least=3)("a", 8, 8, get("bf16"))
    assert not quaver.rules.unprofitable("h100")("a", 0, 8, get("mxfp8"))


#: torchao's `_auto_filter_for_recipe`: (K, N) and whether it leaves the layer alone.
SMALL = [
    ("tensorwise", 4096, 1024, True),
    ("tensorwise", 4112, 1024, False),
    ("tensorwise", 4096, 1040, False),
    ("rowwise", 8192, 2048, True),
    ("rowwise", 8192, 2064, False),
    ("rowwise", 1024, 8192, True),
    ("rowwise", 1040, 8192, False),
    ("rowwise", 2048, 4096, True),
    ("rowwise", 2048, 4112, False),
    ("rowwise", 2064, 4096, False),
    ("rowwise", 8200, 8192, True),
    ("tensorwise", 8192, 8200, True),
]


@pytest.mark.parametrize(("recipe", "k", "n", "left"), SMALL)
def test_torchaos_thresholds(recipe: str, k: int, n: int, left: bool) -> None:
    why = quaver.rules.auto_filter_small_kn(recipe)("a", k, n, get(recipe))
    assert bool(why) is left
    assert not left or f"K={k}, N={n}" in why


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: quaver.rules.unprofitable("h10"), "did you mean 'h100'"),
        (lambda: quaver.rules.unprofitable("h100", tokens=0), "tokens is 0; give how many tokens"),
        (lambda: quaver.rules.unprofitable("h100", tokens="8k"), "tokens is '8k'"),
        (lambda: quaver.rules.unprofitable("h100", least=0), "least is 0; give the speed-up"),
        (lambda: quaver.rules.unprofitable("h100", recipe="rowise"), "did you mean 'rowwise'"),
        (lambda: quaver.rules.auto_filter_small_kn("rowise"), "did you mean 'rowwise'"),
        (lambda: quaver.rules.auto_filter_small_kn("mxfp8"), "unprofitable takes every recipe"),
        (lambda: quaver.rules.auto_filter_small_kn(None), "no thresholds for None"),
    ],
)
def test_bad_input_gives_a_clear_error(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_skip_takes_names_and_filters_mixed_or_one_filter() -> None:
    mxfp8 = get("mxfp8")
    unprofitable = quaver.rules.unprofitable("h100")
    mixed = ConversionRules("mxfp8", ["head", unprofitable, lambda name, k, n, recipe: "odd" if k % 2 else ""])
    assert mixed.decide(["head"], 8, 8)[1] == "skip pattern 'head'"
    assert mixed.refused("a", 8, 8, mxfp8).startswith("predicted")
    assert mixed.unused == ["*"]
    alone = ConversionRules("mxfp8", unprofitable)
    assert alone.refused("a", 8, 8, mxfp8) and not alone.skip
    second = ConversionRules("mxfp8", [lambda *_: "", lambda *_: "second"])
    assert second.refused("a", 8, 8, mxfp8) == "second"
    assert ConversionRules("mxfp8", ()).refused("a", 8, 8, mxfp8) == ""


@pytest.mark.parametrize("entry", [3, None, ["head"], str])
def test_an_invalid_skip_gives_a_clear_error(entry: object) -> None:
    with pytest.raises(ValueError, match=r"skip holds .*give patterns of names"):
        ConversionRules("mxfp8", ["head", entry])  # type: ignore[list-item]


def test_a_filter_without_a_reason_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match="returned True for 'a'; it must return the reason"):
        ConversionRules("mxfp8", lambda *_: True).refused("a", 8, 8, get("mxfp8"))  # type: ignore[arg-type, return-value]


def test_experts_are_judged_by_the_grouped_gemms_of_the_gpu() -> None:
    skip = quaver.rules.unprofitable("h200", tokens=16_384)
    mxfp8, rowwise = quaver.recipes.get("mxfp8"), quaver.recipes.get("rowwise")
    assert "less than 1" in skip("experts", 4096, 14_336, mxfp8, experts=8)  # type: ignore[call-arg]
    assert skip("experts", 4096, 14_336, rowwise, experts=8) == ""  # type: ignore[call-arg]
    few = quaver.rules.unprofitable("h200", tokens=256)
    assert few("experts", 4096, 14_336, rowwise, experts=64), "all weights are quantized for few tokens"  # type: ignore[call-arg]
