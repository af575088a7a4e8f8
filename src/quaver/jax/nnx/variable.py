"""Where an NNX module keeps a recipe's state: Variables of a type whose gradient is their next value."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import Array

from quaver import recipes
from quaver.core.spec import Recipe
from quaver.jax import state
from quaver.jax.state.context import recipe_in_force


@nnx.register_variable_name(OVERWRITE_WITH_GRADIENT)
class OverwriteWithGradient(nnx.Variable):
    """State of a quantized layer: `value_and_grad` of this package replaces it by its gradient.

    In a bridge to linen it is the collection "_overwrite_with_gradient".
    """


class LayerState(nnx.Pytree):
    """The state of one linear layer under one recipe: nothing, or Variables `history` and `factor`, or `count`.

    Args:
        recipe: whose state it is; None has none.
        stacked: leading axes of layers that nnx.vmap made.
    """

    def __init__(self, recipe: str | Recipe | None, stacked: tuple[int, ...] = ()) -> None:
        self.of = None if recipe is None else recipes.get(recipe)
        for name, value in state.init(self.of).items():
            setattr(self, name, OverwriteWithGradient(jnp.broadcast_to(value, (*stacked, *value.shape))))

    def read(self, own: str | Recipe | None, where: str) -> dict[str, Array] | None:
        """The state under the recipe in force; None where that needs none.

        A count of random roundings may be missing where no gradients are taken; `linear` sees to that.
        Raises:
            ValueError: the layer was made under another recipe.
        """
        recipe = recipe_in_force(own)
        needed = {} if recipe is None else state.init(recipe)
        if not needed:
            return None
        if set(needed) == {"count"} and not hasattr(self, "count"):
            return None
        held: dict[str, Any] = {name: getattr(self, name, None) for name in needed}
        if any(held[name] is None or held[name].shape != value.shape for name, value in needed.items()):
            raise ValueError(
                f"{where} runs under recipe {str(recipe)!r} and has {self._what()}. Make the model under that recipe "
                f"(with quaver.jax.autocast({str(recipe)!r}): model = ...), or quaver.jax.nnx.convert(model, recipe)"
            )
        return {name: variable[...] for name, variable in held.items()}

    def _what(self) -> str:
        return "no state: it was made without a recipe" if self.of is None else f"the state of recipe {str(self.of)!r}"


def fresh_state(own: str | Recipe | None) -> LayerState:
    """The state that a new layer gets: that of its own recipe, else that of the ambient one."""
    return LayerState(recipe_in_force(own) if own is None else own)


def joined(*names: str) -> str:
    """Names of modules, one inside the other, with dots."""
    return ".".join(name for name in names if name)


def label(module: Any) -> str:
    """The name of a module in a message."""
    return f"{type(module).__name__} {module.name or '(unnamed)'}"
