"""What ranks say of one call, compared by one all-reduce of 16 bytes: texts travel where they differ.

So what one rank alone must refuse all of them refuse, and none waits for it in the next collective.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from quaver.torch.parallel.traffic import during


def differing(said: str, device: torch.device, group: Any, shown: str = "") -> list[str] | None:
    """What each rank says, in their order, where they do not all say the same; else None.

    Args:
        said: of this rank.
        device: where numbers are compared; a GPU is waited for.
        group: process group; None is the default one.
        shown: in the place of `said` where it is told to others.
    """
    bits = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=7).digest(), "big")
    both = torch.tensor([bits, -bits], dtype=torch.int64, device=device)
    with during("control", "reduce", both, group):
        dist.all_reduce(both, dist.ReduceOp.MAX, group)
    largest, smallest = both.tolist()
    if largest == -smallest:
        return None
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, shown or said, group)
    return told


def refuse(why: str, device: torch.device, group: Any = None, *alike: Any) -> None:
    """Raise a ValueError on all ranks where one of them has a reason, or where they differ.

    On a GPU no rank asks the others, since that would wait for it: one with a reason raises alone.

    Args:
        why: of this rank; "" for none.
        device: of what is given to the call.
        alike: what ranks must have alike.
    """
    if device.type == "cpu":
        said = why or ", ".join(map(str, alike))
        told = differing(said, device, group)
        if told is not None:
            every = "; ".join(f"rank {rank}: {each or 'it fits'}" for rank, each in enumerate(told))
            raise ValueError(f"ranks were given what does not fit together: {every}")
    if why:
        raise ValueError(why)
