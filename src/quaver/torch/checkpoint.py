"""Activation recomputation: keep a block's inputs, run its forward again in backward."""

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, keep nothing but its arguments for backward, and run it again there.

    Args:
        function: what to run; a module or a function.
        *args, **kwargs: its own.
    Returns:
        What the function returns.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
