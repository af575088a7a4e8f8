"""Transformer Engine's `checkpoint`."""

from collections.abc import Callable
from typing import Any

from quaver.torch.state import context


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """`quaver.torch.checkpoint`, which is never reentrant: it replays the random numbers of the first run.

    Raises:
        ValueError: distributed activations, or a context_fn.
    """
    if kwargs.pop("distribute_saved_activations", False):
        raise ValueError(
            "distribute_saved_activations is not supported: leave it out, and each rank saves its own activations"
        )
    for name in ("tp_group", "get_rng_state_tracker"):
        kwargs.pop(name, None)
    return context.checkpoint(function, *args, **kwargs)
