"""Check that all ranks built the same model before they communicate.

If ranks differ in the order, names, shapes or recipes of modules, a collective would get different tensors on each: it
    hangs, aborts or silently mixes numbers. Ranks compare digests first and exchange the full text only if these
    differ, so that all ranks raise the same error.
"""

import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import nn

from quaver.torch.linear.linear import Quantizable
from quaver.torch.state.history.sync import exchange

#: Name of this check in the error that ranks raise when some of them call another one.
WHERE = "the comparison of models by check_consistency or gather_quantized"


def check_consistency(model: nn.Module, mesh: Any = None) -> None:
    """Raise on all ranks if they built different models: module order, names, shapes, dtypes or recipes.

    Call it on all ranks after the model is converted and before `parallelize_module`, `fully_shard` or
    DistributedDataParallel. `gather_quantized` calls it itself. Without a process group it does nothing.

    Args:
        model: the converted model.
        mesh: DeviceMesh of the ranks that hold this same model; None means all ranks of the default group. A pipeline
            stage passes the mesh of its own ranks.
    Raises:
        ValueError: on all of these ranks, with the first difference.
    """
    compare(describe_model(model), mesh)


def describe_model(model: nn.Module) -> list[str]:
    """Describe a model as text, one line per quantizable layer (its recipe) and per parameter (its shape and dtype)."""
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


def compare(lines: Sequence[str], mesh: Any = None, error_here: str = "") -> None:
    """Raise a ValueError on all ranks if their lines differ, or if one rank reports an error.

    Args:
        lines: description of this rank's model.
        mesh: DeviceMesh of the ranks to compare; None means the default group.
        error_here: this rank's own error message, or "". The caller then raises it itself; this function raises it on
        the
            other ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    text = "\n".join(lines)
    groups = (None,) if mesh is None else tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    every, _ = exchange(WHERE, error_here or text, zlib.compress(text.encode()), groups, error=error_here)
    if error_here or every is None:
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
        f"ranks built different models: rank {others[0]} has {b!r} where rank {first} has {a!r}{more}; build "
        "and convert the model in the same way on all ranks, or pass mesh= with the ranks that share it, for "
        "instance those of a pipeline stage"
    )
