"""The head and its cross entropy together, a chunk of tokens after the other: the logits of all never exist at once.

Gradients are made in the forward pass, where a chunk's logits lie at hand, and scaled in the backward; losses that are
not summed up have their logits made again there. Source: Liger Kernel's fused linear cross entropy (arXiv:2410.10989).
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from quaver.core.text.spelling import check_name
from quaver.torch.blocks.loss.chunked import LINEAR_CROSS_ENTROPY, Rule
from quaver.torch.linear.layer import Linear
from quaver.torch.linear.stored import stored
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.selecting import unseen
from quaver.torch.state.context import recipe_in_force

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
    """F.cross_entropy(F.linear(x, weight, bias).float(), targets), with the memory of a chunk's logits alone.

    Args:
        x: [..., dim].
        weight: [V, dim], or an nn.Linear, whose bias is taken too, or the nn.Embedding that is the head as well. The
            head's GEMMs run in high precision whatever its recipe, with a warning where it has one. Of a head in parts,
            `quaver.torch.parallel.Column`, or an embedding, `Vocabulary`, each rank has some words: give the module
            itself, and all targets on every rank, which all get the same loss.
        targets: integers [...].
        bias: [V].
        ignore_index: tokens with this target have no loss and no gradient.
        label_smoothing: as of F.cross_entropy.
        z_loss: adds z_loss × logsumexp², which keeps logits from drifting (PaLM, arXiv:2204.02311).
        soft_cap: logits become soft_cap × tanh(logits / soft_cap).
        reduction: "mean" over the tokens that are not ignored, "sum", or "none".
        chunk: tokens whose logits exist at once; None takes as many as make half a GiB.
    Returns:
        float32 scalar, or [...] for "none". A target outside 0 … V - 1 is an error on a CPU and NaN on a GPU. The mean
        over no token is NaN and its gradient 0.
    Raises:
        ValueError: shapes, dtypes or options that do not fit.
    Bounded: relative RMS of the loss and, in float32, of the gradients 1e-5 of the two functions one after the other.
    """
    over_ranks: Any = None
    if isinstance(weight, (nn.Linear, nn.Embedding)):
        head, over_ranks = weight, getattr(type(weight), "loss_over_ranks", None)
        if over_ranks is None and bias is None and isinstance(head, nn.Linear):
            bias = head.bias
        weight = _weight_of(head)
    elif getattr(weight, "device_mesh", None) is not None:
        raise ValueError(
            "the head's weight lies in parts on ranks: give the layer in its place, linear_cross_entropy(x, head, "
            "targets), with Column() as its style, or the embedding that is the head as well, with Vocabulary()"
        )
    rule = Rule(ignore_index, label_smoothing, z_loss, 0.0 if soft_cap is None else soft_cap)
    check_name("reduction", reduction, REDUCTIONS)
    if over_ranks is None:
        _check_shapes(x, weight, targets, bias)
    capped = soft_cap is None or 0 < soft_cap < math.inf
    if not (0 <= rule.label_smoothing <= 1 and 0 <= rule.z_loss < math.inf and capped):
        raise ValueError(
            f"label_smoothing is {rule.label_smoothing}, z_loss {rule.z_loss}, soft_cap {soft_cap}; the first lies in "
            "0 … 1, the second is finite and not negative, the third finite and above 0, or None"
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
    @unseen
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        rule: Rule,
        reduction: str,
        chunk: int,
        differentiated: bool,
    ) -> Tensor:
        # torch says what is needed as if gradients were never switched off.
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
    """grad × scale, rounded once."""
    if scale is None:
        return grad.to(dtype)
    if is_tracing():
        return (grad * scale).to(dtype)
    if not grad.is_cpu:
        # A GPU would round one number, a tensor without axes, to grad's dtype first.
        scale = scale.view(1)
    return torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))


_warned: set[str] = set()


def _weight_of(layer: nn.Linear | nn.Embedding) -> Tensor:
    """A head's weight; of one under a recipe with a warning, that it is not followed here."""
    if stored.are_codes(layer.weight):
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
