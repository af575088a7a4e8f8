"""Whether all ranks were given inputs of one shape, asked once a forward, by the layer that comes first in it.

Ranks whose inputs differ would wait for one another in the next collective, which takes other numbers of bytes. To ask
only where a rank sees a new shape would not do: another, which sees an old one, would not ask. So the question goes by
the order of calls, which is the same on all ranks: the first layer of a forward asks whenever it is called again.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from quaver.torch.backends.gpu.launching import capture
from quaver.torch.parallel.alike import telling
from quaver.torch.state.recomputation import graph_task_id

#: Of each group the layer that asks, and how many calls of others have come since it did.
_first: dict[str, tuple[Any, int]] = {}
#: After so many calls of others the next layer asks: the one that did belongs to another model.
CALLS = 1 << 12


def check(layer: tuple[Any, ...], x: Tensor, group: Any, says: str, *more: Any) -> None:
    """Compare what ranks were given, where this layer is the first of a forward.

    Args:
        layer: what tells it from other layers, the same on all ranks.
        x: its input.
        says: the layer, for an error.
        more: what ranks must have alike besides.
    Raises:
        ValueError: they differ; on every rank, with what each has.
    """
    if graph_task_id() != -1:
        # A recomputation repeats what was compared.
        return
    name = _name(group)
    opened, calls = _first.get(name, (layer, 0))
    if opened != layer and calls < CALLS:
        _first[name] = opened, calls + 1
        return
    _first[name] = layer, 0
    if x.is_meta or (x.is_cuda and capture.as_captured(x.device)):
        return
    own = f"{tuple(x.shape)} in {str(x.dtype).removeprefix('torch.')}" + "".join(f", {each}" for each in more)
    told = telling.differing(f"{layer} {own}", x.device, group, f"{says} {own}")
    if told is None:
        return
    del _first[name]
    raise ValueError(
        "ranks were given different inputs: "
        + "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(told))
        + "; give all ranks of the mesh inputs of one shape and dtype, such as by padding the last batch"
    )


def close(group: Any) -> None:
    """A backward has run: the next layer that is called opens a forward."""
    _first.pop(_name(group), None)


def _name(group: Any) -> str:
    world: Any = dist.group.WORLD
    return str((group or world).group_name)
