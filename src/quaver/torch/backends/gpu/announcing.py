"""What is said once: which GEMMs of a recipe do not run natively on a GPU, and why."""

import warnings

import torch
from torch import Tensor

from quaver.core.spec import Recipe
from quaver.torch.backends.gpu.launching import device

_announced: set[tuple[str, torch.device]] = set()


def announce(recipe: Recipe, x: Tensor) -> None:
    """Warn once for a recipe and a GPU which of its GEMMs do not run natively, and why."""
    known = str(recipe), x.device
    if known in _announced or not recipe.quantizes:
        return
    _announced.add(known)
    gemms = {name: (gemm.a, gemm.b) for name, gemm in recipe.gemms.items() if gemm.a is not None and gemm.b is not None}
    why = device.why_no_fp8(x.device, "native")
    reasons = {why: list(gemms)} if why else {}
    if not why:
        # Triton is imported when a tensor on a GPU comes.
        from quaver.torch.backends.gpu.gemms import scaled_mm

        for name, operands in gemms.items():
            why = scaled_mm.why_not_native(*operands, x.device)
            if why:
                reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        warnings.warn(
            f"recipe {recipe} on {device.name(x.device)}: {', '.join(names)} run as bf16 GEMMs of decoded operands, "
            f"exact but slower than unquantized ones, because {why}",
            stacklevel=2,
        )
