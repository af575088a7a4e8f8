"""Eight residual MLP blocks in JAX, compiled forward and backward, and the bytes that XLA allocates for them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from quaver.jax import state as states
from quaver.jax.linears.function import linear
from quaver.recipes.spec import Recipe

LAYERS = 8


def compiled_bytes(recipe: Recipe, tokens: int, features: int) -> int:
    """Return the bytes of buffers and outputs of loss and gradients: what a step needs beside its arguments.

    Parameters are float32, activations [tokens, features] bfloat16, and an MLP's hidden features are four times as
    many. Nothing runs.
    """

    def loss(weights: Any, state: Any, x: Array) -> Array:
        for i, ((up, down), (up_state, down_state)) in enumerate(zip(weights, state, strict=True)):
            h = linear(x, up, recipe=recipe, state=up_state, name=f"{i}.up", dtype=x.dtype)
            x = x + linear(jax.nn.gelu(h), down, recipe=recipe, state=down_state, name=f"{i}.down", dtype=x.dtype)
        return jnp.square(x.astype(jnp.float32)).mean()

    hidden = 4 * features
    pair = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((features, hidden), (hidden, features))]
    weights, state = [pair] * LAYERS, [[states.init(recipe)] * 2] * LAYERS
    x = jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16)
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(weights, state, x).compile()
    memory: Any = compiled.memory_analysis()
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes)
