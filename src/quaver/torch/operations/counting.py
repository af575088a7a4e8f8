"""What torch's FlopCounterMode counts for operators into which it does not look, as those of exported programs.

Eager layers need no formula on a CPU: the mode sees the product that stands for a GEMM in eight bits. On a GPU that is
an operator of torch's own for which torch has no formula.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: (the operator's arguments, out_val=what it returned) to FLOPs, by operator.
FORMULAS: dict[Any, Callable[..., int]] = {}


def register() -> None:
    """Tell torch's counter of FLOPs the formulas that it lacks, if it has been imported: that takes Triton's time.

    A FlopCounterMode made before has none of them.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    registered = getattr(module, "flop_registry", None)
    # While another thread imports it, it has no names yet.
    if module is None or registered is None:
        return
    for operator, formula in FORMULAS.items():
        if operator not in registered:
            module.register_flop_formula(operator, get_raw=True)(formula)


def _columns(x: Tensor) -> int:
    """Features along the last axis, of which codes of four bits hold two in one."""
    return x.shape[-1] * (2 if x.dtype is torch.float4_e2m1fn_x2 else 1)


def _scaled_mm(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """a [m, k] @ b [k, n]."""
    return 2 * out_val.numel() * _columns(a)


def _scaled_grouped_mm(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """a [T, k] @ b [groups, k, n]; of two matrices, whose groups lie along what is summed, a [n, T] @ b [T, k]."""
    columns = out_val.shape[-1]
    return 2 * a.shape[-2] * _columns(a) * columns * (a.shape[0] if a.dim() == 3 else 1)


for _name, _formula in (("_scaled_mm_v2", _scaled_mm), ("_scaled_grouped_mm_v2", _scaled_grouped_mm)):
    if hasattr(torch.ops.aten, _name):
        FORMULAS[getattr(torch.ops.aten, _name)] = _formula
