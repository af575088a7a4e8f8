"""The optimizers by name: torch's arguments, and a preset.

Every class takes parameters, groups of them, or a model, whose embeddings are then kept in float32; `lr`, a number or a
tensor of one element; `preset`, a name in `PRESETS` or a `Preset`, which groups may have of their own; `seed`, of what
is rounded at random; `nonfinite`, what to do about gradients that are not finite: "keep", "skip" or "raise"; and
`statistics`, which counts the updates that were held to their bound; and `compile`, which steps matrices of 2^18
elements and more by torch.compile, in some programs that all matrices share: the same bits. Options of torch's that
are not honoured, such as `fused=True`, are refused by name.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quaver.reference.optimizer_state import Preset
from quaver.torch.optim import rules
from quaver.torch.optim.optimizer import Optimizer
from quaver.torch.optim.rules import UpdateRule


class Adam(Optimizer):
    """Adam: weight decay is added to the gradient. See `quaver.torch.optim.rules`."""

    decoupled = False

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

    def rule(self, group: Mapping[str, Any], preset: Preset) -> UpdateRule:
        return rule_of_adam(group, preset, self.decoupled)


def rule_of_adam(group: Mapping[str, Any], preset: Preset, decoupled: bool) -> UpdateRule:
    """Adam's formula for a group, with the bound of its updates while that is known."""
    b1, b2 = group["betas"]
    # The bound is that of betas that stay: a schedule which moves them, as OneCycleLR does, has updates beyond it.
    steady = tuple(group.get("steady_betas", (b1, b2))) == (b1, b2)
    if not steady and isinstance(group, dict):
        group["steady_betas"] = ()
    held = preset.clamp and b1**2 < b2 < 1 and steady
    return rules.Adam(decoupled, held, group["maximize"])


class AdamW(Adam):
    """AdamW: weight decay shrinks the weight itself. See `quaver.torch.optim.rules`."""

    decoupled = True

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

    def rule(self, group: Mapping[str, Any], preset: Preset) -> UpdateRule:
        return rules.Lion(group["maximize"])


class SGD(Optimizer):
    """SGD with momentum as torch has it. See `quaver.torch.optim.rules`."""

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

    def rule(self, group: Mapping[str, Any], preset: Preset) -> UpdateRule:
        return rules.SGD(group["momentum"] != 0, group["nesterov"], group["maximize"])


class Muon(Optimizer):
    """Muon, of matrices and of stacks [E, n, k], whose matrices are stepped one by one.

    A parameter group with `rule="adamw"` steps by AdamW, with `betas` and `eps`: embeddings, heads, norms, biases and
    weights of convolutions belong there. See `quaver.torch.optim.rules`.
    """

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

    def rule(self, group: Mapping[str, Any], preset: Preset) -> UpdateRule:
        if group["rule"] == "adamw":
            return rule_of_adam(group, preset, decoupled=True)
        return rules.Muon(group["nesterov"], adjust=group["adjust_lr_fn"], maximize=group["maximize"])
