"""Every row of the table of activations against its formula in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaver.jax.blocks.layers import ACTIVATIONS, activate
from tests.close import assert_close


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_exact(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def relu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, 0)


def clamped_swiglu(gate: np.ndarray, value: np.ndarray) -> np.ndarray:
    gate, value = np.minimum(gate, 7), np.clip(value, -7, 7)
    return gate * sigmoid(1.702 * gate) * (value + 1)


PLAIN = {
    "linear": lambda x: x,
    "gelu": gelu_tanh,
    "gelu_exact": gelu_exact,
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "relu": relu,
    "squared_relu": lambda x: relu(x) ** 2,
    "silu": lambda x: x * sigmoid(x),
}
GATES = {
    "glu": sigmoid,
    "geglu": gelu_tanh,
    "geglu_exact": gelu_exact,
    "quick_geglu": PLAIN["quick_gelu"],
    "reglu": relu,
    "squared_reglu": PLAIN["squared_relu"],
    "swiglu": PLAIN["silu"],
}
FORMULAS = PLAIN | {name: lambda g, v, f=f: f(g) * v for name, f in GATES.items()} | {"clamped_swiglu": clamped_swiglu}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_and_its_gradient_match_the_formulas(name: str) -> None:
    x = [(np.random.randn(256) * 5).astype(np.float32) for _ in range(ACTIVATIONS[name].inputs)]
    wide = [a.astype(np.float64) for a in x]
    y, gradients = jax.jit(lambda x: (activate(name, *x), jax.grad(lambda x: activate(name, *x).sum())(x)))(x)
    assert_close(name, y, FORMULAS[name](*wide), 1e-6)
    step = 1e-6
    for i, got in enumerate(gradients):
        up, down = ([a + sign * step * (i == j) for j, a in enumerate(wide)] for sign in (1, -1))
        assert_close(f"{name}'s gradient {i}", got, (FORMULAS[name](*up) - FORMULAS[name](*down)) / (2 * step), 1e-5)


def test_bf16_is_computed_in_float32_and_rounded_once() -> None:
    x = jnp.asarray(np.random.randn(2, 64), jnp.bfloat16)
    y = activate("swiglu", *x)
    assert y.dtype == jnp.bfloat16
    assert (y == activate("swiglu", *x.astype(jnp.float32)).astype(jnp.bfloat16)).all()


def test_clamped_swiglu_takes_its_limit() -> None:
    g = v = jnp.asarray([100.0])
    assert_close("limit 1", activate("clamped_swiglu", g, v, limit=1.0), sigmoid(np.float64([1.702])) * 2, 1e-6)


def test_a_wrong_name_or_number_of_arrays_gives_a_clear_error() -> None:
    x = jnp.ones(3)
    with pytest.raises(ValueError, match="no activation 'swigelu'; did you mean 'swiglu'"):
        activate("swigelu", x, x)
    with pytest.raises(ValueError, match="'swiglu' takes 2 arrays, and got 1"):
        activate("swiglu", x)
    with pytest.raises(ValueError, match="'gelu' takes 1 array, and got 2"):
        activate("gelu", x, x)
