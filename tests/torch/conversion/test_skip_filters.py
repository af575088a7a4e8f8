"""`convert(..., skip=)` takes filters, alone or among names, and its report gives their reasons."""

import pytest
from torch import nn

import quaver
import quaver.torch as qt


def model() -> nn.Module:
    """Layers that are predicted to gain and to lose on an H100, without memory for their weights."""
    layers = {"up": (4096, 8192), "down": (8192, 4096), "small": (64, 64), "head": (4096, 4096)}
    return nn.ModuleDict({name: nn.Linear(k, n, device="meta") for name, (k, n) in layers.items()})


def test_the_filter_skips_slower_layers_and_reports_the_prediction() -> None:
    report = qt.convert(model(), "rowwise", skip=quaver.rules.unprofitable("h100"))
    assert set(report.converted) == {"up", "down", "head"}
    assert report.skipped["small"].startswith("predicted 0.") and "rowwise on h100" in report.skipped["small"]
    assert "left alone: small (predicted 0." in str(report) and report.unused == []


def test_names_and_filters_mix() -> None:
    skip = ["head", quaver.rules.auto_filter_small_kn("tensorwise")]
    report = qt.convert(model(), "tensorwise", skip=skip)
    assert set(report.converted) == {"up", "down"}
    assert report.skipped["head"] == "skip pattern 'head'" and "torchao" in report.skipped["small"]


def test_a_filter_sees_the_recipe_that_the_rules_give() -> None:
    seen = {}

    def note(name: str, k: int, n: int, recipe: quaver.Recipe) -> str:
        seen[name] = (k, n, recipe.name)
        return ""

    qt.convert(model(), {"head": None, "small": "mxfp8", "*": "rowwise"}, skip=note)
    assert seen == {"up": (4096, 8192, "rowwise"), "down": (8192, 4096, "rowwise"), "small": (64, 64, "mxfp8")}


def test_a_filter_that_leaves_everything_warns() -> None:
    with pytest.warns(UserWarning, match="convert changed nothing"):
        qt.convert(model(), "rowwise", skip=quaver.rules.unprofitable("h100", least=9))


def test_attention_is_not_a_filters_business() -> None:
    attention = qt.DotProductAttention(4, 16)
    block = nn.ModuleDict({"attention": attention, "small": nn.Linear(16, 16)})
    report = qt.convert(block, quaver.recipes.tensorwise(attention=True), skip=quaver.rules.unprofitable("h100"))
    assert set(report.attention) == {"attention"} and not report.converted
