"""An error for a gradient that is differentiated again and would otherwise pass for a constant."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_C: Any = torch._C
#: () to True under vmap, grad and the other transforms of torch.func. Without it torch refuses those in its own words.
transforms_active: Callable[[], bool] = getattr(_C, "_are_functorch_transforms_active", lambda: False)
#: () to the level of forward mode, -1 outside of torch.autograd.forward_ad.dual_level. Without it torch refuses forward
#: mode in its own words.
forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", -1)

#: The sentence for linear layers.
NO_DOUBLE_BACKWARD = (
    "quantized layers have no second derivative: rounding has none. Compute the part that is differentiated twice in "
    "high precision: with quaver.torch.autocast(enabled=False)"
)


def first_derivative(run: Callable[..., tuple[Any, ...]], ctx: Any, sentence: str, *gs: Tensor) -> tuple[Any, ...]:
    """run(ctx, saved tensors, *gs), a backward whose gradients have no derivative.

    The saved tensors are asked for once: under checkpointing each time unpacks them, and torch refuses a second. Under
    create_graph=True the gradients exist and are tied to the saved tensors and to gs: differentiating one raises a
    NotImplementedError.

    Args:
        sentence: why there is no derivative, and what to do.
    """
    saved = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return run(ctx, saved, *gs)
    with torch.no_grad():
        grads = run(ctx, saved, *gs)
    tied = *gs, *saved, torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
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


def refuse_transforms(*tensors: Tensor | None, sentence: str | None = None) -> None:
    """Raise a NotImplementedError under vmap, torch.func.grad and forward mode.

    Args:
        sentence: of what does not run there in high precision either; None is of linear layers.
    """
    if transforms_active():
        raise NotImplementedError(sentence or NO_FUNCTORCH)
    if forward_level() >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors if t is not None):
        raise NotImplementedError(sentence or NO_FORWARD_MODE)


NO_FORWARD_MODE = (
    "quantized layers have no forward-mode derivative; use reverse mode, or run them in high precision for this: "
    "with quaver.torch.autocast(enabled=False)"
)


NO_FUNCTORCH = (
    "quantized layers do not run under torch.func transforms such as vmap and grad; loop over the batch and use "
    "torch.autograd, or run them in high precision for this: with quaver.torch.autocast(enabled=False)"
)
