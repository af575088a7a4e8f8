"""Where a linen module keeps a recipe's state: the collection whose gradient is its next value.

It is Flax's own, so that `flax.training.train_state.TrainState` and what else knows Flax's FP8 modules know it too.

A layer that is used several times in one step needs a state for each use, as autodiff would add up what they return for
one. nn.scan with variable_broadcast="params" and variable_axes={COLLECTION: 0} gives each use its own history.
"""

from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import Array

from quaver.core.spec import Recipe
from quaver.jax import state
from quaver.jax.state.context import recipe_in_force

#: "_overwrite_with_gradient".
COLLECTION = OVERWRITE_WITH_GRADIENT


def layer_state(module: nn.Module, own: str | Recipe | None) -> dict[str, Array] | None:
    """The state of a module's linear layer under the recipe in force; made by `init`, None where it has none.

    A count of random roundings may be missing where no gradients are taken; `linear` sees to that.
    Raises:
        ValueError: `apply` was not given the collection, or one of another recipe.
    """
    recipe = recipe_in_force(own)
    fresh = {} if recipe is None else state.init(recipe)
    if not fresh:
        return None
    given = all(module.has_variable(COLLECTION, key) for key in fresh) or module.is_mutable_collection(COLLECTION)
    if not given and set(fresh) == {"count"}:
        return None
    where = f"{type(module).__name__} {'.'.join(module.path) or '(root)'} under recipe {str(recipe)!r}"
    if not given:
        raise ValueError(
            f"{where} needs its state, {' and '.join(fresh)} in the collection {COLLECTION!r}, and it was not given. "
            "Initialize under the same recipe (with quaver.jax.autocast(recipe): variables = model.init(...)) and pass "
            "all variables to apply, not 'params' alone; nn.scan and nn.vmap need the collection in variable_axes"
        )
    held = {key: module.variable(COLLECTION, key, lambda value=value: value).value for key, value in fresh.items()}
    for key, value in fresh.items():
        if held[key].shape != value.shape:
            raise ValueError(
                f"{where} has a {key} of shape {held[key].shape} and needs {value.shape}: it is another recipe's; "
                "initialize under this one, and keep the params that you have"
            )
    return held


def qualified_name(module: nn.Module) -> str:
    """The module's path with dots, as PyTorch writes it; it tells the streams of random rounding apart."""
    return ".".join(module.path)
