"""Which recipe a layer runs under."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.state.context import active_context, recipe_in_force
from tests.close import assert_bitwise


@pytest.fixture
def layer() -> qt.Linear:
    return qt.Linear(32, 16)


@pytest.fixture(autouse=True)
def _no_layer_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the thread's record of layers run and compiled by other tests, which suppresses warnings."""
    for name in ("compiled", "ever_ran_layer", "layer_ran"):
        monkeypatch.setattr(active_context, name, False)


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
        in_force = recipe_in_force(None) is recipes.mxfp8()
        meeting.wait()
        return in_force

    def call(_: int) -> bool:
        return inside() and recipe_in_force(None) is None

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(call, range(3))) == [True] * 3


def test_other_threads_do_not_see_it() -> None:
    with qt.autocast("mxfp8"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(recipe_in_force, None).result() is None


def test_backward_uses_the_recipe_of_forward(layer: qt.Linear) -> None:
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


def test_wrong_arguments_give_clear_errors() -> None:
    with pytest.raises(ValueError, match="needs a recipe"):
        qt.autocast()
    with pytest.raises(ValueError, match="did you mean 'mxfp8'"):
        qt.autocast("mxpf8")


# Autocasts in which no layer ran.

PLAIN = nn.Linear(32, 16)


def under_one_autocast(
    recipe: str | None, *calls: Callable[[Tensor], object], enabled: bool = True
) -> Callable[[], None]:
    def body() -> None:
        with qt.autocast(recipe, enabled=enabled):
            for call in calls:
                call(X)

    return body


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_an_autocast_around_a_forward_without_quantizable_layers_warns(mode: type) -> None:
    with (
        mode(),
        pytest.warns(UserWarning, match=r"inside autocast\(mxfp8\).*quaver.torch.convert\(model, recipe\)") as seen,
    ):
        under_one_autocast("mxfp8", PLAIN)()
    assert len(seen) == 1 and seen[0].filename == __file__
    qt.autocast("bf16")(PLAIN)(X)
    with mode(), pytest.warns(UserWarning, match="tensorwise"):
        qt.autocast("tensorwise")(PLAIN)(X)


def outer_and_inner(x: Tensor) -> None:
    with qt.autocast("tensorwise"):
        PLAIN(x)


def switched_off(x: Tensor) -> None:
    with qt.autocast(enabled=False):
        qt.Linear(32, 16)(x)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize(
    "body",
    [
        under_one_autocast("mxfp8", PLAIN, qt.Linear(32, 16)),
        under_one_autocast("mxfp8", PLAIN, qt.Linear(32, 16, recipe="rowwise")),
        under_one_autocast("mxfp8", outer_and_inner, qt.Linear(32, 16)),
        under_one_autocast("mxfp8", switched_off),
        under_one_autocast(None, PLAIN, outer_and_inner, enabled=False),
        under_one_autocast("bf16", PLAIN),
        under_one_autocast("mxfp8", lambda x: qt.explain(qt.Linear(32, 16), x)),
        under_one_autocast(
            "mxfp8", lambda x: qt.grouped_matmul(x, torch.randn(1, 16, 32), torch.tensor([64], dtype=torch.int32))
        ),
    ],
    ids=["layer", "own recipe", "nested", "switched off inside", "switched off", "bf16", "explain", "function"],
)
def test_it_warns_of_nothing_else(body: Callable[[], None], mode: type) -> None:
    with mode():
        body()


def test_a_body_that_runs_nothing_or_fails_does_not_warn() -> None:
    under_one_autocast("mxfp8")()
    y = PLAIN(X)
    under_one_autocast("mxfp8", lambda _: y.backward(torch.ones_like(y)))()
    with pytest.raises(KeyError), qt.autocast("mxfp8"):
        PLAIN(X)
        raise KeyError


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_empty_body_without_gradients_does_not_warn_where_a_layer_has_run(mode: type, layer: qt.Linear) -> None:
    """Validation over an empty data set, after training or after another validation."""
    for forward in (torch.enable_grad, mode):
        active_context.ever_ran_layer = active_context.layer_ran = False
        with forward():
            under_one_autocast("mxfp8", layer)()
        for _ in range(2):
            with mode():
                under_one_autocast("mxfp8")()
    with pytest.warns(UserWarning, match="no quantizable layer"):
        under_one_autocast("mxfp8", PLAIN)()
    with mode(), ThreadPoolExecutor(1) as pool, pytest.warns(UserWarning, match="no quantizable layer"):
        pool.submit(torch.no_grad()(under_one_autocast("mxfp8", PLAIN))).result()


def test_compiled_layers_count_as_layers(layer: qt.Linear) -> None:
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            for _ in range(2):
                under_one_autocast("mxfp8", compiled)()
    active_context.compiled = False
