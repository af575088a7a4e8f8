"""Where a NaN or an infinity first appeared, for the sentence that stops a run."""

import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def finite(value: Any) -> bool:
    if isinstance(value, DTensor):  # the same answer on all ranks, which all ask
        value = value.full_tensor()
    return not isinstance(value, torch.Tensor) or bool(torch.isfinite(value).all())


def first_module(
    model: nn.Module, batch: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[int, str]:
    """The first place, in order of computation, that is not finite on batch int64 [accumulate, B, S + 1], in words.

    The forward pass is run again, without gradients, so that no amax is recorded twice. The number before the words
    is that of the module's call: of several ranks, each of which sees a part, the smallest is the first. All run
    it, since stages of a pipeline have other parameters and wait for one another.

    Args:
        loss: of a batch [B, S + 1], by the model.
    """
    places: list[tuple[int, str]] = []
    for name, parameter in model.named_parameters():
        if not finite(parameter):
            places.append((0, f"the parameter {name} is already not finite"))
            break
    calls = count(1)

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            call = next(calls)
            if not finite(output) and not places:  # in this order, as DTensors are gathered
                places.append((call, f"the first output that is not finite is that of {name}"))

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            for micro_batch in batch:
                loss(micro_batch)
    finally:
        for hook in hooks:
            hook.remove()
    return places[0] if places else (sys.maxsize, "every module's output is finite")


def first_gradient(model: nn.Module) -> tuple[int, str]:
    """The first parameter, in order of backward (from the head down), whose gradient is not finite, in words.

    The number before the words is 0, or the largest where there is none.
    """
    names = [name for name, parameter in model.named_parameters() if not finite(parameter.grad)]
    if not names:
        return sys.maxsize, "the norm overflowed"
    return 0, f"the first gradient that is not finite is that of {names[-1]}"
