"""Transformer Engine's `FusedAdam` and `FusedSGD`, implemented by `quaver.torch.optim` and `torch.optim`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quaver.options import checks
from quaver.reference.optimizer_state import FLOAT32, Preset, StateSpec, packed
from quaver.torch.optim.master_weights import WeightFormat, around
from quaver.torch.optim.optimizers import Adam
from quaver.torch.optim.rules import AdamRule

#: Format of a moment by its dtype, the argument `exp_avg_dtype` or `exp_avg_sq_dtype`.
MOMENT_SPECS = {
    torch.float32: FLOAT32,
    torch.bfloat16: StateSpec(code="bfloat16"),
    torch.float16: StateSpec(code="float16", block=None, scale="float32"),
    torch.uint8: StateSpec(code="e4m3", block=None, scale="float32"),
}


class FusedAdam(Adam):
    """Adam, or AdamW unless `adam_w_mode` is False, with moments in fewer bits.

    `param_groups[i]["step"]` counts the steps of a group, including those in which a parameter has no gradient: an int,
    or an int32 tensor [1] on the device if `capturable`. State dicts of Transformer Engine, torch and Quaver can be
    loaded.

    Differences from Transformer Engine:

    - A float32 master of a bfloat16 weight is always stored as the 16 bits that bfloat16 lacks. So `master_weights` and
      `store_param_remainders` do the same.
    - A float16 master has one scale, a power of two instead of a float32; the weight is the rounded master.
    - Without masters, bfloat16 weights are rounded stochastically instead of to nearest.
    - Tensors of fewer than 4096 elements have float32 states.

    Args:
        use_decoupled_grad: read, clip and zero `p.decoupled_grad`, of any dtype, and ignore `p.grad`.
        set_grad_none: default of `zero_grad(set_to_none)`; deprecated in Transformer Engine.
    Raises:
        ValueError: amsgrad, bias_correction=False, an unknown dtype, or options that capturable does not allow.
    """

    @checks
    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, bias_correction: bool = True, adam_w_mode: bool = True,
        master_weights: bool = False, master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32, exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False, store_param_remainders: bool = False, set_grad_none: bool | None = None,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        if isinstance(betas, bool):
            raise ValueError(f"betas is {betas}; give two numbers, and bias_correction by name")
        if amsgrad or not bias_correction:
            raise ValueError(
                f"amsgrad is {amsgrad} and bias_correction is {bias_correction}: FusedAdam has no amsgrad, as in "
                "Transformer Engine, and always corrects the bias; leave both out"
            )
        if master_weights and master_weight_dtype not in (torch.float32, torch.float16):
            raise ValueError(f"master_weight_dtype is {master_weight_dtype}; give torch.float32 or torch.float16")
        moments = {"exp_avg_dtype": exp_avg_dtype, "exp_avg_sq_dtype": exp_avg_sq_dtype}
        for name, dtype in moments.items():
            if dtype not in MOMENT_SPECS:
                raise ValueError(f"{name} is {dtype}; give one of {', '.join(map(str, MOMENT_SPECS))}")
        float16_masters = master_weights and master_weight_dtype is torch.float16
        remainders = store_param_remainders and master_weights and not float16_masters
        same_dtype = exp_avg_dtype is exp_avg_sq_dtype and exp_avg_dtype in (torch.float32, torch.bfloat16)
        if capturable and (float16_masters or remainders or not same_dtype):
            raise ValueError(
                "capturable needs masters in float32 without store_param_remainders, and both moments in torch.float32 "
                "or both in torch.bfloat16, as in Transformer Engine: leave capturable out, or give these"
            )
        first, second = (MOMENT_SPECS[dtype] for dtype in moments.values())
        # Master formats for bfloat16 weights and for weights stored as codes.
        bfloat16, codes = "remainder" if master_weights or store_param_remainders else "none", "float32"
        if float16_masters:
            bfloat16 = codes = "float16"
        preset = Preset(name="FusedAdam", first=first, second=second, codes=codes, bfloat16=bfloat16, clamp=False)
        self.decoupled, self.capturable, self.use_decoupled_grad = adam_w_mode, capturable, use_decoupled_grad
        self.set_grad_none = set_grad_none
        #: For each parameter of the last step, the count of its group and that tensor's version.
        self._synced: dict[Tensor, tuple[Any, int | None]] = {}
        # With counts on the host, GradScaler must decide on the host whether to skip a step.
        self._step_supports_amp_scaling = capturable
        super().__init__(params, lr, betas, eps, weight_decay, preset=preset)

    def rule(self, group: Mapping[str, Any], preset: Preset) -> AdamRule:
        return AdamRule.from_group(group, preset, self.decoupled)

    def __getstate__(self) -> dict[str, Any]:
        names = ("decoupled", "capturable", "use_decoupled_grad", "set_grad_none", "_step_supports_amp_scaling")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Also called by torch's load_state_dict.
        self._synced = {}
        super().__setstate__(state)

    def _step(self) -> None:
        if self.use_decoupled_grad and hasattr(self, "grad_scale"):
            raise ValueError(
                "torch.amp.GradScaler only sees p.grad, and with use_decoupled_grad gradients are in "
                "p.decoupled_grad: divide them by the scale before optimizer.step(), or leave "
                "use_decoupled_grad out"
            )
        for group in self.param_groups:
            group["step"] = self._group_step(group.get("step", 0), group)
        with self._gradients_in_place():
            stepping = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
            for p, group in stepping:
                if not self.state[p]:
                    self.state[p] = self.first_state(p, group)
                # The bias correction reads the parameter's count; write it only where it may differ.
                if not self._is_synced(p, group["step"]):
                    self.state[p]["step"].fill_(group["step"].squeeze() if self.capturable else group["step"])
            super()._step()
        overflow, _ = self._scaling()
        for group in self.param_groups:
            # In place, so that each replay of a CUDA graph counts.
            group["step"] += 1 if overflow is None else (overflow == 0).to(group["step"])
        self._synced = {p: _with_version(group["step"]) for p, group in stepping}

    def _is_synced(self, p: Tensor, steps: Any) -> bool:
        """True if a parameter's own step count is known to equal that of its group."""
        known, version = self._synced.get(p, (None, None))
        return (known is steps if self.capturable else known == steps) and version == _with_version(steps)[1]

    def _group_step(self, steps: Any, group: dict[str, Any]) -> Any:
        """Return a number of steps in the form that a group stores: an int, or an int32 tensor [1] if capturable."""
        if not self.capturable:
            return int(steps)
        if isinstance(steps, Tensor) and steps.shape == (1,) and steps.dtype is torch.int32:
            return steps
        device = group["params"][0].device if group["params"] else "cpu"
        return torch.as_tensor(steps, dtype=torch.int32, device=device).reshape(1)

    @contextmanager
    def _gradients_in_place(self) -> Iterator[None]:
        """Put `p.decoupled_grad` into `p.grad` inside the context, as all methods of `Adam` read that."""
        if not self.use_decoupled_grad:
            yield
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [(p.grad, p.grad_dtype) for p in parameters]
        try:
            for p in parameters:
                # Without a grad_dtype torch accepts a gradient of any dtype.
                p.grad, p.grad_dtype = None, None
                p.grad = getattr(p, "decoupled_grad", None)
            yield
        finally:
            for p, (gradient, dtype) in zip(parameters, before, strict=True):
                p.grad = None
                p.grad_dtype = dtype
                p.grad = gradient

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients that a step reads, like `Optimizer.clip_grad_norm_`; returns their norm before."""
        with self._gradients_in_place():
            return super().clip_grad_norm_(max_norm, norm_type)

    def step_in_backward(self, *args: Any, **kwargs: Any) -> None:
        """Step each parameter during backward, like `Optimizer.step_in_backward`.

        Raises:
            ValueError: with use_decoupled_grad.
        """
        if self.use_decoupled_grad:
            raise ValueError(
                "backward writes p.grad, and with use_decoupled_grad steps read p.decoupled_grad: leave "
                "step_in_backward or use_decoupled_grad out"
            )
        super().step_in_backward(*args, **kwargs)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set the gradients that a step reads to None, or fill them with 0.

        Args:
            set_to_none: None means the constructor's `set_grad_none`, or True without it.
        Raises:
            ValueError: a value that contradicts `set_grad_none`.
        """
        if None not in (set_to_none, self.set_grad_none) and set_to_none is not self.set_grad_none:
            raise ValueError(
                f"zero_grad has set_to_none={set_to_none}, and FusedAdam was made with "
                f"set_grad_none={self.set_grad_none}: give only one of them"
            )
        to_none = (self.set_grad_none if set_to_none is None else set_to_none) is not False
        if not self.use_decoupled_grad:
            super().zero_grad(to_none)
            return
        for p in (p for group in self.param_groups for p in group["params"]):
            if to_none:
                p.decoupled_grad = None
            elif getattr(p, "decoupled_grad", None) is not None:
                p.decoupled_grad.zero_()

    def _load(self, state_dict: Any) -> None:
        groups, states = [], dict(state_dict["state"])
        for mine, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            group = {name: value for name, value in saved.items() if name != "bias_correction"}
            if not saved.get("bias_correction", True):
                raise ValueError(
                    "the state dict was saved with bias_correction=False, and FusedAdam always corrects the bias here; "
                    "nothing was loaded: start without it"
                )
            keys = [key for key in saved["params"] if key in states]
            counts = [states[key]["step"] for key in keys if "step" in states[key]]
            if "step" not in saved and counts:
                # torch and Quaver count per parameter.
                group["step"] = max(int(count) for count in counts)
            if keys and not counts and "step" in saved:
                # Transformer Engine counts per group.
                group.setdefault("preset", packed(TE_PRESET))
                for p, key in zip(mine["params"], saved["params"], strict=False):
                    if key in states:
                        states[key] = _from_transformer_engine(p, states[key], int(saved["step"]))
            groups.append(group)
        rest = state_dict["param_groups"][len(groups) :]
        super()._load({**state_dict, "state": states, "param_groups": [*groups, *rest]})
        for group in self.param_groups:
            if "step" in group:
                group["step"] = self._group_step(group["step"], group)


def _with_version(steps: Any) -> tuple[Any, int | None]:
    """Return a group's count and, if it is a tensor, its version, which changes with in-place writes."""
    return steps, steps._version if isinstance(steps, Tensor) and not steps.is_inference() else None


#: Formats of the states that `_from_transformer_engine` returns: float32 moments, masters as remainders.
TE_PRESET = Preset(name="Transformer Engine's FusedAdam")


def _from_transformer_engine(p: Tensor, state: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Convert a parameter's state from Transformer Engine's names to Quaver's, with float32 moments.

    Args:
        p: the parameter, with its weight already loaded.
        state: its state in a Transformer Engine state dict.
        steps: step count of its group.
    """
    converted: dict[str, Any] = {name: t.float() for name, t in state.items() if name != "master_param"}
    master, converted["step"] = state.get("master_param"), steps
    if master is None or p.dtype is torch.float32:
        return converted
    if p.dtype is not torch.bfloat16:
        return converted | {"master": master}
    # An int16 master is already a remainder.
    if master.dtype is not torch.int16:
        weight, value = p.detach(), master.to(p.device, torch.float32)
        # If the weight is not the rounded master, it was changed after saving and takes precedence.
        value = torch.where(value.to(weight.dtype) == weight, value, weight.float())
        (master,) = around(WeightFormat("remainder"), value, (weight,))
    return converted | {"remainder": master}


class FusedSGD(torch.optim.SGD):
    """`torch.optim.SGD` with Transformer Engine's positional arguments; same bits, parameters of any dtype."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.0, dampening: float = 0.0, **others: Any) -> None:
        super().__init__(params, lr, momentum, dampening, **others)
