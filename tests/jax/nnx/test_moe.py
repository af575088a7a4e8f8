"""Mixtures of experts in NNX are those in linen, and are converted, balanced and trained."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from quaver.jax import linen as ql
from quaver.jax import nnx as qn
from quaver.jax.blocks.experts import balance_loss, token_counts, update_bias
from quaver.jax.nnx.moe import BalanceBias

DIM, HIDDEN, EXPERTS, K = 32, 48, 4, 2
OPTIONS: dict[str, Any] = {"shared": 16, "shared_gate": True, "router_bias": True, "use_bias": True}
X = jax.random.normal(jax.random.key(1), (3, 8, DIM))


def test_outputs_are_those_of_linen_for_the_same_parameters() -> None:
    for options in ({}, OPTIONS | {"activation": "clamped_swiglu", "activation_options": {"limit": 2.0}}):
        block = qn.MoE(DIM, HIDDEN, EXPERTS, K, rngs=nnx.Rngs(0), **options)
        params = nnx.to_pure_dict(nnx.state(block, nnx.Param))
        layer = ql.MoE(HIDDEN, EXPERTS, K, **options)
        shapes = jax.eval_shape(layer.init, jax.random.key(0), X)["params"]
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
        expected = jax.jit(layer.apply)({"params": params}, X)
        np.testing.assert_array_equal(nnx.jit(lambda block, x: block(x))(block, X), expected)


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_a_converted_mixture_trains(recipe: str | None) -> None:
    block = qn.MoE(DIM, HIDDEN, EXPERTS, K, return_routing=True, balance_bias=True, rngs=nnx.Rngs(0))
    if recipe is not None:
        report = qn.convert(block, recipe)
        assert list(report.converted) == ["wi", "wo"]
    optimizer = nnx.Optimizer(block, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(block: Any, optimizer: Any) -> Any:
        def loss(block: Any) -> Any:
            y, routing = block(X)
            return jnp.square(y - 1).mean() + 0.01 * balance_loss(routing), routing.indices

        (value, indices), grads = qn.value_and_grad(loss, has_aux=True)(block)
        optimizer.update(block, grads)
        block.balance[...] = update_bias(block.balance[...], token_counts(indices, EXPERTS))
        return value

    losses = [float(step(block, optimizer)) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert isinstance(block.balance, BalanceBias) and np.any(np.asarray(block.balance[...]))
    if recipe is not None:
        assert np.asarray(block.wi.state.history[...]).max() > 0
        assert qn.revert(block) == ["wi", "wo"]
