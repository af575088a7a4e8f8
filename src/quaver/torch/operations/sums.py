"""Sums that are rounded where eager mode rounds them.

Inductor keeps a bf16 sum in float32 where it fuses it with what follows, and the bits of what is quantized next differ
from eager's. Compiled, these sums are opaque operators; in eager mode torch's own take their place.
"""

from typing import Any

import torch
from torch import Tensor

from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.operations.operation import Operation


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b of one shape and dtype, for backward functions; not differentiable."""
    return ADD(a, b) if is_tracing() else torch.add(a, b)


class Fork(torch.autograd.Function):
    """(x, uses): x for several uses, whose gradients are summed in eager's order: the first one's, the last's, the one
    before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, uses: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(uses))

    @staticmethod
    def backward(ctx: Any, first: Tensor, *others: Tensor) -> Any:
        for g in reversed(others):
            first = add(first, g)
        return first, None


class Join(torch.autograd.Function):
    """(x, y): x + y, rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.constants = x.dtype, y.dtype
        return ADD(x, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return tuple(g.to(dtype) for dtype in ctx.constants)


ADD: Operation[Tensor] = Operation("add(Tensor a, Tensor b) -> Tensor", torch.add, fake=torch.add)
