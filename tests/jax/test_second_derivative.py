"""A second derivative of a quantized layer raises a clear error however it is requested; the first one works."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import quaver.jax as qj
from quaver import recipes
from tests.jax.transformed import LAYERS, RECIPES, TRANSFORMS, example, integers, twice

Loss = Callable[[Any], Array]


def _tangent(at: Any) -> Any:
    return jax.tree.map(jnp.ones_like, at)


def _dot(a: Any, b: Any) -> Array:
    return sum((jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)), jnp.float32(0))


def _linearized_gradient(loss: Loss, at: Any) -> Any:
    return jax.linear_transpose(jax.linearize(loss, at)[1], at)(jnp.float32(1))[0]


#: Every way to differentiate the gradient of a loss.
WAYS: dict[str, Callable[[Loss, Any], Any]] = {
    "grad of grad": lambda loss, at: jax.grad(lambda a: _dot(jax.grad(loss)(a), at))(at),
    "hessian": lambda loss, at: jax.hessian(loss)(at),
    "jvp of grad": lambda loss, at: jax.jvp(jax.grad(loss), (at,), (_tangent(at),)),
    "jacfwd of grad": lambda loss, at: jax.jacfwd(jax.grad(loss))(at),
    "jacrev of grad": lambda loss, at: jax.jacrev(jax.grad(loss))(at),
    "linearize of grad": lambda loss, at: jax.linearize(jax.grad(loss), at)[1](_tangent(at)),
    "linearize twice": lambda loss, at: jax.linearize(partial(_linearized_gradient, loss), at)[1](_tangent(at)),
    "vjp of vjp": lambda loss, at: jax.vjp(lambda a: jax.vjp(loss, a)[1](jnp.float32(1))[0], at)[1](at),
    "grad of the loss that grad returns": lambda loss, at: jax.grad(lambda a: jax.value_and_grad(loss)(a)[0])(at),
    "jit of grad of jit of grad": lambda loss, at: jax.jit(
        jax.grad(jax.jit(lambda a: _dot(jax.jit(jax.grad(loss))(a), at)))
    )(at),
    "grad of a scan of grads": lambda loss, at: jax.grad(
        lambda a: lax.scan(lambda sum, _: (sum + _dot(jax.grad(loss)(a), at), None), 0.0, length=2)[0]
    )(at),
    "grad of a mapped grad": lambda loss, at: jax.grad(
        lambda a: _dot(jax.vmap(jax.grad(loss))(jax.tree.map(lambda leaf: leaf[None], a)), at)
    )(at),
    "checkpoint of grad": lambda loss, at: jax.grad(jax.checkpoint(lambda a: _dot(jax.grad(loss)(a), at)))(at),
}


def loss_of(layer: str, recipe: str, power: int, transform: Callable[..., Array] = twice) -> tuple[Loss, Any]:
    """A loss as a function of all arguments of a layer called twice, linear in its output or not, and the arguments."""
    row, table = LAYERS[layer], RECIPES[recipe]

    def loss(at: Any) -> Array:
        return (transform(lambda w, s, x: row.apply(w, s, x, table), *at) ** power).sum()

    return loss, example(row, table)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize(("layer", "way"), [("linear", way) for way in WAYS] + [("grouped_dot", "hessian")])
def test_a_second_derivative_is_refused(layer: str, way: str, power: int) -> None:
    loss, at = loss_of(layer, "tensorwise", power)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*autocast\(enabled=False\)"):
        jax.eval_shape(partial(WAYS[way], loss), at)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_second_derivative_is_refused_inside_a_scan(recipe: str) -> None:
    """JAX splits a scan's body, and the derivatives of its parts lose custom rules."""
    loss, at = loss_of("linear", recipe, 2, TRANSFORMS["scan"])
    for way in ("grad of grad", "hessian", "grad of the loss that grad returns"):
        with pytest.raises(NotImplementedError, match="no second derivative"):
            jax.eval_shape(partial(WAYS[way], loss), at)


def test_a_second_derivative_of_a_shared_state_is_refused() -> None:
    fresh = qj.state.init(recipes.delayed(history=3))
    loss = lambda s: sum(leaf.sum() for leaf in jax.tree.leaves(qj.state.share(s, 2)))  # noqa: E731
    assert jax.tree.map(jnp.shape, jax.eval_shape(jax.grad(loss), fresh)) == jax.tree.map(jnp.shape, fresh)
    for way in ("grad of grad", "hessian", "jacfwd of grad", "jit of grad of jit of grad"):
        with pytest.raises(NotImplementedError, match=r"share: .*no second derivative"):
            jax.eval_shape(partial(WAYS[way], loss), fresh)
    _, back = jax.vjp(lambda s: qj.state.share(s, 2), fresh)
    with pytest.raises(NotImplementedError, match=r"share: .*no second derivative"):
        jax.grad(lambda g: _dot(back(g)[0], fresh))(qj.state.share(fresh, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "recipe"), list(product(LAYERS, RECIPES)))
def test_a_second_derivative_is_refused_in_every_layer_and_recipe(layer: str, recipe: str) -> None:
    for way, power in product(WAYS, (1, 2)):
        loss, at = loss_of(layer, recipe, power)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            jax.eval_shape(partial(WAYS[way], loss), at)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_second_derivative_is_refused_under_every_transformation(transform: str, recipe: str) -> None:
    for way in WAYS:
        loss, at = loss_of("linear", recipe, 2, TRANSFORMS[transform])
        with pytest.raises(NotImplementedError, match="no second derivative"):
            jax.eval_shape(partial(WAYS[way], loss), at)


X, W = integers(0, 8, 16), integers(1, 16, 16)


def test_a_gradient_that_is_differentiated_by_its_cotangent_is_refused() -> None:
    _, back = jax.vjp(lambda x: qj.linear(x, W, recipe="mxfp8"), X)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda g: back(g)[0].sum())(X)


def test_forward_mode_inside_a_gradient_is_refused() -> None:
    run = partial(qj.linear, w=W, recipe="mxfp8")
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.eval_shape(jax.grad(lambda x: jax.jvp(run, (x,), (x,))[1].sum()), X)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.eval_shape(jax.jacfwd(run), X)


def test_an_inner_gradient_of_constants_is_one() -> None:
    """Follow the advice of the error: an inner gradient step inside the differentiated function."""

    def loss(w: Array) -> Array:
        return (qj.linear(X, w, recipe="tensorwise") ** 2).mean()

    def after_a_step(w: Array) -> Array:
        return loss(w - 0.125 * jax.grad(loss)(lax.stop_gradient(w)))

    gradient = jax.jit(jax.grad(loss))
    assert (jax.jit(jax.grad(after_a_step))(W) == gradient(W - 0.125 * gradient(W))).all()


def test_in_high_precision_there_are_second_derivatives() -> None:
    with qj.autocast(enabled=False):
        second = jax.jit(jax.hessian(lambda x: (qj.linear(x, W, recipe="mxfp8") ** 2).sum()))(X[0])
    assert np.allclose(second, 2 * np.asarray(W) @ np.asarray(W).T)


def test_the_next_state_comes_through_a_second_step_in_one_function() -> None:
    """A state that one gradient returned is differentiated by the next, inside one jit and inside a scan."""
    recipe = recipes.delayed(history=3)

    def step(state: Any) -> Any:
        loss = lambda w, s: (qj.linear(X, w, recipe=recipe, state=s) ** 2).sum()  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(W, state)[1]

    fresh = qj.state.init(recipe)
    alone = jax.jit(step)
    one_by_one = alone(alone(fresh))
    for both in (lambda s: step(step(s)), lambda s: lax.scan(lambda s, _: (step(s), None), s, length=2)[0]):
        for name, leaf in jax.jit(both)(fresh).items():
            assert (leaf == one_by_one[name]).all()


def test_rounding_has_no_derivative() -> None:
    spec = recipes.get("tensorwise").fprop.a
    assert spec is not None
    with pytest.raises(NotImplementedError, match="rounding has no derivative"):
        jax.grad(lambda x: qj.quantize(x, spec).dequantize().sum())(X)
    straight_through = jax.grad(lambda x: (x + qj.quantize(lax.stop_gradient(x), spec).dequantize()).sum())(X)
    assert (straight_through == 1).all()
    q = qj.quantize(X, spec)
    with pytest.raises(NotImplementedError, match="quantized operands have no derivative"):
        jax.grad(lambda q: qj.matmul(q, q).sum())(q)
    assert (jax.grad(lambda b: qj.matmul(q, q, bias=b).sum())(jnp.zeros(8)) == 8).all()


@pytest.mark.parametrize("what", ["x", "w"])
def test_the_gradient_of_a_quantized_operand_is_refused(what: str) -> None:
    fprop = recipes.get("tensorwise").fprop
    given: dict[str, Any] = {"x": X, "w": W} | {
        what: qj.quantize(X, fprop.a) if what == "x" else qj.quantize(W.T, fprop.b)  # type: ignore[arg-type]
    }
    with pytest.raises(ValueError, match=f"the gradient of {what} is requested, but {what} is a Quantized"):
        jax.grad(lambda q: qj.linear(**given | {what: q}, recipe="tensorwise").sum())(given[what])
