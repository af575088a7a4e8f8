"""Process groups that the library makes beside the default one: ranks wait in them as long as in that.

torch gives a new group a timeout of its own, 30 minutes over gloo, whatever the default group was given.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """`torch.distributed.new_group`, with the default group's timeout.

    Args:
        ranks: None for all.
        options: of that function, but the timeout.
    """
    return dist.new_group(None if ranks is None else list(ranks), timeout=timeout(), **options)


def timeout(group: Any = None) -> timedelta | None:
    """How long ranks wait in a group, the default one if none is given; None where torch does not tell."""
    # Private to torch: without it new groups have torch's own timeout.
    find: Any = getattr(group or dist.group.WORLD, "_get_backend", None)
    if find is None:
        return None
    for kind in ("cpu", "cuda"):
        try:
            backend = find(torch.device(kind))
        except RuntimeError:
            # The group carries no tensors of this kind.
            continue
        told: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
        if told is not None:
            return told
    return None
