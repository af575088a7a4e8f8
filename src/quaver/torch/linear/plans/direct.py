"""A linear layer's step with everything decided beforehand, where a machine has rows for it: see `step.Rows`.

A small layer's time goes into choosing the implementation, the kernel and the layout. A `Plan` chooses them once for
all layers of a shape and inputs of a shape; its step then only computes. The general way, `quaver.torch.linear.gemms`,
takes every call that has no plan, and every call while counters, recomputation, `only` or torch.autocast is active. A
step gives the same bits, gradients and state.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.core.spec import Recipe
from quaver.torch.backends.gpu.launching import capture, device
from quaver.torch.linear.plans import on_cpu
from quaver.torch.linear.plans.step import Step
from quaver.torch.operations import ops, selecting
from quaver.torch.operations.derivatives import forward_level, transforms_active
from quaver.torch.operations.ops import MATMUL, QUANTIZE, any_autocast_enabled
from quaver.torch.state import counters, recomputation
from quaver.torch.state.context import ambient
from quaver.torch.state.layer import device_of
from quaver.torch.state.recomputation import graph_task_id

#: What a decision reads of a call, the recipe by its identity.
Facts = tuple[
    int, torch.Size, torch.dtype, torch.device, torch.Size, torch.dtype, torch.device, tuple[torch.dtype, bool] | None
]


class Plan(NamedTuple):
    """How layers of one shape run on inputs of one shape."""

    #: Held, so that no other recipe gets its identity.
    recipe: Recipe
    #: None where it takes the general way.
    step: Step | None

    def again(self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor | None:
        """y [..., n] of an x [..., k] that the layer has not checked, or None: then the general way must take it."""
        step = self.step
        if step is None or not (x.requires_grad and weight.requires_grad and x.is_contiguous()) or disturbed(layer):
            return None
        return step(x, weight, bias, layer)


#: So many are kept: lengths that come by turns keep theirs, ever new ones drop the oldest.
MOST = 1024
#: A model's layers share them: of a new length each shape of weight is decided once, not each layer.
plans: dict[Facts, Plan] = {}
device.tables.append(plans)


def facts(shape: torch.Size, like: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Facts:
    """The key of a plan for inputs of this shape, with a tensor's dtype and device; a replaced weight has another."""
    of_bias = None if bias is None else (bias.dtype, bias.requires_grad)
    return id(recipe), shape, like.dtype, like.device, weight.shape, weight.dtype, weight.device, of_bias


def keep(key: Facts, plan: Plan) -> None:
    """Put a plan among those that are kept."""
    for oldest in list(plans)[: max(0, len(plans) + 1 - MOST)]:
        # Another thread may have dropped it.
        plans.pop(oldest, None)
    plans[key] = plan


def decided(
    shape: torch.Size, like: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, layer: nn.Module
) -> Step | None:
    """The step of a layer with this weight on what is made of this shape, of dtype and device of a tensor; None for the
    general way."""
    key = facts(shape, like, weight, bias, recipe)
    known = plans.get(key)
    if known is None:
        known = plan(like.new_empty(shape), weight, bias, recipe, layer)
        if known is None:
            return None
        keep(key, known)
    return known.step


def disturbed(layer: nn.Module) -> bool:
    """True if a forward of a layer that trains must go the general way: where it is watched, and while `only`,
    torch.autocast, torch.func or forward mode is active."""
    return (
        watched(layer)
        or QUANTIZE.active is not QUANTIZE.impls
        or MATMUL.active is not MATMUL.impls
        or any_autocast_enabled()
        or transforms_active()
        or forward_level() >= 0
    )


def watched(layer: nn.Module) -> bool:
    """True if counters, recomputation or a selective checkpoint sees what a layer does, where gradients of weights are
    taken away, or where its backward is split on a GPU, whose kernels write to places of their own again; inside
    backward whether that was so in its last forward, of which this is a recomputation that must save what that saved.
    """
    # `state_of` without a call.
    logs = recomputation.state
    state: Any = layer._state
    if logs.replay is None:
        if graph_task_id() != -1 and state.watched is not None:
            known: bool = state.watched
            return known
        now: bool = (
            counters.active.counters is not None
            or logs.writing != ()
            or (ambient.split is not None and _goes_general(layer))
            or (selecting.depth() != 0 and selecting.is_active())
        )
    else:
        now = True
    state.watched = now
    return now


def _goes_general(layer: nn.Module) -> bool:
    """Whether the gradient of a weight that waits, or is taken away, is none that a step's kernels give."""
    return ambient.takes_weights or bool(device.asked) or device_of(layer).type != "cpu"


def plan(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, layer: nn.Module) -> Plan | None:
    """The plan for an x [..., k] that a layer has checked; None where no plan can be made now."""
    if disturbed(layer) or capture.as_captured(x.device):
        return None
    if x.device != weight.device:
        # A launch by addresses would read what lies there; torch's own GEMM says so.
        return Plan(recipe, None)
    step: Step | None = None
    if recipe.dequantized_backward:
        # No row multiplies what it has quantized by what it has not.
        return Plan(recipe, None)
    if x.is_cuda or device.asked:
        # Triton, and all that runs on a GPU, is imported when a GPU is there.
        if not device.why_no_fp8(x.device, "native"):
            from quaver.torch.linear.plans import on_gpu

            step = on_gpu.decide(x, weight, bias, recipe)
        if step is None and not ops.no_kernels(x):
            from quaver.torch.linear.plans import emulated

            step = emulated.decide(x, weight, bias, recipe)
    elif x.is_cpu:
        step = on_cpu.decide(x, weight, recipe)
    return Plan(recipe, step)
