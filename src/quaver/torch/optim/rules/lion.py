"""Lion: the sign of an interpolation of momentum and gradient.

    w ← (1 - lr wd) w - lr sign(β1 m + (1 - β1) g)        m ← β2 m + (1 - β2) g

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quaver.torch.optim.rules.adam import averaged, kept, share, wide
from quaver.torch.optim.rules.rule import Stepped


@dataclass(frozen=True)
class Lion:
    """Lion; no step moves a weight by more than lr, besides its decay."""

    maximize: bool = False

    names = ("exp_avg",)
    signed = (True,)
    whole = False
    asks = False
    bounded = True

    def scalars(self, group: Mapping[str, Any], steps: Tensor) -> tuple[Tensor, ...]:
        (b1, b2), lr = group["betas"], wide(group["lr"], steps)
        numbers = (torch.full_like(steps, share(b1)), torch.full_like(steps, share(b2)), lr, lr * group["weight_decay"])
        return tuple(number.float() for number in numbers)

    def __call__(
        self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> Stepped:
        (m,) = moments
        share1, share2, lr, decay = scalars
        g = -gradient if self.maximize else gradient
        mixed = averaged(m, g, share1)
        # torch's sign of NaN is 0: such weights would stand still for ever without a word.
        update = torch.where(mixed != mixed, mixed, mixed.sign())
        return Stepped(weight - weight * decay - update * lr, (averaged(m, g, share2),))

    def reach(self, amax: Tensor, scalars: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Tensor:
        _, _, lr, decay = scalars
        return (amax * kept(decay) + lr.abs()) * (1 + 2.0**-20)
