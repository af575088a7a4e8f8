"""Test the single-launch roll of delayed scaling and recorded amaxes against `quaver.reference.operations`."""

import copy
import gc
import math
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.reference import operations
from quaver.torch.state.history import amax, roll
from quaver.torch.state.history import roll_gpu as gpu
from quaver.torch.state.layer_state import state_of
from tests.close import assert_bitwise
from tests.kernels.compare import DEVICE

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"history": 4},
    "long": {"history": 1024},
    "ragged": {"history": 37, "algorithm": "most_recent"},
    "margin": {"history": 4, "margin": 2},
    "negative margin": {"history": 3, "margin": -1},
    "of one step": {"history": 1},
    "of two steps": {"history": 2},
    "e4m3": {"history": 4, "format": "e4m3"},
    "any scale": {"history": 4, "power_of_two": False},
    "any scale with a margin": {"history": 4, "power_of_two": False, "margin": 3},
    "beyond all bounds": {"history": 2, "margin": 300},
    "beyond all bounds, any scale": {"history": 2, "power_of_two": False, "margin": -300},
}
EVERY = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def windows(length: int, rng: np.random.Generator) -> np.ndarray:
    """float32 [length, 3] over all magnitudes, with zeros and the largest and smallest amaxes."""
    values = (10.0 ** rng.uniform(-37.9, 38.4, (length, 3))).astype(np.float32)
    values[rng.random(values.shape) < 0.3] = 0
    special = np.float32([0, 2.0**-126, 3.4028235e38, 448, 57344, 1.0])
    return np.where(rng.random(values.shape) < 0.2, rng.choice(special, values.shape), values)


def rolled(window: np.ndarray, factor: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    assert recipe.delayed is not None
    window, factor = window.copy(), factor.copy()
    for i, spec in enumerate(recipe.history_specs):
        window[:, i], factor[i] = operations.roll(
            window[:, i], factor[i], recipe.delayed, spec.format, spec.power_of_two
        )
    return window, factor


def layers_of(recipe: Recipe, count: int = 3) -> list[qt.Linear]:
    return [qt.Linear(4, 4, recipe=recipe, device=DEVICE) for _ in range(count)]


@EVERY
def test_one_launch_rolls_every_layer_as_the_specification_does(options: dict[str, Any]) -> None:
    recipe, rng = recipes.delayed(**options), np.random.default_rng(0)
    assert recipe.delayed is not None
    layers = layers_of(recipe)
    for iteration in range(5):
        given = [
            (windows(recipe.delayed.length, rng), rng.choice([0.0, 1.0, 8.0], 3).astype(np.float32)) for _ in layers
        ]
        for layer, (window, factor) in zip(layers, given, strict=True):
            layer.history.copy_(torch.from_numpy(window))
            layer.factor.copy_(torch.from_numpy(factor))
        assert gpu.roll(layers, recipe.delayed, recipe.history_specs)
        stack = state_of(layers[0]).stacked[0]
        for i, (layer, (window, factor)) in enumerate(zip(layers, given, strict=True)):
            window, factor = rolled(window, factor, recipe)
            assert_bitwise(layer.history, window, f"history of layer {i}, iteration {iteration}")
            assert_bitwise(layer.factor, factor, f"factor of layer {i}, iteration {iteration}")
            assert_bitwise(stack.rolled[i], factor, f"copy for layer {i}, iteration {iteration}")


@pytest.mark.parametrize("top", [0.0, 1.0, 5.0, 3.4e38, 1e-42, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("before", [0.0, 2.0])
def test_nonfinite_amaxes_are_not_recorded(top: float, before: float) -> None:
    given = torch.full((4, 3), before, device=DEVICE)
    gpu.record_amax(given, 1, torch.tensor([[top]], device=DEVICE))
    expected = torch.full((4, 3), before)
    expected[0, 1] = max(before, top) if math.isfinite(top) else before
    assert_bitwise(given, expected)


@EVERY
@pytest.mark.filterwarnings("ignore:.*decoded operands:UserWarning")
def test_a_training_layer_has_the_same_state_as_on_the_plain_path(options: dict[str, Any]) -> None:
    recipe = recipes.delayed(**options)
    start = qt.Linear(8, 6, device=DEVICE).state_dict()
    by_path: dict[str, list[torch.Tensor]] = {}
    for name in ("triton", "reference"):
        torch.manual_seed(0)
        layer = qt.Linear(8, 6, device=DEVICE)
        layer.load_state_dict(start)
        states = by_path[name] = []
        for scale in [1.0, 1e-3, 40.0, 0.0, math.inf, 1.0]:
            x, g = torch.randn(4, 8, device=DEVICE), torch.randn(4, 6, device=DEVICE)
            x[0, 0] *= scale
            with qt.only(name), qt.autocast(recipe):
                layer(x).backward(g)
            states += [layer.history.clone(), layer.factor.clone()]
    for ours, plain in zip(*by_path.values(), strict=True):
        assert_bitwise(ours, plain)


def step(layers: list[qt.Linear]) -> None:
    with qt.only("triton"):
        for layer in layers:
            for column in range(3):
                amax.record(layer, column, torch.full((1, 1), 2.0, device=DEVICE))
        roll.roll(layers)


def moved(layer: qt.Linear, how: str) -> qt.Linear:
    """The layer after an operation that replaces or rewrites buffers."""
    if how == "deepcopy":
        return copy.deepcopy(layer)
    if how == "pickle":
        again: qt.Linear = pickle.loads(pickle.dumps(layer))
        return again
    if how == "to":
        return layer.to(torch.bfloat16)
    if how == "to_empty":
        return layer.to("meta").to_empty(device=DEVICE)
    if how == "new buffers":
        layer.history, layer.factor = layer.history.clone(), layer.factor.clone()
        return layer
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=how == "assign")
    return layer


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "to", "to_empty", "load", "assign", "new buffers"])
def test_buffers_that_move_are_found_again(how: str) -> None:
    recipe = recipes.delayed(history=3)
    layers = layers_of(recipe)
    step(layers)
    layers[1] = moved(layers[1], how)
    before, factor = layers[1].history.cpu().numpy().copy(), layers[1].factor.cpu().numpy().copy()
    before[0] = 2.0
    step(layers)
    window, factor = rolled(before, factor, recipe)
    assert_bitwise(layers[1].history, window)
    assert_bitwise(layers[1].factor, factor)
    assert layers[0].history[0].tolist() == [0.0] * 3 and layers[0].history[-1].tolist() == [2.0] * 3


def test_layers_of_different_rules_roll_together() -> None:
    rules = [recipes.delayed(history=3), recipes.delayed(history=5), recipes.delayed(history=3, margin=1)]
    layers = [layer for rule in rules for layer in layers_of(rule, 2)]
    step(layers)
    assert [layer.factor.tolist()[0] for layer in layers] == [128.0] * 4 + [64.0] * 2
    stacks = {id(state_of(layer).stacked[0]) for layer in layers}
    assert len(stacks) == 3


def test_returned_factors_do_not_change_with_later_rolls() -> None:
    layers = layers_of(recipes.delayed(history=2, algorithm="most_recent"))
    step(layers)
    stack, index = state_of(layers[1]).stacked
    seen = stack.snapshot(index, layers[1].factor)
    before = seen.clone()
    for column in range(3):
        layers[1].history[0, column] = 1e6
    with qt.only("triton"):
        roll.roll(layers)
    assert_bitwise(seen, before)
    assert not torch.equal(layers[1].factor, before)
    layers[1].factor.zero_()
    assert stack.snapshot(index, layers[1].factor) is None, "what torch writes is seen"


def test_a_stack_learns_set_factors_one_roll_later_and_forgets_them_on_a_write() -> None:
    layers = layers_of(recipes.delayed(history=2))
    stack = None
    for iteration in range(3):
        step(layers)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        stack, index = state_of(layers[1]).stacked
        assert stack.is_set(index, layers[1].factor) == [iteration > 0] * 3
    layers[1].factor.zero_()
    assert stack is not None and not any(stack.is_set(1, layers[1].factor))
    assert all(stack.is_set(0, layers[0].factor))


def test_whether_a_factor_is_set_is_read_directly_on_a_cpu() -> None:
    layer = qt.Linear(4, 4, recipe="delayed")
    assert not amax.is_set(0, amax.saved_factors(layer))
    layer.factor[1] = 2.0
    assert [amax.is_set(i, amax.saved_factors(layer)) for i in range(3)] == [False, True, False]
    assert not amax.is_set(0, amax.saved_factors(qt.Linear(4, 4)))


def test_a_roll_changes_the_version_of_a_factor() -> None:
    layers = layers_of(recipes.delayed(history=2))
    step(layers)
    before = layers[1].factor._version
    step(layers)
    assert layers[1].factor._version > before


def test_inputs_of_a_captured_roll_live_as_long_as_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_of(recipes.delayed(history=2))
    step(layers)
    stack = weakref.ref(state_of(layers[0]).stacked[0])
    with monkeypatch.context() as capturing:
        capturing.setattr(gpu.capture, "capturing", lambda _: True)
        for _ in range(3):
            step(layers)
    buffers = {id(stack) for layer in layers for stack in gpu._captured[layer]}
    assert buffers == {id(stack())}
    layers[1].factor = layers[1].factor.clone()
    step(layers)
    assert state_of(layers[0]).stacked[0] is not stack()
    gc.collect()
    assert stack() is not None, "a graph still reads its table"
    numbers = [id(layer) for layer in layers]
    last = layers.pop()
    layers.clear()
    gc.collect()
    assert stack() is not None, "one of its layers lives"
    del last
    gc.collect()
    assert stack() is None and not {id(layer) for layer in gpu._captured} & set(numbers)


@pytest.mark.gpu
def test_the_roll_is_captured_into_a_graph() -> None:
    layers, twins = layers_of(recipes.delayed(history=3)), layers_of(recipes.delayed(history=3))
    step(layers)
    step(twins)
    for layer in (*layers, *twins):
        layer.history[0] = 8.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        roll.roll(layers)
    for value in (8.0, 0.0, 16.0):
        for layer in (*layers, *twins):
            layer.history[0] = value
        graph.replay()
        roll.roll(twins)
        for one, other in zip(layers, twins, strict=True):
            assert_bitwise(one.history, other.history)
            assert_bitwise(one.factor, other.factor)
