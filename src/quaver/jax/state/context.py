"""Which recipe is in force: `autocast` sets it, and `recipe_in_force` gives it to a layer.

A function reads the recipe while it is traced, and the recipe is part of jit's cache key: JAX traces the function again
under another recipe and never reuses it.
"""

from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, NamedTuple

import jax

from quaver import recipes
from quaver.core.spec import Recipe


class _Ambient(NamedTuple):
    recipe: Recipe | None = None
    disabled: bool = False


_context = jax.make_user_context(default_value=_Ambient())


class autocast(ContextDecorator):
    """Run the layers inside under a recipe; layers with a recipe of their own keep it.

    It is for the forward pass: backward uses what forward used. A jitted function may be called inside it or may
    contain it.

    Args:
        recipe: a name from `quaver.recipes.RECIPES` or a Recipe.
        enabled: False switches quantization off inside, also for layers with their own recipe.
    Raises:
        ValueError: unknown recipe, or none given.
    """

    def __init__(self, recipe: str | Recipe | None = None, *, enabled: bool = True) -> None:
        if enabled and recipe is None:
            raise ValueError("autocast needs a recipe, such as autocast('mxfp8'); autocast(enabled=False) needs none")
        self.recipe = None if recipe is None else recipes.get(recipe)
        self.enabled = enabled
        self._entered: list[AbstractContextManager[None]] = []

    def _recreate_cm(self) -> "autocast":
        # A decorated function may run in several threads at once.
        return autocast(self.recipe, enabled=self.enabled)

    def __enter__(self) -> "autocast":
        context = _context(_Ambient(self.recipe) if self.enabled else _Ambient(disabled=True))
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def recipe_in_force(own: str | Recipe | None = None) -> Recipe | None:
    """A layer's own recipe, else the innermost autocast's, else none; none where autocast(enabled=False) rules."""
    ambient = _context.value
    if ambient.disabled:
        return None
    return ambient.recipe if own is None else recipes.get(own)
