"""A compiled step of several layers needs no more memory under a recipe than in bf16: XLA may not decode or draw the
noise of all layers at once."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import quaver.jax as qj
from quaver import recipes
from quaver.recipes.spec import Recipe

LAYERS, TOKENS, FEATURES = 6, 2048, 64


def allocated(recipe: Recipe) -> int:
    """Bytes of temporary buffers and outputs of a step's loss and gradients."""

    def loss(weights: Any, states: Any, x: jax.Array) -> jax.Array:
        for i, (w, state) in enumerate(zip(weights, states, strict=True)):
            x = x + jax.nn.gelu(qj.linear(x, w, recipe=recipe, state=state, name=str(i), dtype=x.dtype))
        return jnp.square(x.astype(jnp.float32)).mean()

    weights = [jax.ShapeDtypeStruct((FEATURES, FEATURES), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((TOKENS, FEATURES), jnp.bfloat16)
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    memory: Any = step.lower(weights, [qj.state.init(recipe)] * LAYERS, x).compile().memory_analysis()
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes)


@cache
def bf16() -> int:
    return allocated(recipes.get("bf16"))


def _each() -> Any:
    """Each recipe; quick are the one with noise, and the one with a GEMM in high precision."""
    for name in recipes.RECIPES:
        if name != "bf16":
            quick = name in ("nvfp4", "rowwise_bf16_wgrad")
            yield pytest.param(name, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize("name", list(_each()))
def test_a_step_needs_no_more_memory_than_in_bf16(name: str) -> None:
    assert allocated(recipes.get(name)) <= bf16()
