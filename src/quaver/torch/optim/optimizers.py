"""Adam, AdamW, Lion, SGD and Muon with torch's arguments and a preset.

Common arguments of every class:

- params: parameters, parameter groups, or a model, whose embeddings then have float32 states.
- lr: a number or a tensor of one element.
- preset: a name in `PRESETS` or a `Preset`; parameter groups may have their own.
- seed: seed of stochastic rounding.
- nonfinite: reaction to gradients that are not finite: "keep", "skip" or "raise".
- statistics: count the updates that were clamped to their bound.
- compile: step matrices of 2^18 elements and more by torch.compile, in a few programs shared by all matrices; the same
  bits.

Unsupported options of torch, such as `fused=True`, raise an error.
"""

from functools import partial
from typing import Any

from torch import Tensor

from quaver.reference.optimizer_state import Preset
from quaver.torch.optim import rules
from quaver.torch.optim.optimizer import Optimizer


class Adam(Optimizer):
    """Adam: weight decay is added to the gradient. See `quaver.torch.optim.rules`."""

    rule = staticmethod(partial(rules.AdamRule.from_group, decoupled=False))

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        preset: str | Preset = "balanced",
        maximize: bool = False,
        **others: Any,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**options, "preset": preset}, **others)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("steady_betas", tuple(group["betas"]))


class AdamW(Adam):
    """AdamW: weight decay scales down the weight itself. See `quaver.torch.optim.rules`."""

    rule = staticmethod(partial(rules.AdamRule.from_group, decoupled=True))

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)


class Lion(Optimizer):
    """Lion. See `quaver.torch.optim.rules`."""

    rule = staticmethod(rules.LionRule.from_group)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        preset: str | Preset = "balanced",
        maximize: bool = False,
        **others: Any,
    ) -> None:
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**options, "preset": preset}, **others)


class SGD(Optimizer):
    """SGD with torch's momentum. See `quaver.torch.optim.rules`."""

    rule = staticmethod(rules.SGDRule.from_group)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        preset: str | Preset = "balanced",
        maximize: bool = False,
        **others: Any,
    ) -> None:
        if nesterov and (not momentum or dampening):
            raise ValueError(
                f"nesterov is True with momentum {momentum} and dampening {dampening}; give momentum above 0 and "
                "dampening 0, or leave nesterov out"
            )
        options: dict[str, Any] = {"lr": lr, "momentum": momentum, "dampening": dampening}
        options |= {"weight_decay": weight_decay}
        options |= {"nesterov": nesterov, "maximize": maximize, "preset": preset}
        super().__init__(params, options, **others)


class Muon(Optimizer):
    """Muon for matrices, and for stacks [E, n, k], whose matrices are stepped separately.

    A parameter group with `rule="adamw"` uses AdamW, with `betas` and `eps`. Put embeddings, heads, norms, biases and
    convolution weights there. See `quaver.torch.optim.rules`.
    """

    rule = staticmethod(rules.MuonRule.from_group)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str = "original",
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        preset: str | Preset = "balanced",
        maximize: bool = False,
        **others: Any,
    ) -> None:
        if adjust_lr_fn not in ("original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn is {adjust_lr_fn!r}; give 'original' or 'match_rms_adamw'")
        options: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        options |= {"adjust_lr_fn": adjust_lr_fn, "betas": betas, "eps": eps, "rule": "muon"}
        super().__init__(params, {**options, "maximize": maximize, "preset": preset}, **others)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        rule = param_group.get("rule", self.defaults["rule"])
        if rule not in ("muon", "adamw"):
            raise ValueError(f"a group of Muon was given rule={rule!r}; give 'muon' or 'adamw'")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("steady_betas", tuple(group["betas"]))
