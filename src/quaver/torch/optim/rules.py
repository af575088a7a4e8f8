"""Update rules of Adam, Lion, Muon, SGD and Schedule-Free AdamW as functions of float32 tensors.

Adam and AdamW, with updates clamped to the bound that they have with exact moments:

    m ← β1 m + (1 - β1) g        v ← β2 v + (1 - β2) g²        u = (m / (1 - β1ᵗ)) / (√(v / (1 - β2ᵗ)) + ε)
    w ← (1 - lr wd) w - lr clamp(u, ±U_t)

Adam adds wd w to the gradient instead of scaling w. Sources: Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter,
arXiv:1711.05101; U_t is defined in `quaver.reference.optim`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quaver.reference.optimizer_state import Preset
from quaver.torch.numerics.rounding import is_tracing

# ---- interface ----


class UpdateResult(NamedTuple):
    """Result of a step, float32 of the weight's shape."""

    weight: Tensor
    moments: tuple[Tensor, ...]
    #: True for elements whose update was clamped to the rule's bound, bool; None if the rule does not clamp.
    clamped: Tensor | None = None


class UpdateRule:
    """Update formula. Instances that compute the same are equal, so that they share compiled code.

    Scalars are float32 tensors of shape [], so that a changed learning rate needs no recompilation.
    """

    #: Name of torch's optimizer with this rule.
    name = ""
    #: Names of the moments in the state of torch's optimizer for this rule.
    names: tuple[str, ...] = ()
    #: For each moment, True if it can be negative, such as Adam's first.
    signed: tuple[bool, ...] = ()
    #: True if a step needs a whole matrix at once.
    needs_matrix = False
    #: True if `weight_bound` bounds the weights after a step.
    has_weight_bound = True
    #: True if `weight_bound` needs the amaxes of gradient and moments.
    bound_needs_amaxes = False
    #: Names of numbers in a parameter's state that every step updates, besides "step": float64 [], 0 at first.
    numbers: tuple[str, ...] = ()

    def next_numbers(self, group: Mapping[str, Any], steps: Tensor, numbers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the `numbers` of a step from those of the step before, each float64 [parameters]."""
        return numbers

    def scalars(self, group: Mapping[str, Any], steps: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Return the scalars of a step, each float32 [parameters].

        Args:
            group: parameter group, with torch's option names.
            steps: float64 [parameters], 1 at the first step.
            numbers: results of `next_numbers`.
        """
        raise NotImplementedError

    def __call__(
        self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> UpdateResult:
        """Compute a step. All tensors are float32 of one shape; none is modified."""
        raise NotImplementedError

    def weight_bound(
        self, amax: Tensor, scalars: tuple[Tensor, ...], gradient_and_moment_amaxes: tuple[Tensor, ...]
    ) -> Tensor:
        """Return an upper bound of the weights' magnitudes after the step, if `has_weight_bound`.

        Args:
            amax: amaxes of the weights before the step, float32 of any shape.
            scalars: results of `scalars` for this parameter.
            gradient_and_moment_amaxes: amaxes of the gradient and of each moment before the step, float32 [], if
                `bound_needs_amaxes`.
        """
        raise NotImplementedError


def expanded(steps: Tensor, *numbers: Tensor | float) -> tuple[Tensor, ...]:
    """Return numbers as float32 tensors of the shape of `steps`."""
    each = (number if isinstance(number, Tensor) else torch.full_like(steps, number) for number in numbers)
    return tuple(number.float() for number in each)


# ---- adam ----

#: Largest finite float32.
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class AdamRule(UpdateRule):
    """Adam, or AdamW if `decoupled`."""

    decoupled: bool = True
    #: True if updates are clamped to U_t.
    clamp: bool = True
    maximize: bool = False

    name = "Adam"
    names = ("exp_avg", "exp_avg_sq")
    signed = (True, False)

    @property
    def has_weight_bound(self) -> bool:  # type: ignore[override]
        return self.clamp

    @classmethod
    def from_group(cls, group: Mapping[str, Any], preset: Preset, decoupled: bool) -> "AdamRule":
        """Return the rule of a parameter group; it clamps updates if the preset asks for it and the bound is valid."""
        b1, b2 = group["betas"]
        # The bound holds for constant betas only; a schedule that changes them, such as OneCycleLR, disables it.
        steady = tuple(group.get("steady_betas", (b1, b2))) == (b1, b2)
        if not steady and isinstance(group, dict):
            group["steady_betas"] = ()
        return cls(decoupled, preset.clamp and b1**2 < b2 < 1 and steady, group["maximize"])

    def scalars(self, group: Mapping[str, Any], steps: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        (b1, b2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
        lr = expand_lr(group["lr"], steps)
        power1, power2 = b1**steps, b2**steps
        update_bound = torch.full_like(steps, float("inf"))
        if self.clamp and b1**2 < b2 < 1:
            ratio = b1**2 / b2
            grown = (1 - ratio**steps) / (1 - ratio) * (1 - power2)
            update_bound = (1 - b1) / (1 - b2) ** 0.5 * grown.sqrt() / (1 - power1)
        bias_corrections = 1 / (1 - power1), (1 - power2).rsqrt()
        decay = lr * decay if self.decoupled else decay
        return expanded(steps, lerp_weight(b1), lerp_weight(b2), eps, lr, decay, *bias_corrections, update_bound)

    def __call__(
        self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> UpdateResult:
        m, v = moments
        lerp_weight1, lerp_weight2, eps, lr, decay, inv_bias_correction1, rsqrt_bias_correction2, update_bound = scalars
        g = -gradient if self.maximize else gradient
        # Drop references early to reduce the peak memory of a chunk.
        del moments, gradient
        if not self.decoupled:
            g = g + weight * decay
        m = lerp(m, g, lerp_weight1)
        # An infinite square would give NaN (infinity minus infinity) at the next step.
        v = lerp(v, (g * g).clamp(max=LARGEST), lerp_weight2)
        del g
        update = (m * inv_bias_correction1) / (root(v) * rsqrt_bias_correction2 + eps)
        clamped = None
        if self.clamp:
            clamped = update.abs() > update_bound * (1 + 1e-6)
            update = torch.minimum(torch.maximum(update, -update_bound), update_bound)
        if self.decoupled:
            weight = weight - weight * decay
        update = update * lr
        return UpdateResult(weight - update, (m, v), clamped)

    def weight_bound(
        self, amax: Tensor, scalars: tuple[Tensor, ...], gradient_and_moment_amaxes: tuple[Tensor, ...]
    ) -> Tensor:
        _, _, _, lr, decay, _, _, update_bound = scalars
        # The factor covers float32 rounding of three operations.
        return (amax * (decay_bound(decay) if self.decoupled else 1.0) + lr.abs() * update_bound) * (1 + 2.0**-20)


def decay_bound(decay: Tensor) -> Tensor:
    """Return an upper bound of the factor by which decay scales a weight, including float32 rounding: float32 []."""
    return (1 - decay).abs() + decay.abs() * 2.0**-22


def lerp_weight(beta: float) -> float:
    """Return β in the form that `lerp` expects: 1 - β, or -β if β is below one half."""
    return 1 - beta if beta >= 0.5 else -beta


def lerp(old: Tensor, new: Tensor, weight: Tensor) -> Tensor:
    """Return β old + (1 - β) new, computed from the operand with the larger weight.

    Computed from the other operand, (new - old) + old would lose a `new` that is small relative to `old`.

    Args:
        old, new: float32 tensors.
        weight: result of `lerp_weight` for β, float32 [].
    """
    if not weight.is_cpu or is_tracing() or type(weight) is not Tensor:
        return (new - old) * weight + torch.where(weight > 0, old, new)
    return (new - old) * weight + (old if weight > 0 else new)


def root(v: Tensor) -> Tensor:
    """Return √v, correctly rounded as on GPUs and in compiled code; torch's CPU sqrt is one ulp off in one of six
    elements.
    """
    if not v.is_cpu or is_tracing() or type(v) is not Tensor:
        return v.sqrt()
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    with np.errstate(invalid="ignore"):
        np.sqrt(v.numpy(), out=out.numpy())
    return out


def expand_lr(lr: Tensor | float, steps: Tensor) -> Tensor:
    if isinstance(lr, Tensor):
        return lr.detach().to(steps.device, torch.float64).expand_as(steps)
    return torch.full_like(steps, lr)


# ---- lion ----
# Lion: the sign of an interpolation of momentum and gradient.
#
#     w ← (1 - lr wd) w - lr sign(β1 m + (1 - β1) g)        m ← β2 m + (1 - β2) g
#
# Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675.


@dataclass(frozen=True)
class LionRule(UpdateRule):
    """Lion; a step changes a weight by at most lr, besides its decay."""

    maximize: bool = False

    name = "Lion"
    names = ("exp_avg",)
    signed = (True,)

    @classmethod
    def from_group(cls, group: Mapping[str, Any], _: Preset) -> "LionRule":
        """Return the rule of a parameter group."""
        return cls(group["maximize"])

    def scalars(self, group: Mapping[str, Any], steps: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        (b1, b2), lr = group["betas"], expand_lr(group["lr"], steps)
        return expanded(steps, lerp_weight(b1), lerp_weight(b2), lr, lr * group["weight_decay"])

    def __call__(
        self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> UpdateResult:
        (m,) = moments
        lerp_weight1, lerp_weight2, lr, decay = scalars
        g = -gradient if self.maximize else gradient
        mixed = lerp(m, g, lerp_weight1)
        # Propagate NaN: torch's sign of NaN is 0, and such weights would silently stop training.
        update = torch.where(mixed != mixed, mixed, mixed.sign())
        return UpdateResult(weight - weight * decay - update * lr, (lerp(m, g, lerp_weight2),))

    def weight_bound(
        self, amax: Tensor, scalars: tuple[Tensor, ...], gradient_and_moment_amaxes: tuple[Tensor, ...]
    ) -> Tensor:
        _, _, lr, decay = scalars
        return (amax * decay_bound(decay) + lr.abs()) * (1 + 2.0**-20)


# ---- muon ----
# Muon: the momentum of a matrix with its singular values brought near 1.
#
#     b ← μ b + (1 - μ) g        u = orthogonalized(g + μ (b - g))        w ← (1 - lr wd) w - lr s u
#
# Source: Jordan et al., https://kellerjordan.github.io/posts/muon/; the polynomial and the two choices of s are those
# of torch.optim.Muon (s = √max(1, rows / columns), or 0.2 √max(rows, columns) of Liu et al., arXiv:2502.16982).

COEFFICIENTS = (3.4445, -4.775, 2.0315)


@dataclass(frozen=True)
class MuonRule(UpdateRule):
    """Muon for one matrix. It has no bound, so amaxes are measured after a step."""

    nesterov: bool = True
    steps: int = 5
    adjust: str = "original"
    maximize: bool = False
    eps: float = 1e-7

    name = "Muon"
    names = ("momentum_buffer",)
    signed = (True,)
    needs_matrix = True
    has_weight_bound = False

    @classmethod
    def from_group(cls, group: Mapping[str, Any], preset: Preset) -> UpdateRule:
        """Return the rule of a parameter group, which is AdamW's if the group says so."""
        if group["rule"] == "adamw":
            return AdamRule.from_group(group, preset, decoupled=True)
        return cls(group["nesterov"], adjust=group["adjust_lr_fn"], maximize=group["maximize"])

    def scalars(self, group: Mapping[str, Any], steps: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        lr = expand_lr(group["lr"], steps)
        # Weight of the buffer in its moving average, and of the gradient in Nesterov's.
        momentum = lerp_weight(group["momentum"]), lerp_weight(1 - group["momentum"])
        return expanded(steps, lr, lr * group["weight_decay"], *momentum)

    def __call__(
        self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> UpdateResult:
        lr, decay, buffer_weight, gradient_weight = scalars
        g = -gradient if self.maximize else gradient
        buffer = lerp(moments[0], g, buffer_weight)
        update = lerp(g, buffer, gradient_weight) if self.nesterov else buffer
        update = orthogonalized(update, self.steps, self.eps)
        rows, columns = weight.shape
        ratio = max(1, rows / columns) ** 0.5 if self.adjust == "original" else 0.2 * max(rows, columns) ** 0.5
        return UpdateResult(weight - weight * decay - update * (lr * ratio), (buffer,))


def orthogonalized(update: Tensor, steps: int, eps: float) -> Tensor:
    """Bring the singular values of a matrix near 1 by an odd polynomial in bfloat16; returns float32 of its shape."""
    a, b, c = COEFFICIENTS
    x = update.bfloat16()
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    # An enclosing torch.autocast would cast the norm to float32 and the matrices to its own dtype.
    with torch.autocast(x.device.type, enabled=False):
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if transposed else x).float()


# ---- sgd ----
# Stochastic gradient descent with torch's momentum.
#
#     g ← g + wd w        b ← μ b + (1 - dampening) g (g at the first step)
#     w ← w - lr (b, or g + μ b if nesterov)
#
# Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013.


@dataclass(frozen=True)
class SGDRule(UpdateRule):
    """SGD; the amaxes of gradient and buffer bound a step."""

    momentum: bool = False
    nesterov: bool = False
    maximize: bool = False

    name = "SGD"
    bound_needs_amaxes = True

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def signed(self) -> tuple[bool, ...]:  # type: ignore[override]
        return (True,) if self.momentum else ()

    @classmethod
    def from_group(cls, group: Mapping[str, Any], _: Preset) -> "SGDRule":
        """Return the rule of a parameter group."""
        return cls(group["momentum"] != 0, group["nesterov"], group["maximize"])

    def scalars(self, group: Mapping[str, Any], steps: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        new = torch.where(steps <= 1, 1.0, 1.0 - group["dampening"])
        return expanded(steps, expand_lr(group["lr"], steps), group["weight_decay"], group["momentum"], new)

    def __call__(
        self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> UpdateResult:
        lr, decay, momentum, new = scalars
        g = (-gradient if self.maximize else gradient) + weight * decay
        if not self.momentum:
            return UpdateResult(weight - g * lr, ())
        buffer = moments[0] * momentum + g * new
        update = g + buffer * momentum if self.nesterov else buffer
        return UpdateResult(weight - update * lr, (buffer,))

    def weight_bound(
        self, amax: Tensor, scalars: tuple[Tensor, ...], gradient_and_moment_amaxes: tuple[Tensor, ...]
    ) -> Tensor:
        lr, decay, momentum, new = scalars
        step = gradient_and_moment_amaxes[0] + decay.abs() * amax
        if self.momentum:
            buffer = momentum.abs() * gradient_and_moment_amaxes[1] + new.abs() * step
            step = step + momentum.abs() * buffer if self.nesterov else buffer
        return (amax + lr.abs() * step) * (1 + 2.0**-20)


# ---- schedule-free ----
# Schedule-Free AdamW: gradients are taken at y, between the iterate z of AdamW without momentum and the weighted
# average x of all z, which is the result of training. The weight is y, and the first moment is u = z - y:
#
#     v ← β2 v + (1 - β2) g²        d = clamp(g / (√(v / (1 - β2ᵗ)) + ε), ±L_t) + wd y
#     y ← y + c u - γ (1 - β1 (1 - c)) d        u ← (1 - c) (u - γ β1 d)        x = y - (1 - β1) / β1 u
#
# In step t, γ = lr min(1, t / warmup) and c = p / Σ p, of the weights p = tʳ max(γ)^weight_lr_power of all steps so
# far. Because v contains (1 - β2) g², a clamp at L_t = √((1 - β2ᵗ) / (1 - β2)) changes a step only if g² overflows.
#
# Source: Defazio et al., "The Road Less Scheduled", arXiv:2405.15682; facebookresearch/schedule_free stores z instead.


@dataclass(frozen=True)
class ScheduleFreeRule(UpdateRule):
    """Schedule-Free AdamW; the amax of u bounds a step."""

    name = "ScheduleFreeAdamW"
    names = ("z_minus_y", "exp_avg_sq")
    signed = (True, False)
    numbers = ("lr_max", "weight_sum")
    bound_needs_amaxes = True

    @classmethod
    def from_group(cls, group: Mapping[str, Any], _: Preset) -> "ScheduleFreeRule":
        """Return the rule of a parameter group."""
        return cls()

    def next_numbers(self, group: Mapping[str, Any], steps: Tensor, numbers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        lr_max, weight_sum = numbers
        lr_max = torch.maximum(lr_max, schedule_free_lr(group, steps))
        return lr_max, weight_sum + average_weight(group, steps, lr_max)

    def scalars(self, group: Mapping[str, Any], steps: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
        lr_max, weight_sum = numbers
        (b1, b2), lr = group["betas"], schedule_free_lr(group, steps)
        weight = average_weight(group, steps, lr_max)
        # Every weight is 0 before a learning rate above 0.
        c = torch.where(weight_sum > 0, weight / weight_sum, 0.0)
        rates = lr * (1 - b1 * (1 - c)), lr * b1
        bias_correction2 = 1 - b2**steps
        update_bound = (bias_correction2 / (1 - b2)).sqrt()
        options = group["eps"], group["weight_decay"]
        return expanded(steps, lerp_weight(b2), *options, c, 1 - c, *rates, bias_correction2.rsqrt(), update_bound)

    def __call__(
        self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> UpdateResult:
        u, v = moments
        lerp_weight2, eps, decay, c, rest, y_rate, u_rate, rsqrt_bias_correction2, update_bound = scalars
        v = lerp(v, (gradient * gradient).clamp(max=LARGEST), lerp_weight2)
        update = gradient / (root(v) * rsqrt_bias_correction2 + eps)
        update = torch.minimum(torch.maximum(update, -update_bound), update_bound)
        # The clamp would hide an infinite gradient.
        update = torch.where(gradient.abs() <= LARGEST, update, float("nan"))
        del gradient, moments
        update = update + weight * decay
        return UpdateResult(weight + (u * c - update * y_rate), ((u - update * u_rate) * rest, v))

    def weight_bound(
        self, amax: Tensor, scalars: tuple[Tensor, ...], gradient_and_moment_amaxes: tuple[Tensor, ...]
    ) -> Tensor:
        _, _, decay, c, _, y_rate, _, _, update_bound = scalars
        step = c * gradient_and_moment_amaxes[1] + y_rate * update_bound
        return (amax * decay_bound(y_rate * decay) + step) * (1 + 2.0**-20)


def schedule_free_lr(group: Mapping[str, Any], steps: Tensor) -> Tensor:
    """Return the learning rate γ of a step, with warmup: float64 [parameters]."""
    return expand_lr(group["lr"], steps) * (steps / max(group["warmup_steps"], 1)).clamp(max=1.0)


def average_weight(group: Mapping[str, Any], steps: Tensor, lr_max: Tensor) -> Tensor:
    """Return the weight p of a step's z in the average x: float64 [parameters]."""
    weight: Tensor = steps ** group["r"] * lr_max ** group["weight_lr_power"]
    return weight
