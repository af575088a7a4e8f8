"""Where a NaN or an infinity first appeared, for the sentence that stops a run."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from quaver.train.learning.torch.decoder import loss_of


def finite(value: Any) -> bool:
    if isinstance(value, DTensor):  # the same answer on all ranks, which all ask
        value = value.full_tensor()
    return not isinstance(value, torch.Tensor) or bool(torch.isfinite(value).all())


def first_module(model: nn.Module, batch: torch.Tensor, dtype: str) -> str:
    """The first place, in order of computation, that is not finite on batch int64 [accumulate, B, S + 1].

    The forward pass is run again, without gradients, so that no amax is recorded twice.
    """
    for name, parameter in model.named_parameters():
        if not finite(parameter):
            return f"the parameter {name} is already not finite"
    names: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not names and not finite(output):
                names.append(name)

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            for micro_batch in batch:
                loss_of(model, micro_batch, dtype)
    finally:
        for hook in hooks:
            hook.remove()
    return f"the first output that is not finite is that of {names[0]}" if names else "every module's output is finite"


def first_gradient(model: nn.Module) -> str:
    """The first parameter, in order of backward (from the head down), whose gradient is not finite."""
    names = [name for name, parameter in model.named_parameters() if not finite(parameter.grad)]
    return f"the first gradient that is not finite is that of {names[-1]}" if names else "the norm overflowed"
