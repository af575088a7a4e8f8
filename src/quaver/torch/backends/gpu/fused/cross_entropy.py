"""Cross entropy of a chunk of logits on a GPU: the kernel's launch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.kernels.fused.cross_entropy import cross_entropy as kernel
from quaver.torch.backends.gpu.fused.producers import DTYPES
from quaver.torch.backends.gpu.launching.passes import Launch, Pass, Passes
from quaver.torch.backends.gpu.launching.rooms import whole

#: Columns of a block, and warps.
BLOCK, WARPS = 4096, 8

#: ignore_index, label_smoothing, z_loss, soft_cap; 0 switches a term off.
Rule = tuple[int, float, float, float]


def reason(x: Tensor, weight: Tensor, *_: Any) -> str:
    """Why the kernel does not take the logits x @ weight.T, or ""; the device has been asked before."""
    if x.dtype not in DTYPES:
        return "it takes rows of float32, bfloat16 or float16"
    return "" if max(x.shape[0], weight.shape[0]) < 2**31 else "a side is beyond 2^31 - 1"


def losses(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """(logits x @ weight.T + bias, or their gradient if it is asked for, and losses [rows]): see `rows`."""
    logits = padded_rows(x.shape[0], weight.shape[0], x.dtype, x.device)
    torch.mm(x, weight.t(), out=logits) if bias is None else torch.addmm(bias, x, weight.t(), out=logits)
    return logits, rows(logits, *options, padded=True)


def rows(
    logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool, rule: Rule, *, padded: bool = False
) -> Tensor:
    """Losses float32 [rows] of logits [rows, columns], which the gradient replaces if asked for.

    Args:
        targets: int64 [rows].
        weights: float32 [rows] that the gradient is multiplied by, or None.
        padded: whether what lies between the rows may be overwritten: see `padded_rows`.
    """
    # A column of a batch's labels has its rows apart.
    targets, weights = targets.contiguous(), None if weights is None else weights.contiguous()
    ignore_index, *terms = rule
    losses: Tensor = _passes((logits, targets, weights), gradient, ignore_index, *map(float, terms), padded)[0]
    return losses


def padded_rows(count: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for logits [count, columns], their rows multiples of 16 apart: else they would be read number by number."""
    return torch.empty((count, -(-columns // 16) * 16), dtype=dtype, device=device)[:, :columns]


def _pass(
    given: Sequence[Any],
    gradient: bool,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float,
    padded: bool,
) -> Pass:
    logits, targets, weights = given
    count, columns = logits.shape
    constants = {
        "BLOCK": BLOCK,
        "SMOOTHING": label_smoothing != 0,
        "Z_LOSS": z_loss != 0,
        "CAP": soft_cap != 0,
        "GRADIENT": gradient,
        "RAGGED": columns % BLOCK != 0,
    }
    room = logits.stride(0) if padded else columns
    numbers = (columns, room, logits.stride(0), ignore_index, label_smoothing, z_loss, soft_cap)
    losses = whole((count,), torch.float32)
    tensors = (logits, targets, losses, weights)
    return Pass(given, (losses,), [Launch(kernel, (count,), tensors, numbers, constants, WARPS)])


_passes = Passes(_pass)
