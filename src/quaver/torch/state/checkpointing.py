"""Activation recomputation that is exact under every recipe.

torch's own checkpoint, told what the first run took from state that moves on meanwhile: which recipe was in force,
delayed scaling's factors, the counts of the noise. So the forward may be run again after later forwards, after the
histories have rolled and after autocast has ended.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.state.context import ambient
from quaver.torch.state.recomputation import Log, Replay


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


def _contexts() -> tuple[Log, "_Again"]:
    """The contexts that torch enters around the first run, and around each run that repeats it."""
    log = Log()
    return log, _Again(log)


class _Again:
    """The first run's recipe and reads in force, and what has taken gradients of weights from it."""

    def __init__(self, log: Log) -> None:
        self.replay = Replay(log)
        self.ambient = ambient.now
        self.taker = ambient.split if ambient.takes_weights else None
        self.before: list[Any] = []

    def __enter__(self) -> None:
        self.before.append((ambient.now, ambient.split, ambient.takes_weights))
        ambient.now = self.ambient
        if self.taker is not None:
            ambient.split, ambient.takes_weights = self.taker, True
        self.replay.__enter__()

    def __exit__(self, *error: object) -> None:
        self.replay.__exit__(*error)
        ambient.now, ambient.split, ambient.takes_weights = self.before.pop()
