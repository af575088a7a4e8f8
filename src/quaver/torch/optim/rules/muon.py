"""Muon: the momentum of a matrix with its singular values brought near 1.

    b ← μ b + (1 - μ) g        u = orthogonalized(g + μ (b - g))        w ← (1 - lr wd) w - lr s u

Source: Jordan et al., https://kellerjordan.github.io/posts/muon/; the polynomial and the two choices of s are those of
torch.optim.Muon (s = √max(1, rows / columns), or 0.2 √max(rows, columns) of Liu et al., arXiv:2502.16982).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quaver.torch.optim.rules.adam import averaged, share, wide
from quaver.torch.optim.rules.rule import Stepped

COEFFICIENTS = (3.4445, -4.775, 2.0315)


@dataclass(frozen=True)
class Muon:
    """Muon of a matrix; what a step reaches is measured."""

    nesterov: bool = True
    steps: int = 5
    adjust: str = "original"
    maximize: bool = False
    eps: float = 1e-7

    names = ("momentum_buffer",)
    signed = (True,)
    whole = True
    asks = False
    bounded = False

    def scalars(self, group: Mapping[str, Any], steps: Tensor) -> tuple[Tensor, ...]:
        lr = wide(group["lr"], steps)
        # Of the buffer in its own average, and of the gradient in Nesterov's.
        momentum = (torch.full_like(steps, share(beta)) for beta in (group["momentum"], 1 - group["momentum"]))
        numbers = (lr, lr * group["weight_decay"], *momentum)
        return tuple(number.float() for number in numbers)

    def __call__(
        self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> Stepped:
        lr, decay, of_buffer, of_gradient = scalars
        g = -gradient if self.maximize else gradient
        buffer = averaged(moments[0], g, of_buffer)
        update = averaged(g, buffer, of_gradient) if self.nesterov else buffer
        update = orthogonalized(update, self.steps, self.eps)
        rows, columns = weight.shape
        ratio = max(1, rows / columns) ** 0.5 if self.adjust == "original" else 0.2 * max(rows, columns) ** 0.5
        return Stepped(weight - weight * decay - update * (lr * ratio), (buffer,))

    def reach(self, amax: Tensor, scalars: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Tensor:
        raise NotImplementedError


def orthogonalized(update: Tensor, steps: int, eps: float) -> Tensor:
    """Singular values of a matrix brought near 1 by an odd polynomial, in bfloat16: float32 of its shape."""
    a, b, c = COEFFICIENTS
    x = update.bfloat16()
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    # An ambient torch.autocast would take the norm to float32 and matrices to a dtype of its own.
    with torch.autocast(x.device.type, enabled=False):
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if turned else x).float()
