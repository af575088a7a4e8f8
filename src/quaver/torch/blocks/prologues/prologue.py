"""What makes the input of linear layers, by itself: a differentiable function of its tensors, with no layer behind."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.torch.linear.entrance import Prologue
from quaver.torch.operations.derivatives import first_derivative, transforms_active
from quaver.torch.operations.selecting import unseen
from quaver.torch.state.context import ambient


def alone(prologue: Prologue, sentence: str, *x: Tensor | None) -> Tensor:
    """prologue(x), whose backward is the prologue's own.

    Args:
        sentence: why that has no derivative of its own, and what to do.
    """
    if transforms_active():
        raise NotImplementedError(sentence)
    apply: Any = _Alone.apply
    if not torch.compiler.is_compiling():
        apply = _apply if ambient.split is None else ambient.split(_Alone, _apply)
    y: Tensor = apply(prologue, sentence, *x)
    return y


class _Alone(torch.autograd.Function):
    @staticmethod
    @unseen
    def forward(ctx: Any, prologue: Prologue, sentence: str, *x: Tensor | None) -> Tensor:
        y, saved = prologue.forward(*x)
        ctx.save_for_backward(*saved)
        ctx.constants = prologue, sentence
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return first_derivative(_backward, ctx, ctx.constants[1], g)


def _backward(ctx: Any, saved: Sequence[Any], g: Tensor) -> tuple[Any, ...]:
    return None, None, *ctx.constants[0].backward(g, saved)


#: `Function.apply` without its checks for torch.func, which `alone` has made.
_apply: Any = super(torch.autograd.Function, _Alone).apply
