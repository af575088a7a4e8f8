"""Cross entropy of a head's logits, a chunk of tokens after the other, with the gradients: what stands behind
`linear_cross_entropy`. One opaque operator for a compiler; for the rows of a chunk's logits a kernel on a GPU.
"""

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.torch.operations import ops
from quaver.torch.operations.operation import Impl, Operation

#: The logits of a chunk take at most this many bytes, unless its size is given.
CHUNK_BYTES = 2**29
#: Bytes of the float32 copies that a CPU makes of a chunk's logits at a time: they stay in a core's cache.
PIECE = 2**18


class Rule(NamedTuple):
    """How a row of logits becomes a loss; 0 switches a term off."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0


def _impl(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    row_weights: Tensor | None,
    dtype: torch.dtype,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *of_rule, chunk, of_x, of_weight, of_bias = options
    rule = Rule(*of_rule)
    check_targets(targets, weight.shape[0], rule.ignore_index)
    tokens, wide = x.shape[0], torch.float64 if dtype is torch.float64 else torch.float32
    losses = x.new_empty(tokens, dtype=wide)
    grad_x = x.new_empty(x.shape if of_x else 0, dtype=dtype)
    grad_weight: Tensor | None = None
    grad_bias = weight.new_zeros(weight.shape[0] if of_bias else 0, dtype=wide)
    with torch.no_grad(), ops.without_autocast(ops.autocast_device(x)):
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        chunk = chunk or chunk_of(tokens, weight.shape[0], dtype)
        for start, end in ((at, min(at + chunk, tokens)) for at in range(0, tokens, chunk)):
            xc = x[start:end].to(dtype)
            scale = None if row_weights is None else row_weights[start:end]
            logits, losses[start:end] = LOSSES(xc, w, b, targets[start:end], scale, of_x or of_weight or of_bias, rule)
            if of_x:
                torch.mm(logits, w, out=grad_x[start:end])
            if of_weight:
                grad_weight = added(grad_weight, logits, xc)
            if of_bias:
                grad_bias += logits.sum(0, dtype=wide)
    if grad_weight is None:
        grad_weight = weight.new_zeros(weight.shape if of_weight else 0, dtype=wide)
    return losses, grad_x, grad_weight, grad_bias


def added(total: Tensor | None, grad: Tensor, x: Tensor) -> Tensor:
    """total + grad.T @ x, in float32 whatever the operands are: a sum of chunks is rounded once, at its end."""
    if grad.dtype in (torch.float32, torch.float64):
        # torch's counter of FLOPs knows no `addmm_`.
        return grad.t() @ x if total is None else torch.addmm(total, grad.t(), x, out=total)
    if grad.is_cuda:
        part = torch.mm(grad.t(), x, out_dtype=torch.float32)
        return part if total is None else total.add_(part)
    wide, step = x.float(), _piece(grad.shape[0])
    if total is None:
        total = grad.new_zeros((grad.shape[1], x.shape[1]), dtype=torch.float32)
    for words, part in zip(total.split(step), grad.split(step, 1), strict=True):
        torch.addmm(words, part.float().t(), wide, out=words)
    return total


def _losses(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, weight, bias)
    if not logits.is_cpu:
        return logits, rows(logits, targets, weights, *options)
    step = _piece(logits.shape[1])
    scales = itertools.repeat(None) if weights is None else weights.split(step)
    parts = zip(logits.split(step), targets.split(step), scales, strict=False)
    return logits, torch.cat([rows(*part, *options) for part in parts])


def _piece(count: int) -> int:
    """So many lines of `count` numbers are `PIECE` bytes in float32; at least one."""
    return max(1, PIECE // (4 * max(count, 1)))


def rows(logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool, rule: Rule) -> Tensor:
    """What the kernel does, in plain operations."""
    count = logits.shape[1]
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    bent: Tensor | None = None
    if rule.soft_cap:
        bent = torch.tanh(z / rule.soft_cap)
        z = rule.soft_cap * bent
    lse = z.logsumexp(-1) if rule.z_loss else z.new_zeros(())
    z = z.log_softmax(-1)
    kept, known = targets != rule.ignore_index, (targets >= 0) & (targets < count)
    safe = torch.where(known, targets, 0)[:, None]
    losses = -z.gather(1, safe)[:, 0]
    if rule.label_smoothing:
        losses = (1 - rule.label_smoothing) * losses - rule.label_smoothing * z.mean(-1)
    if rule.z_loss:
        losses = losses + rule.z_loss * lse.square()
    losses = torch.where(kept, torch.where(known, losses, torch.nan), 0.0)
    if gradient:
        d = z.exp_()
        if rule.z_loss:
            d *= 1 + 2 * rule.z_loss * lse[:, None]
        d.scatter_add_(1, safe, torch.full_like(d[:, :1], rule.label_smoothing - 1))
        if rule.label_smoothing:
            d -= rule.label_smoothing / count
        if bent is not None:
            d *= 1 - bent.square()
        d *= torch.where(known, 1.0 if weights is None else weights, torch.nan)[:, None]
        logits.copy_(d.masked_fill_(~kept[:, None], 0.0))
    return losses


def chunk_of(tokens: int, count: int, dtype: torch.dtype) -> int:
    """Tokens of a chunk: as many as `CHUNK_BYTES` hold, spread evenly, in multiples of 128 where there are so many."""
    most = max(1, CHUNK_BYTES // (count * dtype.itemsize))
    even = -(-tokens // max(1, -(-tokens // most)))
    return max(1, min(most, -(-even // 128) * 128))


def why_no_targets(targets: Tensor, count: int, ignore_index: int) -> str:
    """Which of them is no word of `count`, or ""; on a GPU always that."""
    # Reading them on a GPU would wait for it.
    if not targets.is_cpu:
        return ""
    bad = ((targets < 0) | (targets >= count)) & (targets != ignore_index)
    if not bad.any():
        return ""
    return f"target {int(targets[bad][0])} is outside 0 … {count - 1} and is not ignore_index, {ignore_index}"


def check_targets(targets: Tensor, count: int, ignore_index: int) -> None:
    why = why_no_targets(targets, count, ignore_index)
    if why:
        raise ValueError(why)


def _fake(x: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype, (of_x, of_weight, of_bias) = options[3], options[-3:]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return (
        x.new_empty(x.shape[:1], dtype=wide),
        x.new_empty(x.shape if of_x else (0,), dtype=dtype),
        weight.new_empty(weight.shape if of_weight else (0,), dtype=wide),
        weight.new_empty(weight.shape[:1] if of_bias else (0,), dtype=wide),
    )


def _flops(x: Tensor, weight: Tensor, *options: Any, **_: Any) -> int:
    """Of the logits, and of the gradients of x and weight where they are computed with them."""
    of_x, of_weight, _of_bias = options[-3:]
    return 2 * x.shape[0] * weight.numel() * (1 + of_x + of_weight)


def _no_kernel(x: Tensor, *_: Any) -> str:
    return "the tensor is not on a GPU" if x.is_meta else ops.no_kernels(x)


#: (x [rows, k], weight, bias, targets, row_weights, whether the gradient is wanted, the `Rule`) to the logits, or to
#: their gradient if it is wanted, and the losses [rows].
LOSSES: Operation[tuple[Tensor, Tensor]] = Operation(
    "cross_entropy_rows",
    [
        Impl("triton", f"{ops.GPU}.fused.cross_entropy:losses", f"{ops.GPU}.fused.cross_entropy:reason", _no_kernel),
        Impl("reference", _losses),
    ],
)
#: To the losses [T], and the gradients of x, weight and bias; those that are not needed are empty. The options between
#: dtype and chunk are those of a `Rule`.
LINEAR_CROSS_ENTROPY: Operation[tuple[Tensor, Tensor, Tensor, Tensor]] = Operation(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor targets, Tensor? row_weights, ScalarType dtype,"
    " int ignore_index, float label_smoothing, float z_loss, float soft_cap, SymInt chunk, bool of_x, bool of_weight,"
    " bool of_bias) -> (Tensor losses, Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    _impl,
    fake=_fake,
    flops=_flops,
)
