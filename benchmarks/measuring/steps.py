"""Forward and backward as training runs them: gradients dropped or added up, weights changed or not since."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver.recipes.spec import Recipe

Step = Callable[[], None]


def step_of(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    g: Tensor,
    recipe: Recipe | str | None = None,
    *,
    changing: bool = False,
    accumulating: bool = False,
    parameters: Iterable[Tensor] | None = None,
) -> Step:
    """Return a function that runs one step.

    Args:
        model: takes x.
        x: requires a gradient.
        g: gradient of the result.
        recipe: entered by autocast around the forward, which is part of the step; None enters none.
        changing: count every parameter as changed afterwards, as an optimizer's update would: nothing that was made
            of it is used again. That takes about a microsecond.
        accumulating: keep the parameters' gradients, as in micro-batches; x's is dropped.
        parameters: those of the model, if it is no module.
    """
    if parameters is None:
        parameters = model.parameters() if isinstance(model, nn.Module) else ()
    weights = list(parameters)
    dropped = [x] if accumulating else [x, *weights]

    def step() -> None:
        if recipe is None:
            y = model(x)
        else:
            with qt.autocast(recipe):
                y = model(x)
        y.backward(g)
        for tensor in dropped:
            tensor.grad = None
        if changing:
            touch(weights)

    return step


def touch(parameters: Sequence[Tensor]) -> None:
    """Raise the version of every parameter and leave its values."""
    torch._C._autograd._unsafe_set_version_counter(tuple(parameters), tuple(p._version + 1 for p in parameters))
