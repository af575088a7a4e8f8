"""Stochastic gradient descent, with momentum as torch has it.

    g ← g + wd w        b ← μ b + (1 - dampening) g (g at the first step)        w ← w - lr (b, or g + μ b if nesterov)

Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quaver.torch.optim.rules.adam import wide
from quaver.torch.optim.rules.rule import Stepped


@dataclass(frozen=True)
class SGD:
    """SGD. The gradient and the buffer bound a step, by their largest elements."""

    momentum: bool = False
    nesterov: bool = False
    maximize: bool = False

    whole = False
    asks = True
    bounded = True

    @property
    def names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def signed(self) -> tuple[bool, ...]:
        return (True,) if self.momentum else ()

    def scalars(self, group: Mapping[str, Any], steps: Tensor) -> tuple[Tensor, ...]:
        first = steps <= 1
        new = torch.where(first, 1.0, 1.0 - group["dampening"])
        numbers = (
            *(wide(group["lr"], steps), torch.full_like(steps, group["weight_decay"])),
            *(torch.full_like(steps, group["momentum"]), new),
        )
        return tuple(number.float() for number in numbers)

    def __call__(
        self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> Stepped:
        lr, decay, momentum, new = scalars
        g = (-gradient if self.maximize else gradient) + weight * decay
        if not self.momentum:
            return Stepped(weight - g * lr, ())
        buffer = moments[0] * momentum + g * new
        update = g + buffer * momentum if self.nesterov else buffer
        return Stepped(weight - update * lr, (buffer,))

    def reach(self, amax: Tensor, scalars: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Tensor:
        lr, decay, momentum, new = scalars
        step = others[0] + decay.abs() * amax
        if self.momentum:
            buffer = momentum.abs() * others[1] + new.abs() * step
            step = step + momentum.abs() * buffer if self.nesterov else buffer
        return (amax + lr.abs() * step) * (1 + 2.0**-20)
