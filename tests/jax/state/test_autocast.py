"""The active recipe; and a jitted function never runs with another one than it was traced for."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax

import quaver.jax as qj
from quaver import recipes
from quaver.jax.state.context import recipe_in_force

X, W = jnp.linspace(-1, 1, 64).reshape(4, 16) ** 3, jnp.linspace(-0.3, 1, 128).reshape(16, 8)


def test_the_innermost_counts_and_a_layers_own_before_it() -> None:
    own = recipes.mxfp8()
    assert recipe_in_force() is None and recipe_in_force(own) is own and recipe_in_force("mxfp8") is own
    with qj.autocast("tensorwise"):
        assert recipe_in_force() is recipes.tensorwise() and recipe_in_force(own) is own
        with qj.autocast(recipe=recipes.nvfp4(hadamard=False)):
            assert recipe_in_force() is recipes.nvfp4(hadamard=False)
        with qj.autocast(enabled=False):
            assert recipe_in_force() is None and recipe_in_force(own) is None
            with qj.autocast("rowwise"):
                assert recipe_in_force(own) is own
        assert recipe_in_force() is recipes.tensorwise()
    assert recipe_in_force() is None


def test_it_decorates_and_is_left_when_something_is_raised() -> None:
    @qj.autocast("mxfp8")
    def inside() -> Any:
        return recipe_in_force()

    assert inside() is recipes.mxfp8() and recipe_in_force() is None
    with pytest.raises(KeyError), qj.autocast("mxfp8"):
        raise KeyError
    assert recipe_in_force() is None


def test_a_missing_or_unknown_recipe_is_an_error() -> None:
    with pytest.raises(ValueError, match="autocast needs a recipe"):
        qj.autocast()
    with pytest.raises(ValueError, match="mxfp8"):
        qj.autocast("mxfp")


def test_a_jitted_function_is_traced_again_under_another_recipe() -> None:
    traced = []

    @jax.jit
    def layer(x: Array) -> Array:
        traced.append(recipe_in_force())
        return qj.linear(x, W)

    plain = layer(X)
    with qj.autocast("mxfp8"):
        quantized = layer(X)
        assert (layer(X) == quantized).all()
    assert (layer(X) == plain).all() and not (quantized == plain).all()
    with qj.autocast("mxfp8"):
        layer(X)
    with qj.autocast("mxfp8"), qj.autocast(enabled=False):
        assert (layer(X) == plain).all()
    assert traced == [None, recipes.mxfp8(), None]


@pytest.mark.parametrize("how", ["scan", "checkpoint", "vmap"])
def test_the_bodies_of_transformations_are_too(how: str) -> None:
    def body(x: Array) -> Array:
        return qj.linear(x, W)

    def scanned(x: Array) -> Array:
        return lax.scan(lambda _, row: (None, body(row[None])), None, x)[1][:, 0]

    function = {"scan": scanned, "checkpoint": jax.checkpoint(body), "vmap": jax.vmap(body)}[how]
    plain = function(X)
    with qj.autocast("tensorwise"):
        quantized = function(X)
    assert not (quantized == plain).all() and (function(X) == plain).all()


def test_backward_uses_the_recipe_of_forward() -> None:
    with qj.autocast("tensorwise"):
        _, back = jax.vjp(lambda w: qj.linear(X, w), W)
        inside = back(jnp.ones((4, 8)))[0]
    with qj.autocast("mxfp8"):
        assert (back(jnp.ones((4, 8)))[0] == inside).all()


def test_another_thread_has_its_own() -> None:
    seen = []
    with qj.autocast("mxfp8"):
        thread = threading.Thread(target=lambda: seen.append(recipe_in_force()))
        thread.start()
        thread.join()
    assert seen == [None]
