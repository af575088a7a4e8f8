"""Recipe context: `autocast` sets the recipe, `recipe_in_force` returns it, `checkpoint` recomputes under it."""

import threading
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

import torch
import torch.utils.checkpoint

from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.numerics.rounding import called_while_traced, is_tracing
from quaver.torch.state.history import roll, scaling_step
from quaver.torch.state.layer_state import ReadLog, Replay, recomputing
from quaver.torch.state.noise import layer_numbering

# ---- autocast ----


class _ActiveContext(threading.local):
    # A thread-local, because Dynamo traces it and not a ContextVar. A single tuple needs a single lookup.
    #: (recipe, True inside autocast(enabled=False), number of open autocasts).
    now: tuple[Recipe | None, bool, int]
    #: True once a quantizable layer has read its recipe since this thread entered an outermost autocast.
    layer_ran = False
    #: True once a quantizable layer has read its recipe in any autocast of this thread, or before the first.
    ever_ran_layer = False
    #: True once a compiled layer has run in this thread; such layers do not read the recipe when they run.
    compiled = False
    #: Set while the forward of a pipeline stage runs: maps an autograd function and its `apply` to the function to call
    #: instead. Compiled code never reads it.
    apply_override: Callable[[type[torch.autograd.Function], Callable[..., Any]], Callable[..., Any]] | None = None
    #: True if `apply_override` takes weight gradients from autograd, including those of unquantized layers.
    captures_wgrad = False

    def __init__(self) -> None:
        # Dynamo guards on instance attributes: setting `now` later would make the first autocast recompile.
        self.now = None, False, 0


active_context = _ActiveContext()


class autocast(ContextDecorator):
    """Run layers under a recipe; layers with a recipe of their own keep it.

    Use it around the forward pass; backward uses the recipe of its forward. Entering the outermost autocast with
    gradients enabled begins a step of delayed scaling: histories of layers that ran in this thread's earlier autocasts
    are updated, after one all-reduce of the amaxes. Layers whose backward is still pending are updated when their model
    runs forward again, so several models in one loop or process train as each does alone.

    Warns on exit if a forward ran but no quantizable layer did. With gradients, a forward is detected by new autograd
    nodes. Without gradients any body counts, until a quantizable layer has run in this thread. There is no warning in
    compiled code, or if compiled layers ran in this thread.

    Args:
        recipe: a name from `quaver.recipes.RECIPES` or a Recipe.
        enabled: False disables quantization inside, also for layers with their own recipe.
        group: process group over which delayed scaling reduces its amaxes; the default group if torch.distributed is
            initialized. All its ranks must enter in the same order. The layers keep the group afterwards, also outside
            of autocast, and steps of other groups skip these layers until they run.

    Raises:
        ValueError: the recipe is unknown, or none was passed.
    """

    def __init__(self, recipe: str | Recipe | None = None, *, enabled: bool = True, group: Any = None) -> None:
        if enabled and recipe is None:
            raise ValueError("autocast needs a recipe, such as autocast('mxfp8'); autocast(enabled=False) needs none")
        self.recipe = None if recipe is None else _resolve(recipe)
        self.enabled = enabled
        self.group = group
        #: For each entry the previous context; for an outermost entry also the previous step and the number of autograd
        #: nodes.
        self._before: list[
            tuple[tuple[Recipe | None, bool, int], tuple[scaling_step.ScalingStep | None, int] | None]
        ] = []

    def _recreate_cm(self) -> "autocast":
        # A new object, because a decorated function may run in several threads at once.
        return autocast(self.recipe, enabled=self.enabled, group=self.group)

    def __enter__(self) -> "autocast":
        before, entered = active_context.now, None
        if before[2] == 0:
            layer_numbering.next = 0
        if before[2] == 0 and not recomputing():
            rolls = self.enabled and torch.is_grad_enabled()
            if not is_tracing():
                entered = scaling_step.enter(rolls, self.group, self.recipe), nodes() if rolls else -1
                active_context.ever_ran_layer = active_context.ever_ran_layer or active_context.layer_ran
                active_context.layer_ran = False
            elif rolls:
                roll.roll_all(self.group, self.recipe)
        self._before.append((before, entered))
        active_context.now = (self.recipe if self.enabled else None, not self.enabled, before[2] + 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        active_context.now, entered = self._before.pop()
        if active_context.now[2] == 0:
            layer_numbering.next = None
        if entered is not None:
            step, before = entered
            scaling_step.leave(step)
            if kind is None and not active_context.layer_ran and self._expects_layers() and ran(before):
                warnings.warn(NOTHING_RAN.format(self.recipe), stacklevel=2)

    def _expects_layers(self) -> bool:
        return self.enabled and self.recipe is not None and self.recipe.quantizes and not active_context.compiled


NOTHING_RAN = (
    "no quantizable layer ran inside autocast({}), so nothing was quantized; autocast applies to quaver.torch's "
    "layers: call quaver.torch.convert(model, recipe) first, or build the model from quaver.torch.Linear"
)


def ran(before: int) -> bool:
    """Return True if a forward seems to have run since `before` nodes existed; -1 means without gradients.

    Without gradients there is no trace, so a forward is assumed until the thread has run a quantizable layer. After
    that the body was more likely empty, such as a loop over no batches.
    """
    return not active_context.ever_ran_layer if before < 0 else nodes() != before


def nodes() -> int:
    """Return the number of autograd nodes that this thread has created, from an undocumented torch function; 0 without
    it.
    """
    number = getattr(torch.autograd, "_get_sequence_nr", None)
    return 0 if number is None else int(number())


#: Recipes without options, built at import, because torch.compile can trace a lookup but not the construction.
_PLAIN = {name: build() for name, build in recipes.RECIPES.items()}


def _resolve(recipe: str | Recipe) -> Recipe:
    if isinstance(recipe, str) and recipe in _PLAIN:
        return _PLAIN[recipe]
    if is_tracing():
        if isinstance(recipe, Recipe):
            return recipe
        if "(" in recipe:
            raise ValueError(
                f"torch.compile cannot parse the options in {recipe!r}; build the recipe outside of the compiled "
                "function, recipe = quaver.recipes.get(text), and pass autocast(recipe)"
            )
    return recipes.get(recipe)


def recipe_in_force(own: Recipe | None) -> Recipe | None:
    """Return the layer's own recipe, else that of the innermost autocast, else None; None inside
    autocast(enabled=False).

    Every quantizable layer calls this when it runs.
    """
    if not is_tracing():
        active_context.layer_ran = True
    return in_force(own)


def in_force(own: Recipe | None) -> Recipe | None:
    """Return the same as `recipe_in_force` without registering that a quantizable layer ran."""
    recipe, disabled, _ = active_context.now
    if own is None:
        return recipe
    return None if disabled else own


@called_while_traced
def record_compiled_layer() -> None:
    """Record that this thread runs compiled layers."""
    active_context.compiled = True


# ---- activation checkpointing that is exact under every recipe ----


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function without saving activations, and run it again in backward (activation checkpointing).

    It is torch's checkpoint, extended to replay state that changes in between: recipe, delayed-scaling factors and
    noise counters. So the recomputation is exact even after later forwards, history updates, and the end of autocast.
    Outputs, gradients, histories and counts equal those without checkpointing. RNG state and torch's determinism checks
    are as in torch's checkpoint, which is also what runs inside compiled functions.

    Args:
        function: module or function to run; it may enter `autocast` itself.
        *args, **kwargs: its arguments. `debug`, `determinism_check`, `early_stop` and `preserve_rng_state` go to
        torch.utils.checkpoint.checkpoint.

    Returns:
        The result of the function.

    Raises:
        ValueError: use_reentrant=True or a context_fn was passed; the replay uses its own context_fn.
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
    """Return the contexts for torch to enter around the first run, and around each recomputation."""
    log = ReadLog()
    return log, _RecomputeContext(log)


class _RecomputeContext:
    """Restores recipe, logged reads and weight-gradient handling of the first run around a recomputation."""

    def __init__(self, log: ReadLog) -> None:
        self.replay = Replay(log)
        self.active_context = active_context.now
        self.wgrad_override = active_context.apply_override if active_context.captures_wgrad else None
        self.before: list[Any] = []

    def __enter__(self) -> None:
        self.before.append((active_context.now, active_context.apply_override, active_context.captures_wgrad))
        active_context.now = self.active_context
        if self.wgrad_override is not None:
            active_context.apply_override, active_context.captures_wgrad = self.wgrad_override, True
        self.replay.__enter__()

    def __exit__(self, *error: object) -> None:
        self.replay.__exit__(*error)
        active_context.now, active_context.apply_override, active_context.captures_wgrad = self.before.pop()
