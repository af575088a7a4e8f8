"""The rows of a layer's step on a CPU, for recipes of FP8 that round to nearest.

Three products of a few thousand numbers take less time than a dozen calls of Python. These make those that compute
something; formulas, bits and state are those of `cpu.fp8` and `cpu.gemm` behind `quaver.torch.linear.gemms`. They hold
no tensor of a call: torch may swap a weight that nothing else holds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.core.spec import QuantSpec, Recipe
from quaver.torch.backends.cpu import fp8, repeated
from quaver.torch.backends.cpu.gemm import REMEMBERED, SMALL, decoded, matmul, scaled_product
from quaver.torch.linear.gemms import Call, quantized_weight
from quaver.torch.linear.plans.step import Multiply, Operands, Rows, Scale, Step, Weight
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.state import kept_weights
from quaver.torch.state.history import amax, steps

#: `Rows.form` of rows that take a weight as `Quantized`.
WHOLE = "whole"


class HostFactors(NamedTuple):
    """What delayed scaling gives one step of a layer, as numbers."""

    factors: list[float]
    of_input: float
    version: float
    #: Whose history notes the amaxes.
    layer: nn.Module

    def note(self, layer: nn.Module, column: int, top: float) -> None:
        amax.record(layer, column, top)

    def in_backward(self, layer: nn.Module, g: Tensor) -> "HostFactors":
        return self


def _factors(layer: nn.Module, x: Tensor) -> HostFactors | None:
    factors = steps.factors(layer, True)
    return None if isinstance(factors, Tensor) else HostFactors(factors, factors[0], factors[1], layer)


def decide(x: Tensor, weight: Tensor, recipe: Recipe) -> Step | None:
    """The step for inputs like x, or None where the general way is the only one."""
    specs = [spec for spec in recipe.operands().values() if spec is not None]
    size = x.numel() * weight.shape[0]
    if size == 0 or recipe.fprop.a is None or recipe.dgrad.a is None or any(fp8.reason(x, spec) for spec in specs):
        return None
    one = size <= SMALL and all(recipe.plan) and all(spec.per_tensor for spec in specs)
    return Step(recipe, x, weight.shape[0], (_of_one_scale if one else _of_any_scales)(recipe, x.shape, x.dtype))


def _of_any_scales(recipe: Recipe, shape: torch.Size, dtype: torch.dtype) -> Rows:
    """Operands are `Quantized`, scales and all; what backward keeps of the input is taken apart."""
    (a, b), (c, d), (e, f) = ((gemm.a, gemm.b) for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    assert a is not None and b is not None and c is not None and d is not None
    k, tokens, plan = shape[-1], shape[:-1].numel(), recipe.plan

    def of_input(x: Tensor, delayed: HostFactors | None) -> Operands:
        q = _by_factor(fp8.quantize, x if x.dim() == 2 else x.view(-1, k), a, delayed, amax.INPUT)
        return q.data, q.scale, *((q.data, q.scale) if plan.input else (None, None)), q.amax

    def turned_input(x: Tensor) -> tuple[Tensor, Scale]:
        q = fp8.quantize(x.view(-1, k).t(), f)  # type: ignore[arg-type]
        return q.data, q.scale

    def of_grad_output(g: Tensor, delayed: HostFactors | None) -> Operands:
        q = _by_factor(fp8.quantize, g, c, delayed, amax.GRAD_OUTPUT)
        if plan.grad_output:
            repeated.mark(q, repeated.GRADIENT)
        return q, None, q.T if plan.grad_output else None, None, None

    def turned_grad_output(g: Tensor) -> tuple[Quantized, None]:
        return fp8.quantize(g.t(), e), None  # type: ignore[arg-type]

    def of_weight(
        weight: Tensor, layer: nn.Module, delayed: HostFactors | None, forward: bool
    ) -> tuple[kept_weights.Entry, Weight]:
        factors, version = (None, 0.0) if delayed is None else (delayed.factors, delayed.version)
        # What forward did not quantize is kept when backward does.
        call = Call(layer, recipe, weight, weight.dtype, forward or not plan.weight, factors)
        if not forward:
            turned = quantized_weight(call, weight, "dgrad", d)
            return kept_weights.Entry(turned), Weight(None, None, turned, None, factors, recipe, WHOLE)
        q = quantized_weight(call, weight, "fprop", b)
        entry = kept_weights.lookup(layer, "fprop", weight, b, version) or kept_weights.Entry(q)
        entry.ready = Weight(q, None, q.T if plan.weight else None, None, factors, recipe, WHOLE)
        return entry, entry.ready

    def of_output(data: Tensor, scale: Scale, right: Any, _: Scale, bias: Tensor | None) -> Tensor:
        left = Quantized(data, scale, a, (tokens, k), mark=repeated.thread.codes and repeated.mark_of(data))
        return matmul(left, right, dtype, bias)

    def of_gradient_of_input(left: Any, _: Scale, right: Any, __: Scale, bias: Tensor | None) -> Tensor:
        return matmul(left, right, dtype, bias)

    def of_gradient(left: Any, _: Scale, data: Tensor, scale: Scale, __: Tensor | None) -> Tensor:
        right = Quantized(data, scale, f, (k, tokens), plan.input or min(k, tokens) > 1)  # type: ignore[arg-type]
        right.mark = repeated.thread.codes and repeated.mark_of(data)
        return matmul(left, right, dtype)

    return Rows(
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
        turned_input=None if f is None or plan.input else turned_input,
        turned_grad_output=None if e is None or plan.grad_output else turned_grad_output,
        form=WHOLE,
    )


def _by_factor(
    quantize: Callable[..., Any], x: Tensor, spec: QuantSpec, delayed: HostFactors | None, column: int
) -> Any:
    """What a function of `fp8` gives, by the factor of a column and noted there if scaling is delayed."""
    if delayed is None:
        return quantize(x, spec)
    q = quantize(x, spec, None, delayed.factors[column])
    amax.record(delayed.layer, column, q.amax if isinstance(q, Quantized) else q[2])
    return q


def _of_one_scale(recipe: Recipe, shape: torch.Size, dtype: torch.dtype) -> Rows:
    """Few elements, and one scale serves a matrix and its transpose: only what computes something is called."""
    a, b, c = recipe.fprop.a, recipe.fprop.b, recipe.dgrad.a
    assert a is not None and b is not None and c is not None

    def of_input(x: Tensor, delayed: HostFactors | None) -> Operands:
        x = x if x.dim() == 2 else x.view(-1, shape[-1])
        codes, scale, top = _by_factor(fp8.per_tensor, x, a, delayed, amax.INPUT)
        return codes, scale, codes, scale, top

    def of_grad_output(g: Tensor, delayed: HostFactors | None) -> Operands:
        codes, scale, _ = _by_factor(fp8.per_tensor, g, c, delayed, amax.GRAD_OUTPUT)
        values = codes.float()
        return values, scale, values.t(), scale, None

    def of_weight(
        weight: Tensor, layer: nn.Module, delayed: HostFactors | None, forward: bool
    ) -> tuple[kept_weights.Entry, Weight]:
        factor = 0.0 if delayed is None else delayed.version
        window = kept_weights.begin(layer, weight) if forward else None
        q = fp8.quantize(weight, b, None, factor)
        entry = kept_weights.keep(layer, "fprop", weight, b, factor, q, window) or kept_weights.Entry(q)
        if forward and delayed is not None:
            amax.record(layer, amax.WEIGHT, q.amax)
        # Few values are remembered, others are decoded by each product.
        values = decoded(q) if q.data.numel() <= REMEMBERED else q.data
        assert values is not None
        factors = None if delayed is None else delayed.factors
        entry.ready = Weight(values.t(), q.scale, values, q.scale, factors, recipe)
        return entry, entry.ready

    product = _product(dtype)
    return Rows(of_input, of_grad_output, of_weight, None, _factors, product, product, product, False, -1)


def _product(dtype: torch.dtype) -> Multiply:
    def multiply(a: Tensor, of_a: float, b: Tensor, of_b: float, bias: Tensor | None) -> Tensor:
        # Codes are decoded here, which other layers of one input may read otherwise; values are what they are.
        return scaled_product(a.float(), b.float(), of_a, of_b, dtype, bias)

    return multiply
