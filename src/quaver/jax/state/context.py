"""The recipe in force: `autocast` sets it, and layers read it with `recipe_in_force`.

A function reads the recipe while it is traced. The recipe is part of jit's cache key, so JAX traces the function again
under another recipe.
"""

import weakref
from contextlib import AbstractContextManager, ContextDecorator
from functools import partial
from typing import Any, NamedTuple

import jax

from quaver import recipes
from quaver.recipes.spec import Recipe

# ---- recipe context ----


class _ActiveContext(NamedTuple):
    recipe: Recipe | None = None
    disabled: bool = False


_context = jax.make_user_context(default_value=_ActiveContext())


class autocast(ContextDecorator):
    """Run the layers inside under a recipe; layers with their own recipe keep it.

    It only needs to surround the forward: backward uses what the forward used. A jitted function may be called inside
    it or contain it.

    Args:
        recipe: a name from `quaver.recipes.RECIPES` or a Recipe.
        enabled: False disables quantization inside, also for layers with their own recipe.
    Raises:
        ValueError: unknown recipe, or none.
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
        context = _context(_ActiveContext(self.recipe) if self.enabled else _ActiveContext(disabled=True))
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def recipe_in_force(own: str | Recipe | None = None) -> Recipe | None:
    """Return the layer's own recipe, else the innermost autocast's, else None; None under autocast(enabled=False)."""
    active_context = _context.value
    if active_context.disabled:
        return None
    return active_context.recipe if own is None else recipes.get(own)


# ---- number of calls that read a layer's state in one step, whose state gradients autodiff would sum ----
#
# A traced state is an object. Calls that receive the same object are counted, and the backward rule checks the count
# when it is traced. The counter is not part of the computation and is freed with the object.

_seen: "dict[int, tuple[weakref.ref[Any], StateReads]]" = {}


class StateReads:
    """Counter of the calls that read one state."""

    count = 0


def state_reads_of(state: Any) -> StateReads:
    """Count one more call that reads this state, and return its counter."""
    leaf = next(iter(jax.tree.leaves(state)), None)
    if not isinstance(leaf, jax.core.Tracer):
        # Only tracers are differentiated, so other values are not counted.
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
