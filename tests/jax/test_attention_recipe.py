"""A recipe that quantizes attention is refused in JAX, which does not support it, instead of ignored."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import quaver
import quaver.jax as qj
import quaver.jax.linen as ql
import quaver.jax.nnx as qn
from quaver.jax.blocks.attention import attention

QUANTIZED = quaver.recipes.tensorwise(attention=True)
# Threefry takes seconds to compile.
KEY = jax.random.key(0, impl="unsafe_rbg")
X = jnp.ones((1, 3, 8))
HEADS = jnp.ones((1, 3, 2, 4))

CALLS: dict[str, Callable[[Any], Any]] = {
    "the function": lambda recipe: attention(HEADS, HEADS, HEADS, recipe=recipe),
    "linen's core": lambda recipe: ql.DotProductAttention(recipe=recipe).apply({}, HEADS, HEADS, HEADS),
    "linen": lambda recipe: ql.MultiHeadAttention(2, recipe=recipe).init(KEY, X),
    "nnx's core": lambda recipe: qn.DotProductAttention(recipe=recipe)(HEADS, HEADS, HEADS),
    "nnx": lambda recipe: qn.MultiHeadAttention(8, 2, recipe=recipe, rngs=nnx.Rngs(KEY))(X),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_recipe_that_quantizes_attention_is_refused(call: Callable[[Any], Any]) -> None:
    # The error is raised while JAX traces.
    def traced(recipe: Any) -> None:
        jax.eval_shape(lambda: call(recipe))

    with pytest.raises(ValueError, match="'tensorwise' has attention=True and quaver"):
        traced(QUANTIZED)
    with qj.autocast(QUANTIZED):
        with pytest.raises(ValueError, match="attention=True"):
            traced(None)
        # A layer's own recipe has priority over the ambient one.
        traced("tensorwise")
    with qj.autocast(QUANTIZED), qj.autocast(enabled=False):
        traced(None)


def test_convert_refuses_it_before_anything_is_changed() -> None:
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(KEY))
    with pytest.raises(ValueError, match="attention=True"):
        qn.convert(model, {"*": QUANTIZED})
