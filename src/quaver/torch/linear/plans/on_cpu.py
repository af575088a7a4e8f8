"""The rows of a small layer's step on a CPU, where one scale serves a tensor.

Three products of a few thousand numbers take less time than a dozen calls of Python. These make those that compute
something; formulas, bits and state are those of `cpu.fp8` and `cpu.gemm` behind `quaver.torch.linear.gemms`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from quaver.core.spec import QuantSpec, Recipe
from quaver.torch.backends.cpu import fp8
from quaver.torch.backends.cpu.gemm import REMEMBERED, SMALL, decoded, scaled_product
from quaver.torch.linear.plans.step import Multiply, Operands, Rows, Step, Weight
from quaver.torch.state import kept_weights
from quaver.torch.state.history import amax, steps


def decide(x: Tensor, weight: Tensor, recipe: Recipe) -> Step | None:
    """The step for inputs like x, or None where the general way is as fast or the only one."""
    specs = list(recipe.operands().values())
    size = x.numel() * weight.shape[0]
    if any(s is None or not s.per_tensor or fp8.reason(x, s) for s in specs):
        return None
    if not (0 < size <= SMALL and all(recipe.plan)):
        return None
    a, b, c = recipe.fprop.a, recipe.fprop.b, recipe.dgrad.a
    assert a is not None and b is not None and c is not None

    def of_input(x: Tensor, delayed: HostFactors | None) -> Operands:
        codes, scale, top = _codes(x if x.dim() == 2 else x.view(-1, x.shape[-1]), a, delayed, amax.INPUT)
        return codes.float(), scale, codes, scale, top

    def of_grad_output(g: Tensor, delayed: HostFactors | None) -> Operands:
        codes, scale, _ = _codes(g if g.dim() == 2 else g.view(-1, g.shape[-1]), c, delayed, amax.GRAD_OUTPUT)
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
        entry.ready = Weight(values.t(), q.scale, values, q.scale, delayed, recipe)
        return entry, entry.ready

    forward, gradient = _product(x.dtype), _product(weight.dtype)
    return Step(recipe, x, Rows(of_input, of_grad_output, of_weight, None, _factors, forward, forward, gradient, False))


class HostFactors(NamedTuple):
    """`step.Factors` as numbers."""

    factors: list[float]
    version: float
    #: Whose history notes the amaxes.
    layer: nn.Module

    def in_backward(self, layer: nn.Module, g: Tensor) -> "HostFactors":
        return self


def _factors(layer: nn.Module, x: Tensor) -> HostFactors | None:
    factors = steps.factors(layer, True)
    return None if isinstance(factors, Tensor) else HostFactors(factors, factors[amax.WEIGHT], layer)


def _codes(x: Tensor, spec: QuantSpec, delayed: HostFactors | None, column: int) -> tuple[Tensor, float, float]:
    """As `fp8.per_tensor`, by the factor of a column and noted there where scaling is delayed."""
    if delayed is None:
        return fp8.per_tensor(x, spec)
    codes, scale, top = fp8.per_tensor(x, spec, factor=delayed.factors[column])
    amax.record(delayed.layer, column, top)
    return codes, scale, top


def _product(dtype: torch.dtype) -> Multiply:
    def multiply(a: Tensor, of_a: float, b: Tensor, of_b: float, bias: Tensor | None) -> Tensor:
        # Codes that were kept are decoded here; values are what they are.
        return scaled_product(a, b.float(), of_a, of_b, dtype, bias)

    return multiply
