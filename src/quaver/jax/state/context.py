"""Which recipe is in force: `autocast` sets it, and `recipe_in_force` gives it to a layer.

A function reads the recipe while it is traced, and the recipe is part of jit's cache key: JAX traces the function again
under another recipe and never reuses it.
"""

import weakref
from contextlib import AbstractContextManager, ContextDecorator
from functools import partial
from typing import Any, NamedTuple

import jax

from quaver import recipes
from quaver.recipes.spec import Recipe

# ---- context ---------------------------------------------------------------------------------------------


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
    active_context = _context.value
    if active_context.disabled:
        return None
    return active_context.recipe if own is None else recipes.get(own)


# ---- uses ------------------------------------------------------------------------------------------------
# How many calls read one layer's state in one step: autodiff would add up the states that it returns for them.
#
# A state that is traced is an object; the calls that get the same one are counted beside it, and a backward rule that
# is about to be traced looks at the count. What is counted is not part of any computation, and goes when the object
# does.

_seen: "dict[int, tuple[weakref.ref[Any], StateReads]]" = {}


class StateReads:
    """How many calls read one state."""

    count = 0


def uses_of(state: Any) -> StateReads:
    """Count one more call that reads this state."""
    leaf = next(iter(jax.tree.leaves(state)), None)
    if not isinstance(leaf, jax.core.Tracer):
        # A value is not what is differentiated.
        return StateReads()
    known, uses = _seen.get(id(leaf), (None, None))
    if known is None or uses is None or known() is not leaf:
        uses = StateReads()
        _seen[id(leaf)] = (weakref.ref(leaf, partial(_forget, id(leaf))), uses)
    uses.count += 1
    return uses


def _forget(key: int, ref: "weakref.ref[Any]") -> None:
    if key in _seen and _seen[key][0] is ref:
        del _seen[key]
