"""What tells a user that a gradient cannot be differentiated again, where it would otherwise pass for a constant."""

from typing import Any

import torch
from torch import Tensor

#: Of linear layers.
NO_DOUBLE_BACKWARD = (
    "quantized layers have no second derivative: rounding has none. Compute the part that is differentiated twice in "
    "high precision: with quaver.torch.autocast(enabled=False)"
)


def no_second_derivative(grads: tuple[Any, ...], sentence: str, *sources: Any) -> tuple[Any, ...]:
    """The gradients, tied to what they depend on: differentiating one raises a NotImplementedError of this sentence.

    Args:
        grads: what a backward found, tensors and whatever else.
        sentence: why there is none, and what to do.
        sources: what the gradients depend on, tensors or None.
    """
    tied = *sources, torch.empty(0, requires_grad=True)
    return tuple(_Refuse.apply(g, sentence, *tied) if isinstance(g, Tensor) else g for g in grads)


class _Refuse(torch.autograd.Function):
    """A gradient as it is, tied to what it depends on."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, sentence: str, *sources: Tensor | None) -> Tensor:
        ctx.sentence = sentence
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise NotImplementedError(ctx.sentence)
