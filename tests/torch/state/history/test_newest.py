"""Test delayed scaling with kernels: the cast records its amax in the history, bit for bit like a separate launch."""

import copy
import math

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.torch.state.history import amax
from tests.close import assert_bitwise

RECIPE = recipes.delayed(history=3)
#: Factors for one element of an input or of a gradient, step by step.
OUTLIERS = [1.0, 1e-3, math.inf, math.nan, 0.0, 1e30, 1.0]


def trained(layer: qt.Linear, tokens: int = 20) -> list[Tensor]:
    """Train a few steps with values that a history must not record; return outputs, gradients and buffers."""
    tensors: list[Tensor] = []
    for step, outlier in enumerate(OUTLIERS):
        torch.manual_seed(step)
        x, g = torch.randn(tokens, layer.in_features), torch.randn(tokens, layer.out_features)
        x[:1, 0] *= outlier
        g[-1:, 1] *= outlier
        x.requires_grad_()
        with qt.autocast(recipe=RECIPE):
            layer(x).backward(g)
        tensors += [x.grad, *(b.clone() for b in layer.buffers())]  # type: ignore[list-item]
    return tensors


@pytest.mark.parametrize("tokens", [20, 0])
def test_histories_match_those_of_the_reference(tokens: int) -> None:
    layer = qt.Linear(24, 16)
    twin = copy.deepcopy(layer)
    with qt.only("triton"):
        ours = trained(layer, tokens)
    with qt.only("reference"):
        expected = trained(twin, tokens)
    for one, other in zip(ours, expected, strict=True):
        assert_bitwise(one, other)


def test_nothing_is_recorded_without_gradients_or_twice_by_recomputation() -> None:
    layer = qt.Linear(24, 16)
    with qt.only("triton"), qt.autocast(recipe=RECIPE):
        qt.checkpoint(layer, torch.randn(4, 24, requires_grad=True)).sum().backward()
        before = layer.get_buffer("history").clone()
        assert (before[0] > 0).all()
        with torch.no_grad():
            layer(torch.full((4, 24), 100.0))
        assert_bitwise(layer.get_buffer("history"), before)
        x = torch.full((4, 24), 7.0, requires_grad=True)
        y = qt.checkpoint(layer, x)
        seen = layer.get_buffer("history")[0, amax.INPUT].item()
        layer.get_buffer("history")[0, amax.INPUT] = 0.0
        y.sum().backward()
    assert seen == 7.0
    assert layer.get_buffer("history")[0, amax.INPUT] == 0.0, "the second forward of a checkpoint notes nothing"


@pytest.mark.parametrize("how", ["deepcopy", "new buffers", "moved memory"])
def test_a_moved_history_is_recorded_into_at_its_new_place(how: str) -> None:
    layer = qt.Linear(24, 16)
    with qt.only("triton"), qt.autocast(recipe=RECIPE):
        layer(torch.randn(4, 24))
        first = layer
        if how == "deepcopy":
            layer = copy.deepcopy(layer)
        elif how == "new buffers":
            layer.history = layer.get_buffer("history").clone()
        else:
            layer.get_buffer("history").data = layer.get_buffer("history").clone()
        before = first.get_buffer("history").clone()
        layer(torch.full((4, 24), 50.0))
    assert layer.get_buffer("history")[0, amax.INPUT] == 50.0
    if how == "deepcopy":
        assert_bitwise(first.get_buffer("history"), before)
