"""What JAX does to a compiled training step: donation, ahead-of-time compiling, export, checkify, NaN checks.

docs/guides/jax.md has the table; transformations of single layers are tested in test_transformations.py, devices in
operations/test_sharding.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

import quaver.jax as qj
import quaver.jax.nnx as qn
from quaver import recipes

RECIPES = {"mxfp8": recipes.mxfp8(), "delayed": recipes.delayed(history=4), "nvfp4": recipes.nvfp4()}
every = pytest.mark.parametrize("name", RECIPES)
X = jnp.asarray(np.random.default_rng(0).standard_normal((16, 32)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).standard_normal((32, 32)) / 6, jnp.float32)


def arguments(name: str) -> tuple[Any, Any]:
    # Copies, which may be donated.
    return {"a": W + 0, "b": W.T + 0}, {layer: qj.state.init(RECIPES[name]) for layer in ("a", "b")}


def step_of(name: str) -> Any:
    """One step of gradient descent on two layers."""

    def loss(params: Any, state: Any, x: Any) -> Any:
        for layer in ("a", "b"):
            x = jnp.tanh(qj.linear(x, params[layer], recipe=RECIPES[name], state=state[layer], name=layer))
        return jnp.square(x).mean()

    def step(params: Any, state: Any, x: Any) -> Any:
        value, (gradient, state) = jax.value_and_grad(loss, argnums=(0, 1))(params, state, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), state, value

    return step


def assert_same(a: Any, b: Any) -> None:
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(left, right)


@every
def test_a_step_that_donates_its_arguments_updates_them_in_place(name: str) -> None:
    expected = jax.jit(step_of(name))(*arguments(name), X)
    params, state = arguments(name)
    own = jax.jit(step_of(name), donate_argnums=(0, 1))(params, state, X)
    assert_same(own, expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))


@every
def test_a_step_is_compiled_ahead_of_time_and_exported(name: str) -> None:
    args = (*arguments(name), X)
    step = jax.jit(step_of(name))
    expected = step(*args)
    compiled = step.lower(*jax.eval_shape(lambda *a: a, *args)).compile()
    assert_same(compiled(*args), expected)
    restored = jax.export.deserialize(jax.export.export(step)(*args).serialize())
    assert_same(restored.call(*args), expected)


@every
def test_checkify_reports_a_nan_that_a_quantized_layer_passes_on(name: str) -> None:
    checked = jax.jit(checkify.checkify(step_of(name), errors=checkify.float_checks))
    error, got = checked(*arguments(name), X)
    assert error.get() is None
    assert_same(got, jax.jit(step_of(name))(*arguments(name), X))
    error, _ = checked(*arguments(name), X.at[0, 0].set(jnp.nan))
    assert "nan generated" in error.get()


@every
def test_debug_nans_raises_only_for_values_that_are_nan(name: str) -> None:
    step = jax.jit(step_of(name))
    with jax.debug_nans(True):
        step(*arguments(name), X)
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(step(*arguments(name), X.at[0, 0].set(jnp.nan)))


@every
def test_an_nnx_model_is_split_and_merged_in_a_jitted_step(name: str) -> None:
    model = qn.MLP(32, 64, recipe=RECIPES[name], name="mlp", rngs=nnx.Rngs(0))
    plain = nnx.clone(model)

    @jax.jit
    def of_state(state: Any, x: Any) -> Any:
        own = nnx.merge(graph, state)
        value, gradient = qn.value_and_grad(lambda m: jnp.square(m(x)).mean())(own)
        return value, gradient, nnx.state(own)

    @nnx.jit
    def of_model(model: Any, x: Any) -> Any:
        return qn.value_and_grad(lambda m: jnp.square(m(x)).mean())(model)

    graph, state = nnx.split(model)
    value, gradient, after = of_state(state, X)
    assert_same((value, gradient), of_model(plain, X))
    assert_same(after, nnx.state(plain))
