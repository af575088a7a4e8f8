"""Test that `dot_general` under a recipe equals the linear layer for any order of axes."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import quaver.jax as qj
from quaver import recipes
from tests.close import assert_bitwise, assert_close

#: Shapes and dimension numbers, and the same product as matrices [T, K] @ [K, N].
CASES: dict[str, Any] = {
    "matrices": ((8, 32), (32, 16), (((1,), (0,)), ((), ()))),
    "leading axes": ((2, 4, 32), (32, 16), (((2,), (0,)), ((), ()))),
    "transposed weight": ((8, 32), (16, 32), (((1,), (1,)), ((), ()))),
    "two contracted": ((8, 4, 8), (4, 8, 3, 5), (((1, 2), (0, 1)), ((), ()))),
    "in another order": ((4, 8, 6), (8, 4, 5), (((0, 1), (1, 0)), ((), ()))),
}


def pair(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    x, y = (jax.device_put(rng.normal(size=shape).astype(np.float32)) for shape in (a, b))
    return x, y


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_the_linear_layer(case: Any) -> None:
    shape_a, shape_b, dimensions = case
    a, b = pair(shape_a, shape_b)
    (ca, cb), _ = dimensions
    x = np.moveaxis(np.asarray(a), ca, range(-len(ca), 0))
    x = x.reshape(*x.shape[: a.ndim - len(ca)], -1)
    w = np.moveaxis(np.asarray(b), cb, range(len(cb)))
    w = w.reshape(x.shape[-1], -1)
    got = jax.jit(lambda a, b: qj.dot_general(a, b, dimensions, recipe="mxfp8"))(a, b)
    assert got.shape == jax.eval_shape(partial(lax.dot_general, dimension_numbers=dimensions), a, b).shape
    expected = jax.jit(lambda x, w: qj.linear(x, w, recipe="mxfp8"))(x, w)
    assert_bitwise(got, np.asarray(expected).reshape(got.shape))


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_batch_axes_are_scaled_separately_and_share_a_state(name: str) -> None:
    a, b = (np.asarray(t) for t in pair((3, 2, 8, 16), (2, 16, 5, 3)))
    a = a * np.float32([1, 1e3, 1e-3])[:, None, None, None]
    dimensions = (((3,), (1,)), ((0, 1), (3, 0)))
    state = qj.state.init(recipes.get(name))

    def loss(a: Any, b: Any, state: Any) -> tuple[Array, Array]:
        y = qj.dot_general(a, b, dimensions, recipe=name, state=state)
        return (y**2).sum(), y

    (_, y), (_, _, after) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(a, b, state)
    assert y.shape == (3, 2, 8, 5)
    one = jax.jit(partial(qj.linear, recipe=name))
    for i in range(3):
        for j in range(2):
            assert_close(f"slice {i}, {j}", np.asarray(y)[i, j], one(a[i, j], b[j, ..., i], state=state), 1e-6)
    if name == "delayed":
        assert_bitwise(np.asarray(after["history"])[-1, 0], np.abs(a).max())
    if name == "nvfp4":
        assert_bitwise(after["count"], np.float32([6, 6]))


def test_without_a_recipe_it_equals_jax() -> None:
    a, b = pair(*CASES["two contracted"][:2])
    dimensions = CASES["two contracted"][2]
    for recipe in (None, "bf16"):
        got = qj.dot_general(a, b, dimensions, lax.Precision.HIGHEST, jnp.float32, recipe=recipe)
        assert_bitwise(got, lax.dot_general(a, b, dimensions, lax.Precision.HIGHEST, jnp.float32))


def test_the_output_has_the_dtype_that_is_preferred() -> None:
    a, b = (t.astype(jnp.bfloat16) for t in pair((8, 32), (32, 16)))
    dimensions = CASES["matrices"][2]
    for preferred, dtype in ((None, jnp.bfloat16), (jnp.float32, jnp.float32)):
        run = partial(qj.dot_general, preferred_element_type=preferred, recipe="mxfp8")
        assert jax.jit(run, static_argnums=2)(a, b, dimensions).dtype == dtype


def test_it_works_as_a_flax_dot_general() -> None:
    x, _ = pair((2, 4, 8, 16), ())
    layer = nn.DenseGeneral((3, 5), axis=(-2, -1), dot_general=partial(qj.dot_general, recipe="rowwise"))
    # Threefry takes seconds to compile.
    y, variables = jax.jit(layer.init_with_output)(jax.random.key(0, impl="unsafe_rbg"), x)
    kernel = variables["params"]["kernel"].reshape(128, 15)
    assert_close("output", y.reshape(8, 15), qj.linear(x.reshape(8, 128), kernel, recipe="rowwise"), 1e-6)
