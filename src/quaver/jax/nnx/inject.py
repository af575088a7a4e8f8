"""Recipes for models made of Flax's own modules: operations that fit the slots of those modules.

nnx.Linear(512, 2048, dot_general=DotGeneral("tensorwise"), rngs=rngs)
nnx.Einsum("bd,df->bf", (512, 2048), einsum_op=Einsum("mxfp8"), rngs=rngs)
"""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from quaver.core.spec import Recipe
from quaver.jax.dot_general import dot_general
from quaver.jax.nnx.variable import fresh_state, label


class DotGeneral(nnx.Module):
    """jax.lax.dot_general of an input and a kernel under a recipe, with that layer's state: one for each layer.

    Args:
        recipe: name or Recipe; None takes the ambient one.
        seed, name: of stochastic rounding, as DenseGeneral's.
    """

    def __init__(self, recipe: str | Recipe | None = None, *, seed: int = 0, name: str = "") -> None:
        self.recipe = recipe
        self.seed = seed
        self.name = name
        self.state = fresh_state(recipe)

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        **options: Any,
    ) -> Array:
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            recipe=self.recipe,
            state=self.state.read(self.recipe, label(self)),
            name=self.name,
            seed=self.seed,
            **options,
        )


class Einsum(nnx.Module):
    """jnp.einsum of an input and a kernel under a recipe, with that layer's state; the second operand is the kernel."""

    def __init__(self, recipe: str | Recipe | None = None, *, seed: int = 0, name: str = "") -> None:
        self.recipe = recipe
        self.seed = seed
        self.name = name
        self.state = fresh_state(recipe)

    def __call__(self, equation: str, lhs: Array, rhs: Array, **options: Any) -> Array:
        run = functools.partial(
            dot_general,
            recipe=self.recipe,
            state=self.state.read(self.recipe, label(self)),
            name=self.name,
            seed=self.seed,
        )
        return jnp.einsum(equation, lhs, rhs, _dot_general=run, **options)
