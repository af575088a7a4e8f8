"""Which recipe is in force: `autocast` sets it, and `recipe_in_force` gives it to a layer."""

import threading
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

import torch
import torch.utils.checkpoint

from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.state.history import roll, scaling_step
from quaver.torch.state.layer_state import ReadLog, Replay, recomputing
from quaver.torch.state.noise import order

# ---- context ---------------------------------------------------------------------------------------------


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


active_context = _Ambient()


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
        self._before: list[
            tuple[tuple[Recipe | None, bool, int], tuple[scaling_step.ScalingStep | None, int] | None]
        ] = []

    def _recreate_cm(self) -> "autocast":
        # A decorated function may run in several threads at once.
        return autocast(self.recipe, enabled=self.enabled, group=self.group)

    def __enter__(self) -> "autocast":
        before, entered = active_context.now, None
        if before[2] == 0:
            order.next = 0
        if before[2] == 0 and not recomputing():
            rolls = self.enabled and torch.is_grad_enabled()
            if not is_tracing():
                entered = scaling_step.enter(rolls, self.group, self.recipe), nodes() if rolls else -1
                active_context.ever, active_context.asked = active_context.ever or active_context.asked, False
            elif rolls:
                roll.roll_all(self.group, self.recipe)
        self._before.append((before, entered))
        active_context.now = (self.recipe if self.enabled else None, not self.enabled, before[2] + 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        active_context.now, entered = self._before.pop()
        if active_context.now[2] == 0:
            order.next = None
        if entered is not None:
            step, before = entered
            scaling_step.leave(step)
            if kind is None and not active_context.asked and self._expects_layers() and ran(before):
                warnings.warn(NOTHING_RAN.format(self.recipe), stacklevel=2)

    def _expects_layers(self) -> bool:
        return self.enabled and self.recipe is not None and self.recipe.quantizes and not active_context.compiled


NOTHING_RAN = (
    "no quantizable layer ran inside autocast({}), so it quantized nothing; it reaches quaver.torch's layers: "
    "call quaver.torch.convert(model, recipe) first, or make the model of quaver.torch.Linear"
)


def ran(before: int) -> bool:
    """Whether something ran since there were so many nodes, as far as can be told; -1 is a body without gradients.

    That one leaves no trace: it is taken for a forward until the thread has run a quantizable layer. From then on it is
    more likely that it was empty, as a loop over no batch is.
    """
    return not active_context.ever if before < 0 else nodes() != before


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
        active_context.asked = True
    return in_force(own)


def in_force(own: Recipe | None) -> Recipe | None:
    """`recipe_in_force` of what may have nothing to quantize under it."""
    recipe, disabled, _ = active_context.now
    if own is None:
        return recipe
    return None if disabled else own


# ---- checkpointing ---------------------------------------------------------------------------------------
# Activation recomputation that is exact under every recipe.
#
# torch's own checkpoint, told what the first run took from state that moves on meanwhile: which recipe was in force,
# delayed scaling's factors, the counts of the noise. So the forward may be run again after later forwards, after the
# histories have rolled and after autocast has ended.


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, keep nothing but its arguments for backward, and run it again there.

    The random state is kept, so that dropout drops the same, and so are torch's checks that the second run does what
    the first one did. Inside a compiled function it is torch's own checkpoint, which the compiler knows.

    Args:
        function: what to run; a module or a function, which may enter `autocast` itself.
        *args, **kwargs: its own. `debug`, `determinism_check`, `early_stop` and `preserve_rng_state` are
            torch.utils.checkpoint.checkpoint's.
    Returns:
        What the function returns.
    Raises:
        ValueError: use_reentrant=True or a context_fn is asked for: replaying needs this one.
    Exact: outputs, gradients, histories and counts are those without checkpointing.
    """
    if kwargs.pop("use_reentrant", False) or "context_fn" in kwargs:
        raise ValueError(
            "quaver.torch.checkpoint is not reentrant and has a context_fn of its own; leave out use_reentrant and "
            "context_fn, or call torch.utils.checkpoint.checkpoint"
        )
    if is_tracing():
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


def _contexts() -> tuple[ReadLog, "_RecomputeContext"]:
    """The contexts that torch enters around the first run, and around each run that repeats it."""
    log = ReadLog()
    return log, _RecomputeContext(log)


class _RecomputeContext:
    """The first run's recipe and reads in force, and what has taken gradients of weights from it."""

    def __init__(self, log: ReadLog) -> None:
        self.replay = Replay(log)
        self.active_context = active_context.now
        self.taker = active_context.split if active_context.takes_weights else None
        self.before: list[Any] = []

    def __enter__(self) -> None:
        self.before.append((active_context.now, active_context.split, active_context.takes_weights))
        active_context.now = self.active_context
        if self.taker is not None:
            active_context.split, active_context.takes_weights = self.taker, True
        self.replay.__enter__()

    def __exit__(self, *error: object) -> None:
        self.replay.__exit__(*error)
        active_context.now, active_context.split, active_context.takes_weights = self.before.pop()
