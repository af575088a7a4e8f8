"""Sums that are rounded where eager mode rounds them.

Inductor keeps a bf16 sum in float32 where it fuses it with what follows, and the bits of what is quantized next differ
from eager's. Compiled, these sums are opaque operators; in eager mode they are torch's own.
"""

from typing import Any

import torch
from torch import Tensor

from quaver.torch.operations.operation import Operation


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b of one shape and dtype, for backward functions; not differentiable."""
    return ADD(a, b) if torch.compiler.is_compiling() else torch.add(a, b)


def fork(x: Tensor, uses: int = 2) -> tuple[Tensor, ...]:
    """x for several uses, whose gradients are summed in eager's order: the first one's, the last's, the one before."""
    if torch.compiler.is_compiling():
        branches: tuple[Tensor, ...] = _Fork.apply(x, uses)
        return branches
    return (x,) * uses


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, uses: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(uses))

    @staticmethod
    def backward(ctx: Any, first: Tensor, *others: Tensor) -> Any:
        for g in reversed(others):
            first = add(first, g)
        return first, None


def join(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """x + scale · y, differentiably; the product is rounded before the sum."""
    if torch.compiler.is_compiling():
        total: Tensor = _Join.apply(x, y, scale)
        return total
    return _join(x, y, scale)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: float) -> Tensor:
        ctx.constants = scale, x.dtype, y.dtype
        return JOIN(x, y, scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        scale, of_x, of_y = ctx.constants
        narrow = g.to(of_y)
        return g.to(of_x), narrow if scale == 1.0 else narrow * scale, None


def _join(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return x + y if scale == 1.0 else x + y * scale


ADD: Operation[Tensor] = Operation("add(Tensor a, Tensor b) -> Tensor", torch.add, fake=torch.add)
JOIN: Operation[Tensor] = Operation("join(Tensor x, Tensor y, float scale) -> Tensor", _join, fake=_join)
