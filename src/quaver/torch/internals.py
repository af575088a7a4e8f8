"""Private names of torch that several rooms need, each with what takes its place in a version that lacks it.

Names that one file needs stay in that file; docs/limits.md lists all of them and what happens where one is missing.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad

_C: Any = torch._C

#: () to True under vmap, grad and the other transforms of torch.func. Without it torch refuses those in its own words.
transforms_active: Callable[[], bool] = getattr(_C, "_are_functorch_transforms_active", lambda: False)
#: () to the number of the backward that runs in this thread, -1 outside of one. Without it no recomputation is seen.
graph_task_id: Callable[[], int] = getattr(_C, "_current_graph_task_id", lambda: -1)


def _any_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


#: () to True while torch.autocast is on for a kind of device.
any_autocast_enabled: Callable[[], bool] = getattr(_C, "_is_any_autocast_enabled", _any_autocast)


#: () to the level of forward mode, -1 outside of torch.autograd.forward_ad.dual_level. Without it torch refuses forward
#: mode in its own words.
forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", -1)
#: Of a storage: which object it is in C++, or without that its address.
storage_id: Callable[[Any], int] = (
    attrgetter("_cdata") if hasattr(torch.UntypedStorage, "_cdata") else torch.UntypedStorage.data_ptr
)


def _raw_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


#: Of a GPU's index: the address of its current stream; and () to the index of the current GPU. Builds for a CPU lack
#: the first two names, and nothing calls them there.
raw_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _raw_stream)
current_gpu: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
