"""Adam, AdamW, Lion, SGD and Muon with torch's arguments and a preset, and Schedule-Free AdamW.

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

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quaver.reference.optimizer_state import Preset
from quaver.torch.linear import stored_weight
from quaver.torch.optim import codes, layout, ranks, rules
from quaver.torch.optim.optimizer import Optimizer
from quaver.torch.quantized_tensor import QuantizedTensor


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


class ScheduleFreeAdamW(Optimizer):
    """AdamW that needs no learning rate schedule: the result of training is the average of its iterates.

    The model has the weights y that are trained. Call `eval()` before evaluating or exporting the model, which replaces
    them by the average x, and `train()` before the next step. Arguments are those of
    `schedulefree.AdamWScheduleFree`. See `quaver.torch.optim.rules`.
    """

    rule = staticmethod(rules.ScheduleFreeRule.from_group)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        *,
        preset: str | Preset = "balanced",
        **others: Any,
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options |= {"warmup_steps": warmup_steps, "r": r, "weight_lr_power": weight_lr_power, "train_mode": True}
        super().__init__(params, {**options, "preset": preset}, **others)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        betas = param_group.get("betas", self.defaults["betas"])
        if betas[0] == 0:
            raise ValueError(
                f"{type(self).__name__} was given betas={betas!r}, and x follows from y by a division by the first; "
                "give it above 0, such as 0.9"
            )
        super().add_param_group(param_group)

    def eval(self) -> None:
        """Replace the weights y, which are trained, by their average x, rounded to nearest in the weights' format."""
        self._set_mode(train=False)

    def train(self) -> None:
        """Replace x by y again. What two roundings of the weights' format change is lost."""
        self._set_mode(train=True)

    def _update(self, parameters: list[Tensor], factor: Tensor | None, overflow: Tensor | None = None) -> None:
        if not all(group["train_mode"] for group in self.param_groups):
            raise ValueError(
                "a step was called after eval(), while the model has averaged weights; nothing was changed: call "
                "optimizer.train() before the forward pass of a training step"
            )
        super()._update(parameters, factor, overflow)

    @torch.no_grad()
    def _set_mode(self, train: bool) -> None:
        """Switch all parameter groups between y and x.

        x = y - (1 - β1) / β1 u is a step of SGD whose gradient is u = z - y, so weights in codes and shards get their
        scales as in any step.
        """
        self._finish_steps()
        stepping, index = list[ranks.SteppingParameter](), 0
        for group in self.param_groups:
            for p in group["params"]:
                if group["train_mode"] != train and self.state.get(p):
                    stepping.append(self._switched(p, index, group, train))
                index += 1
        for group in self.param_groups:
            group["train_mode"] = train
        sharded = [one for one in stepping if one.config.weight_format.code_spec and layout.shardings(one.p)]
        # Switches are rare, so they are not compiled.
        programs, self._programs = self._programs, None
        try:
            for one in stepping:
                assert one.parts is not None
                # Copies of one parameter at a time, if the states are in host memory.
                parts = one.parts.to(self.device_of_step(one.p))
                here = one._replace(parts=parts)
                agreed = ranks.agree_on_amaxes([here], self._local_amax) if any(one is each for each in sharded) else {}
                self._step_parameter(here, agreed.get(one.p, {}), None)
                for target, source in zip(one.parts.weight, parts.weight, strict=True):
                    if target is not source:
                        target.copy_(source)
        finally:
            self._programs = programs
        if sharded:
            ranks.gather_scales(sharded)
        for one in stepping:
            if isinstance(one.p, QuantizedTensor):
                torch.autograd.graph.increment_version(one.p)
            # The next step treats codes as written on all ranks: fully_shard moves some ranks' shards after a load.
            self._stepped.pop(one.p, None)

    def _switched(self, p: Tensor, index: int, group: Mapping[str, Any], train: bool) -> ranks.SteppingParameter:
        """Prepare the step of a parameter from y to x, or back if `train`."""
        self._check_state(p, group)
        config = self.config(p, group)
        if stored_weight.holds_codes(p):
            self._follow_writes(p, config)
        self._ensure_amax(p, config)
        state, spec = self.state[p], config.moments[0]
        u = layout.moment_tensors(state, config.rule.names[0], spec)
        config = replace(
            config,
            rule=rules.SGDRule(),
            weight_format=replace(config.weight_format, stochastic=False),
            moments=(),
            gradient=spec if spec.of.scaled else None,
        )
        parts = layout.tensors_of(p, config, state, u)
        if spec.of.scaled and (spec.block is None or spec.of.numbers > 1):
            # Steps read gradients with one scale per block only.
            parts = parts._replace(gradient=(codes.decode(parts.gradient[0], parts.gradient[1], spec),))
            config = replace(config, gradient=None)
        b1 = group["betas"][0]
        lr = (1 - b1) / b1 * (-1 if train else 1)
        sgd = {"lr": lr, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
        scalars = config.rule.scalars(sgd, state["step"].double())
        amax = layout.local(state["amax"]) if config.predicts_scale else None
        return ranks.SteppingParameter(p, index, group, config, parts, scalars, None, amax)
