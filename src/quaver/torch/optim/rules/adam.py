"""Adam and AdamW, with updates held to the bound that exact moments keep.

    m ← β1 m + (1 - β1) g        v ← β2 v + (1 - β2) g²        u = (m / (1 - β1ᵗ)) / (√(v / (1 - β2ᵗ)) + ε)
    w ← (1 - lr wd) w - lr clamp(u, ±U_t)

Adam adds wd w to the gradient in place of the factor. Sources: Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter,
arXiv:1711.05101; U_t is `quaver.core.states.bounds`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.optim.rules.rule import Stepped

#: The largest float32.
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Adam:
    """Adam; `decoupled`, AdamW."""

    decoupled: bool = True
    #: Whether updates are held to U_t.
    clamp: bool = True
    maximize: bool = False

    @property
    def bounded(self) -> bool:
        return self.clamp

    names = ("exp_avg", "exp_avg_sq")
    signed = (True, False)
    whole = False
    asks = False

    def scalars(self, group: Mapping[str, Any], steps: Tensor) -> tuple[Tensor, ...]:
        (b1, b2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
        lr = wide(group["lr"], steps)
        power1, power2 = b1**steps, b2**steps
        limit = torch.full_like(steps, float("inf"))
        if self.clamp and b1**2 < b2 < 1:
            ratio = b1**2 / b2
            grown = (1 - ratio**steps) / (1 - ratio) * (1 - power2)
            limit = (1 - b1) / (1 - b2) ** 0.5 * grown.sqrt() / (1 - power1)
        numbers = (
            *(torch.full_like(steps, v) for v in (share(b1), share(b2), eps)),
            *(lr, lr * decay if self.decoupled else torch.full_like(steps, decay)),
            *(1 / (1 - power1), (1 - power2).rsqrt(), limit),
        )
        return tuple(number.float() for number in numbers)

    def __call__(
        self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> Stepped:
        m, v = moments
        share1, share2, eps, lr, decay, grow1, grow2, limit = scalars
        g = -gradient if self.maximize else gradient
        # What is not needed further on lives no longer: a piece's memory is what is there together.
        del moments, gradient
        if not self.decoupled:
            g = g + weight * decay
        m = averaged(m, g, share1)
        # A square beyond float32 would be infinite, and infinity less infinity is NaN at the next step.
        v = averaged(v, (g * g).clamp(max=LARGEST), share2)
        del g
        update = (m * grow1) / (root(v) * grow2 + eps)
        clamped = None
        if self.clamp:
            clamped = update.abs() > limit * (1 + 1e-6)
            update = torch.minimum(torch.maximum(update, -limit), limit)
        if self.decoupled:
            weight = weight - weight * decay
        update = update * lr
        return Stepped(weight - update, (m, v), clamped)

    def reach(self, amax: Tensor, scalars: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Tensor:
        _, _, _, lr, decay, _, _, limit = scalars
        # Above by what float32 may round: three operations.
        return (amax * (kept(decay) if self.decoupled else 1.0) + lr.abs() * limit) * (1 + 2.0**-20)


def kept(decay: Tensor) -> Tensor:
    """What a weight of 1 is at most after its decay, which float32 rounds by the weight's ulps: float32 []."""
    return (1 - decay).abs() + decay.abs() * 2.0**-22


def share(beta: float) -> float:
    """What `averaged` is given of β: 1 - β, or -β where β is below one half."""
    return 1 - beta if beta >= 0.5 else -beta


def averaged(old: Tensor, new: Tensor, share: Tensor) -> Tensor:
    """β old + (1 - β) new, from the one that has the larger part.

    From the other, a small `new` would be lost in (new - old) + old beside a large `old`.

    Args:
        share: of β, float32 [].
    """
    if not share.is_cpu or is_tracing() or type(share) is not Tensor:
        return (new - old) * share + torch.where(share > 0, old, new)
    return (new - old) * share + (old if share > 0 else new)


def root(v: Tensor) -> Tensor:
    """√v, rounded correctly, as compilers and GPUs have it: torch's own on a CPU is one off in one element of six."""
    if not v.is_cpu or is_tracing() or type(v) is not Tensor:
        return v.sqrt()
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    with np.errstate(invalid="ignore"):
        np.sqrt(v.numpy(), out=out.numpy())
    return out


def wide(lr: Tensor | float, steps: Tensor) -> Tensor:
    if isinstance(lr, Tensor):
        return lr.detach().to(steps.device, torch.float64).expand_as(steps)
    return torch.full_like(steps, lr)
