"""What makes the input of linear layers, by itself: a differentiable function of its tensors, with no layer behind."""

from typing import Any

import torch
from torch import Tensor

from quaver.torch.internals import transforms_active
from quaver.torch.linear.entrance import Prologue
from quaver.torch.operations.derivatives import no_second_derivative


def alone(prologue: Prologue, sentence: str, *x: Tensor | None) -> Tensor:
    """prologue(x), whose backward is the prologue's own.

    Args:
        sentence: why that has no derivative of its own, and what to do.
    """
    if transforms_active():
        raise NotImplementedError(sentence)
    apply = _Alone.apply if torch.compiler.is_compiling() else _apply
    y: Tensor = apply(prologue, sentence, *x)
    return y


class _Alone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prologue: Prologue, sentence: str, *x: Tensor | None) -> Tensor:
        y, saved = prologue.forward(*x)
        ctx.save_for_backward(*saved)
        ctx.constants = prologue, sentence
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (prologue, sentence), saved = ctx.constants, ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, None, *prologue.backward(g, saved)
        with torch.no_grad():
            grads = prologue.backward(g, saved)
        return None, None, *no_second_derivative(grads, sentence, g, *saved)


#: `Function.apply` without its checks for torch.func, which `alone` has made.
_apply: Any = super(torch.autograd.Function, _Alone).apply
