"""A linear layer's step with everything decided beforehand, where a machine has rows for it: see `step.Rows`.

A small layer's time goes into choosing the implementation, the kernel and the layout. A `Plan` chooses them once for
all layers of a shape and inputs of a shape; its step then only computes. The general way, `quaver.torch.linear.gemms`,
takes every call that has no plan, and every call while counters, recomputation, `only` or torch.autocast is active. A
step gives the same bits, gradients and state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.cpu import decode
from quaver.torch.backends.cpu import quantize as fp8
from quaver.torch.backends.cpu.gemm import REMEMBERED, SMALL, decoded, matmul, scaled_product
from quaver.torch.backends.gpu import capture, device
from quaver.torch.linear.gemms import LinearContext, quantized_weight
from quaver.torch.linear.plan_step import CachedWeightOperands, Multiply, Operands, PlannedKernels, PlannedLinear, Scale
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops, selecting
from quaver.torch.operations.autograd import forward_level, transforms_active
from quaver.torch.operations.ops import MATMUL, QUANTIZE, any_autocast_enabled
from quaver.torch.state import counters, layer_state, weight_cache
from quaver.torch.state.context import active_context
from quaver.torch.state.history import amax, scaling_step
from quaver.torch.state.layer_state import device_of, graph_task_id

# ---- on cpu ----------------------------------------------------------------------------------------------
# The rows of a layer's step on a CPU, for recipes of FP8 that round to nearest.
#
# Three products of a few thousand numbers take less time than a dozen calls of Python. These make those that compute
# something; formulas, bits and state are those of `cpu.quantize` and `cpu.gemm` behind `quaver.torch.linear.gemms`.
# They hold no tensor of a call: torch may swap a weight that nothing else holds.

#: `Rows.form` of rows that take a weight as `Quantized`.
WHOLE = "whole"


class HostScaleFactors(NamedTuple):
    """What delayed scaling gives one step of a layer, as numbers."""

    factors: list[float]
    of_input: float
    version: float
    #: Whose history notes the amaxes.
    layer: nn.Module

    def note(self, layer: nn.Module, column: int, top: float) -> None:
        amax.record(layer, column, top)

    def in_backward(self, layer: nn.Module, g: Tensor) -> "HostScaleFactors":
        return self


def _factors(layer: nn.Module, x: Tensor) -> HostScaleFactors | None:
    factors = scaling_step.factors(layer, True)
    return None if isinstance(factors, Tensor) else HostScaleFactors(factors, factors[0], factors[1], layer)


def decide(x: Tensor, weight: Tensor, recipe: Recipe) -> PlannedLinear | None:
    """The step for inputs like x, or None where the general way is the only one."""
    specs = [spec for spec in recipe.operands().values() if spec is not None]
    size = x.numel() * weight.shape[0]
    if size == 0 or recipe.fprop.a is None or recipe.dgrad.a is None or any(fp8.reason(x, spec) for spec in specs):
        return None
    one = size <= SMALL and all(recipe.plan) and all(spec.per_tensor for spec in specs)
    return PlannedLinear(
        recipe, x, weight.shape[0], (_of_one_scale if one else _of_any_scales)(recipe, x.shape, x.dtype)
    )


def _of_any_scales(recipe: Recipe, shape: torch.Size, dtype: torch.dtype) -> PlannedKernels:
    """Operands are `Quantized`, scales and all; what backward keeps of the input is taken apart."""
    (a, b), (c, d), (e, f) = ((gemm.a, gemm.b) for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    assert a is not None and b is not None and c is not None and d is not None
    k, tokens, plan = shape[-1], shape[:-1].numel(), recipe.plan

    def of_input(x: Tensor, delayed: HostScaleFactors | None) -> Operands:
        q = _by_factor(fp8.quantize, x if x.dim() == 2 else x.view(-1, k), a, delayed, amax.INPUT)
        return q.data, q.scale, *((q.data, q.scale) if plan.input else (None, None)), q.amax

    def transposed_input(x: Tensor) -> tuple[Tensor, Scale]:
        q = fp8.quantize(x.view(-1, k).t(), f)  # type: ignore[arg-type]
        return q.data, q.scale

    def of_grad_output(g: Tensor, delayed: HostScaleFactors | None) -> Operands:
        q = _by_factor(fp8.quantize, g, c, delayed, amax.GRAD_OUTPUT)
        if plan.grad_output:
            decode.mark(q, decode.GRADIENT)
        return q, None, q.T if plan.grad_output else None, None, None

    def transposed_grad_output(g: Tensor) -> tuple[Quantized, None]:
        return fp8.quantize(g.t(), e), None  # type: ignore[arg-type]

    def of_weight(
        weight: Tensor, layer: nn.Module, delayed: HostScaleFactors | None, forward: bool
    ) -> tuple[weight_cache.CachedWeight, CachedWeightOperands]:
        factors, version = (None, 0.0) if delayed is None else (delayed.factors, delayed.version)
        # What forward did not quantize is kept when backward does.
        call = LinearContext(layer, recipe, weight, weight.dtype, forward or not plan.weight, factors)
        if not forward:
            transposed = quantized_weight(call, weight, "dgrad", d)
            return weight_cache.CachedWeight(transposed), CachedWeightOperands(
                None, None, transposed, None, factors, recipe, WHOLE
            )
        q = quantized_weight(call, weight, "fprop", b)
        entry = weight_cache.lookup(layer, "fprop", weight, b, version) or weight_cache.CachedWeight(q)
        entry.ready = CachedWeightOperands(q, None, q.T if plan.weight else None, None, factors, recipe, WHOLE)
        return entry, entry.ready

    def of_output(data: Tensor, scale: Scale, right: Any, _: Scale, bias: Tensor | None) -> Tensor:
        left = Quantized(data, scale, a, (tokens, k), mark=decode.thread.codes and decode.mark_of(data))
        return matmul(left, right, dtype, bias)

    def of_gradient_of_input(left: Any, _: Scale, right: Any, __: Scale, bias: Tensor | None) -> Tensor:
        return matmul(left, right, dtype, bias)

    def of_gradient(left: Any, _: Scale, data: Tensor, scale: Scale, __: Tensor | None) -> Tensor:
        right = Quantized(data, scale, f, (k, tokens), plan.input or min(k, tokens) > 1)  # type: ignore[arg-type]
        right.mark = decode.thread.codes and decode.mark_of(data)
        return matmul(left, right, dtype)

    return PlannedKernels(
        of_input,
        of_grad_output,
        of_weight,
        None,
        _factors,
        of_output,
        of_gradient_of_input,
        None if f is None else of_gradient,
        False,
        -1,
        transposed_input=None if f is None or plan.input else transposed_input,
        transposed_grad_output=None if e is None or plan.grad_output else transposed_grad_output,
        form=WHOLE,
    )


def _by_factor(
    quantize: Callable[..., Any], x: Tensor, spec: QuantSpec, delayed: HostScaleFactors | None, column: int
) -> Any:
    """What a function of `fp8` gives, by the factor of a column and noted there if scaling is delayed."""
    if delayed is None:
        return quantize(x, spec)
    q = quantize(x, spec, None, delayed.factors[column])
    amax.record(delayed.layer, column, q.amax if isinstance(q, Quantized) else q[2])
    return q


def _of_one_scale(recipe: Recipe, shape: torch.Size, dtype: torch.dtype) -> PlannedKernels:
    """Few elements, and one scale serves a matrix and its transpose: only what computes something is called."""
    a, b, c = recipe.fprop.a, recipe.fprop.b, recipe.dgrad.a
    assert a is not None and b is not None and c is not None

    def of_input(x: Tensor, delayed: HostScaleFactors | None) -> Operands:
        x = x if x.dim() == 2 else x.view(-1, shape[-1])
        codes, scale, top = _by_factor(fp8.per_tensor, x, a, delayed, amax.INPUT)
        return codes, scale, codes, scale, top

    def of_grad_output(g: Tensor, delayed: HostScaleFactors | None) -> Operands:
        codes, scale, _ = _by_factor(fp8.per_tensor, g, c, delayed, amax.GRAD_OUTPUT)
        values = codes.float()
        return values, scale, values.t(), scale, None

    def of_weight(
        weight: Tensor, layer: nn.Module, delayed: HostScaleFactors | None, forward: bool
    ) -> tuple[weight_cache.CachedWeight, CachedWeightOperands]:
        factor = 0.0 if delayed is None else delayed.version
        window = weight_cache.begin(layer, weight) if forward else None
        q = fp8.quantize(weight, b, None, factor)
        entry = weight_cache.keep(layer, "fprop", weight, b, factor, q, window) or weight_cache.CachedWeight(q)
        if forward and delayed is not None:
            amax.record(layer, amax.WEIGHT, q.amax)
        # Few values are remembered, others are decoded by each product.
        values = decoded(q) if q.data.numel() <= REMEMBERED else q.data
        assert values is not None
        factors = None if delayed is None else delayed.factors
        entry.ready = CachedWeightOperands(values.t(), q.scale, values, q.scale, factors, recipe)
        return entry, entry.ready

    product = _product(dtype)
    return PlannedKernels(of_input, of_grad_output, of_weight, None, _factors, product, product, product, False, -1)


def _product(dtype: torch.dtype) -> Multiply:
    def multiply(a: Tensor, of_a: float, b: Tensor, of_b: float, bias: Tensor | None) -> Tensor:
        # Codes are decoded here, which other layers of one input may read otherwise; values are what they are.
        return scaled_product(a.float(), b.float(), of_a, of_b, dtype, bias)

    return multiply


# ---- direct ----------------------------------------------------------------------------------------------

#: What a decision reads of a call, the recipe by its identity.
Facts = tuple[
    int, torch.Size, torch.dtype, torch.device, torch.Size, torch.dtype, torch.device, tuple[torch.dtype, bool] | None
]


class LinearPlan(NamedTuple):
    """How layers of one shape run on inputs of one shape."""

    #: Held, so that no other recipe gets its identity.
    recipe: Recipe
    #: None where it takes the general way.
    step: PlannedLinear | None

    def again(self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor | None:
        """y [..., n] of an x [..., k] that the layer has not checked, or None: then the general way must take it."""
        step = self.step
        if (
            step is None
            or not (x.requires_grad and weight.requires_grad and x.is_contiguous())
            or needs_slow_path(layer)
        ):
            return None
        return step(x, weight, bias, layer)


#: So many are kept: lengths that come by turns keep theirs, ever new ones drop the oldest.
MOST = 1024
#: A model's layers share them: of a new length each shape of weight is decided once, not each layer.
plans: dict[Facts, LinearPlan] = {}
device.tables.append(plans)


def facts(shape: torch.Size, like: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Facts:
    """The key of a plan for inputs of this shape, with a tensor's dtype and device; a replaced weight has another."""
    of_bias = None if bias is None else (bias.dtype, bias.requires_grad)
    return id(recipe), shape, like.dtype, like.device, weight.shape, weight.dtype, weight.device, of_bias


def keep(key: Facts, plan: LinearPlan) -> None:
    """Put a plan among those that are kept."""
    for oldest in list(plans)[: max(0, len(plans) + 1 - MOST)]:
        # Another thread may have dropped it.
        plans.pop(oldest, None)
    plans[key] = plan


def decided(
    shape: torch.Size, like: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, layer: nn.Module
) -> PlannedLinear | None:
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


def needs_slow_path(layer: nn.Module) -> bool:
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
    logs = layer_state.state
    state: Any = layer._state
    if logs.replay is None:
        if graph_task_id() != -1 and state.watched is not None:
            known: bool = state.watched
            return known
        now: bool = (
            counters.active.counters is not None
            or logs.writing != ()
            or (active_context.split is not None and _goes_general(layer))
            or (selecting.depth() != 0 and selecting.is_active())
        )
    else:
        now = True
    state.watched = now
    return now


def _goes_general(layer: nn.Module) -> bool:
    """Whether the gradient of a weight that waits, or is taken away, is none that a step's kernels give."""
    return active_context.takes_weights or bool(device.asked) or device_of(layer).type != "cpu"


def plan(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, layer: nn.Module) -> LinearPlan | None:
    """The plan for an x [..., k] that a layer has checked; None where no plan can be made now."""
    if needs_slow_path(layer) or capture.as_captured(x.device):
        return None
    if x.device != weight.device:
        # A launch by addresses would read what lies there; torch's own GEMM says so.
        return LinearPlan(recipe, None)
    step: PlannedLinear | None = None
    if recipe.dequantized_backward:
        # No row multiplies what it has quantized by what it has not.
        return LinearPlan(recipe, None)
    if x.is_cuda or device.asked:
        # Triton, and all that runs on a GPU, is imported when a GPU is there.
        if not device.why_no_fp8(x.device, "native"):
            from quaver.torch.linear import plan_gpu

            step = plan_gpu.decide(x, weight, bias, recipe)
        if step is None and not ops.no_kernels(x):
            from quaver.torch.linear import plan_emulated

            step = plan_emulated.decide(x, weight, bias, recipe)
    elif x.is_cpu:
        step = decide(x, weight, recipe)
    return LinearPlan(recipe, step)
