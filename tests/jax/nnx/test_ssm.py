"""The Mamba-2 block in NNX is that in linen, and is converted and trained."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from quaver.jax import linen as ql
from quaver.jax import nnx as qn

DIM = 32
SIZES: dict[str, Any] = {"head_dim": 8, "state": 16}
X = jax.random.normal(jax.random.key(1), (2, 12, DIM))


def test_outputs_and_states_are_those_of_linen_for_the_same_parameters() -> None:
    for options in ({}, {"gate": "no_norm", "conv_bias": False, "use_bias": True, "out_bias": False}):
        block = qn.Mamba2(DIM, **SIZES, **options, rngs=nnx.Rngs(0))
        params = nnx.to_pure_dict(nnx.state(block, nnx.Param))
        layer = ql.Mamba2(**SIZES, **options)
        shapes = jax.eval_shape(layer.init, jax.random.key(0), X)["params"]
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
        state = block.first_state(2)
        expected = jax.jit(lambda v, x, s, layer=layer: layer.apply(v, x, state=s))({"params": params}, X, state)
        got = nnx.jit(lambda block, x, s: block(x, state=s))(block, X, state)
        jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_converted_block_trains() -> None:
    block = qn.Mamba2(DIM, **SIZES, rngs=nnx.Rngs(0))
    assert list(qn.convert(block, "delayed").converted) == ["in_proj", "out_proj"]
    optimizer = nnx.Optimizer(block, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(block: Any, optimizer: Any) -> Any:
        value, grads = qn.value_and_grad(lambda block: jnp.square(block(X) - 1).mean())(block)
        optimizer.update(block, grads)
        return value

    losses = [float(step(block, optimizer)) for _ in range(6)]
    assert losses[-1] < losses[0]
    assert np.asarray(block.in_proj.state.history[...]).max() > 0
