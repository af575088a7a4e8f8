"""A function of tensors whose backward is its own: what makes the input of linear layers, with no layer behind it."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.operations.derivatives import first_derivative, transforms_active
from quaver.torch.operations.selecting import unseen
from quaver.torch.state.context import ambient


class Differentiated(Protocol):
    """A function of tensors outside autograd, and its backward."""

    def forward(self, *x: Tensor | None) -> tuple[Any, Sequence[Any]]:
        """The output, or a tuple of outputs, and what backward needs."""

    def backward(self, *gs_and_saved: Any) -> Sequence[Any]:
        """(the gradient of each output, what was kept) to the gradients of what forward took."""


def alone(function: Differentiated, sentence: str, *x: Tensor | None) -> Any:
    """What function.forward gives, whose backward is the function's own.

    Args:
        sentence: why that has no derivative of its own, and what to do.
    """
    if transforms_active():
        raise NotImplementedError(sentence)
    apply: Any = _Alone.apply
    if not is_tracing():
        apply = _apply if ambient.split is None else ambient.split(_Alone, _apply)
    return apply(function, sentence, *x)


class _Alone(torch.autograd.Function):
    @staticmethod
    @unseen
    def forward(ctx: Any, function: Differentiated, sentence: str, *x: Tensor | None) -> Any:
        y, saved = function.forward(*x)
        ctx.save_for_backward(*saved)
        ctx.constants = function, sentence
        return y

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return first_derivative(_backward, ctx, ctx.constants[1], *gs)


def _backward(ctx: Any, saved: Sequence[Any], *gs: Tensor) -> tuple[Any, ...]:
    return None, None, *ctx.constants[0].backward(*gs, saved)


#: `Function.apply` without its checks for torch.func, which `alone` has made.
_apply: Any = super(torch.autograd.Function, _Alone).apply
