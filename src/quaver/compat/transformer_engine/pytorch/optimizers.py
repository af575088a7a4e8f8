"""Transformer Engine's optimizers over `quaver.torch.optim` and `torch.optim`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quaver.core.options import checks
from quaver.core.states.codes import FLOAT32, StateSpec
from quaver.core.states.presets import Preset
from quaver.torch.optim.loading.presets import packed
from quaver.torch.optim.optimizers import Adam
from quaver.torch.optim.weights import Keeping, around

#: How a moment is kept by the dtype that is asked for.
KEPT = {
    torch.float32: FLOAT32,
    torch.bfloat16: StateSpec(code="bfloat16"),
    torch.float16: StateSpec(code="float16", block=None, scale="float32"),
    torch.uint8: StateSpec(code="e4m3", block=None, scale="float32"),
}


class FusedAdam(Adam):
    """Adam, or AdamW unless `adam_w_mode` is False, with moments in fewer bits.

    `param_groups[i]["step"]` counts the steps of a group, of parameters without a gradient too: an integer, or an int32
    tensor on the device if `capturable`. State dicts of Transformer Engine's, of torch's and of ours load.

    Masters of bfloat16 weights are the 16 bits that float32 has more: `master_weights` and `store_param_remainders` ask
    for the same. In float16 they have one scale, a power of two where it has a float32, and the weight is the master
    rounded. Without masters weights are rounded at random, where it rounds them to nearest. Tensors of fewer than 4096
    elements have float32 states in any case.

    Args:
        use_decoupled_grad: read, clip and zero `p.decoupled_grad`, of any dtype, and leave `p.grad` alone.
        set_grad_none: of `zero_grad`, deprecated.
    Raises:
        ValueError: amsgrad, no correction of bias, dtypes of states that there are not, or that capturable excludes.
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
            raise ValueError("FusedAdam has no amsgrad (in Transformer Engine neither), and corrects its bias always")
        if master_weights and master_weight_dtype not in (torch.float32, torch.float16):
            raise ValueError(f"master_weight_dtype is {master_weight_dtype}; give torch.float32 or torch.float16")
        moments = {"exp_avg_dtype": exp_avg_dtype, "exp_avg_sq_dtype": exp_avg_sq_dtype}
        for name, dtype in moments.items():
            if dtype not in KEPT:
                raise ValueError(f"{name} is {dtype}; give one of {', '.join(map(str, KEPT))}")
        halved = master_weights and master_weight_dtype is torch.float16
        remainders = store_param_remainders and master_weights and not halved
        one = exp_avg_dtype is exp_avg_sq_dtype and exp_avg_dtype in (torch.float32, torch.bfloat16)
        if capturable and (halved or remainders or not one):
            raise ValueError(
                "capturable takes masters in float32 without store_param_remainders, and both moments in torch.float32 "
                "or both in torch.bfloat16, as in Transformer Engine: leave capturable out, or give these"
            )
        first, second = (KEPT[dtype] for dtype in moments.values())
        masters, codes = "remainder" if master_weights or store_param_remainders else "none", "float32"
        if halved:
            masters = codes = "float16"
        preset = Preset(name="FusedAdam", first=first, second=second, codes=codes, bfloat16=masters, clamp=False)
        self.decoupled, self.capturable, self.use_decoupled_grad = adam_w_mode, capturable, use_decoupled_grad
        self.set_grad_none = set_grad_none
        #: Parameters that the last step stepped, and their groups' counts after it, by `_seen`.
        self._agreeing: dict[Tensor, tuple[Any, int | None]] = {}
        # Where steps are counted on the host, GradScaler decides about them there.
        self._step_supports_amp_scaling = capturable
        super().__init__(params, lr, betas, eps, weight_decay, preset=preset)

    def __getstate__(self) -> dict[str, Any]:
        names = ("decoupled", "capturable", "use_decoupled_grad", "set_grad_none", "_step_supports_amp_scaling")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Of a load too.
        self._agreeing = {}
        super().__setstate__(state)

    def _step(self) -> None:
        if self.use_decoupled_grad and hasattr(self, "grad_scale"):
            raise ValueError(
                "torch.amp.GradScaler sees p.grad alone, and gradients are in p.decoupled_grad: divide them by the "
                "scale before optimizer.step(), or leave use_decoupled_grad out"
            )
        for group in self.param_groups:
            group["step"] = self._count(group.get("step", 0), group)
        with self._gradients_in_place():
            stepping = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
            for p, group in stepping:
                if not self.state[p]:
                    self.state[p] = self.first_state(p, group)
                if not self._agrees(p, group["step"]):
                    self.state[p]["step"].fill_(group["step"].squeeze() if self.capturable else group["step"])
            super()._step()
        overflow, _ = self._scaling()
        for group in self.param_groups:
            # In place: a graph counts at each replay.
            group["step"] += 1 if overflow is None else (overflow == 0).to(group["step"])
        self._agreeing = {p: _seen(group["step"]) for p, group in stepping}

    def _agrees(self, p: Tensor, steps: Any) -> bool:
        """Whether a parameter's own count is known to be its group's, with which it has gone on since."""
        number, version = self._agreeing.get(p, (None, None))
        return (number is steps if self.capturable else number == steps) and version == _seen(steps)[1]

    def _count(self, steps: Any, group: dict[str, Any]) -> Any:
        """A number of steps as a group has it."""
        if not self.capturable:
            return int(steps)
        if isinstance(steps, Tensor) and steps.shape == (1,) and steps.dtype is torch.int32:
            return steps
        device = group["params"][0].device if group["params"] else "cpu"
        return torch.as_tensor(steps, dtype=torch.int32, device=device).reshape(1)

    @contextmanager
    def _gradients_in_place(self) -> Iterator[None]:
        """Have decoupled gradients in `p.grad`, in which every step looks, whatever their dtypes are."""
        if not self.use_decoupled_grad:
            yield
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [(p.grad, p.grad_dtype) for p in parameters]
        try:
            for p in parameters:
                p.grad, p.grad_dtype = None, None
                p.grad = getattr(p, "decoupled_grad", None)
            yield
        finally:
            for p, (gradient, dtype) in zip(parameters, before, strict=True):
                p.grad = None
                p.grad_dtype = dtype
                p.grad = gradient

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `Optimizer.clip_grad_norm_`, of the gradients that a step reads."""
        with self._gradients_in_place():
            return super().clip_grad_norm_(max_norm, norm_type)

    def step_in_backward(self, *args: Any, **kwargs: Any) -> None:
        """As `Optimizer.step_in_backward`. Raises: ValueError, of decoupled gradients."""
        if self.use_decoupled_grad:
            raise ValueError("backward gives p.grad, and steps read p.decoupled_grad: leave step_in_backward out")
        super().step_in_backward(*args, **kwargs)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients that a step reads, or fill them with 0. Raises: ValueError, if set_grad_none differs."""
        if None not in (set_to_none, self.set_grad_none) and set_to_none is not self.set_grad_none:
            raise ValueError(
                f"zero_grad has set_to_none={set_to_none}, and FusedAdam set_grad_none={self.set_grad_none}"
            )
        keeps = (self.set_grad_none if set_to_none is None else set_to_none) is False
        if not self.use_decoupled_grad:
            super().zero_grad(not keeps)
            return
        for p in (p for group in self.param_groups for p in group["params"]):
            if not keeps:
                p.decoupled_grad = None
            elif getattr(p, "decoupled_grad", None) is not None:
                p.decoupled_grad.zero_()

    def _load(self, state_dict: Any) -> None:
        groups, states = [], dict(state_dict["state"])
        for mine, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            group = {name: value for name, value in saved.items() if name != "bias_correction"}
            if not saved.get("bias_correction", True):
                raise ValueError("the state dict was saved with bias_correction=False, and bias is corrected here")
            keys = [key for key in saved["params"] if key in states]
            counts = [states[key]["step"] for key in keys if "step" in states[key]]
            if "step" not in saved and counts:
                group["step"] = max(int(count) for count in counts)
            if keys and not counts and "step" in saved:
                group.setdefault("preset", packed(THEIRS))
                for p, key in zip(mine["params"], saved["params"], strict=False):
                    if key in states:
                        states[key] = _as_ours(p, states[key], int(saved["step"]))
            groups.append(group)
        rest = state_dict["param_groups"][len(groups) :]
        super()._load({**state_dict, "state": states, "param_groups": [*groups, *rest]})
        for group in self.param_groups:
            if "step" in group:
                group["step"] = self._count(group["step"], group)


def _seen(steps: Any) -> tuple[Any, int | None]:
    """A group's count and, of a tensor, its version, which a write in place moves."""
    return steps, steps._version if isinstance(steps, Tensor) and not steps.is_inference() else None


#: How Transformer Engine's state dicts have states.
THEIRS = Preset(name="Transformer Engine's FusedAdam")


def _as_ours(p: Tensor, state: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """A parameter's state of Transformer Engine's: moments in float32, the group's steps, the master by our names."""
    given: dict[str, Any] = {name: t.float() for name, t in state.items() if name != "master_param"}
    master, given["step"] = state.get("master_param"), steps
    if master is None or p.dtype is torch.float32:
        return given
    if p.dtype is not torch.bfloat16:
        return given | {"master": master}
    if master.dtype is not torch.int16:
        weight, value = p.detach(), master.to(p.device, torch.float32)
        value = torch.where(value.to(weight.dtype) == weight, value, weight.float())
        (master,) = around(Keeping("remainder"), value, (weight,))
    return given | {"remainder": master}


class FusedSGD(torch.optim.SGD):
    """`torch.optim.SGD`, bit for bit, of parameters in any dtype."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.0, dampening: float = 0.0, **others: Any) -> None:
        super().__init__(params, lr, momentum, dampening, **others)
