"""Experts in JAX: a whole layer of functions, also under transformations."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import quaver.jax as qj
from tests.close import assert_bitwise, assert_close
from tests.xla_options import QUICKEST


def layer(x: Any, router: Any, w: Any, recipe: str | None = None) -> Any:
    routing = qj.route(x @ router, 2)
    rows, sizes, places = qj.permute(x, routing.indices, w.shape[0], pad=8)
    return qj.unpermute(qj.grouped_dot(rows, w, sizes, recipe=recipe), places, 2, routing.weights)


def drawn() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in ((24, 16), (16, 4), (4, 16, 8)))


def dense(x: Any, router: Any, w: Any) -> Any:
    """Every expert on every token."""
    logits = x @ router
    chosen = jax.lax.top_k(logits, 2)[1]
    weights = jax.nn.softmax(jnp.take_along_axis(logits, chosen, 1), -1)
    mask = (jax.nn.one_hot(chosen, w.shape[0]) * weights[..., None]).sum(1)
    return jnp.einsum("te,th,ehn->tn", mask, x, w, precision="highest")


def test_a_layer_and_its_gradients_match_every_expert_on_every_token() -> None:
    x, router, w = drawn()

    def loss(run: Any, *args: Any) -> Any:
        return jnp.sin(run(*args)).sum()

    ours = jax.jit(jax.value_and_grad(lambda *args: loss(layer, *args), (0, 1, 2)))(x, router, w)
    theirs = jax.value_and_grad(lambda *args: loss(dense, *args), (0, 1, 2))(x, router, w)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert_close("", np.asarray(a), np.asarray(b), 2e-6)


def test_rows_of_zeros_change_no_output_under_a_recipe() -> None:
    x, router, w = drawn()

    @partial(jax.jit, static_argnums=0, compiler_options=QUICKEST)
    def padded(pad: int) -> Any:
        rows, sizes, places = qj.permute(x, qj.route(x @ router, 2).indices, 4, pad=pad)
        return qj.unpermute(qj.grouped_dot(rows, w, sizes, recipe="mxfp8"), places, 2)

    assert_bitwise(*(np.asarray(padded(pad)) for pad in (1, 32)))


def test_a_batch_is_mapped_over() -> None:
    x, router, _ = drawn()
    batch = np.stack([x, x[::-1]])

    def rows_of(x: Any) -> Any:
        return qj.permute(x, qj.route(x @ router, 2).indices, 4).rows

    alone = jax.jit(rows_of)
    for one, rows in zip(batch, jax.jit(jax.vmap(rows_of))(batch), strict=True):
        assert_bitwise(np.asarray(rows), np.asarray(alone(one)))
