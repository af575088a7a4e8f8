"""Plans of linear layers: kernels and layouts chosen once per recipe, shape, dtype and device.

In a small layer most of the time goes into choosing implementation, kernel and layout. A `LinearPlan` makes these
choices once for all layers and inputs of the same shapes, and its step only computes. Results, gradients and state are
the same bits as on the slow path, `quaver.torch.linear.gemms`. The slow path runs calls without a plan, and all calls
while counters, recomputation, `only` or torch.autocast is active.
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
from quaver.torch.operations import ops, selective_checkpoint
from quaver.torch.operations.autograd import forward_level, transforms_active
from quaver.torch.operations.ops import MATMUL, QUANTIZE, any_autocast_enabled
from quaver.torch.state import counters, layer_state, weight_cache
from quaver.torch.state.context import active_context
from quaver.torch.state.history import amax, scaling_step
from quaver.torch.state.layer_state import device_of, graph_task_id

# ---- planned GEMMs on the CPU ----
# Kernels for FP8 recipes that round to nearest. For layers of a few thousand elements a dozen Python calls cost more
# than the three GEMMs, so the functions call only what computes. Formulas, bits and state are those of `cpu.quantize`
# and `cpu.gemm` on the slow path. They hold no tensor of a call: torch can swap a weight only if nothing else
# references it.

#: `PlannedKernels.form` of kernels that take the weight as `Quantized`.
WHOLE = "whole"


class HostScaleFactors(NamedTuple):
    """Encode factors of one layer's step under delayed scaling, as Python floats."""

    factors: list[float]
    of_input: float
    version: float
    #: Layer whose history records the amaxes.
    layer: nn.Module

    def note(self, layer: nn.Module, column: int, top: float) -> None:
        amax.record(layer, column, top)

    def in_backward(self, layer: nn.Module, g: Tensor) -> "HostScaleFactors":
        return self


def _factors(layer: nn.Module, x: Tensor) -> HostScaleFactors | None:
    factors = scaling_step.factors(layer, True)
    return None if isinstance(factors, Tensor) else HostScaleFactors(factors, factors[0], factors[1], layer)


def decide(x: Tensor, weight: Tensor, recipe: Recipe) -> PlannedLinear | None:
    """Plan the CPU step for inputs like x, or return None if only the slow path supports them."""
    specs = [spec for spec in recipe.operands().values() if spec is not None]
    size = x.numel() * weight.shape[0]
    if size == 0 or recipe.fprop.a is None or recipe.dgrad.a is None or any(fp8.reason(x, spec) for spec in specs):
        return None
    one = size <= SMALL and all(recipe.plan) and all(spec.per_tensor for spec in specs)
    return PlannedLinear(
        recipe, x, weight.shape[0], (_per_tensor_kernels if one else _general_kernels)(recipe, x.shape, x.dtype)
    )


def _general_kernels(recipe: Recipe, shape: torch.Size, dtype: torch.dtype) -> PlannedKernels:
    """Return kernels for any kind of scale: operands are `Quantized`, and the input is saved as codes and scales."""
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
            decode.cache_decoded(q, decode.GRADIENT)
        return q, None, q.T if plan.grad_output else None, None, None

    def transposed_grad_output(g: Tensor) -> tuple[Quantized, None]:
        return fp8.quantize(g.t(), e), None  # type: ignore[arg-type]

    def of_weight(
        weight: Tensor, layer: nn.Module, delayed: HostScaleFactors | None, forward: bool
    ) -> tuple[weight_cache.CachedWeight, CachedWeightOperands]:
        factors, version = (None, 0.0) if delayed is None else (delayed.factors, delayed.version)
        # A layout that the forward did not quantize is cached when the backward quantizes it.
        call = LinearContext(layer, recipe, weight, weight.dtype, forward or not plan.weight, factors)
        if not forward:
            transposed = quantized_weight(call, weight, "dgrad", d)
            return weight_cache.CachedWeight(transposed), CachedWeightOperands(
                None, None, transposed, None, factors, recipe, WHOLE
            )
        q = quantized_weight(call, weight, "fprop", b)
        entry = weight_cache.lookup(layer, "fprop", weight, b, version) or weight_cache.CachedWeight(q)
        entry.planned_operands = CachedWeightOperands(
            q, None, q.T if plan.weight else None, None, factors, recipe, WHOLE
        )
        return entry, entry.planned_operands

    def of_output(data: Tensor, scale: Scale, right: Any, _: Scale, bias: Tensor | None) -> Tensor:
        left = Quantized(
            data, scale, a, (tokens, k), decode_cache_key=decode.thread.codes and decode.decode_cache_key_of(data)
        )
        return matmul(left, right, dtype, bias)

    def of_gradient_of_input(left: Any, _: Scale, right: Any, __: Scale, bias: Tensor | None) -> Tensor:
        return matmul(left, right, dtype, bias)

    def of_gradient(left: Any, _: Scale, data: Tensor, scale: Scale, __: Tensor | None) -> Tensor:
        right = Quantized(data, scale, f, (k, tokens), plan.input or min(k, tokens) > 1)  # type: ignore[arg-type]
        right.decode_cache_key = decode.thread.codes and decode.decode_cache_key_of(data)
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
    """Quantize x with a function of `cpu.quantize`; under delayed scaling use a column's encode factor and record the
    amax.
    """
    if delayed is None:
        return quantize(x, spec)
    q = quantize(x, spec, None, delayed.factors[column])
    amax.record(delayed.layer, column, q.amax if isinstance(q, Quantized) else q[2])
    return q


def _per_tensor_kernels(recipe: Recipe, shape: torch.Size, dtype: torch.dtype) -> PlannedKernels:
    """Return kernels for small operands with one scale per tensor, which a matrix and its transpose share."""
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
        entry = weight_cache.store(layer, "fprop", weight, b, factor, q, window) or weight_cache.CachedWeight(q)
        if forward and delayed is not None:
            amax.record(layer, amax.WEIGHT, q.amax)
        # Small weights are decoded once and cached; larger ones are decoded in each GEMM.
        values = decoded(q) if q.data.numel() <= REMEMBERED else q.data
        assert values is not None
        factors = None if delayed is None else delayed.factors
        entry.planned_operands = CachedWeightOperands(values.t(), q.scale, values, q.scale, factors, recipe)
        return entry, entry.planned_operands

    product = _product(dtype)
    return PlannedKernels(of_input, of_grad_output, of_weight, None, _factors, product, product, product, False, -1)


def _product(dtype: torch.dtype) -> Multiply:
    def multiply(a: Tensor, of_a: float, b: Tensor, of_b: float, bias: Tensor | None) -> Tensor:
        # Cached inputs are codes, because layers that share the input may decode them differently; float32 stays as it
        # is.
        return scaled_product(a.float(), b.float(), of_a, of_b, dtype, bias)

    return multiply


# ---- plans ----

#: Key of a plan: recipe (by identity), shapes, dtypes, devices, and dtype and requires_grad of the bias.
PlanKey = tuple[
    int, torch.Size, torch.dtype, torch.device, torch.Size, torch.dtype, torch.device, tuple[torch.dtype, bool] | None
]


class LinearPlan(NamedTuple):
    """Plan of a linear layer for one recipe, one weight shape and one input shape."""

    #: Recipe; referenced so that its id, part of the key, is not reused.
    recipe: Recipe
    #: Planned step, or None if these calls take the slow path.
    step: PlannedLinear | None

    def run_cached_plan(self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor | None:
        """Run the planned step on an unchecked x [..., k]; return y [..., n], or None for the slow path."""
        step = self.step
        if (
            step is None
            or not (x.requires_grad and weight.requires_grad and x.is_contiguous())
            or needs_slow_path(layer)
        ):
            return None
        return step(x, weight, bias, layer)


#: Maximum number of cached plans; the oldest are dropped first, so alternating sequence lengths keep their plans.
MAX_PLANS = 1024
#: Plans by key, shared by all layers: a new sequence length is planned once per weight shape, not once per layer.
plans: dict[PlanKey, LinearPlan] = {}
device.tables.append(plans)


def plan_key(shape: torch.Size, like: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> PlanKey:
    """Return the key of the plan for inputs of `shape` with the dtype and device of `like`."""
    of_bias = None if bias is None else (bias.dtype, bias.requires_grad)
    return id(recipe), shape, like.dtype, like.device, weight.shape, weight.dtype, weight.device, of_bias


def store(key: PlanKey, plan: LinearPlan) -> None:
    """Add a plan to the cache, and drop the oldest plans beyond `MAX_PLANS`."""
    for oldest in list(plans)[: max(0, len(plans) + 1 - MAX_PLANS)]:
        # Another thread may have removed it already.
        plans.pop(oldest, None)
    plans[key] = plan


def planned(
    shape: torch.Size, like: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, layer: nn.Module
) -> PlannedLinear | None:
    """Return the planned step for inputs of `shape` with dtype and device of `like`, or None for the slow path.

    Makes and caches the plan if there is none.
    """
    key = plan_key(shape, like, weight, bias, recipe)
    known = plans.get(key)
    if known is None:
        known = plan(like.new_empty(shape), weight, bias, recipe, layer)
        if known is None:
            return None
        store(key, known)
    return known.step


def needs_slow_path(layer: nn.Module) -> bool:
    """Return True if a training forward of the layer must take the slow path.

    True if the layer is observed (see `is_observed`), or while `only`, torch.autocast, torch.func or forward mode is
    active.
    """
    return (
        is_observed(layer)
        or QUANTIZE.enabled is not QUANTIZE.implementations
        or MATMUL.enabled is not MATMUL.implementations
        or any_autocast_enabled()
        or transforms_active()
        or forward_level() >= 0
    )


def is_observed(layer: nn.Module) -> bool:
    """Return True if something observes or changes this layer's forward so that planned steps cannot run it.

    Observers are counters, recomputation and selective checkpoints; the others are taking weight gradients away and
    splitting the backward on a GPU, whose kernels reuse their buffers. Inside backward returns the answer of the
    layer's last forward, because a recomputation must save the same tensors.
    """
    # Reads the state directly; `state_of` would cost a call.
    logs = layer_state.state
    state: Any = layer._state
    if logs.replay is None:
        if graph_task_id() != -1 and state.is_observed is not None:
            known: bool = state.is_observed
            return known
        now: bool = (
            counters.active.counters is not None
            or logs.writing != ()
            or (active_context.apply_override is not None and _needs_unplanned_wgrad(layer))
            or (selective_checkpoint.dispatch_mode_depth() != 0 and selective_checkpoint.is_active())
        )
    else:
        now = True
    state.is_observed = now
    return now


def _needs_unplanned_wgrad(layer: nn.Module) -> bool:
    """Return True if wgrad is delayed or taken away in a way that planned kernels do not support."""
    return active_context.captures_wgrad or bool(device.forced_implementations) or device_of(layer).type != "cpu"


def plan(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, layer: nn.Module) -> LinearPlan | None:
    """Plan a layer for a checked x [..., k]; returns None if no plan can be made now."""
    if needs_slow_path(layer) or capture.is_captured_or_rehearsed(x.device):
        return None
    if x.device != weight.device:
        # A kernel launch would read addresses of the wrong device; torch's own GEMM raises the right error.
        return LinearPlan(recipe, None)
    step: PlannedLinear | None = None
    if recipe.dequantized_backward:
        # Planned kernels cannot multiply a quantized operand by an unquantized one.
        return LinearPlan(recipe, None)
    if x.is_cuda or device.forced_implementations:
        # Triton and the GPU modules are imported only if there is a GPU.
        if not device.why_no_fp8(x.device, "native"):
            from quaver.torch.linear import plan_gpu

            step = plan_gpu.decide(x, weight, bias, recipe)
        if step is None and not ops.no_kernels(x):
            from quaver.torch.linear import plan_emulated

            step = plan_emulated.decide(x, weight, bias, recipe)
    elif x.is_cpu:
        step = decide(x, weight, recipe)
    return LinearPlan(recipe, step)
