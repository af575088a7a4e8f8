"""Where a NaN or an infinity first appeared, for the sentence that stops a run."""

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from quaver.torch.linear.stored.stored import CODES


class Place(NamedTuple):
    """Where a value is not finite."""

    #: Of several in one stage, the smallest is the first.
    number: int
    #: Of the module or parameter; "" of none.
    name: str
    #: In words.
    says: str


def finite(value: Any) -> bool:
    """Whether a tensor is, or all that a module gives."""
    if isinstance(value, tuple):
        return all(map(finite, value))
    if isinstance(value, DTensor):  # the same answer on all ranks, which all ask
        value = value.full_tensor()
    if isinstance(value, torch.Tensor) and value.dtype in CODES:
        value = value.float()
    return not isinstance(value, torch.Tensor) or bool(torch.isfinite(value).all())


def first_module(model: nn.Module, batch: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> Place:
    """The first place, in order of computation, that is not finite on batch int64 [accumulate, B, S + 1].

    The forward pass is run again, without gradients, so that no amax is recorded twice. Its number is that of the
    module's call, or 0 of a parameter's. All ranks run it, since stages of a pipeline have other parameters and wait
    for one another.

    Args:
        loss: of a batch [B, S + 1], by the model.
    """
    places: list[Place] = []
    for name, parameter in model.named_parameters():
        if not finite(parameter):
            places.append(Place(0, name, f"the parameter {name} is already not finite"))
            break
    calls = count(1)

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            call = next(calls)
            if not finite(output) and not places:  # in this order, as DTensors are gathered
                places.append(Place(call, name, f"the first output that is not finite is that of {name}"))

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            for micro_batch in batch:
                loss(micro_batch)
    finally:
        for hook in hooks:
            hook.remove()
    return places[0] if places else Place(0, "", "every module's output is finite")


def first_gradient(model: nn.Module) -> Place:
    """The first parameter, in order of backward (from the head down), whose gradient is not finite."""
    names = [name for name, p in model.named_parameters() if not finite(p.grad)]
    if not names:
        return Place(0, "", "the norm overflowed")
    return Place(0, names[-1], f"the first gradient that is not finite is that of {names[-1]}")
