"""A small layer's step on a CPU, which `quaver.torch.linear.plans.direct` chooses where one scale serves a tensor.

Three products of a few thousand numbers take less time than a dozen calls of Python. A step makes those that compute
something; formulas, bits and state are those of `cpu.fp8` and `cpu.gemm` behind `quaver.torch.linear.gemms`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quaver.core.spec import QuantSpec, Recipe
from quaver.torch.backends.cpu import fp8
from quaver.torch.backends.cpu.gemm import SMALL, decoded, scaled_product
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops
from quaver.torch.operations.derivatives import first_derivative
from quaver.torch.state import counters, kept_weights
from quaver.torch.state.history import amax, steps
from quaver.torch.state.layer import state_of


def decide(x: Tensor, weight: Tensor, recipe: Recipe) -> "Step | None":
    """The step for inputs like x, or None where the general way is as fast or the only one."""
    specs = list(recipe.operands().values())
    size = x.numel() * weight.shape[0]
    if any(s is None or not s.per_tensor or fp8.reason(x, s) for s in specs):
        return None
    return Step(recipe) if 0 < size <= SMALL and all(recipe.plan) else None


class Step:
    """A layer's step under a recipe, on tensors whose three products are small."""

    __slots__ = ("grad_output", "input", "recipe", "weight")

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.fprop.a is not None and recipe.fprop.b is not None and recipe.dgrad.a is not None
        self.recipe = recipe
        self.input, self.weight, self.grad_output = recipe.fprop.a, recipe.fprop.b, recipe.dgrad.a

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor | None:
        if not weight.is_contiguous():
            return None
        factors = None
        if self.recipe.delayed is not None:
            if state_of(layer).prepared is not self.recipe:
                return None
            factors = steps.factors(layer, True)
            if isinstance(factors, Tensor):
                return None
        y: Tensor = _apply(x, weight, bias, (self, layer, factors))
        return y

    def operand(
        self, layer: nn.Module, weight: Tensor, factors: list[float] | None
    ) -> tuple[Quantized, kept_weights.Entry]:
        """The weight's operand, kept until the weight or its factor changes."""
        factor = 0.0 if factors is None else factors[amax.WEIGHT]
        entry = kept_weights.lookup(layer, "fprop", weight, self.weight, factor)
        q = None if entry is None else entry.quantized
        if entry is None or q is None or q.scale.__class__ is not float:
            # Or it was kept by another implementation, under `only`.
            window = kept_weights.begin(layer, weight)
            q = fp8.quantize(weight, self.weight, None, factor)
            entry = kept_weights.keep(layer, "fprop", weight, self.weight, factor, q, window) or kept_weights.Entry(q)
        if factors is not None:
            amax.record(layer, amax.WEIGHT, q.amax)
        return q, entry


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, constants: Any) -> Tensor:
        step, layer, factors = constants
        w, entry = step.operand(layer, weight, factors)
        rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
        codes, scale, top = fp8.per_tensor(rows, step.input, factor=factors and factors[amax.INPUT])
        if factors is not None:
            amax.record(layer, amax.INPUT, top)
        # The weight itself, so that autograd sees a change of it before backward.
        ctx.save_for_backward(weight, codes)
        owed = None if factors is None else steps.owed(layer)
        ctx.constants = step, layer, factors, owed, entry, scale, x.shape, None if bias is None else bias.dtype
        y = scaled_product(codes.float(), decoded(w).t(), scale, w.scale, x.dtype, bias)
        # A view could not be written to: see `linear.shaped`.
        return y if rows is x else y.resize_(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled("cpu"):
            with ops.without_autocast("cpu"):
                return _Step.backward(ctx, g)
        return first_derivative(_backward, ctx, g)


#: `Function.apply` without its checks for torch.func, which have been made.
_apply: Any = super(torch.autograd.Function, _Step).apply


def _backward(ctx: Any, g: Tensor) -> Any:
    step, layer, factors, owed, entry, of_x, shape, bias = ctx.constants
    if owed is not None:
        owed.settle()
    need_input, need_weight, need_bias, _ = ctx.needs_input_grad
    weight, x = ctx.saved_tensors
    lying = g.reshape(-1, g.shape[-1])
    g = lying.contiguous()
    spec: QuantSpec = step.grad_output
    codes, scale, top = fp8.per_tensor(g, spec, factor=factors and factors[amax.GRAD_OUTPUT])
    if factors is not None:
        amax.record(layer, amax.GRAD_OUTPUT, top)
    if counters.active.counters is not None:
        q = Quantized(codes, scale, spec, (g.shape[0], g.shape[1]))
        counters.active.counters.note(layer, "grad_output", g, q)
    values, dtype = codes.float(), g.dtype
    of_input = of_weight = None
    if need_input:
        w = entry.quantized
        if w is None:
            w = fp8.quantize(weight, step.weight, None, 0.0 if factors is None else factors[amax.WEIGHT])
        of_input = scaled_product(values, decoded(w), scale, w.scale, dtype).view(shape)
    if need_weight:
        of_weight = scaled_product(values.t(), x.float(), scale, of_x, weight.dtype)
        entry.window.used = torch._C._current_graph_task_id()
    return of_input, of_weight, ops.bias_gradient(lying, bias) if need_bias else None, None
