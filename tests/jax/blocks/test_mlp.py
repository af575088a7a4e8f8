"""The MLP functions against their formulas in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaver
from quaver.jax import state as states
from quaver.jax.blocks.layers import hidden_features
from tests.close import assert_bitwise, assert_close
from tests.jax import plain_layer
from tests.jax.functional_mlp import layer_norm_mlp, mlp

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((3, 4, 32)).astype(np.float32)


def parameters(activation: str) -> tuple[np.ndarray, ...]:
    """wi, wo, bi, bo."""
    features = hidden_features(activation, 48)
    shapes = (32, *features), (48, 16), features, (16,)
    return tuple(RANDOM.standard_normal(shape).astype(np.float32) for shape in shapes)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_an_mlp_matches_its_formula(activation: str) -> None:
    wi, wo, bi, bo = parameters(activation)
    scale, shift = (RANDOM.standard_normal(32).astype(np.float32) for _ in range(2))
    wide = {"wi": {"kernel": wi, "bias": bi}, "wo": {"kernel": wo, "bias": bo}, "norm": {"scale": scale, "bias": shift}}
    wide = jax.tree.map(lambda a: a.astype(np.float64), wide)
    y = mlp(X, *map(jnp.asarray, (wi, wo, bi, bo)), activation=activation)
    assert_close("mlp", y, plain_layer.mlp(X, wide), 1e-6)
    y, normalized = layer_norm_mlp(*map(jnp.asarray, (X, scale, shift, wi, wo, bi, bo)), activation=activation)
    expected = plain_layer.norm(X.astype(np.float64), wide["norm"], "LayerNorm")
    assert_close("normalized", normalized, expected, 1e-6)
    assert_close("layer_norm_mlp", y, plain_layer.mlp(expected, wide), 1e-6)


def test_each_of_the_two_layers_has_a_state() -> None:
    recipe = quaver.recipes.delayed(history=2)
    wi, wo, _, _ = map(jnp.asarray, parameters("gelu"))
    state: Any = {"wi": states.init(recipe), "wo": states.init(recipe)}

    def loss(wi: Any, wo: Any, state: Any) -> Any:
        return mlp(X, wi, wo, recipe=recipe, state=state).sum()

    after = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(wi, wo, state)[2]
    assert_bitwise(after["wi"]["history"][1, :2], np.array([np.abs(X).max(), np.abs(wi).max()]))
    assert after["wo"]["history"][1, 1:].tolist() == [np.abs(wo).max(), 1.0]


def test_a_matrix_that_does_not_fit_the_activation_gives_a_clear_error() -> None:
    wi, wo, _, _ = map(jnp.asarray, parameters("gelu"))
    with pytest.raises(
        ValueError, match=r"'swiglu' needs a first matrix \[d, hidden, 2\], gate and value, and got one"
    ):
        mlp(X, wi, wo, activation="swiglu")
    with pytest.raises(ValueError, match=r"'gelu' needs a first matrix \[d, hidden\] and got one of 3 axes"):
        mlp(X, jnp.ones((32, 48, 2)), wo)
