"""Test which uses may read a layer's state without updating it, and the errors of others."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import quaver.jax as qj
from quaver import recipes
from tests.close import assert_bitwise
from tests.jax.transformed import integers

RECIPE = recipes.delayed(history=3)
X, W = integers(0, 8, 16), integers(1, 16, 16)


def linear(x: Array, w: Array, state: Any) -> Array:
    return qj.linear(x, w, recipe=RECIPE, state=state)


@cache
def after_a_step() -> Any:
    return jax.jit(jax.grad(lambda w, s: linear(X, w, s).sum(), argnums=(0, 1)))(W, qj.state.init(RECIPE))[1]


@pytest.mark.parametrize("how", ["x alone", "stop_gradient", "checkpoint"])
def test_the_gradient_of_x_alone_reads_a_history_and_leaves_it_alone(how: str) -> None:
    state = after_a_step()
    expected = jax.jit(jax.grad(lambda x, s: linear(x, W, s).sum(), argnums=(0, 1)))(X, state)[0]
    stopped = lax.stop_gradient
    ways = {
        "x alone": lambda x: jax.grad(lambda x: linear(x, W, state).sum())(x),
        "stop_gradient": lambda x: jax.grad(lambda *a: linear(a[0], *map(stopped, a[1:])).sum(), (0, 1, 2))(
            x, W, state
        )[0],
        "checkpoint": lambda x: jax.grad(jax.checkpoint(lambda x: linear(x, W, state).sum()))(x),
    }
    assert_bitwise(jax.jit(ways[how])(X), expected)


def test_a_teacher_in_the_same_loss_reads_the_state_that_the_student_writes() -> None:
    def loss(w: Array, state: Any) -> Array:
        teacher = linear(X, lax.stop_gradient(w), lax.stop_gradient(state))
        return (linear(X, w, state) * teacher).sum()

    state = after_a_step()
    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(W, state)
    separate = jax.grad(lambda w, s: (linear(X, w, s) * linear(X, W, state)).sum(), argnums=(0, 1))
    expected = jax.jit(separate)(W, state)
    jax.tree.map(assert_bitwise, got, expected)


def test_the_gradient_of_x_alone_under_stochastic_rounding_warns_about_its_noise() -> None:
    state = qj.state.init("nvfp4")
    with pytest.raises(ValueError, match=r"only the gradient of x.*argnums=\(0, 1\)\)\(x, state\)"):
        jax.grad(lambda x: qj.linear(x, W, recipe="nvfp4", state=state).sum())(X)
    gradients = jax.grad(lambda x, s: qj.linear(x, W, recipe="nvfp4", state=s).sum(), argnums=(0, 1))
    assert jax.eval_shape(gradients, X, state)[1]["count"].shape == (2,)


def test_a_step_without_the_state_suggests_stop_gradient() -> None:
    with pytest.raises(ValueError, match=r"put jax.lax.stop_gradient around its weights, its bias and its state"):
        jax.grad(lambda w: linear(X, w, qj.state.init(RECIPE)).sum())(W)


def test_branches_of_a_cond_take_the_state_as_an_operand() -> None:
    """Branches that close over the state count as two calls; the error says how to avoid it."""

    def closing_over(w: Array, state: Any, taken: Array) -> Array:
        return lax.cond(taken, lambda x: 2 * linear(x, w, state), lambda x: linear(x, w, state), X).sum()

    def loss_of_operands(w: Array, state: Any, taken: Array) -> Array:
        return lax.cond(taken, lambda x, s: 2 * linear(x, w, s), lambda x, s: linear(x, w, s), X, state).sum()

    state = after_a_step()
    with pytest.raises(ValueError, match=r"branches of jax.lax.cond, pass the state to the branches as an operand"):
        jax.eval_shape(jax.grad(closing_over, argnums=(0, 1)), W, state, jnp.bool_(True))
    step = jax.jit(jax.grad(loss_of_operands, argnums=(0, 1)))
    without = jax.jit(jax.grad(lambda w, s, times: (times * linear(X, w, s)).sum(), argnums=(0, 1)))
    for taken in (True, False):
        jax.tree.map(assert_bitwise, step(W, state, np.bool_(taken)), without(W, state, np.float32(1 + taken)))


def test_a_state_that_a_traced_function_is_called_with_twice_is_seen_in_the_next_loss() -> None:
    """The body is traced once, so that no trace can detect it."""
    layer = jax.checkpoint(linear)

    def loss(w: Array, state: Any) -> Array:
        return layer(layer(X, w, state), w, state).sum()

    summed = jax.jit(jax.grad(loss, argnums=(0, 1)))(W, after_a_step())[1]
    assert jnp.isnan(jax.jit(loss)(W, summed))
    with pytest.raises(ValueError, match="cannot be the result of a step"):
        qj.state.check(summed, RECIPE)


@jax.jit
@partial(jax.grad, argnums=(0, 1))
def gradient_of_linear(w: Array, state: Any) -> Array:
    return qj.linear(X, w, recipe="nvfp4", state=state).sum()


@jax.jit
@partial(jax.grad, argnums=(0, 1))
def gradient_of_grouped(w: Array, state: Any) -> Array:
    return qj.grouped_dot(X, w, jnp.array([8]), recipe="nvfp4", state=state).sum()


@pytest.mark.parametrize("count", [2.0**24 - 1, 2.0**24, 2.0**25, float("inf")])
def test_a_count_that_float32_cannot_count_on_is_seen_in_the_gradient(count: float) -> None:
    """Beyond 2**24 every step would draw the same noise."""
    state = {"count": jnp.full(2, count, jnp.float32)}
    for gradient_of, weight in ((gradient_of_linear, W), (gradient_of_grouped, W[None])):
        assert bool(jnp.isnan(gradient_of(weight, state)[0]).all()) is (count > 2.0**24)


def test_layers_that_are_mapped_may_read_one_history_for_the_gradient_of_x() -> None:
    state, weights = after_a_step(), jnp.stack([W, W.T])
    got = jax.jit(jax.grad(lambda x: jax.vmap(linear, (None, 0, None))(x, weights, state).sum()))(X)
    one = jax.jit(jax.grad(lambda x, w: linear(x, w, state).sum()))
    each = [one(X, w) for w in weights]
    assert_bitwise(got, each[0] + each[1])
