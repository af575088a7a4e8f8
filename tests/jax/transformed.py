"""Layers of every kind as functions of (weights, states, x), and what JAX makes of a function: what is crossed.

All values are small integers, exact in every format, so that no order of summation shows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import Array, lax

import quaver.jax as qj
import quaver.jax.linen as ql
import quaver.jax.nnx as qn
from quaver import recipes
from quaver.jax.blocks.attention import attention
from quaver.jax.blocks.layers import rms_norm
from quaver.jax.linears.function import SAVED_NAME
from tests.jax.functional_mlp import mlp

#: Tokens and features; the output of a layer has the shape of its input.
T, D = 8, 16

#: A stateless recipe, one that quantizes again in backward, and the two with a state.
RECIPES: dict[str, Any] = {
    "tensorwise": recipes.get("tensorwise"),
    "mxfp8": recipes.get("mxfp8"),
    "delayed": recipes.delayed(history=3),
    "nvfp4": recipes.get("nvfp4"),
}


def integers(seed: int, *shape: int) -> Array:
    # numpy converts and device_put copies: a conversion and jnp.asarray are a program for each shape.
    return jax.device_put(np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32))


@dataclass(frozen=True)
class Layer:
    """A layer for x [T, D]."""

    #: Shapes of its weights.
    shapes: tuple[tuple[int, ...], ...]
    #: (weights, state, x, recipe) to [T, D].
    apply: Callable[..., Array]
    #: The number of linear layers with a state; 0 if the state is not in a list.
    states: int = 0
    #: Whether all its operations are exact on integers.
    exact: bool = True
    #: For a module, the layer with the same function and weights; "" for a function.
    function: str = ""

    def weights(self, seed: int) -> list[Array]:
        return [integers(seed + i, *shape) for i, shape in enumerate(self.shapes)]

    def state(self, recipe: Any) -> Any:
        fresh = qj.state.init(recipe)
        return [fresh] * self.states if self.states else fresh


def _linear(w: Any, s: Any, x: Array, recipe: Any) -> Array:
    return jax.nn.relu(qj.linear(x, *w, recipe=recipe, state=s))


def _dot_general(w: Any, s: Any, x: Array, recipe: Any) -> Array:
    halves = x.reshape(T, 2, D // 2)
    y = qj.dot_general(halves, w[0], (((2,), (1,)), ((1,), (0,))), recipe=recipe, state=s)
    return jax.nn.relu(y.transpose(1, 0, 2).reshape(T, D))


def _grouped(w: Any, s: Any, x: Array, recipe: Any) -> Array:
    return jax.nn.relu(qj.grouped_dot(x, w[0], jnp.array([3, T - 3]), recipe=recipe, state=s))


def _mlp(w: Any, s: Any, x: Array, recipe: Any) -> Array:
    return mlp(x, *w, activation="relu", recipe=recipe, state={"wi": s[0], "wo": s[1]})


def _attention(w: Any, s: Any, x: Array, recipe: Any) -> Array:
    q, k, v = jnp.split(qj.linear(x, w[0], recipe=recipe, state=s[0]).reshape(1, T, 6, D // 2), 3, axis=2)
    y = attention(q / 8, k / 8, v, mask_type="causal").reshape(T, D)
    return qj.linear(y, w[1], recipe=recipe, state=s[1])


def _norm_linear(w: Any, s: Any, x: Array, recipe: Any) -> Array:
    return qj.linear(rms_norm(x, w[0], zero_centered=True), w[1], recipe=recipe, state=s)


def linen_layer(wrap: Callable[..., Any] = lambda cls: cls) -> Layer:
    """linen's DenseGeneral, perhaps lifted by nn.remat or nn.jit."""

    def apply(w: Any, s: Any, x: Array, recipe: Any) -> Array:
        variables: dict[str, Any] = {"params": {"kernel": w[0], "bias": w[1]}}
        if s:
            variables[ql.COLLECTION] = s
        return jax.nn.relu(wrap(ql.DenseGeneral)(D, recipe=recipe).apply(variables, x))

    return Layer(((D, D), (D,)), apply, function="linear")


def nnx_layer(wrap: Callable[..., Any] = lambda f: f) -> Layer:
    """NNX's DenseGeneral, perhaps called inside nnx.remat or nnx.jit."""

    def apply(w: Any, s: Any, x: Array, recipe: Any) -> Array:
        dense = qn.DenseGeneral(D, D, recipe=recipe, rngs=nnx.Rngs(jax.random.key(0, impl="unsafe_rbg")))
        dense.kernel[...], dense.bias[...] = w
        for name, value in s.items():
            getattr(dense.state, name)[...] = value
        return jax.nn.relu(wrap(lambda dense, x: dense(x))(dense, x))

    return Layer(((D, D), (D,)), apply, function="linear")


LAYERS: dict[str, Layer] = {
    "linear": Layer(((D, D), (D,)), _linear),
    "dot_general": Layer(((2, D // 2, D // 2),), _dot_general),
    "grouped_dot": Layer(((2, D, D),), _grouped),
    "mlp": Layer(((D, 2 * D), (2 * D, D)), _mlp, states=2),
    "attention": Layer(((D, 3 * D), (D, D)), _attention, states=2, exact=False),
    "norm and linear": Layer(((D,), (D, D)), _norm_linear, exact=False),
    "linen": linen_layer(),
    "linen in nn.remat": linen_layer(nn.remat),
    "linen in nn.jit": linen_layer(nn.jit),
    "nnx": nnx_layer(),
    "nnx in nnx.remat": nnx_layer(nnx.remat),
    "nnx in nnx.jit": nnx_layer(nnx.jit),
}

Function = Callable[[Any, Any, Array], Array]


def twice(f: Function, weights: Any, states: Any, x: Array) -> Array:
    """f called with the weights and state of one layer, and then of another."""
    return f(weights[1], states[1], f(weights[0], states[0], x))


def _stacked(weights: Any, states: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *zip(weights, states, strict=True))


def scanned(wrap: Callable[[Function], Function]) -> Callable[..., Array]:
    """The same as a scan over both layers, its body wrapped."""

    def run(f: Function, weights: Any, states: Any, x: Array) -> Array:
        body = wrap(f)
        return lax.scan(lambda h, layer: (body(*layer, h), None), x, _stacked(weights, states))[0]

    return run


def calls(wrap: Callable[[Function], Function]) -> Callable[..., Array]:
    return lambda f, weights, states, x: twice(wrap(f), weights, states, x)


def _conditional(f: Function) -> Function:
    """f where x is finite, which it always is, but no compiler knows it."""
    return lambda w, s, x: lax.cond(jnp.isfinite(x[0, 0]), f, lambda w, s, x: 3 * f(w, s, x), w, s, x)


def _mapped(f: Function) -> Function:
    return lambda w, s, x: jax.vmap(f)(*jax.tree.map(lambda leaf: leaf[None], (w, s, x)))[0]


def _vjp(f: Function) -> Function:
    """f with a custom differentiation rule, whose backward calls the rule of f."""

    @jax.custom_vjp
    def own(w: Any, s: Any, x: Array) -> Array:
        return f(w, s, x)

    own.defvjp(lambda w, s, x: jax.vjp(f, w, s, x), lambda back, g: back(g))
    return own


policy = partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(SAVED_NAME))
everything = partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)

#: Transformations of a function that is called twice; none may change the result.
TRANSFORMS: dict[str, Callable[..., Array]] = {
    "jit": calls(jax.jit),
    "checkpoint": calls(jax.checkpoint),
    "checkpoint that keeps operands": calls(policy),
    "checkpoint that keeps everything": calls(everything),
    "checkpoint twice": calls(lambda f: jax.checkpoint(jax.checkpoint(f))),
    "jit in checkpoint": calls(lambda f: jax.checkpoint(jax.jit(f))),
    "checkpoint in jit": calls(lambda f: jax.jit(jax.checkpoint(f))),
    "checkpoint of both": lambda f, *args: jax.checkpoint(partial(twice, jax.checkpoint(f)))(*args),
    "cond": calls(_conditional),
    "vmap in checkpoint": calls(lambda f: jax.checkpoint(_mapped(f))),
    "checkpoint in vmap": calls(lambda f: _mapped(jax.checkpoint(f))),
    "a rule of one's own": calls(_vjp),
    "scan": scanned(lambda f: f),
    "checkpoint in scan": scanned(jax.checkpoint),
    "checkpoint in jit in scan": scanned(lambda f: jax.jit(jax.checkpoint(f))),
    "two uses in scan": lambda f, weights, states, x: lax.scan(
        lambda h, both: (twice(jax.checkpoint(f), *both, h), None),
        x,
        jax.tree.map(lambda leaf: leaf[None], (list(weights), list(states))),
    )[0],
}

#: What may be differentiated: the weights of either call, and x. States always are where there are any.
NEEDS: dict[str, tuple[bool, bool, bool]] = {
    "first weights": (True, False, False),
    "second weights": (False, True, False),
    "x": (False, False, True),
    "weights": (True, True, False),
    "second weights and x": (False, True, True),
    "everything": (True, True, True),
    "nothing but states": (False, False, False),
}


def gradients(
    run: Callable[..., Array],
    f: Function,
    weights: Any,
    states: Any,
    x: Array,
    how: str = "grad",
    needs: Iterable[str] = NEEDS,
) -> Any:
    """The gradients for each of NEEDS, of one traced f: a dict of ((weights, weights, x), states), zeros where not
    requested.

    Args:
        run: of TRANSFORMS.
        needs: the requested ones of NEEDS.
        how: "grad", or "linearize" and transpose.
    """
    cotangent = integers(99, *x.shape)

    def of(needed: tuple[bool, bool, bool]) -> Any:
        def loss(requested: Any, states: Any) -> Array:
            first, second, into = (
                given if need else fixed for given, fixed, need in zip(requested, (*weights, x), needed, strict=True)
            )
            return (run(f, (first, second), states, into) * cotangent).sum()

        at = (*weights, x), states
        if how == "grad":
            return jax.grad(loss, argnums=(0, 1))(*at)
        return jax.linear_transpose(jax.linearize(loss, *at)[1], *at)(jnp.float32(1))

    return {name: of(NEEDS[name]) for name in needs}


def example(layer: Layer, recipe: Any) -> tuple[Any, Any, Array]:
    """Weights and fresh states of two layers, and x."""
    return (layer.weights(1), layer.weights(11)), (layer.state(recipe), layer.state(recipe)), integers(0, T, D)
