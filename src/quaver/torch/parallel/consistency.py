"""What ranks have built, compared before they communicate by it: one sentence on all of them, not a hang.

Ranks of other module order, names, shapes or recipes would give one collective other tensors, which waits, aborts or
mixes numbers without a word. Compared are digests; texts travel where these differ.
"""

import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import nn

from quaver.torch.linear.linear import Quantizable
from quaver.torch.state.history.sync import exchange

#: The call, in an error of ranks of which some make another one.
WHERE = "the comparison of models by check_consistency or gather_quantized"


def check_consistency(model: nn.Module, mesh: Any = None) -> None:
    """Refuse ranks that have built different models: other order, names, shapes, dtypes or recipes.

    Call it once a model is converted, on all ranks, before `parallelize_module`, `fully_shard` or
    DistributedDataParallel; `gather_quantized` calls it. Without a process group it does nothing.

    Args:
        mesh: a DeviceMesh of the ranks that have this very model; None takes all ranks of the default group. A stage of
            a pipeline gives the mesh of its own ranks.
    Raises:
        ValueError: on all of these ranks, with the first difference.
    """
    compare(lines_of(model), mesh)


def lines_of(model: nn.Module) -> list[str]:
    """What ranks have alike of a model, a line each: modules in order, parameters, recipes."""
    lines = []
    for name, module in model.named_modules():
        if isinstance(module, Quantizable):
            own = module.recipe
            under = "no recipe of its own" if own is None else own.text
            lines.append(f"{name or type(module).__name__} under {under}")
        for key, p in module._parameters.items():
            if p is not None:
                lines.append(f"{name}.{key}".lstrip(".") + f" {tuple(p.shape)} {p.dtype}")
    return lines


def compare(lines: Sequence[str], mesh: Any = None, refused: str = "") -> None:
    """Raise a ValueError on all ranks where they have other lines, or where one of them has refused to go on.

    Args:
        refused: why this one does; what calls this raises it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    text = "\n".join(lines)
    groups = (None,) if mesh is None else tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    every, _ = exchange(WHERE, refused or text, zlib.compress(text.encode()), groups, error=refused)
    if refused or every is None:
        return
    stopped = next((rank for rank in sorted(every) if every[rank][1]), None)
    if stopped is not None:
        raise ValueError(f"rank {stopped} cannot go on: {every[stopped][1]}")
    first = min(every)
    others = [rank for rank in sorted(every) if every[rank][0] != every[first][0]]
    one, other = (zlib.decompress(every[rank][0]).decode().split("\n") for rank in (first, others[0]))
    a, b = next((a, b) for a, b in zip_longest(one, other, fillvalue="nothing more") if a != b)
    more = f", and {len(others) - 1} more ranks differ from it" if len(others) > 1 else ""
    raise ValueError(
        f"ranks built different models: rank {others[0]} has {b!r} where rank {first} has {a!r}{more}; build and "
        "convert the model alike on all ranks, or give mesh= those that share it, as a stage of a pipeline does"
    )
