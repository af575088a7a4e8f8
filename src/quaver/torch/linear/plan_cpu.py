"""Plan of a small linear layer on a CPU: FP8 recipes with one scale per tensor, which a matrix and its transpose share.

In a layer of a few thousand elements a dozen Python calls cost more than the three GEMMs, so these functions call only
what computes. Formulas, bits and state are those of `quaver.torch.linear.general`. They reference no tensor of a call:
torch can swap a weight only if nothing else references it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.cpu import quantize as fp8
from quaver.torch.backends.cpu.gemm import REMEMBERED, SMALL, decoded, scaled_product
from quaver.torch.linear import general
from quaver.torch.linear.plan import (
    LinearCall,
    LinearPlan,
    Operands,
    WeightOperands,
    cached_operands,
    saved_operands,
    written_transpose,
)
from quaver.torch.state import weight_cache
from quaver.torch.state.history import amax, scaling_step


def build(x: Tensor, weight: Tensor, recipe: Recipe) -> LinearPlan | None:
    """Plan a layer for inputs like x [..., K], or return None if it is large or the recipe has other scales."""
    specs = [spec for spec in recipe.operands().values() if spec is not None]
    a, b, c = recipe.fprop.a, recipe.fprop.b, recipe.dgrad.a
    if not 0 < x.numel() * weight.shape[0] <= SMALL or a is None or b is None or c is None or not all(recipe.reuse):
        return None
    if any(not spec.per_tensor or fp8.reason(x, spec) for spec in specs):
        return None
    input_spec, weight_spec, grad_spec, dtype = a, b, c, x.dtype

    def quantize_input(call: LinearCall, x: Tensor, save: bool) -> Operands:
        codes, scale, top = _quantize(call, x, input_spec, amax.INPUT)
        return codes, scale, codes, scale, top

    def quantize_grad(call: LinearCall, g: Tensor, needs: Sequence[Any], bias_dtype: Any) -> Operands:
        codes, scale, _ = _quantize(call, g, grad_spec, amax.GRAD_OUTPUT)
        values = codes.float()
        return values, scale, values.t(), scale, None

    def quantize_weight(call: LinearCall, weight: Tensor) -> WeightOperands:
        factors = call.factors
        w = cached_operands(call, weight, 0.0 if factors is None else factors[amax.WEIGHT])
        if w is None:
            return new_weight(call, weight, True)
        if factors is not None and w.factors is not factors:
            amax.record(call.layer, amax.WEIGHT, call.entry.quantized.amax)  # type: ignore[union-attr]
            w.factors = factors
        return w

    def new_weight(call: LinearCall, weight: Tensor, forward: bool) -> WeightOperands:
        layer, factors = call.layer, call.factors
        factor = 0.0 if factors is None else factors[amax.WEIGHT]
        window = weight_cache.begin(layer, weight) if forward else None
        q = fp8.quantize(weight, weight_spec, None, factor)
        entry = weight_cache.store(layer, "fprop", weight, weight_spec, factor, q, window)
        entry = entry or weight_cache.CachedWeight(q)
        # Small weights are decoded once and cached; larger ones are decoded in each GEMM.
        values = decoded(q) if q.data.numel() <= REMEMBERED else q.data
        assert values is not None
        w = entry.fast_operands = WeightOperands(values.t(), q.scale, values, q.scale, recipe, factors)
        if forward:
            call.entry = entry
            if factors is not None:
                amax.record(layer, amax.WEIGHT, q.amax)
        return w

    def transpose_weight(call: LinearCall, weight: Tensor) -> tuple[Tensor, float]:
        w = saved_operands(call) or new_weight(call, weight, False)
        return w.dgrad, w.dgrad_scale

    def multiply(call: LinearCall, x: Tensor, x_scale: float, y: Tensor, y_scale: float, bias: Tensor | None) -> Tensor:
        # Cached inputs are codes, because layers that share the input may decode them differently; float32 stays as it
        # is.
        return scaled_product(x.float(), y.float(), x_scale, y_scale, dtype, bias)

    def wgrad(call: LinearCall, g: Tensor, g_scale: float, x: Tensor, x_scale: float, _: torch.dtype) -> Tensor:
        return scaled_product(g.float(), x.float(), g_scale, x_scale, dtype, None)

    return LinearPlan(
        recipe=recipe,
        quantize_input=quantize_input,
        transpose_input=written_transpose,
        quantize_weight=quantize_weight,
        transpose_weight=transpose_weight,
        quantize_grad=quantize_grad,
        transpose_grad=written_transpose,
        fprop=multiply,
        dgrad=multiply,
        wgrad=wgrad,
        factors=None if recipe.delayed is None else _factors,
        record_amax=general.record_amax,
        implementation=-1,
    )


def _factors(layer: Any, x: Tensor) -> list[float] | None:
    factors = scaling_step.factors(layer, True)
    return factors if factors.__class__ is list else None


def _quantize(call: LinearCall, x: Tensor, spec: QuantSpec, column: int) -> tuple[Tensor, float, float]:
    """Return codes, decode scale and amax of a matrix; under delayed scaling by its factor, and record the amax."""
    if call.factors is None:
        return fp8.per_tensor(x, spec)
    codes, scale, top = fp8.per_tensor(x, spec, None, call.factors[column])
    amax.record(call.layer, column, top)
    return codes, scale, top
