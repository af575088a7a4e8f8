"""Modules that one step calls several times, under recipes with state: siamese, ALBERT-like and DPO."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import quaver.jax as qj
import quaver.jax.linen as ql
import quaver.jax.nnx as qn
from quaver import recipes
from quaver.jax import state as states

RECIPES = {"delayed": recipes.delayed(history=4), "nvfp4": recipes.nvfp4()}
# Threefry takes seconds to compile.
KEY = jax.random.key(0, impl="unsafe_rbg")
X, Y = jax.random.normal(KEY, (2, 32, 32))


def slices(state: Any, uses: int) -> list[Any]:
    return [jax.tree.map(lambda leaf, i=i: leaf[i], state) for i in range(uses)]


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(left, right)


def assert_close(a: Any, b: Any) -> None:
    """Equal up to the order in which the two modules' programs add."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=2e-6 * max(float(jnp.abs(right).max()), 1e-9))


def merged(state: dict[str, jax.Array], uses: int) -> dict[str, jax.Array]:
    return states.merge(*slices(state, uses))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_siamese_linen_model_trains_as_with_share(recipe: str) -> None:
    layer = ql.DenseGeneral(32, use_bias=False, recipe=RECIPES[recipe], uses=2)
    variables = layer.init(KEY, X)
    kernel, state = variables["params"]["kernel"], states.init(RECIPES[recipe])

    @jax.jit
    @jax.grad
    def of_module(variables: Any) -> Any:
        return (layer.apply(variables, X) * layer.apply(variables, Y)).sum()

    @jax.jit
    @partial(jax.grad, argnums=(0, 1))
    def of_function(w: Any, state: Any) -> Any:
        first, second = slices(states.share(state, 2), 2)
        # The parameters' path is empty at the root of a model, and selects the noise.
        run = partial(qj.linear, recipe=RECIPES[recipe], name="")
        return (run(X, w, state=first) * run(Y, w, state=second)).sum()

    for _ in range(2):
        gradients = of_module(variables)
        wanted, state = of_function(kernel, state)
        np.testing.assert_array_equal(gradients["params"]["kernel"], wanted)
        variables = {"params": variables["params"], ql.COLLECTION: gradients[ql.COLLECTION]}
        assert_same(merged(variables[ql.COLLECTION], 2), state)


class Albert(nn.Module):
    """One Transformer layer, called three times."""

    recipe: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        layer = ql.TransformerLayer(heads=2, hidden=64, recipe=self.recipe, uses=3, name="layer")
        for _ in range(3):
            x = layer(x)
        return x


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_called_by_a_loop_is_the_same_in_linen_and_nnx(recipe: str) -> None:
    x = X.reshape(2, 16, 32)
    linen = Albert(RECIPES[recipe])
    variables = linen.init(KEY, x)
    gradients = jax.jit(jax.grad(lambda v: (linen.apply(v, x) ** 2).mean()))(variables)
    model = qn.TransformerLayer(32, heads=2, hidden=64, recipe=RECIPES[recipe], uses=3, name="layer", rngs=nnx.Rngs(0))
    nnx.update(model, nnx.State(variables["params"]["layer"]))

    @nnx.jit
    def step(model: Any, x: Any) -> Any:
        def loss(model: Any) -> Any:
            y = x
            for _ in range(3):
                y = model(y)
            return (y**2).mean()

        return qn.value_and_grad(loss)(model)[1]

    own = nnx.to_pure_dict(step(model, x)), nnx.to_pure_dict(nnx.state(model, qn.OverwriteWithGradient))
    assert_close(own[0], gradients["params"]["layer"])
    qkv = own[1]["attention"]["qkv"]["state"]
    assert_close(qkv, gradients[ql.COLLECTION]["layer"]["attention"]["qkv"])
    recorded = qkv["history"][:, -1] if recipe == "delayed" else qkv["count"]
    assert (recorded > 0).all() and len(recorded) == 3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_preference_loss_reads_the_policy_twice_and_leaves_the_reference(recipe: str) -> None:
    policy = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    reference = nnx.clone(policy)
    qn.convert(policy, RECIPES[recipe], uses={"*": 2})
    qn.convert(reference, RECIPES[recipe], uses=2)
    before = nnx.to_pure_dict(nnx.state(reference, qn.OverwriteWithGradient))

    @nnx.jit
    def step(policy: Any, reference: Any) -> Any:
        def loss(policy: Any) -> Any:
            chosen = policy(X) - jax.lax.stop_gradient(reference(X))
            rejected = policy(Y) - jax.lax.stop_gradient(reference(Y))
            return -jax.nn.log_sigmoid((chosen - rejected).sum(-1)).mean()

        return qn.value_and_grad(loss)(policy)

    loss, gradients = step(policy, reference)
    assert np.isfinite(loss) and float(jnp.abs(gradients["kernel"][...]).max()) > 0
    assert_same(nnx.to_pure_dict(nnx.state(reference, qn.OverwriteWithGradient)), before)
    after = nnx.to_pure_dict(nnx.state(policy, qn.OverwriteWithGradient))["dot_general"]["state"]
    if recipe == "delayed":
        amaxes = [[float(jnp.abs(x).max()), float(jnp.abs(policy.kernel[...]).max())] for x in (X, Y)]
        assert after["history"][:, -1, :2].tolist() == amaxes
    else:
        # The input has no gradient, so grad_output is rounded for wgrad only.
        assert after["count"].tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("calls", [1, 3])
def test_another_number_of_calls_raises(recipe: str, calls: int) -> None:
    layer = ql.DenseGeneral(32, recipe=RECIPES[recipe], uses=2)
    variables = jax.eval_shape(layer.init, KEY, X)

    def loss(variables: Any) -> Any:
        y = X
        for _ in range(calls):
            y = layer.apply(variables, y)
        return y.sum()

    with pytest.raises(ValueError, match=rf"uses=2 and called {calls} times"):
        jax.eval_shape(jax.grad(loss), variables)


def test_calls_that_jax_traces_by_themselves_raise_or_agree() -> None:
    layer = ql.DenseGeneral(32, recipe=RECIPES["delayed"], uses=2)
    variables = layer.init(KEY, X)
    apply = jax.checkpoint(layer.apply)
    with pytest.raises(ValueError, match=r"uses=2 and called 1 times"):
        jax.eval_shape(jax.grad(lambda v: apply(v, apply(v, X)).sum()), variables)
    both = lambda v: layer.apply(v, layer.apply(v, X)).sum()  # noqa: E731
    plain = jax.jit(jax.grad(both))(variables)
    assert_same(jax.jit(jax.grad(jax.checkpoint(both)))(variables), plain)
    # A closure over the variables is counted like any other call.
    closed = jax.jit(jax.grad(lambda v: jax.checkpoint(lambda x: layer.apply(v, layer.apply(v, x)))(X).sum()))
    assert_same(closed(variables), plain)


def test_a_shared_layer_can_be_read_any_number_of_times() -> None:
    layer = ql.DenseGeneral(32, recipe=RECIPES["delayed"], uses=2)
    variables = layer.init(KEY, X)
    one = layer.apply(variables, X)
    run = jax.jit(lambda v: [layer.apply(v, X) for _ in range(3)])
    for y in run(variables):
        np.testing.assert_array_equal(y, one)


def test_a_state_of_another_number_of_uses_is_named() -> None:
    variables = ql.DenseGeneral(32, recipe=RECIPES["delayed"]).init(KEY, X)
    with pytest.raises(ValueError, match="another number of uses"):
        ql.DenseGeneral(32, recipe=RECIPES["delayed"], uses=2).apply(variables, X)
    with pytest.raises(ValueError, match="uses is 0"):
        states.init("delayed", 0)
