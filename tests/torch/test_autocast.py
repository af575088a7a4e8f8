"""Which recipe a layer runs under."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.autocast import recipe_in_force
from tests.close import assert_bitwise


@pytest.fixture
def layer() -> qt.Linear:
    return qt.Linear(32, 16)


X = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)


def under(name: str, layer: nn.Linear) -> Tensor:
    own = qt.Linear(32, 16, recipe=name)
    own.load_state_dict(layer.state_dict(), strict=False)
    return own(X)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_name_and_its_recipe_are_the_same(name: str, layer: qt.Linear) -> None:
    for given in (name, recipes.get(name)):
        with qt.autocast(given):
            assert recipe_in_force(None) is recipes.get(name)
            assert_bitwise(layer(X), under(name, layer))
    assert recipe_in_force(None) is None


def test_outside_of_any_it_is_high_precision(layer: qt.Linear) -> None:
    assert_bitwise(layer(X), nn.functional.linear(X, layer.weight, layer.bias))


def test_the_innermost_wins_and_the_outer_comes_back(layer: qt.Linear) -> None:
    with qt.autocast("tensorwise"):
        with qt.autocast("mxfp8"):
            assert_bitwise(layer(X), under("mxfp8", layer))
        assert_bitwise(layer(X), under("tensorwise", layer))


def test_a_layers_own_recipe_beats_autocast(layer: qt.Linear) -> None:
    layer.recipe = recipes.mxfp8()
    with qt.autocast("tensorwise"):
        assert_bitwise(layer(X), under("mxfp8", layer))


def test_enabled_false_switches_all_off_until_an_inner_one(layer: qt.Linear) -> None:
    layer.recipe = recipes.mxfp8()
    with qt.autocast(enabled=False):
        assert_bitwise(layer(X), nn.functional.linear(X, layer.weight, layer.bias))
        with qt.autocast("tensorwise"):
            assert_bitwise(layer(X), under("mxfp8", layer))


def test_it_is_left_when_an_error_passes_through() -> None:
    with pytest.raises(KeyError), qt.autocast("mxfp8"):
        raise KeyError
    assert recipe_in_force(None) is None


def test_one_object_may_be_entered_again_and_inside_itself() -> None:
    one = qt.autocast("mxfp8")
    for _ in range(2):
        with one, one:
            assert recipe_in_force(None) is recipes.mxfp8()
        assert recipe_in_force(None) is None


def test_it_decorates_functions_also_in_several_threads() -> None:
    meeting = threading.Barrier(3, timeout=20)

    @qt.autocast("mxfp8")
    def inside() -> bool:
        meeting.wait()
        found = recipe_in_force(None) is recipes.mxfp8()
        meeting.wait()
        return found

    def call(_: int) -> bool:
        return inside() and recipe_in_force(None) is None

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(call, range(3))) == [True] * 3


def test_other_threads_do_not_see_it() -> None:
    with qt.autocast("mxfp8"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(recipe_in_force, None).result() is None


def test_backward_uses_what_forward_used(layer: qt.Linear) -> None:
    grads = []
    for other in ("mxfp8", "tensorwise"):
        layer.zero_grad()
        with qt.autocast("mxfp8"):
            y = layer(X)
        with qt.autocast(other):
            y.backward(torch.ones_like(y))
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad)
    assert_bitwise(*grads)


def test_wrong_arguments_are_sentences() -> None:
    with pytest.raises(ValueError, match="needs a recipe"):
        qt.autocast()
    with pytest.raises(ValueError, match="did you mean 'mxfp8'"):
        qt.autocast("mxpf8")
