"""Test conversion decisions and reports without a framework."""

from typing import Any

import pytest

import quaver
from quaver.recipes.conversion import ConversionReport, ConversionRules


def test_the_first_rule_that_fits_any_name_decides_and_skip_comes_first() -> None:
    choice = ConversionRules({"*.up": "mxfp8", "tied": None, "*": "rowwise"}, ["head"])
    decided = {
        names: choice.decide(names, 64, 64)
        for names in (("a.up",), ("a.down",), ("head",), ("x", "tied"), ("tied", "b.up"))
    }
    assert {names: rule and rule.recipe for names, (rule, _) in decided.items()} == {
        ("a.up",): "mxfp8",
        ("a.down",): "rowwise",
        ("head",): None,
        ("x", "tied"): None,
        ("tied", "b.up"): "mxfp8",
    }
    assert decided["head",][1] == "skip pattern 'head'"
    assert decided["x", "tied"][1] == "rule 'tied' leaves it untouched"
    assert choice.unused == []


def test_rules_that_never_decide_are_unused() -> None:
    choice = ConversionRules(quaver.Rules({"up": "mxfp8", "up*": "nvfp4"}), ["lm_head"])
    assert choice.decide(["up"], 8, 8)[1] == ""
    assert choice.decide(["down"], 8, 8) == (None, "no rule matches it")
    assert choice.unused == ["lm_head", "up*"]


def test_a_report_counts_gives_reasons_and_suggests_the_nearest_name() -> None:
    mxfp8 = quaver.recipes.mxfp8()
    report = ConversionReport(
        {"a.up": mxfp8, "b.up": mxfp8}, {"a.head": "no rule matches it"}, ["*.hed"], {"Conv": 2}, "linear"
    )
    assert str(report).splitlines() == [
        "converted 2 to mxfp8",
        "  left alone: a.head (no rule matches it)",
        "  not linear: 2 Conv",
        "  matched nothing: *.hed; did you mean 'head'?",
    ]


def test_a_report_has_the_share_of_parameters_read_by_gemms() -> None:
    report = ConversionReport({"up": quaver.recipes.mxfp8()}, converted_parameters=1000, chosen_parameters=500)
    assert str(report).splitlines()[1] == (
        "  of 1,500 parameters that GEMMs read 67%; 500 left alone by choice, 0 not reached"
    )
    assert report.share == 2 / 3 and not report.reaches_little
    report.unreached_parameters = 1001
    assert report.reaches_little and ConversionReport().share == 0 and not ConversionReport().reaches_little


def torchaos(module: object, fqn: str) -> bool:
    return fqn != "head"


@pytest.mark.parametrize("given", [torchaos, [torchaos], [lambda module, fqn: True], ["head", lambda name: ""]])
def test_a_filter_of_torchaos_signature_gives_a_clear_error(given: Any) -> None:
    with pytest.raises(ValueError, match=r"\(name, in_features, out_features, recipe\).*opposite sense"):
        ConversionRules("mxfp8", given)


def test_filters_of_any_other_shape_are_called() -> None:
    ConversionRules("mxfp8", [lambda *args: "", lambda name, i, o, recipe, more=1: "", max])


def test_skip_as_a_string_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"give a list of patterns: skip=\['head'\]"):
        ConversionRules("mxfp8", "head")
