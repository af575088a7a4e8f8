"""grouped_dot is a linear layer for each group of rows, forward and backward, under every recipe."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import quaver.jax as qj
from quaver.jax.linears import grouped
from quaver.jax.linears.grouped import grouped_dot
from quaver.recipes import get, nvfp4
from quaver.recipes.spec import GemmSpec, Recipe
from tests.close import assert_bitwise, assert_close
from tests.pairs import alternating

SIZES = [(5, 0, 40, 19), (64, 0, 0, 0), (0, 1, 2, 3)]
T, K, N, E = 64, 48, 40, 4
#: One of each kind of block, of reuse in backward, and of state.
RECIPES = {
    "delayed": get("delayed", history=4),
    "rowwise_bf16_wgrad": get("rowwise_bf16_wgrad"),
    "blockwise": get("blockwise"),
    "mxfp8": get("mxfp8", weight_2d=True),
    "nvfp4": get("nvfp4"),
    # Backward of dequantized operands.
    "dequantized": Recipe("dequantized", get("mxfp8").fprop, *[GemmSpec(None, None)] * 2, dequantized_backward=True),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=shape).astype(np.float32) for shape in ((T, K), (E, K, N), (T, N)))
    # Every group has the largest element of each operand, so that the scale of the tensor is that of each group.
    x[[0, 20, 40], 3], g[[0, 20, 40], 5] = 6.0, 7.0
    return x, w, g


@partial(jax.jit, static_argnames=("recipe",))
def step(x: Any, w: Any, g: Any, sizes: Any, recipe: Any) -> tuple[Any, Any, Any, Any]:
    """Output, both gradients and the next state."""
    y, backward = jax.vjp(
        lambda x, w, state: grouped_dot(x, w, sizes, recipe=recipe, state=state), x, w, qj.state.init(recipe)
    )
    return y, *backward(g)


@partial(jax.jit, static_argnames=("recipe",))
def layer(x: Any, w: Any, g: Any, recipe: Any) -> tuple[Any, Any, Any]:
    y, backward = jax.vjp(lambda x, w, s: qj.linear(x, w, recipe=recipe, state=s), x, w, qj.state.init(recipe))
    return y, *backward(g)[:2]


def one_by_one(x: Any, w: Any, g: Any, sizes: Any, recipe: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same by a linear layer for each group; rows beyond the groups give zeros."""
    y, dx, dw = np.zeros_like(g), np.zeros_like(x), np.zeros_like(w)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        start += size
        if size:
            y[rows], dx[rows], dw[e] = layer(x[rows], w[e], g[rows], recipe)
    return y, dx, dw


@every_recipe
def test_groups_are_linear_layers_one_by_one(name: str) -> None:
    """Without noise, which depends on the position in the whole operand."""
    recipe = nvfp4(stochastic_rounding=False) if name == "nvfp4" else RECIPES[name]
    x, w, g = arrays()
    sizes = (20, 0, 20, 20)
    *got, _ = step(x, w, g, np.array(sizes, np.int32), recipe)
    for what, a, b in zip(("y", "grad_x", "grad_w"), got, one_by_one(x, w, g, sizes, recipe), strict=True):
        assert_close(what, a, b, 1e-6)


def high_precision(x: Any, w: Any, g: Any, sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    expert = np.repeat(np.arange(E + 1), [*sizes, T - sum(sizes)])
    hot = (expert[:, None] == np.arange(E)).astype(np.float32)
    return (
        np.einsum("te,tk,ekn->tn", hot, x, w),
        np.einsum("te,tn,ekn->tk", hot, g, w),
        np.einsum("te,tk,tn->ekn", hot, x, g),
    )


@every_recipe
@pytest.mark.parametrize("sizes", SIZES)
def test_empty_groups_and_rows_of_no_group(name: str, sizes: tuple[int, ...]) -> None:
    x, w, g = arrays()
    *got, _ = step(x, w, g, np.array(sizes, np.int32), RECIPES[name])
    for a, b in zip(got, high_precision(x, w, g, sizes), strict=True):
        a = np.asarray(a)
        assert_bitwise(a[b == 0] == 0, np.ones(int((b == 0).sum()), bool))
        noise = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert noise < (0.35 if name == "nvfp4" else 0.08), f"{noise:.3f}"


def test_the_cuda_path_has_the_same_products() -> None:
    """ragged_dot is meant for CUDA; it also runs on a CPU, but slower."""
    x, w, g = arrays()

    @jax.jit
    def products(x: Any, transposed: Any, g: Any, sizes: Any) -> tuple[Any, Any]:
        lay = grouped._layout(RECIPES["mxfp8"], x, sizes)
        rows, gradients = (grouped._take(z, lay.token) for z in (x, g))
        operands = rows.T, gradients.T
        return (
            (grouped._rows_ragged(rows, transposed, lay), grouped._rows_tiled(rows, transposed, lay)),
            (grouped._tokens_ragged(*operands, lay), grouped._tokens_tiled(*operands, lay)),
        )

    both = products(x, np.swapaxes(w, 1, 2), g, np.array((7, 0, 40, 17), np.int32))
    for what, (ragged, tiled) in zip(("rows", "tokens"), both, strict=True):
        assert_close(what, ragged, tiled, 1e-6)


def test_a_delayed_state_records_the_largest_of_all_groups() -> None:
    x, w, g = arrays()
    w[2, 0, 0] = 9.0
    state = step(x, w, g, np.array((7, 0, 40, 17), np.int32), RECIPES["delayed"])[3]
    assert_bitwise(np.asarray(state["history"][-1]), np.float32([6, 9, 7]))


def test_noise_moves_on_with_the_count() -> None:
    x, w, g = arrays()
    sizes = np.array((7, 0, 40, 17), np.int32)
    state = step(x, w, g, sizes, RECIPES["nvfp4"])[3]
    assert_bitwise(np.asarray(state["count"]), np.float32([1, 1]))


def test_without_a_recipe_it_is_ragged_dot() -> None:
    x, w, _ = arrays()
    sizes = np.array((7, 0, 40, 17), np.int32)
    assert_close("plain", grouped_dot(x, w, sizes), jax.lax.ragged_dot(x, w, sizes), 1e-6)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, w, _ = arrays()
    with pytest.raises(ValueError, match="group_sizes \\[experts\\]"):
        grouped_dot(x, w, np.zeros(3, np.int32), recipe="mxfp8")


EMPTY = [(0, 8, 16, 4), (6, 0, 16, 4), (6, 8, 0, 4), (6, 8, 16, 0), (0, 0, 0, 0)]


@pytest.mark.parametrize(
    ("sizes", "recipe"), alternating(EMPTY, ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"], [(0, 8, 16, 4)])
)
def test_nothing_to_multiply_gives_zeros(sizes: tuple[int, ...], recipe: str) -> None:
    tokens, k, n, experts = sizes
    x, w = jax.numpy.ones((tokens, k)), jax.numpy.ones((experts, k, n))
    counts = np.zeros(experts, np.int32)
    counts[:1] = tokens

    def loss(x: Any, w: Any) -> Any:
        y = grouped_dot(x, w, counts, recipe=recipe)
        assert y.shape == (tokens, n)
        return y.sum()

    assert loss(x, w) == 0
    for given, grad in zip((x, w), jax.grad(loss, (0, 1))(x, w), strict=True):
        assert grad.shape == given.shape and not grad.any()


def test_a_delayed_state_outlasts_a_step_without_tokens() -> None:
    state = qj.state.init("delayed")
    x, w, sizes = jax.numpy.ones((0, 8)), jax.numpy.ones((4, 8, 16)), np.zeros(4, np.int32)
    after = jax.grad(lambda s: grouped_dot(x, w, sizes, recipe="delayed", state=s).sum())(state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
