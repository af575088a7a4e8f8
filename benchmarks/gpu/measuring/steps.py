"""Forward and backward as training runs them: gradients dropped, weights changed or not since the last step."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import quaver.torch as qt
from benchmarks.gpu.measuring.clock import Step
from quaver.recipes.spec import Recipe


def step_of(model: nn.Module, x: Tensor, g: Tensor, recipe: Recipe | None = None, *, changing: bool = False) -> Step:
    """One step.

    Args:
        model: takes x.
        x: requires a gradient.
        g: gradient of the result.
        recipe: entered by autocast around the forward; None enters none.
        changing: count every parameter as changed afterwards, as an optimizer's update would: nothing that was made
            of it is used again.
    """
    parameters = list(model.parameters())

    def step() -> None:
        if recipe is None:
            y = model(x)
        else:
            with qt.autocast(recipe):
                y = model(x)
        y.backward(g)
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        if changing:
            touch(parameters)

    return step


def touch(parameters: Sequence[Tensor]) -> None:
    """Raise the version of every parameter and leave its values."""
    torch._C._autograd._unsafe_set_version_counter(tuple(parameters), tuple(p._version + 1 for p in parameters))
