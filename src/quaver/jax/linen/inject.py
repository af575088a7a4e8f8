"""Recipes for models made of Flax's own modules: operations that fit the slots of those modules.

nn.Dense(4096, dot_general_cls=dot_general_cls("tensorwise"))
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from quaver import recipes
from quaver.core.spec import Recipe
from quaver.jax.linears.contraction import dot_general
from quaver.jax.linen.state import layer_state, qualified_name


def dot_general_cls(recipe: str | Recipe | None = None, *, seed: int = 0) -> Callable[[], "DotGeneral"]:
    """For the slot `dot_general_cls` of flax.linen's Dense, DenseGeneral and MultiHeadDotProductAttention.

    Args:
        recipe: name or Recipe; None takes the ambient one.
        seed: of stochastic rounding.
    Returns:
        A class, as the slot wants it: called without arguments it makes the operation.
    Raises:
        ValueError: no such recipe.
    """
    return functools.partial(DotGeneral, recipe=None if recipe is None else recipes.get(recipe), seed=seed)


def einsum_cls(recipe: str | Recipe | None = None, *, seed: int = 0) -> Callable[[], "Einsum"]:
    """The same for where a model takes an einsum, as with flax.linen.fp8_ops.Fp8Einsum."""
    return functools.partial(Einsum, recipe=None if recipe is None else recipes.get(recipe), seed=seed)


class DotGeneral(nn.Module):
    """jax.lax.dot_general of an input and a kernel under a recipe; the state of delayed scaling is the module's."""

    recipe: str | Recipe | None = None
    seed: int = 0

    @nn.compact
    def __call__(self, lhs: Array, rhs: Array, dimension_numbers: Any, *args: Any, **options: Any) -> Array:
        return _operation(self)(lhs, rhs, dimension_numbers, *args, **options)


class Einsum(nn.Module):
    """jnp.einsum of an input and a kernel under a recipe; the second operand is the kernel."""

    recipe: str | Recipe | None = None
    seed: int = 0

    @nn.compact
    def __call__(
        self,
        equation: str,
        lhs: Array,
        rhs: Array,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Array:
        run = _operation(self)
        return jnp.einsum(
            equation, lhs, rhs, precision=precision, preferred_element_type=preferred_element_type, _dot_general=run
        )


def _operation(module: Any) -> Callable[..., Array]:
    """`dot_general` with a module's recipe and state."""
    # The name of the layer that the module was put into: "layers_0.Dense_0", not "….DotGeneral_0".
    layer = qualified_name(module).rpartition(".")[0]
    state = layer_state(module, module.recipe)
    return functools.partial(dot_general, recipe=module.recipe, state=state, name=layer, seed=module.seed)
