"""What is decided about a layer, and what is reported: without any framework."""

import pytest

import quaver
from quaver.core.conversion import Choice, Report


def test_the_first_rule_that_fits_any_name_decides_and_skip_comes_first() -> None:
    choice = Choice({"*.up": "mxfp8", "tied": None, "*": "rowwise"}, ["head"])
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


def test_what_never_decided_is_unused() -> None:
    choice = Choice(quaver.Rules({"up": "mxfp8", "up*": "nvfp4"}), ["lm_head"])
    assert choice.decide(["up"], 8, 8)[1] == ""
    assert choice.decide(["down"], 8, 8) == (None, "no rule matches it")
    assert choice.unused == ["lm_head", "up*"]


def test_a_report_counts_gives_reasons_and_suggests_the_nearest_name() -> None:
    mxfp8 = quaver.recipes.mxfp8()
    report = Report({"a.up": mxfp8, "b.up": mxfp8}, {"a.head": "no rule matches it"}, ["*.hed"], {"Conv": 2}, "linear")
    assert str(report).splitlines() == [
        "converted 2 to mxfp8",
        "  left alone: a.head (no rule matches it)",
        "  not linear: 2 Conv",
        "  matched nothing: *.hed; did you mean 'head'?",
    ]


def test_skip_as_a_string_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"give a list of patterns: skip=\['head'\]"):
        Choice("mxfp8", "head")
