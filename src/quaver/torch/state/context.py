"""Which recipe is in force: `autocast` sets it, and `recipe_in_force` gives it to a layer."""

import threading
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

import torch

from quaver import recipes
from quaver.core.spec import Recipe
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.state.history import rolling, steps
from quaver.torch.state.noise import order
from quaver.torch.state.recomputation import recomputing


class _Ambient(threading.local):
    # Dynamo traces a thread-local; it does not trace a ContextVar. One tuple is one look-up.
    #: The recipe, whether autocast(enabled=False) rules, and how many autocasts are open.
    now: tuple[Recipe | None, bool, int]
    #: True once a quantizable layer has asked for its recipe since this thread entered an outermost autocast.
    asked = False
    #: True once one has asked in any autocast of this thread, or before the first.
    ever = False
    #: True once a compiled layer has run in this thread: such layers ask nothing when they run.
    compiled = False
    #: Where the forward of a pipeline's stage runs: an autograd function and its `apply` to what is called in the place
    #: of that. No compiled code asks for it.
    split: Callable[[type[torch.autograd.Function], Callable[..., Any]], Callable[..., Any]] | None = None
    #: Whether that takes the gradients of weights away from autograd, of layers that quantize nothing, too.
    takes_weights = False

    def __init__(self) -> None:
        # Dynamo guards on whether an object has an attribute: one of the class alone, which a first autocast sets,
        # would compile that function again.
        self.now = None, False, 0


ambient = _Ambient()


class autocast(ContextDecorator):
    """Run the layers inside under a recipe; layers with a recipe of their own keep it.

    It is for the forward pass: backward uses what forward used. Entering the outermost one with gradients enabled
    begins a step of delayed scaling, and the histories of the layers that ran in this thread's earlier ones roll, after
    one all-reduce of the maxima. Layers whose backward is still to come roll when their model runs forward again, so
    that several models in one loop or one process train as each does alone.

    One that is left after a forward in which no quantizable layer ran warns. With gradients a forward is what made part
    of a graph; without, any body counts, until a quantizable layer has run in this thread: after that the body may have
    been empty. None warns in compiled code, nor where compiled layers ran in this thread.

    Args:
        recipe: a name from `quaver.recipes.RECIPES` or a Recipe.
        enabled: False switches quantization off inside, also for layers with their own recipe.
        group: process group that delayed scaling's maxima are reduced over; the default group if torch.distributed
            is initialized. All its ranks must enter alike. It is the layers' own from then on: outside of autocast they
            are reduced over it too, and another group's step leaves them alone until they run.
    Raises:
        ValueError: unknown recipe, or none given.
    """

    def __init__(self, recipe: str | Recipe | None = None, *, enabled: bool = True, group: Any = None) -> None:
        if enabled and recipe is None:
            raise ValueError("autocast needs a recipe, such as autocast('mxfp8'); autocast(enabled=False) needs none")
        self.recipe = None if recipe is None else _resolve(recipe)
        self.enabled = enabled
        self.group = group
        #: What each entry found, and of an outermost one: the step of delayed scaling, and the number of graph nodes.
        self._before: list[tuple[tuple[Recipe | None, bool, int], tuple[steps.Step | None, int] | None]] = []

    def _recreate_cm(self) -> "autocast":
        # A decorated function may run in several threads at once.
        return autocast(self.recipe, enabled=self.enabled, group=self.group)

    def __enter__(self) -> "autocast":
        before, entered = ambient.now, None
        if before[2] == 0:
            order.next = 0
        if before[2] == 0 and not recomputing():
            rolls = self.enabled and torch.is_grad_enabled()
            if not is_tracing():
                entered = steps.enter(rolls, self.group, self.recipe), nodes() if rolls else -1
                ambient.ever, ambient.asked = ambient.ever or ambient.asked, False
            elif rolls:
                rolling.roll_all(self.group, self.recipe)
        self._before.append((before, entered))
        ambient.now = (self.recipe if self.enabled else None, not self.enabled, before[2] + 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        ambient.now, entered = self._before.pop()
        if ambient.now[2] == 0:
            order.next = None
        if entered is not None:
            step, before = entered
            steps.leave(step)
            if kind is None and not ambient.asked and self._expects_layers() and ran(before):
                warnings.warn(NOTHING_RAN.format(self.recipe), stacklevel=2)

    def _expects_layers(self) -> bool:
        return self.enabled and self.recipe is not None and self.recipe.quantizes and not ambient.compiled


NOTHING_RAN = (
    "no quantizable layer ran inside autocast({}), so it quantized nothing; it reaches quaver.torch's layers: "
    "call quaver.torch.convert(model, recipe) first, or make the model of quaver.torch.Linear"
)


def ran(before: int) -> bool:
    """Whether something ran since there were so many nodes, as far as can be told; -1 is a body without gradients.

    That one leaves no trace: it is taken for a forward until the thread has run a quantizable layer. From then on it is
    more likely that it was empty, as a loop over no batch is.
    """
    return not ambient.ever if before < 0 else nodes() != before


def nodes() -> int:
    """How many nodes of graphs this thread has made, by a name that torch does not document; 0 where it is missing."""
    number = getattr(torch.autograd, "_get_sequence_nr", None)
    return 0 if number is None else int(number())


#: The recipes without options, ready made: a compiler traces a lookup, but not how a recipe is built and checked.
_PLAIN = {name: build() for name, build in recipes.RECIPES.items()}


def _resolve(recipe: str | Recipe) -> Recipe:
    if isinstance(recipe, str) and recipe in _PLAIN:
        return _PLAIN[recipe]
    if is_tracing():
        if isinstance(recipe, Recipe):
            return recipe
        if "(" in recipe:
            raise ValueError(
                f"torch.compile cannot read the options in {recipe!r}; build the recipe outside of what is compiled, "
                "recipe = quaver.recipes.get(text), and give autocast(recipe)"
            )
    return recipes.get(recipe)


def recipe_in_force(own: Recipe | None) -> Recipe | None:
    """A layer's own recipe, else the innermost autocast's, else none; none where autocast(enabled=False) rules.

    It is what a quantizable layer asks when it runs.
    """
    if not is_tracing():
        ambient.asked = True
    return in_force(own)


def in_force(own: Recipe | None) -> Recipe | None:
    """`recipe_in_force` of what may have nothing to quantize under it."""
    recipe, disabled, _ = ambient.now
    if own is None:
        return recipe
    return None if disabled else own
