"""Transformer Engine's optimizers over `quaver.torch.optim` and `torch.optim`."""

from typing import Any

import torch

from quaver.core.options import checks
from quaver.core.states.codes import FLOAT32, StateSpec
from quaver.core.states.presets import Preset
from quaver.torch.optim.optimizers import Adam

#: How a moment is kept by the dtype that is asked for.
KEPT = {
    torch.float32: FLOAT32,
    torch.bfloat16: StateSpec(code="bfloat16"),
    torch.float16: StateSpec(code="float16", block=None, scale="float32"),
    torch.uint8: StateSpec(code="e4m3", block=None, scale="float32"),
}


class FusedAdam(Adam):
    """Adam, or AdamW unless `adam_w_mode` is False, with moments in fewer bits.

    `capturable` and `set_grad_none` tell of what holds here anyway.

    Masters of bfloat16 weights are kept as the 16 bits that float32 has more: `master_weights` and
    `store_param_remainders` ask for the same. Without, weights are rounded at random, where it rounds them to nearest.

    Raises:
        ValueError: amsgrad, no correction of bias, decoupled gradients, or dtypes of states that there are not.
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
        if master_weight_dtype is not torch.float32 or use_decoupled_grad:
            raise ValueError("master_weight_dtype is torch.float32 here, and use_decoupled_grad is not there")
        moments = {"exp_avg_dtype": exp_avg_dtype, "exp_avg_sq_dtype": exp_avg_sq_dtype}
        for name, dtype in moments.items():
            if dtype not in KEPT:
                raise ValueError(f"{name} is {dtype}; give one of {', '.join(map(str, KEPT))}")
        first, second = (KEPT[dtype] for dtype in moments.values())
        masters = "remainder" if master_weights or store_param_remainders else "none"
        preset = Preset(name="FusedAdam", first=first, second=second, bfloat16=masters, clamp=False)
        self.decoupled = adam_w_mode
        super().__init__(params, lr, betas, eps, weight_decay, preset=preset)


class FusedSGD(torch.optim.SGD):
    """`torch.optim.SGD`, bit for bit, of parameters in any dtype."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.0, dampening: float = 0.0, **others: Any) -> None:
        super().__init__(params, lr, momentum, dampening, **others)
