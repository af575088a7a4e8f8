"""The three GEMMs of a linear layer as plain functions, which every layer that contains one composes.

    fprop   output      [T, N] = input         [T, K] @ weight   [N, K].T
    dgrad   grad_input  [T, K] = grad_output   [T, N] @ weight.T [K, N].T
    wgrad   grad_weight [N, K] = grad_output.T [N, T] @ input.T  [K, T].T

A `Call` carries what one forward decides to its backward. Kept for backward is what the GEMM consumed, one byte an
element or half of one, never the input in high precision unless the recipe asks for it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.core.spec import QuantSpec, Recipe
from quaver.torch import amax, counters, ops, recomputation, stored, weights
from quaver.torch.noise import quantize_with_noise
from quaver.torch.quantized import Quantized

Factors = Tensor | list[float] | None


def fprop(
    x: Tensor | Quantized, weight: Tensor, bias: Tensor | None, layer: nn.Module, recipe: Recipe, call: "Call"
) -> Tensor:
    """x [T, K], perhaps quantized already, to [T, N]; what backward will need is left in `call`."""
    a, b = recipe.fprop.a, recipe.fprop.b
    xq: Tensor | Quantized = x
    if a is None or b is None:
        assert isinstance(x, Tensor)
        w = stored.dequantized(layer, weight, x.dtype) if weight.dtype in stored.CODES else weight
        y = high_precision(x, w, x.dtype, bias)
    else:
        xq = codes = x if isinstance(x, Quantized) else quantize(layer, amax.INPUT, "input", x, a, recipe, call)
        wq = quantized_weight(layer, weight, "fprop", b, recipe, call)
        if call.plan.weight and not call.traced and "_weights" in layer.__dict__:
            call.weight = wq
        y = call.matmul(codes, wq, call.dtype, bias)
    if call.keep_input:
        assert isinstance(x, Tensor)
        call.kept = kept_input(x, xq, layer, recipe, call)
    return y


def kept_input(x: Tensor, xq: Tensor | Quantized, layer: nn.Module, recipe: Recipe, call: "Call") -> Tensor | Quantized:
    """The operand of wgrad: of x [T, K], and of what fprop consumed of it."""
    c = recipe.wgrad.b
    if c is None:
        return x
    if call.plan.input:
        return xq
    return quantize(layer, amax.INPUT, "input.T", x.t(), c, recipe, call)


def backward(
    g: Tensor,
    weight: Tensor,
    kept: Tensor | Quantized,
    layer: nn.Module,
    recipe: Recipe,
    call: "Call",
    need_input: bool,
    need_weight: bool,
    weight_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """grad_output [T, N] to grad_input [T, K] and grad_weight [N, K], as far as they are needed."""
    gq: Tensor | Quantized = g
    grad_input = grad_weight = None
    if recipe.dgrad.a is not None and (need_input or (need_weight and call.plan.grad_output)):
        gq = quantize(layer, amax.GRAD_OUTPUT, "grad_output", g, recipe.dgrad.a, recipe, call)
    if need_input:
        grad_input = dgrad(gq, weight, layer, recipe, call)
    if need_weight:
        if recipe.wgrad.a is None:
            gt: Tensor | Quantized = g.t()
        elif call.plan.grad_output:
            gt = gq.T
        else:
            gt = quantize(layer, amax.GRAD_OUTPUT, "grad_output.T", g.t(), recipe.wgrad.a, recipe, call)
        grad_weight = wgrad(gt, kept, recipe, call, weight_dtype)
    return grad_input, grad_weight


def dgrad(g: Tensor | Quantized, weight: Tensor, layer: nn.Module, recipe: Recipe, call: "Call") -> Tensor:
    """grad_output [T, N], quantized already if the recipe says so, to grad_input [T, K]."""
    spec = recipe.dgrad.b
    if spec is None:
        assert isinstance(g, Tensor)
        w = stored.dequantized(layer, weight, g.dtype) if weight.dtype in stored.CODES else weight
        return high_precision(g, w.t(), call.dtype)
    assert isinstance(g, Quantized)
    return call.matmul(g, quantized_weight(layer, weight, "dgrad", spec, recipe, call), call.dtype, None)


def wgrad(g: Tensor | Quantized, kept: Tensor | Quantized, recipe: Recipe, call: "Call", dtype: torch.dtype) -> Tensor:
    """grad_output.T [N, T] and what fprop kept of the input to grad_weight [N, K] in the parameter's dtype.

    A parameter that is codes takes float32.
    """
    if dtype in stored.CODES:
        dtype = torch.float32
    if isinstance(kept, Tensor):
        assert isinstance(g, Tensor)
        return high_precision(g, kept.t(), dtype)
    assert isinstance(g, Quantized)
    return call.matmul(g, kept.T if call.plan.input else kept, dtype, None)


class Call:
    """What one forward of one layer decides, and what its backward needs besides tensors."""

    __slots__ = ("dtype", "factors", "keep_input", "kept", "matmul", "plan", "quantize", "record", "traced", "weight")

    def __init__(
        self, recipe: Recipe, x: Tensor, dtype: torch.dtype, keep_input: bool, record: bool, factors: Factors
    ) -> None:
        #: Of the activations.
        self.dtype = dtype
        self.keep_input = keep_input
        #: Whether delayed scaling notes the amaxes of this call.
        self.record = record
        #: Encode factors of input, weight and grad_output as the forward saw them; None without delayed scaling.
        self.factors = factors
        #: Whether torch.compile is looking: then operations are opaque and nothing is kept between calls.
        self.traced = torch.compiler.is_compiling()
        self.plan = recipe.plan
        if self.traced:
            self.quantize, self.matmul = ops.run_quantize, ops.run_matmul
        else:
            _, self.quantize, self.matmul, _ = ops.resolve(recipe, x)
        #: The operand that wgrad will consume.
        self.kept: Tensor | Quantized | None = None
        #: fprop's weight where dgrad will consume it too and the layer keeps it anyway.
        self.weight: Quantized | None = None


def quantize(
    layer: nn.Module, column: int, operand: str, x: Tensor, spec: QuantSpec, recipe: Recipe, call: Call
) -> Quantized:
    """Quantize one operand of a layer, with its history or its noise where the recipe has them."""
    if call.factors is not None:
        if call.traced and call.record and column == amax.GRAD_OUTPUT:
            return ops.quantize_opaquely(x, spec, None, call.factors[column], number=layer.__dict__["_number"])
        q = call.quantize(x, spec, None, call.factors[column])
        if call.record:
            amax.record(layer, column, q.amax)
    elif spec.rounding == "nearest":
        q = call.quantize(x, spec)
    else:
        q = quantize_with_noise(layer, operand, x, spec)
    if counters.active.counters is not None and not recomputation.replaying():
        counters.active.counters.note(layer, operand, x, q)
    return q


def quantized_weight(
    layer: nn.Module, weight: Tensor, side: str, spec: QuantSpec, recipe: Recipe, call: Call
) -> Quantized:
    """The weight [N, K] for fprop, or its transpose [K, N] for dgrad; kept until the weight changes."""
    shared = side == "dgrad" and call.plan.weight
    if shared and call.weight is not None:
        return call.weight.T
    if weight.dtype in stored.CODES:
        return stored.operand(layer, weight, side == "dgrad", call.plan.weight, spec, call)
    if call.traced:
        if shared:
            return call.quantize(weight, spec, None, None if call.factors is None else call.factors[amax.WEIGHT]).T
        w, operand = (weight, "weight") if side == "fprop" else (weight.t(), "weight.T")
        return quantize(layer, amax.WEIGHT, operand, w, spec, recipe, call)
    factor = 0.0 if call.factors is None else float(call.factors[amax.WEIGHT])
    kept_as = "fprop" if shared else side
    q = weights.lookup(layer, kept_as, weight, spec, factor)
    if q is None:
        if shared:
            q = call.quantize(weight, spec, None, factor)
        else:
            w, operand = (weight, "weight") if side == "fprop" else (weight.t(), "weight.T")
            q = quantize(layer, amax.WEIGHT, operand, w, spec, recipe, call)
        weights.keep(layer, kept_as, weight, spec, factor, q)
    elif call.record and call.factors is not None and side == "fprop":
        amax.record(layer, amax.WEIGHT, q.amax)
    return q.T if shared else q


def high_precision(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [m, k] @ b [n, k].T unquantized, for operands that a recipe leaves alone."""
    if torch.compiler.is_compiling():
        # In eager mode the caller has switched it off.
        with torch.autocast(a.device.type, enabled=False):
            return _high_precision(a, b, dtype, bias)
    return _high_precision(a, b, dtype, bias)


def _high_precision(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    if a.dtype is b.dtype is dtype:
        return F.linear(a, b, bias)
    y = a.to(torch.float32) @ b.to(torch.float32).t()
    return (y if bias is None else y + bias).to(dtype)
