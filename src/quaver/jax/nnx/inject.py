"""Recipes for models made of Flax's own modules: operations that fit the slots of those modules.

nnx.Linear(512, 2048, dot_general=DotGeneral("tensorwise"), rngs=rngs)
nnx.Einsum("bd,df->bf", (512, 2048), einsum_op=Einsum("mxfp8"), rngs=rngs)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from quaver.core.spec import Recipe
from quaver.jax.linears.contraction import dot_general
from quaver.jax.nnx.variable import fresh_state, label


class _Operation(nnx.Module):
    """What the operations below share: a recipe, and the state of the layer that one is put into."""

    def __init__(self, recipe: str | Recipe | None = None, *, seed: int = 0, name: str = "") -> None:
        self.recipe = recipe
        self.seed = seed
        self.name = name
        self.state = fresh_state(recipe)

    def _operation(self) -> Callable[..., Array]:
        state = self.state.read(self.recipe, label(self))
        return functools.partial(dot_general, recipe=self.recipe, state=state, name=self.name, seed=self.seed)


class DotGeneral(_Operation):
    """jax.lax.dot_general of an input and a kernel under a recipe, with that layer's state: one for each layer.

    Args:
        recipe: name or Recipe; None takes the ambient one.
        seed, name: of stochastic rounding, as DenseGeneral's.
    """

    def __call__(self, lhs: Array, rhs: Array, dimension_numbers: Any, *args: Any, **options: Any) -> Array:
        return self._operation()(lhs, rhs, dimension_numbers, *args, **options)


class Einsum(_Operation):
    """jnp.einsum of an input and a kernel under a recipe, with that layer's state; the second operand is the kernel.

    Args: as DotGeneral's.
    """

    def __call__(self, equation: str, lhs: Array, rhs: Array, **options: Any) -> Array:
        return jnp.einsum(equation, lhs, rhs, _dot_general=self._operation(), **options)
