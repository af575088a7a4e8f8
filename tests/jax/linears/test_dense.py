"""A linear layer over any axes against numpy's tensordot."""

import jax.numpy as jnp
import numpy as np
import pytest

from quaver.jax.linears.dot_general import dense, normalize_axes
from quaver.jax.linears.function import linear
from tests.close import assert_bitwise, assert_close

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((3, 4, 5, 6)).astype(np.float32)


@pytest.mark.parametrize("axis", [-1, 1, (1, 3), (-1, -2), (0, 1, 2)])
@pytest.mark.parametrize("features", [(7,), (2, 3)])
def test_any_axes_are_contracted_in_their_order(axis: int | tuple[int, ...], features: tuple[int, ...]) -> None:
    axes = normalize_axes(axis, 4)
    kernel = RANDOM.standard_normal((*(X.shape[a] for a in axes), *features)).astype(np.float32)
    bias = RANDOM.standard_normal(features).astype(np.float32)
    y = dense(jnp.asarray(X), jnp.asarray(kernel), jnp.asarray(bias), axis=axis)
    expected = np.tensordot(X.astype(np.float64), kernel, (axes, range(len(axes)))) + bias
    assert_close(str(axis), y, expected, 1e-6)


def test_with_a_recipe_it_is_linear_of_matrices() -> None:
    kernel = jnp.asarray(RANDOM.standard_normal((5, 6, 2, 8)), jnp.float32)
    y = dense(jnp.asarray(X), kernel, axis=(2, 3), recipe="mxfp8")
    expected = linear(jnp.asarray(X).reshape(12, 30), kernel.reshape(30, 16), recipe="mxfp8")
    assert_bitwise(y, expected.reshape(3, 4, 2, 8))


def test_invalid_arguments_give_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"head contracts axes \(3,\) of x .*, whose sizes are \(6,\), with a kernel"):
        dense(jnp.asarray(X), jnp.ones((5, 7)), name="head")
    for axis in (4, (1, 1), (1, -3), ()):
        with pytest.raises(ValueError, match="does not name different axes of an array with 4 of them"):
            normalize_axes(axis, 4)
