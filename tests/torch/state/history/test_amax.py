"""Delayed scaling in a layer, step by step, against the pure functions of `quaver.reference.operations`."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.reference import operations
from quaver.torch.linear.linear import Linear
from quaver.torch.state.history import roll as rolling
from tests.close import assert_bitwise, assert_close
from tests.torch.linear.composition import compose

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"history": 4},
    "margin": {"history": 4, "margin": 2},
    "negative margin": {"history": 3, "margin": -1},
    "most recent": {"history": 4, "algorithm": "most_recent"},
    "of one step": {"history": 1},
    "of two steps": {"history": 2},
    "e4m3": {"history": 4, "format": "e4m3"},
    "any scale": {"history": 4, "power_of_two": False},
    "any scale with a margin": {"history": 4, "power_of_two": False, "margin": 3},
}
EVERY = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@dataclass
class Mirror:
    """The expected buffers of a layer."""

    recipe: Recipe
    history: np.ndarray = field(init=False)
    factor: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        assert self.recipe.delayed is not None
        self.history = np.zeros((self.recipe.delayed.length, 3), np.float32)
        self.factor = np.zeros(3, np.float32)

    def roll(self) -> None:
        assert self.recipe.delayed is not None
        for i, spec in enumerate(self.recipe.history_specs):
            self.history[:, i], self.factor[i] = operations.roll(
                self.history[:, i], self.factor[i], self.recipe.delayed, spec.format, spec.power_of_two
            )

    def record(self, column: int, x: Tensor) -> None:
        with np.errstate(invalid="ignore"):
            self.history[:, column] = operations.record(self.history[:, column], float(x.detach().abs().max()))

    def check(self, layer: nn.Module, what: str = "") -> None:
        assert_bitwise(layer.history, self.history, f"{what} history")
        assert_bitwise(layer.factor, self.factor, f"{what} factor")


def step(layer: Linear, recipe: Recipe, x: Tensor, g: Tensor) -> Tensor:
    with qt.autocast(recipe):
        y: Tensor = layer(x)
    y.backward(g)
    return y


@EVERY
@pytest.mark.parametrize("implementation", ["", "reference"])
def test_histories_and_factors_follow_the_specification(options: dict[str, Any], implementation: str) -> None:
    recipe = recipes.delayed(**options)
    layer, mirror = qt.Linear(8, 6), Mirror(recipe)
    scales = [1.0, 1e-3, 40.0, 0.0, math.inf, 3e30, 1e-30, math.nan, 1e-42, 2.0, 448.0, 1.0, 1.0, 1.0, 1.0]
    for i, scale in enumerate(scales):
        x = torch.randn(4, 8, requires_grad=True)
        g = torch.randn(4, 6)
        with torch.no_grad():
            x[0, 0] *= scale
            x[1:] *= min(scale, 1.0) if math.isfinite(scale) else 1.0
            g *= scales[-i]
            layer.weight.mul_(1.3)
        mirror.roll()
        before = tuple(mirror.factor.tolist())
        if implementation:
            with qt.only(implementation):
                y = step(layer, recipe, x, g)
        else:
            y = step(layer, recipe, x, g)
        for column, t in enumerate((x, layer.weight, g)):
            mirror.record(column, torch.where(t.abs() < 2.0**-126, 0.0, t))
        mirror.check(layer, f"step {i}")
        expected = compose(layer, recipe, x, g, factors=before)
        assert_close(f"output of step {i}", y, expected.output, 1e-6)
        assert_close(f"grad_input of step {i}", x.grad, expected.grad_input, 1e-6)
        assert_close(f"grad_weight of step {i}", layer.weight.grad, expected.grad_weight, 1e-6)
        layer.zero_grad()


@EVERY
@pytest.mark.parametrize("margin", [None, 200, -200])
def test_several_layers_roll_as_the_reference_does(options: dict[str, Any], margin: int | None) -> None:
    recipe = recipes.delayed(**options | ({} if margin is None else {"margin": margin}))
    assert recipe.delayed is not None
    rng = np.random.default_rng(0)
    layers, mirrors = [qt.Linear(4, 4, recipe=recipe) for _ in range(3)], [Mirror(recipe) for _ in range(3)]
    for _ in range(15):
        for layer, mirror in zip(layers, mirrors, strict=True):
            window = (10.0 ** rng.uniform(-37.9, 38.4, (recipe.delayed.length, 3))).astype(np.float32)
            window[rng.random(window.shape) < 0.3] = 0
            mirror.history, mirror.factor = window, rng.choice([0.0, 1.0, 8.0], 3).astype(np.float32)
            layer.history.copy_(torch.from_numpy(window))
            layer.factor.copy_(torch.from_numpy(mirror.factor))
            mirror.roll()
        rolling.roll(layers)
        for layer, mirror in zip(layers, mirrors, strict=True):
            mirror.check(layer)


def test_an_unset_factor_uses_the_tensors_own_amax() -> None:
    delayed, current = qt.Linear(8, 6), qt.Linear(8, 6)
    current.load_state_dict(delayed.state_dict())
    x, g = torch.randn(4, 8) * 1e-6, torch.randn(4, 6) * 1e-6
    y = step(delayed, recipes.delayed(), x, g)
    assert delayed.factor.tolist() == [0.0, 0.0, 0.0]
    assert_bitwise(y, step(current, recipes.tensorwise(), x, g))
    assert_bitwise(delayed.weight.grad, current.weight.grad)


def test_a_step_of_zeros_changes_nothing() -> None:
    layer, recipe = qt.Linear(8, 6), recipes.delayed(history=3)
    step(layer, recipe, torch.randn(4, 8), torch.randn(4, 6))
    with torch.no_grad():
        layer.weight.zero_()
    step(layer, recipe, torch.zeros(4, 8), torch.zeros(4, 6))
    before = layer.history.clone(), layer.factor.clone()
    assert before[1].all()
    for _ in range(3):
        step(layer, recipe, torch.zeros(4, 8), torch.zeros(4, 6))
    assert_bitwise(layer.history, before[0])
    assert_bitwise(layer.factor, before[1])


def test_zero_tokens_record_nothing_but_the_weight() -> None:
    layer = qt.Linear(8, 6)
    step(layer, recipes.delayed(history=3), torch.randn(0, 8), torch.randn(0, 6))
    assert layer.history[0].tolist() == [0.0, layer.weight.abs().max().item(), 0.0]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_overflow_does_not_freeze_a_scale(value: float) -> None:
    layer, recipe = qt.Linear(8, 6), recipes.delayed(history=8)
    x, g = torch.randn(4, 8), torch.randn(4, 6)
    step(layer, recipe, x, g)
    rolling.roll_all()
    before = layer.factor.clone()
    bad_x, bad_g = x.clone(), g.clone()
    bad_x[0, 0] = bad_g[0, 0] = value
    y = step(layer, recipe, bad_x, bad_g)
    assert y[0].isnan().all() and layer.weight.grad is not None and layer.weight.grad.isnan().any()
    assert layer.history[0, 0] == 0 and layer.history[0, 2] == 0
    step(layer, recipe, x, g)
    assert_bitwise(layer.factor, before)
    assert layer.history.isfinite().all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_neither_record_nor_roll(mode: type) -> None:
    layer, recipe = qt.Linear(8, 6), recipes.delayed(history=4)
    step(layer, recipe, torch.randn(4, 8), torch.randn(4, 6))
    before = layer.history.clone(), layer.factor.clone()
    assert before[0][0].all()
    with mode(), qt.autocast(recipe):
        layer(torch.randn(4, 8) * 1e4)
    with qt.autocast(enabled=False):
        layer(torch.randn(4, 8) * 1e4)
    assert_bitwise(layer.history, before[0])
    assert_bitwise(layer.factor, before[1])


def test_a_nested_autocast_does_not_roll() -> None:
    layer, recipe = qt.Linear(8, 6), recipes.delayed(history=4)
    step(layer, recipe, torch.randn(4, 8), torch.randn(4, 6))
    with qt.autocast(recipe):
        after = layer.history.clone()
        layer(torch.randn(4, 8))
        recorded = layer.history.clone()
        with qt.autocast(recipe), qt.autocast("mxfp8"):
            assert_bitwise(layer.history, recorded)
    assert not after[0].any() and recorded[0, :2].all()


def test_two_calls_in_a_step_record_the_maximum_of_both() -> None:
    layer = qt.Linear(8, 6)
    x, g = torch.randn(2, 4, 8), torch.randn(2, 4, 6)
    with qt.autocast(recipes.delayed(history=4)):
        outputs = [layer(one) for one in x]
    for y, one in zip(outputs, g, strict=True):
        y.backward(one)
    assert layer.history[0].tolist() == [t.abs().max().item() for t in (x, layer.weight, g)]


@pytest.mark.parametrize("calls", [1, 3])
def test_an_unchanged_weight_is_still_recorded(calls: int) -> None:
    """Otherwise a cached or frozen weight would drop out of its amax window."""
    layer, recipe = qt.Linear(8, 6), recipes.delayed(history=2)
    layer.weight.requires_grad_(False)
    for _ in range(5):
        with qt.autocast(recipe):
            for _ in range(calls):
                layer(torch.randn(4, 8, requires_grad=True)).sum().backward()
        assert layer.history[0, 1] == layer.weight.abs().max()


def test_backward_uses_the_factor_its_forward_saw() -> None:
    layer, recipe = qt.Linear(8, 6), recipes.delayed(history=2, algorithm="most_recent")
    x, g = torch.randn(4, 8), torch.randn(4, 6)
    step(layer, recipe, x, g)
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    with qt.autocast(recipe):
        saw = tuple(layer.factor.tolist())
        y = layer(leaf)
    layer.history[0] = torch.tensor([1e6, 1e6, 1e6])
    rolling.roll_all()
    now = layer.factor.tolist()
    assert all(0 < a < b for a, b in zip(now, saw, strict=True))
    y.backward(g)
    expected = compose(layer, recipe, x, g, factors=saw)
    assert_close("grad_input", leaf.grad, expected.grad_input, 1e-6)
    assert_close("grad_weight", layer.weight.grad, expected.grad_weight, 1e-6)


def test_factors_of_another_format_are_not_used() -> None:
    """E5M2's factor would saturate E4M3 a hundredfold."""
    layer = qt.Linear(8, 6)
    x, g = torch.randn(4, 8), torch.randn(4, 6)
    for _ in range(2):
        step(layer, recipes.delayed(history=4), x, g)
    layer.zero_grad()
    e4m3 = recipes.delayed(history=4, format="e4m3")
    step(layer, e4m3, x, g)
    assert_close("grad_weight", layer.weight.grad, compose(layer, e4m3, x, g).grad_weight, 1e-6)
    step(layer, e4m3, x, g)
    assert layer.factor[2] == 2.0 ** math.floor(math.log2(448 / g.abs().max()))


def test_another_history_length_restarts_with_a_warning() -> None:
    layer = qt.Linear(8, 6)
    step(layer, recipes.delayed(history=4), torch.randn(4, 8), torch.randn(4, 6))
    with pytest.warns(UserWarning, match="history of 4 steps is replaced by an empty one of 6"):
        step(layer, recipes.delayed(history=6), torch.randn(4, 8), torch.randn(4, 6))
    assert layer.history.shape == (6, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_history_and_factor_are_float32_for_any_default_dtype(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        layer = qt.Linear(32, 16, dtype=torch.float32)
        for _ in range(2):
            with qt.autocast("delayed"):
                y = layer(torch.randn(4, 32, dtype=torch.float32))
            y.sum().backward()
    finally:
        torch.set_default_dtype(before)
    assert layer.history.dtype is layer.factor.dtype is torch.float32
    assert (layer.factor != 0).all()
