"""`linear_cross_entropy`: output head and cross entropy in one, computed chunk by chunk so that logits are never all
stored.

One custom operator computes loss and gradients. On a GPU, a Triton kernel processes the rows of a chunk's logits.
"""

import itertools
import math
import warnings
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.recipes.text import check_name
from quaver.torch.linear import stored_weight
from quaver.torch.linear.linear import Linear
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Implementation, Operation
from quaver.torch.state.context import recipe_in_force
from quaver.torch.state.selective_checkpoint import hide_from_policies

# ---- loss and gradients of a chunk of tokens ----

#: Maximum bytes of a chunk's logits, unless the caller gives the chunk size.
CHUNK_BYTES = 2**29
#: Bytes of the float32 copies that a CPU makes at a time of a chunk's logits, so that they stay in a core's cache.
PIECE = 2**18


class LossConfig(NamedTuple):
    """Terms of the loss of a row of logits; 0 disables a term."""

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
    *rule_options, chunk, of_x, of_weight, of_bias = options
    rule = LossConfig(*rule_options)
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
    """Return total + grad.T @ x in float32 for any dtype, so that a sum over chunks is rounded only once, at the
    end.
    """
    if grad.dtype in (torch.float32, torch.float64):
        # torch's FLOP counter does not count `addmm_`.
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
    """Return how many rows of `count` float32 numbers fit into `PIECE` bytes; at least one."""
    return max(1, PIECE // (4 * max(count, 1)))


def rows(logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool, rule: LossConfig) -> Tensor:
    """Compute the losses of a chunk in plain torch, as the kernel does; with `gradient`, overwrite logits with it.

    Args:
        logits: [rows, V], overwritten with their gradient if `gradient` is True.
        targets: int64 [rows].
        weights: factor of each row's gradient [rows], or None.
        gradient: True to compute the gradient.
        rule: terms of the loss.
    Returns:
        Losses [rows], float32 or float64.
    """
    count = logits.shape[1]
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    bent: Tensor | None = None
    if rule.soft_cap:
        bent = torch.tanh(z / rule.soft_cap)
        z = rule.soft_cap * bent
    lse = z.logsumexp(-1) if rule.z_loss else z.new_zeros(())
    z = z.log_softmax(-1)
    counted, known = targets != rule.ignore_index, (targets >= 0) & (targets < count)
    safe = torch.where(known, targets, 0)[:, None]
    losses = -z.gather(1, safe)[:, 0]
    if rule.label_smoothing:
        losses = (1 - rule.label_smoothing) * losses - rule.label_smoothing * z.mean(-1)
    if rule.z_loss:
        losses = losses + rule.z_loss * lse.square()
    losses = torch.where(counted, torch.where(known, losses, torch.nan), 0.0)
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
        logits.copy_(d.masked_fill_(~counted[:, None], 0.0))
    return losses


def chunk_of(tokens: int, count: int, dtype: torch.dtype) -> int:
    """Return the tokens per chunk: as many as fit `CHUNK_BYTES`, spread evenly, in multiples of 128 if there are
    that many.
    """
    most = max(1, CHUNK_BYTES // (count * dtype.itemsize))
    even = -(-tokens // max(1, -(-tokens // most)))
    return max(1, min(most, -(-even // 128) * 128))


def why_no_targets(targets: Tensor, count: int, ignore_index: int) -> str:
    """Return an error message if a target is outside the vocabulary, else ""; always "" on a GPU."""
    # Reading the values would synchronize with the GPU.
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
    """Return the FLOPs of the logits, and of the gradients of x and weight if they are computed."""
    of_x, of_weight, _of_bias = options[-3:]
    return 2 * x.shape[0] * weight.numel() * (1 + of_x + of_weight)


def _no_kernel(x: Tensor, *_: Any) -> str:
    return "the tensor is not on a GPU" if x.is_meta else ops.no_kernels(x)


#: Losses [rows] from (x [rows, k], weight, bias, targets, row_weights, True if the gradient is needed, `LossConfig`).
#: Returns the logits, or their gradient if needed, and the losses.
LOSSES: Operation[tuple[Tensor, Tensor]] = Operation(
    "cross_entropy_rows",
    [
        Implementation("triton", f"{ops.GPU}.cross_entropy:losses", f"{ops.GPU}.cross_entropy:reason", _no_kernel),
        Implementation("reference", _losses),
    ],
)
#: Returns losses [T] and the gradients of x, weight and bias; those that are not needed are empty. The arguments
#: between dtype and chunk are the fields of `LossConfig`.
LINEAR_CROSS_ENTROPY: Operation[tuple[Tensor, Tensor, Tensor, Tensor]] = Operation(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor targets, Tensor? row_weights, ScalarType dtype,"
    " int ignore_index, float label_smoothing, float z_loss, float soft_cap, SymInt chunk, bool of_x, bool of_weight,"
    " bool of_bias) -> (Tensor losses, Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    _impl,
    fake=_fake,
    flops=_flops,
)


# ---- linear_cross_entropy ----
#
# Gradients are computed in the forward, while a chunk's logits exist, and scaled in the backward. With reduction="none"
# the logits are recomputed in the backward. Source: Liger Kernel's fused linear cross entropy (arXiv:2410.10989).

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor | nn.Linear | nn.Embedding,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Return F.cross_entropy(F.linear(x, weight, bias).float(), targets) while storing only one chunk of logits.

    Args:
        x: [..., dim].
        weight: [V, dim], or an nn.Linear, whose bias is used too, or the nn.Embedding that is also the head. The head's
            GEMMs run in high precision whatever its recipe, with a warning if it has one. For a vocabulary-parallel
            head (`quaver.torch.parallel.ColwiseParallel`) or embedding (`VocabParallel`), pass the module itself, and
            all targets on every rank; every rank gets the same loss.
        targets: integers [...].
        bias: [V].
        ignore_index: tokens with this target have no loss and no gradient.
        label_smoothing: as in F.cross_entropy.
        z_loss: adds z_loss × logsumexp², which keeps logits from drifting (PaLM, arXiv:2204.02311).
        soft_cap: logits become soft_cap × tanh(logits / soft_cap).
        reduction: "mean" over the tokens that are not ignored, "sum", or "none".
        chunk: number of tokens whose logits exist at once; None chooses it so that they take half a GiB.
    Returns:
        A float32 scalar, or [...] for "none". A target outside 0 … V - 1 raises an error on a CPU and gives NaN on a
        GPU. The mean over no token is NaN with gradient 0.
    Raises:
        ValueError: shapes, dtypes or options that do not fit.
    Bounded: relative RMS 1e-5 from the two functions called one after the other, for the loss and, in float32, the
    gradients.
    """
    over_ranks: Any = None
    if isinstance(weight, (nn.Linear, nn.Embedding)):
        head, over_ranks = weight, getattr(type(weight), "loss_over_ranks", None)
        if over_ranks is None and bias is None and isinstance(head, nn.Linear):
            bias = head.bias
        weight = _weight_of(head)
    elif getattr(weight, "device_mesh", None) is not None:
        raise ValueError(
            "the head's weight is sharded across ranks: pass the layer instead, linear_cross_entropy(x, head, "
            "targets), with ColwiseParallel() as its style, or the embedding that is also the head, with "
            "VocabParallel()"
        )
    rule = LossConfig(ignore_index, label_smoothing, z_loss, 0.0 if soft_cap is None else soft_cap)
    check_name("reduction", reduction, REDUCTIONS)
    if over_ranks is None:
        _check_shapes(x, weight, targets, bias)
    capped = soft_cap is None or 0 < soft_cap < math.inf
    if not (0 <= rule.label_smoothing <= 1 and 0 <= rule.z_loss < math.inf and capped):
        raise ValueError(
            f"label_smoothing is {rule.label_smoothing}, z_loss {rule.z_loss}, soft_cap {soft_cap}; "
            "label_smoothing must be in 0 … 1, z_loss finite and not negative, soft_cap finite and above 0, or "
            "None"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; give the number of tokens, 1 or more, or None")
    kind = ops.autocast_device(x)
    casting = torch.is_autocast_enabled(kind) and x.dtype is not torch.float64
    if not casting and (x.dtype is not weight.dtype or not x.is_floating_point()):
        raise ValueError(f"x is {x.dtype} and the weight {weight.dtype}; convert one, or enter torch.autocast")
    dtype = torch.get_autocast_dtype(kind) if casting else x.dtype
    if over_ranks is not None:
        of_all: Tensor = over_ranks(head, x, targets, bias, dtype, rule, reduction, chunk)
        return of_all
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    labels = targets.reshape(-1).to(torch.int64)
    options = dtype, rule, reduction, chunk or 0, torch.is_grad_enabled()
    losses: Tensor = _LinearCrossEntropy.apply(flat, weight, bias, labels, *options)
    return losses.view(targets.shape) if reduction == "none" else losses


def _check_shapes(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or weight.shape[0] == 0:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: they are [..., dim] and [V, dim], V > 0"
        )
    if targets.shape != x.shape[:-1] or targets.is_floating_point() or targets.dtype is torch.bool:
        raise ValueError(
            f"targets are {targets.dtype} {tuple(targets.shape)}; x {tuple(x.shape)} needs integers of shape "
            f"{tuple(x.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; the weight's {tuple(weight.shape)} needs [V]")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @hide_from_policies
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        rule: LossConfig,
        reduction: str,
        chunk: int,
        differentiated: bool,
    ) -> Tensor:
        # needs_input_grad does not reflect torch.no_grad.
        needs = tuple(differentiated and need for need in ctx.needs_input_grad[:3])
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.constants = needs, dtype, rule, reduction, chunk, *dtypes
        if reduction == "none":
            ctx.save_for_backward(x, weight, bias, targets)
            needs = (False, False, False)
        losses, *grads = LINEAR_CROSS_ENTROPY(x, weight, bias, targets, None, dtype, *rule, chunk, *needs)
        if reduction == "none":
            return losses
        total, count = losses.sum(), None
        if reduction == "mean":
            count = (targets != rule.ignore_index).sum()
            total = total / count
            count = count.clamp(min=1)
        ctx.save_for_backward(count, *grads)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        needs, dtype, rule, reduction, chunk, *dtypes = ctx.constants
        if reduction == "none":
            x, weight, bias, targets = ctx.saved_tensors
            scales = g.contiguous()
            _, *grads = LINEAR_CROSS_ENTROPY(x, weight, bias, targets, scales, dtype, *rule, chunk, *needs)
            scale = None
        else:
            count, *grads = ctx.saved_tensors
            scale = g if count is None else g / count
        gradients = [
            scaled(grad, scale, to) if need else None for need, grad, to in zip(needs, grads, dtypes, strict=True)
        ]
        return *gradients, None, None, None, None, None, None


def scaled(grad: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return grad × scale, rounded once."""
    if scale is None:
        return grad.to(dtype)
    if is_tracing():
        return (grad * scale).to(dtype)
    if not grad.is_cpu:
        # Give it an axis: a GPU would round a 0-dim scale to grad's dtype first.
        scale = scale.view(1)
    return torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))


_warned: set[str] = set()


def _weight_of(layer: nn.Linear | nn.Embedding) -> Tensor:
    """Return a head's weight; warn if it has a recipe, which is ignored here."""
    if stored_weight.holds_codes(layer.weight):
        raise ValueError("the head's weight is stored in eight bits or fewer; dequantize_weights(head) first")
    recipe = recipe_in_force(layer.recipe) if isinstance(layer, Linear) else None
    if recipe is not None and recipe.quantizes and "head" not in _warned:
        _warned.add("head")
        warnings.warn(
            f"linear_cross_entropy runs the head's GEMMs in high precision, not in {recipe.name}; to quantize them, "
            "call the head and F.cross_entropy",
            stacklevel=3,
        )
    return layer.weight
