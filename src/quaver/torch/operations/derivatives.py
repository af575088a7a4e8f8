"""An error for a gradient that is differentiated again and would otherwise pass for a constant."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from quaver.torch.internals import forward_mode_active, transforms_active

#: The sentence for linear layers.
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
    tied = *sources, torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
    return tuple(_Refuse.apply(g, sentence, *tied) if isinstance(g, Tensor) else g for g in grads)


def first_derivative(run: Callable[..., tuple[Any, ...]], ctx: Any, *gs: Tensor) -> tuple[Any, ...]:
    """run(ctx, saved tensors, *gs), the backward of linear layers.

    They are asked for once: under checkpointing each time unpacks them, and torch refuses a second. Under
    create_graph=True the gradients exist, only their own derivative does not.
    """
    saved = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return run(ctx, saved, *gs)
    with torch.no_grad():
        grads = run(ctx, saved, *gs)
    return no_second_derivative(grads, NO_DOUBLE_BACKWARD, *gs, *saved)


class _Refuse(torch.autograd.Function):
    """A gradient as it is, tied to what it depends on."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, sentence: str, *sources: Tensor | None) -> Tensor:
        ctx.sentence = sentence
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise NotImplementedError(ctx.sentence)


def refuse_transforms(*tensors: Tensor | None) -> None:
    """Raise a NotImplementedError under vmap, torch.func.grad and forward mode."""
    if transforms_active():
        raise NotImplementedError(NO_FUNCTORCH)
    if forward_mode_active() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors if t is not None):
        raise NotImplementedError(NO_FORWARD_MODE)


NO_FORWARD_MODE = (
    "quantized layers have no forward-mode derivative; use reverse mode, or run them in high precision for this: "
    "with quaver.torch.autocast(enabled=False)"
)


NO_FUNCTORCH = (
    "quantized layers do not run under torch.func transforms such as vmap and grad; loop over the batch and use "
    "torch.autograd, or run them in high precision for this: with quaver.torch.autocast(enabled=False)"
)
