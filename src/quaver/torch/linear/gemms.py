"""The three GEMMs of a linear layer as plain functions, which every layer that contains one composes.

    fprop   output      [T, N] = input         [T, K] @ weight   [N, K].T
    dgrad   grad_input  [T, K] = grad_output   [T, N] @ weight.T [K, N].T
    wgrad   grad_weight [N, K] = grad_output.T [N, T] @ input.T  [K, T].T

A `Call` carries what one forward decides to its backward. Kept for backward is what the GEMM consumed, one byte an
element or half of one, never the input in high precision unless the recipe asks for it.
"""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.core.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu.launching import capture, device
from quaver.torch.linear.stored import stored
from quaver.torch.numerics.philox import QUIET, Noise
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops
from quaver.torch.state import counters, kept_weights, recomputation
from quaver.torch.state.history import amax, steps
from quaver.torch.state.layer import state_of
from quaver.torch.state.noise import draw, drawn

Factors = Tensor | list[float] | None


def fprop(
    x: Tensor | Quantized, weight: Tensor, bias: Tensor | None, layer: nn.Module, recipe: Recipe, call: "Call"
) -> Tensor:
    """x [T, K], perhaps quantized already, to [T, N]; what backward will need is left in `call`."""
    a, b = recipe.fprop.a, recipe.fprop.b
    xq: Tensor | Quantized = x
    kept: Quantized | None = None
    if a is None or b is None:
        assert isinstance(x, Tensor)
        w = stored.dequantized(layer, weight, x.dtype) if weight.dtype in stored.CODES else weight
        y = high_precision(x, w, x.dtype, bias)
        if call.record and not call.traced:
            # Nothing else looks at the weight here: the gradient could go and come back, and dgrad's codes stay.
            kept_weights.look(layer, weight)
    else:
        c = recipe.wgrad.b
        if isinstance(x, Quantized):
            xq = codes = x
        elif call.both is not None and call.keep_input and c is not None and both_at_once(a, c, call):
            codes, kept = quantize_both(layer, amax.INPUT, "input", x, a, c, recipe, call)
        else:
            xq = codes = quantize(layer, amax.INPUT, "input", x, a, recipe, call)
        if weight.is_cuda and (weight.shape[0] | weight.shape[1]) & 15:
            announce_features(layer, weight)
        wq = quantized_weight(layer, weight, "fprop", b, recipe, call)
        y = call.matmul(codes, wq, call.dtype, bias, recipe.fprop.fast_accum)
    if call.keep_input:
        assert isinstance(x, Tensor)
        call.kept = kept_input(x, xq, layer, recipe, call) if kept is None else kept
    return y


def announce_features(layer: nn.Module, weight: Tensor) -> None:
    """Warn once of a layer whose features no native GEMM takes; tokens are padded, features are not."""
    state = state_of(layer)
    if state.announced or device.why_no_fp8(weight.device, "native"):
        return
    state.announced = True
    n, k = weight.shape
    name = layer.__dict__.get("qualified_name") or f"Linear({k} → {n})"
    warnings.warn(
        f"{name} has a weight [{n}, {k}]: a GEMM of cuBLASLt writes multiples of 16 columns, so its GEMMs that would "
        "write others run as bf16 GEMMs of decoded operands, exact but slower; pad the features or leave the layer out "
        "with convert(skip=...)",
        stacklevel=2,
    )


def kept_input(x: Tensor, xq: Tensor | Quantized, layer: nn.Module, recipe: Recipe, call: "Call") -> Tensor | Quantized:
    """The operand of wgrad, input.T [K, T]: of x [T, K], and of what fprop consumed of it; x itself unquantized."""
    c = recipe.wgrad.b
    if c is None:
        return x
    if call.plan.input:
        assert isinstance(xq, Quantized)
        return xq.T
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
    bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """grad_output [T, N] to grad_input [T, K], grad_weight [N, K] and, of this dtype, grad_bias [N], as needed."""
    if call.owed is not None:
        call.owed.settle()
    gq: Tensor | Quantized = g
    turned: Quantized | None = None
    grad_input = grad_weight = grad_bias = None
    a, c = recipe.dgrad.a, recipe.wgrad.a
    if a is not None and (need_input or (need_weight and call.plan.grad_output)):
        if call.both is not None and need_input and need_weight and c is not None and both_at_once(a, c, call):
            sums = bias_dtype in ops.DTYPES
            gq, turned = quantize_both(layer, amax.GRAD_OUTPUT, "grad_output", g, a, c, recipe, call, sums)
        else:
            gq = quantize(layer, amax.GRAD_OUTPUT, "grad_output", g, a, recipe, call)
    if bias_dtype is not None:
        grad_bias = ops.bias_gradient(g, bias_dtype, gq.partial_sums if isinstance(gq, Quantized) else None)
    if need_input:
        grad_input = dgrad(gq, weight, layer, recipe, call)
    if need_weight:
        gt: Tensor | Quantized
        if turned is not None:
            gt = turned
        elif c is None:
            gt = g.t()
        elif call.plan.grad_output:
            gt = gq.T
        else:
            gt = quantize(layer, amax.GRAD_OUTPUT, "grad_output.T", g.t(), c, recipe, call)
        grad_weight = wgrad(gt, kept, recipe, call, weight_dtype)
        if not call.traced:
            kept_weights.used(layer)
    return grad_input, grad_weight, grad_bias


def dgrad(g: Tensor | Quantized, weight: Tensor, layer: nn.Module, recipe: Recipe, call: "Call") -> Tensor:
    """grad_output [T, N], quantized already if the recipe says so, to grad_input [T, K]."""
    spec = recipe.dgrad.b
    if spec is None:
        assert isinstance(g, Tensor)
        w = stored.dequantized(layer, weight, g.dtype) if weight.dtype in stored.CODES else weight
        return high_precision(g, w.t(), call.dtype)
    assert isinstance(g, Quantized)
    wq = quantized_weight(layer, weight, "dgrad", spec, recipe, call)
    return call.matmul(g, wq, call.dtype, None, recipe.dgrad.fast_accum)


def wgrad(g: Tensor | Quantized, kept: Tensor | Quantized, recipe: Recipe, call: "Call", dtype: torch.dtype) -> Tensor:
    """grad_output.T [N, T] and what fprop kept, input.T [K, T], to grad_weight [N, K] in the parameter's dtype.

    A parameter that is codes takes float32.
    """
    if dtype in stored.CODES:
        dtype = torch.float32
    if isinstance(kept, Tensor):
        assert isinstance(g, Tensor)
        return high_precision(g, kept.t(), dtype)
    assert isinstance(g, Quantized)
    return call.matmul(g, kept, dtype, None, recipe.wgrad.fast_accum)


class Call:
    """The decisions of one forward of one layer, and what its backward needs besides tensors."""

    __slots__ = (
        "both",
        "dtype",
        "factors",
        "keep_input",
        "kept",
        "matmul",
        "owed",
        "plan",
        "quantize",
        "record",
        "traced",
        "turned_weight",
        "version",
        "weight",
    )

    def __init__(
        self, recipe: Recipe, x: Tensor, dtype: torch.dtype, keep_input: bool, record: bool, factors: Factors
    ) -> None:
        #: The dtype of the activations.
        self.dtype = dtype
        self.keep_input = keep_input
        #: True if delayed scaling notes the amaxes of this call.
        self.record = record
        #: Encode factors of input, weight and grad_output as the forward saw them; None without delayed scaling.
        self.factors = factors
        #: True if torch.compile is tracing: then operations are opaque and nothing is kept between calls.
        self.traced = torch.compiler.is_compiling()
        self.plan = recipe.plan
        self.quantize: Callable[..., Quantized]
        self.matmul: Callable[..., Tensor]
        #: `ops.QUANTIZE_BOTH` where it is worth while.
        self.both: Callable[..., tuple[Quantized, Quantized]] | None
        if self.traced:
            self.quantize, self.matmul = ops.QUANTIZE, ops.MATMUL
            self.both = ops.QUANTIZE_BOTH if x.is_cuda else None
        else:
            _, self.quantize, self.matmul, self.both = ops.resolve(recipe, x)
        #: Of factors on a device, which writing of theirs the forward saw.
        self.version: int | None = None
        #: The operand that wgrad will consume.
        self.kept: Tensor | Quantized | None = None
        #: fprop's weight where dgrad will consume it too and the layer keeps it anyway.
        self.weight: kept_weights.Entry | None = None
        #: dgrad's weight where the read that wrote fprop's wrote it too and the layer does not keep it.
        self.turned_weight: Quantized | None = None
        #: What keeps a step of delayed scaling from being over until its backward has run.
        self.owed: steps.Owed | None = None

    def owe(self, layer: nn.Module) -> None:
        """A forward of this layer will note its grad_output."""
        if self.factors is not None and self.record and not self.traced:
            self.owed = steps.owed(layer)


def quantize(
    layer: nn.Module, column: int, operand: str, x: Tensor, spec: QuantSpec, recipe: Recipe, call: Call
) -> Quantized:
    """Quantize one operand of a layer, with its history or its noise where the recipe has them."""
    if call.factors is not None:
        factor, noise = call.factors[column], _noise(layer, operand, spec)
        if call.traced and call.record and column == amax.GRAD_OUTPUT:
            q = ops.QUANTIZE.traced(x, spec, None, factor, noise, number=state_of(layer).number)
            _drawn(layer, operand, spec)
            return q
        if call.both is None or call.traced:
            q = call.quantize(x, spec, None, factor, noise)
        else:
            known, newest = amax.is_set(layer, column, call.factors), _newest(layer, column, x, call)
            q = call.quantize(x, spec, None, factor, noise, known, newest)
        _drawn(layer, operand, spec)
        if call.record:
            amax.record(layer, column, q.amax, q.noted)
    elif spec.rounding == "nearest":
        q = call.quantize(x, spec)
    else:
        q = quantize_with_noise(layer, operand, x, spec)
    if counters.active.counters is not None and not recomputation.replaying():
        counters.active.counters.note(layer, operand, x, q)
    return q


def _noise(layer: nn.Module, operand: str, spec: QuantSpec) -> Noise:
    return QUIET if spec.rounding == "nearest" else draw(layer, operand)


def _drawn(layer: nn.Module, operand: str, spec: QuantSpec) -> None:
    if spec.rounding != "nearest":
        drawn(layer, operand)


def quantize_with_noise(layer: nn.Module, operand: str, x: Tensor, spec: QuantSpec) -> Quantized:
    """Round at random; the count moves on, so that the next micro-batch draws other noise."""
    q: Quantized = ops.QUANTIZE(x, spec, None, None, draw(layer, operand))
    drawn(layer, operand)
    return q


def _newest(layer: nn.Module, column: int, x: Tensor, call: Call) -> Tensor | None:
    """The place where a kernel notes an operand's amax, if this call records it."""
    return amax.newest(layer, column, x) if call.record and not call.traced else None


def both_at_once(spec: QuantSpec, other: QuantSpec, call: Call) -> bool:
    """True if an operand and its transpose come from one call of `quantize_both`."""
    if counters.active.counters is not None:
        return False
    return not call.traced or spec.rounding == other.rounding == "nearest"


def quantize_both(
    layer: nn.Module,
    column: int,
    operand: str,
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    recipe: Recipe,
    call: Call,
    sums: bool = False,
) -> tuple[Quantized, Quantized]:
    """x by one spec and its transpose by another; see `quantize`. They share nothing but what their kernel shares.

    Args:
        sums: True sums x over its rows too, where the same read gives that: `partial_sums` of the first.
    """
    assert call.both is not None
    noise = turned_noise = _noise(layer, operand, spec)
    shared = spec == other and spec.transposable
    if not shared:
        turned_noise = _noise(layer, operand + ".T", other)
    if call.factors is not None:
        factor, record = call.factors[column], call.record
        if call.traced:
            number = state_of(layer).number if record and column == amax.GRAD_OUTPUT else None
            q, turned = ops.QUANTIZE_BOTH.traced(x, spec, other, None, factor, number=number)
            record = record and number is None
        else:
            known, newest = amax.is_set(layer, column, call.factors), _newest(layer, column, x, call)
            q, turned = call.both(x, spec, other, None, factor, noise, turned_noise, known, newest, sums)
        if record:
            amax.record(layer, column, q.amax, q.noted)
    elif sums and not call.traced:
        q, turned = call.both(x, spec, other, None, None, noise, turned_noise, False, None, True)
    else:
        q, turned = call.both(x, spec, other, None, None, noise, turned_noise)
    _drawn(layer, operand, spec)
    if not shared:
        _drawn(layer, operand + ".T", other)
    return q, turned


def _version(layer: nn.Module, call: Call) -> int:
    """Which writing of its factors on a device a forward saw: what stands for their value in a key."""
    if call.version is None:
        factor = layer._buffers["factor"]
        assert factor is not None
        call.version = factor._version
        if recomputation.state.replay is not None or recomputation.state.writing:
            call.version = recomputation.noted(layer, "version of factors", call.version)
    return call.version


def capturing(x: Tensor) -> bool:
    """True while a CUDA graph is captured or that is rehearsed: no kept weight is read, and none is kept."""
    return capture.as_captured(x.device)


def quantized_weight(
    layer: nn.Module, weight: Tensor, side: str, spec: QuantSpec, recipe: Recipe, call: Call
) -> Quantized:
    """The weight [N, K] for fprop, or its transpose [K, N] for dgrad; kept as `quaver.torch.state.kept_weights`
    says."""
    shared = side == "dgrad" and call.plan.weight
    q = None if call.weight is None else call.weight.quantized
    if shared and q is not None:
        return q.T
    if side == "dgrad" and call.turned_weight is not None:
        turned, call.turned_weight = call.turned_weight, None
        return turned
    if weight.dtype in stored.CODES:
        return stored.operand(layer, weight, side == "dgrad", call.plan.weight, spec, call)
    if call.traced:
        if shared:
            return call.quantize(weight, spec, None, None if call.factors is None else call.factors[amax.WEIGHT]).T
        w, operand = (weight, "weight") if side == "fprop" else (weight.t(), "weight.T")
        return quantize(layer, amax.WEIGHT, operand, w, spec, recipe, call)
    if call.factors is None:
        written = 0.0
    else:
        written = _version(layer, call) if isinstance(call.factors, Tensor) else call.factors[amax.WEIGHT]
    kept_as = "fprop" if shared else side
    keeps = not capturing(weight)
    entry = kept_weights.lookup(layer, kept_as, weight, spec, written, call.record) if keeps else None
    q = None if entry is None else entry.quantized
    if q is None:
        window = kept_weights.begin(layer, weight, call.record) if keeps else None
        q, other = _quantize_weight(layer, weight, side, spec, recipe, call)
        if other is not None and call.plan.weight:
            q.twin = other
        entry = kept_weights.keep(layer, kept_as, weight, spec, written, q, window) if keeps else kept_weights.Entry(q)
        if other is not None and not call.plan.weight:
            kept = kept_weights.keep(layer, "dgrad", weight, other.spec, written, other, window)
            call.turned_weight = other if kept is None else None
        if not call.record and entry is None:
            kept_weights.quantized_again(layer, weight)
    elif call.record and call.factors is not None and side == "fprop":
        amax.record(layer, amax.WEIGHT, q.amax)
    if call.plan.weight:
        call.weight = entry
    return q.T if shared else q


def _quantize_weight(
    layer: nn.Module, weight: Tensor, side: str, spec: QuantSpec, recipe: Recipe, call: Call
) -> tuple[Quantized, Quantized | None]:
    """The weight, and what dgrad will ask for if the same read gives it; or for a dgrad that reuses nothing that."""
    if torch.is_inference_mode_enabled() and kept_weights.can_keep(layer, weight):
        # What is kept serves other modes too.
        with torch.inference_mode(False), torch.no_grad():
            return _quantize_weight(layer, weight, side, spec, recipe, call)
    if side == "dgrad" and call.plan.weight:
        return call.quantize(weight, spec, None, None if call.factors is None else call.factors[amax.WEIGHT]), None
    if side == "dgrad":
        return quantize(layer, amax.WEIGHT, "weight.T", weight.t(), spec, recipe, call), None
    other = recipe.dgrad.b
    wanted = call.both is not None and call.record and other is not None and both_at_once(spec, other, call)
    if not wanted:
        return quantize(layer, amax.WEIGHT, "weight", weight, spec, recipe, call), None
    assert other is not None
    return quantize_both(layer, amax.WEIGHT, "weight", weight, spec, other, recipe, call)


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
