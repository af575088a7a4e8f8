"""Check that all ranks built the same model before they communicate.

If ranks differ in the order, names, shapes or recipes of modules, a collective would get different tensors on each: it
hangs, aborts or silently mixes numbers.
"""

import zlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from quaver.torch.linear.linear import Quantizable
from quaver.torch.state.history.sync import check_agreement


def check_consistency(model: nn.Module, mesh: Any = None) -> None:
    """Raise on all ranks if they built different models: module order, names, shapes, dtypes or recipes.

    Call it on all ranks after the model is converted and before `parallelize_module`, `fully_shard` or
    DistributedDataParallel. `gather_quantized` calls it itself. Without a process group it does nothing.

    Args:
        model: the converted model.
        mesh: DeviceMesh of the ranks that hold this same model; None means all ranks of the default group. A pipeline
            stage passes the mesh of its own ranks.
    Raises:
        ValueError: on all of these ranks, with the first differences.
    """
    compare_models(model, mesh)


def compare_models(
    model: nn.Module, mesh: Any = None, more: Mapping[str, str] | None = None, error: Exception | None = None
) -> None:
    """Implement `check_consistency`.

    Args:
        model, mesh: as there.
        more: further facts that must be equal.
        error: why this rank cannot continue; then all ranks raise.
    """
    facts: dict[str, Any] = {}
    for name, module in model.named_modules() if error is None else ():
        if isinstance(module, Quantizable):
            own = module.recipe
            facts[name or type(module).__name__] = "under " + ("no recipe of its own" if own is None else own.text)
        for key, p in module._parameters.items():
            if p is not None:
                facts[f"{name}.{key}".lstrip(".")] = f"{tuple(p.shape)} {p.dtype}"
    facts |= more or {}
    facts["order of these names"] = zlib.crc32("\n".join(facts).encode())
    check_agreement(
        "the comparison of models by check_consistency or gather_quantized",
        facts,
        *(() if mesh is None else (mesh.get_group(dim) for dim in range(mesh.ndim))),
        error=error or "",
        advice="build and convert the model in the same way on all ranks, or pass mesh= with the ranks that share it, "
        "for instance those of a pipeline stage",
    )
