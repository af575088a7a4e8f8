"""Counters of saturated, flushed and non-finite values."""

from typing import Any

import pytest
import torch
from torch import nn

import quaver.torch as qt
from quaver import recipes
from quaver.inspection.counts import OperandCounts
from quaver.torch.state import observer

QUANTIZING = [name for name in recipes.RECIPES if name != "bf16"]


def model_with(recipe: Any, features: int = 32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(features, 16), nn.Identity())
    qt.convert(model, recipe)
    return model


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_each_operand_is_counted_under_its_name(recipe: str) -> None:
    model = model_with(recipe)
    x = torch.randn(8, 32, requires_grad=True)
    with qt.count(model) as counted:
        model(x).sum().backward()
    r = recipes.get(recipe)
    reuse = r.reuse
    expected = {"input": 8 * 32, "weight": 32 * 16, "grad_output": 8 * 16}
    if not reuse.weight:
        expected["weight.T"] = 32 * 16
    if r.wgrad.a is not None and not reuse.grad_output:
        expected["grad_output.T"] = 8 * 16
    if r.wgrad.b is not None and not reuse.input:
        expected["input.T"] = 8 * 32
    assert {operand: c.elements for operand, c in counted.table["0"].items()} == expected
    assert all(c.nonfinite == 0 for c in counted.table["0"].values())
    if not any(s is not None and s.two_level for s in r.operands().values()):
        assert all(c.saturated == 0 for c in counted.table["0"].values())


@pytest.mark.parametrize("power_of_two", [True, False])
def test_current_scaling_saturates_nothing(power_of_two: bool) -> None:
    layer = nn.Linear(32, 16)
    qt.convert(layer, recipes.tensorwise(power_of_two=power_of_two))
    with qt.count(layer) as counted:
        for seed in range(20):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
            layer(x).sum().backward()
    assert counted.table[""]["input"] == OperandCounts(elements=20 * 8 * 32)


def test_values_beyond_a_given_factor_are_counted_as_saturated() -> None:
    model = model_with("delayed")
    model(torch.full((8, 32), 1.75)).sum().backward()
    x = torch.full((8, 32), 1.75)
    x[0, :3] = torch.tensor([1.8, -100.0, 2.0])
    with qt.count(model) as counted:
        model(x)
    assert model[0].factor[0] == 256.0
    assert counted.table["0"]["input"] == OperandCounts(elements=256, saturated=3)


def test_values_too_small_for_their_scale_are_counted_as_flushed() -> None:
    model = model_with("tensorwise")
    x = torch.zeros(8, 32)
    x[0, 0] = 448.0
    # Half the smallest E4M3 subnormal rounds to zero (ties to even); larger values do not.
    x[1, :4] = torch.tensor([2.0**-10, -(2.0**-11), 2.0**-9, 2.0**-10 * 1.25])
    with qt.count(model) as counted:
        model(x)
    assert counted.table["0"]["input"] == OperandCounts(elements=256, flushed=2)


def test_infinities_and_nan_are_counted_once_each() -> None:
    model = model_with("rowwise")
    x = torch.ones(8, 32)
    x[0, 0], x[1, 1], x[1, 2] = float("inf"), float("nan"), float("-inf")
    with qt.count(model) as counted:
        model(x)
    assert counted.table["0"]["input"] == OperandCounts(elements=256, nonfinite=3)


def test_a_hadamard_neither_multiplies_infinities_nor_adds_elements() -> None:
    model = model_with("nvfp4")
    x = torch.ones(5, 32)
    x[0, 0] = float("inf")
    with qt.count(model) as counted:
        model(x).sum().backward()
    counts = counted.table["0"]["input.T"]
    assert (counts.elements, counts.nonfinite) == (5 * 32, 1)


def test_counts_add_up_over_steps_and_include_cached_weights() -> None:
    model = model_with("mxfp8")
    x = torch.randn(8, 32)
    model(x).sum().backward()
    with qt.count(model) as counted:
        for _ in range(3):
            model(x).sum().backward()
    assert counted.table["0"]["input"].elements == 3 * 256
    assert counted.table["0"]["weight"].elements == 512


def test_only_layers_of_the_model_are_counted_also_in_an_inner_count() -> None:
    model, other = model_with("mxfp8"), model_with("mxfp8")
    x = torch.randn(8, 32)
    with qt.count(model) as outer:
        other(x)
        assert not outer.table
        with qt.count(other) as inner:
            other(x)
            model(x)
        model(x)
    assert set(inner.table) == set(outer.table) == {"0"}
    assert outer.table["0"]["input"].elements == 2 * 256 and inner.table["0"]["input"].elements == 256


def test_an_error_inside_ends_the_counting() -> None:
    with pytest.raises(RuntimeError, match="mine"), qt.count(nn.Identity()):
        raise RuntimeError("mine")
    assert not observer.active.observers


def test_counting_changes_no_bits() -> None:
    model = model_with("tensorwise")
    x = torch.randn(8, 32)
    y = model(x)
    with qt.count(model):
        assert torch.equal(model(x), y)


def test_counters_are_shown_as_they_are_printed_and_in_a_notebook_as_a_table() -> None:
    model = nn.Sequential(qt.Linear(32, 32, recipe="mxfp8"))
    with qt.count(model) as counted:
        assert repr(counted) == str(counted) == "nothing was quantized while counting"
        assert counted._repr_html_() == f"<p>{counted}</p>"
        model(torch.randn(16, 32))
    assert repr(counted) == str(counted) and len(str(counted).splitlines()) == 4
    page = counted._repr_html_()
    assert page.count("<tr>") == 4 and "<th>saturated</th>" in page and ">512<" in page and ">1024<" in page
