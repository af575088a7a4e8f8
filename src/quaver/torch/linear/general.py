"""The plan that runs any recipe on any device: each operand a `Quantized`, or a tensor where nothing is quantized.

    fprop   output      [T, N] = input         [T, K] @ weight   [N, K].T
    dgrad   grad_input  [T, K] = grad_output   [T, N] @ weight.T [K, N].T
    wgrad   grad_weight [N, K] = grad_output.T [N, T] @ input.T  [K, T].T

Also used while something observes single quantizations or GEMMs (an observer, `only`, selective checkpoints) and for
torch.compile, which sees each of them as one opaque operator. The forward saves the quantized wgrad operand (8 or 4
bits an element), or the input itself if the recipe leaves wgrad unquantized, or fprop's codes that wgrad dequantizes.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu import capture, device
from quaver.torch.linear import plan_traced, stored_weight
from quaver.torch.linear.plan import LinearCall, LinearPlan, Operands, WeightOperands
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import NO_NOISE, Noise, is_tracing
from quaver.torch.operations import ops
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state import layer_state, observer, selective_checkpoint, weight_cache
from quaver.torch.state.history import amax, scaling_step
from quaver.torch.state.layer_state import state_of
from quaver.torch.state.noise import advance_count, draw

#: Value in `needs` for a weight gradient that is computed later. The backward may return a function in its place, which
#: references only what it needs and accepts another `dtype` than the weight's.
LATER: Any = object()

# ---- plans and calls ----

#: Plans by recipe and, off the CPU, device and dtype.
_plans: dict[Any, LinearPlan] = {}
ops.resolved_caches.append(_plans)


def plan_for(recipe: Recipe, x: Tensor, weights: Sequence[Any] = ()) -> LinearPlan:
    """Return the general plan for inputs like x; one for torch.compile while a compiler traces.

    Args:
        weights: while a compiler traces, those of all layers, if another plan for them may be chosen.
    """
    if is_tracing():
        if weights and plan_traced.emulates_layers(recipe, x, weights):
            return plan_traced.plan_of(recipe)
        both = ops.QUANTIZE_BOTH if x.is_cuda else None
        return _plan(ops.ResolvedOperations(recipe, ops.QUANTIZE, ops.MATMUL, both))
    key = id(recipe) if x.is_cpu else (id(recipe), x.device, x.dtype)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _plan(ops.resolve(recipe, x))
    return plan


def _plan(operations: ops.ResolvedOperations) -> LinearPlan:
    recipe = operations.recipe
    return LinearPlan(
        recipe=recipe,
        quantize_input=quantize_input,
        transpose_input=transpose_input,
        quantize_weight=quantize_weight,
        transpose_weight=transpose_weight,
        quantize_grad=quantize_grad,
        transpose_grad=transpose_grad,
        fprop=fprop,
        dgrad=dgrad,
        wgrad=wgrad,
        record_amax=record_amax,
        recomputed_input=recomputed_input,
        operations=operations,
    )


def record_amax(call: LinearCall, column: int, top: Any) -> None:
    """Record an amax that another layer has measured."""
    amax.record(call.layer, column, top)


def begin(
    layer: nn.Module,
    recipe: Recipe,
    x: Tensor,
    dtype: torch.dtype,
    training: bool,
    weights: Sequence[Any] = (),
) -> LinearCall:
    """Begin a call of a layer and join the current step of delayed scaling.

    Args:
        x: tensor whose device selects the implementations.
        dtype: dtype of the GEMMs' inputs and outputs.
        weights: as in `plan_for`.
    """
    traced = is_tracing()
    call = LinearCall(plan_for(recipe, x, weights), layer, training, dtype, traced)
    if recipe.delayed is not None:
        call.factors = scaling_step.factors(layer, training)
        if training and not traced:
            # The step stays open until backward has recorded grad_output.
            call.pending = scaling_step.pending(layer)
    return call


# ---- input ----


def quantize_input(call: LinearCall, x: Tensor, save: bool) -> Operands:
    """Quantize the input for fprop, and for wgrad if one read of x serves both."""
    a, c = call.recipe.fprop.a, call.recipe.wgrad.b
    if a is None:
        return x, None, None, None, None
    if save and c is not None and both_at_once(call, a, c):
        q, transposed = quantize_both(call, amax.INPUT, "input", x, a, c)
        return q, None, transposed, None, q.amax
    q = quantize(call, amax.INPUT, "input", x, a)
    return q, None, None, None, q.amax


def transpose_input(call: LinearCall, x: Tensor | None, operands: Operands) -> tuple[Tensor | Quantized, None]:
    """Return the wgrad operand input.T [K, T] from the fprop operand or from x [T, K]; x itself if wgrad is
    unquantized.
    """
    q, _, transposed, _, _ = operands
    if transposed is not None:
        return transposed, None
    c = call.recipe.wgrad.b
    if call.recipe.reuse.input:
        return q.T, None
    if c is None and call.recipe.dequantized_backward:
        return q, None
    assert x is not None
    return x if c is None else quantize(call, amax.INPUT, "input.T", x.t(), c, True), None


def can_recompute(recipe: Recipe) -> bool:
    """Return True if backward may quantize a recomputed input; with stochastic rounding noise is drawn once."""
    spec = recipe.saved_input
    return spec is None or spec.rounding == "nearest"


def recomputed_input(call: LinearCall, x: Tensor) -> tuple[Tensor | Quantized, None]:
    """Return what `transpose_input` returns for an x that backward has recomputed.

    Codes that the forward has made are neither recorded nor counted again; an input.T that it left out is counted.
    """
    a, c = call.recipe.fprop.a, call.recipe.wgrad.b
    factor = None if call.factors is None else call.factors[amax.INPUT]
    if call.recipe.reuse.input:
        assert a is not None
        return call.quantize_unrecorded(x, a, False, factor).T, None
    if c is None and call.recipe.dequantized_backward:
        assert a is not None
        return call.quantize_unrecorded(x, a, False), None
    if c is None:
        return x, None
    if factor is None:
        return quantize(call, amax.INPUT, "input.T", x.t(), c, True), None
    return call.quantize_unrecorded(x.t(), c, True, factor), None


# ---- weight ----


class PrequantizedWeight(Protocol):
    """Interface of a weight [N, K] that arrives quantized: a tensor without values that returns operands on request.

    Such a weight is neither cached nor planned, because only its owner knows when it changes. Its layers run eagerly,
    because torch.compile would treat the operands as constants.
    """

    @staticmethod
    def eagerly(function: Callable[..., Any], *args: Any) -> Any:
        """Call a function outside of torch.compile."""

    def check_recipe(self, layer: nn.Module, recipe: Recipe | None) -> None:
        """Raise ValueError if the layer's current recipe is not the one that quantized the weight."""

    def quantized_operand(self, call: LinearCall, side: str) -> Quantized:
        """Return the operand [N, K] for "fprop" or the transpose [K, N] for "dgrad", by the call's recipe and factors.

        Records the weight's amax if the recipe has a history.
        """


def is_prequantized(weight: Any) -> bool:
    """Return True if the weight is a `PrequantizedWeight`; plain parameters are not."""
    return hasattr(weight, "quantized_operand")


def quantize_weight(call: LinearCall, weight: Tensor) -> WeightOperands:
    """Return the fprop operand of the weight [N, K]: quantized, or in high precision if the recipe leaves it so."""
    b = call.recipe.fprop.b
    if call.recipe.fprop.a is None:
        w = stored_weight.plain_values(weight, call.dtype)
        if call.training and not call.traced and w is weight:
            # Nothing else registers this use of the weight, and the cached dgrad operand must notice a changed weight.
            weight_cache.expire(call.layer, weight if call.comm is None else call.comm.parameter)
        return WeightOperands(w)
    assert b is not None
    if weight.is_cuda and (weight.shape[0] | weight.shape[1]) & 15:
        warn_once_features(call.layer, weight)
    return WeightOperands(quantized_weight(call, weight, "fprop", b))


def transpose_weight(call: LinearCall, weight: Tensor) -> tuple[Tensor | Quantized, None]:
    """Return the dgrad operand weight.T [K, N]."""
    spec = call.recipe.dgrad.b
    if spec is None:
        return plain_weight(call, weight, call.dtype).t(), None
    return quantized_weight(call, weight, "dgrad", spec), None


def plain_weight(call: LinearCall, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] for an unquantized dgrad; the dequantized fprop operand if the recipe says so."""
    if call.recipe.dequantized_backward:
        spec = call.recipe.fprop.b
        assert spec is not None
        return plain(quantized_weight(call, weight, "fprop", spec), dtype)
    return stored_weight.plain_values(weight, dtype)


def quantized_weight(call: LinearCall, weight: Tensor, side: str, spec: QuantSpec) -> Any:
    """Return the weight [N, K] for fprop or its transpose [K, N] for dgrad, from `quaver.torch.state.weight_cache` if
    valid.

    A traced call of a layer with `cache_compiled_weight` returns a `WeightReference`, from which the GEMM's operator
    gets the operand.
    """
    layer = call.layer
    if weight.__class__ is not nn.Parameter and is_prequantized(weight):
        prequantized: Quantized = weight.quantized_operand(call, side)  # type: ignore[attr-defined]
        return prequantized
    shared = side == "dgrad" and call.recipe.reuse.weight
    q = None if call.entry is None else call.entry.quantized
    if shared and q is not None:
        return q.T
    if side == "dgrad" and call.transposed_weight is not None:
        transposed, call.transposed_weight = call.transposed_weight, None
        return transposed
    if isinstance(weight, QuantizedTensor):
        return stored_weight.operand(weight, side == "dgrad", call.recipe.reuse.weight, spec, call)
    if call.traced:
        if _cached_by_operator(call, spec):
            number = state_of(layer).number
            assert number is not None
            return ops.WeightReference(weight, number, call.recipe, side == "dgrad")
        if shared:
            factor = None if call.factors is None else call.factors[amax.WEIGHT]
            return call.quantize_unrecorded(weight, spec, False, factor, ops.NO_NOISE_ID).T
        if side == "fprop":
            return quantize(call, amax.WEIGHT, "weight", weight, spec)
        return quantize(call, amax.WEIGHT, "weight.T", weight.t(), spec, True)
    key = factor_key(call)
    cache_name = "fprop" if shared else side
    keeps = not capturing(weight)
    parameter = weight if call.comm is None else call.comm.parameter
    entry = weight_cache.lookup(layer, cache_name, parameter, spec, key, call.training) if keeps else None
    q = None if entry is None else entry.quantized
    if q is None:
        window = weight_cache.begin(layer, parameter, call.training) if keeps else None
        q, other = _quantize_weight(call, weight, side, spec)
        if other is not None and call.recipe.reuse.weight:
            q.cached_transpose = other
        entry = (
            weight_cache.store(layer, cache_name, parameter, spec, key, q, window)
            if keeps
            else weight_cache.CachedWeight(q)
        )
        if other is not None and not call.recipe.reuse.weight:
            dgrad_entry = weight_cache.store(layer, "dgrad", parameter, other.spec, key, other, window)
            call.transposed_weight = other if dgrad_entry is None else None
        if not call.training and entry is None:
            weight_cache.count_uncached_forward(layer, parameter)
    elif call.training and call.factors is not None and side == "fprop":
        amax.record(layer, amax.WEIGHT, q.amax)
    if call.recipe.reuse.weight:
        call.entry = entry
    return q.T if shared else q


def _cached_by_operator(call: LinearCall, spec: QuantSpec) -> bool:
    """Return True if the operators of a compiled graph find the weight in the weight cache.

    Not under delayed scaling, whose graph records the weight's amax; nor for what another process may run.
    """
    recipe, layer = call.recipe, call.layer
    return (
        layer.cache_compiled_weight  # type: ignore[return-value]
        and call.training
        and call.comm is None
        and recipe.delayed is None
        and not recipe.dequantized_backward
        and spec.rounding == "nearest"
        and not torch.compiler.is_exporting()
    )


def cached_operand(layer: nn.Module, weight: Tensor, recipe: Recipe, transposed: bool) -> Quantized | None:
    """Return a weight's operand for an operator of a compiled graph, from the weight cache if valid.

    None if `weight` is not the layer's parameter, such as a parametrized weight or the transpose that Conv1D multiplies
    by: a view that an operator makes has no base whose changes could be seen.

    Args:
        weight: [N, K], as the operator got it: the parameter, or a detached alias of it.
        transposed: True for dgrad.
    """
    parameter = layer._parameters.get("weight")
    if parameter is None or _layout(parameter) != _layout(weight):
        return None
    spec = recipe.dgrad.b if transposed else recipe.fprop.b
    assert spec is not None
    with torch.no_grad():
        call = begin(layer, recipe, parameter, parameter.dtype, True)
        call.in_operator = True
        weight_cache.expire_without_gradient(layer, parameter)
        q: Quantized = quantized_weight(call, parameter, "dgrad" if transposed else "fprop", spec)
    return q


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def _quantize_weight(
    call: LinearCall, weight: Tensor, side: str, spec: QuantSpec
) -> tuple[Quantized, Quantized | None]:
    """Quantize the weight for `side`, and dgrad's operand too if one read can write both (else None)."""
    parameter = weight if call.comm is None else call.comm.parameter
    if torch.is_inference_mode_enabled() and weight_cache.can_cache(call.layer, parameter):
        # Cached tensors must not be inference tensors, because other modes read them too.
        with torch.inference_mode(False), torch.no_grad():
            return _quantize_weight(call, weight, side, spec)
    if side == "dgrad" and call.recipe.reuse.weight:
        factor = None if call.factors is None else call.factors[amax.WEIGHT]
        if call.comm is not None:
            return call.comm.quantize("weight", weight, spec, factor, NO_NOISE), None
        return call.operations.quantize(weight, spec, None, factor), None
    if side == "dgrad":
        return quantize(call, amax.WEIGHT, "weight.T", weight.t(), spec), None
    other = call.recipe.dgrad.b
    if not call.training or other is None or not both_at_once(call, spec, other):
        return quantize(call, amax.WEIGHT, "weight", weight, spec), None
    return quantize_both(call, amax.WEIGHT, "weight", weight, spec, other)


def capturing(x: Tensor) -> bool:
    """Return True while a CUDA graph is captured or rehearsed; the weight cache is then neither read nor written."""
    # On a CPU nothing is captured except in tests that simulate a GPU.
    return bool(
        not x.is_cpu or device.forced_implementations or capture.rehearsed
    ) and capture.is_captured_or_rehearsed(x.device)


def factor_key(call: LinearCall) -> Any:
    """Return the cache key of the weight's encode factor: its value on the host, or the version of the device
    factors.
    """
    if call.factors is None:
        return 0.0
    return _version(call) if isinstance(call.factors, Tensor) else call.factors[amax.WEIGHT]


def _version(call: LinearCall) -> int:
    """Return the version of the device factors that the forward read; the weight cache uses it as a key."""
    if call.version is None:
        factor = call.layer._buffers["factor"]
        assert factor is not None
        call.version = factor._version
        if layer_state.state.replay is not None or layer_state.state.writing:
            call.version = layer_state.logged_or_replayed(call.layer, "version of factors", call.version)
    return call.version


def warn_once_features(layer: nn.Module, weight: Tensor) -> None:
    """Warn once if no native GEMM supports the layer's features; tokens are padded automatically, features are not."""
    state = state_of(layer)
    if state.announced or device.why_no_fp8(weight.device, "native"):
        return
    state.announced = True
    n, k = weight.shape
    name = layer.__dict__.get("qualified_name") or f"Linear({k} → {n})"
    warnings.warn(
        f"{name} has a weight [{n}, {k}], and cuBLASLt's GEMMs need multiples of 16 output columns: its other GEMMs "
        "run as bf16 GEMMs of decoded operands, exact but slower; pad the features or leave the layer out with "
        "convert(skip=...)",
        stacklevel=2,
    )


# ---- grad_output ----


def quantize_grad(call: LinearCall, g: Tensor, needs: Sequence[Any], bias_dtype: Any) -> Operands:
    """Quantize grad_output for dgrad, and for wgrad if one read of g serves both."""
    need_input, need_weight, need_bias = needs
    a, c = call.recipe.dgrad.a, call.recipe.wgrad.a
    if a is None or not (need_input or (need_weight and call.recipe.reuse.grad_output)):
        return g, None, None, None, None
    if need_input and need_weight and c is not None and both_at_once(call, a, c):
        sums = need_bias and bias_dtype in ops.DTYPES
        q, transposed = quantize_both(call, amax.GRAD_OUTPUT, "grad_output", g, a, c, sums)
        sums = q.partial_sums
        grad_bias = None if sums is None or not need_bias else ops.bias_gradient(g, bias_dtype, sums)
        return q, None, transposed, None, grad_bias
    q = quantize(call, amax.GRAD_OUTPUT, "grad_output", g, a, False)
    return q, None, None, None, None


def transpose_grad(call: LinearCall, g: Tensor, operands: Operands) -> tuple[Tensor | Quantized, None]:
    """Return the wgrad operand grad_output.T [N, T]."""
    q, _, transposed, _, _ = operands
    c = call.recipe.wgrad.a
    if transposed is not None:
        return transposed, None
    if c is None:
        return g.t(), None
    if call.recipe.reuse.grad_output:
        return q.T, None
    return quantize(call, amax.GRAD_OUTPUT, "grad_output.T", g.t(), c, True), None


# ---- GEMMs ----


def fprop(call: LinearCall, x: Any, _: None, weight: Any, __: None, bias: Tensor | None) -> Tensor:
    """Compute x [T, K] @ weight [N, K].T + bias."""
    hidden = not call.traced and selective_checkpoint.thread.hidden != ()
    if isinstance(x, Tensor):
        if hidden:
            # The checkpoint's cached result must not change, but an output may be written to.
            return selective_checkpoint.seen(high_precision, x, weight, call.dtype, bias).clone()
        return high_precision(x, weight, call.dtype, bias)
    multiply = ops.shown_matmul if hidden else call.operations.matmul
    return multiply(x, weight, call.dtype, bias, call.recipe.fprop.fast_accum)


def dgrad(call: LinearCall, g: Any, _: None, weight: Any, __: None, bias: None) -> Tensor:
    """Compute g [T, N] @ weight.T [K, N].T."""
    if isinstance(g, Tensor):
        return high_precision(g, weight, call.dtype)
    return call.operations.matmul(g, weight, call.dtype, None, call.recipe.dgrad.fast_accum)


def wgrad(call: LinearCall, g: Any, _: None, x: Any, __: None, dtype: torch.dtype) -> Tensor:
    """Compute g.T [N, T] @ x.T [K, T].T in dtype."""
    record_backward(call)
    if isinstance(g, Tensor):
        return high_precision(g, plain(x, g.dtype).t(), dtype)
    return call.operations.matmul(g, x, dtype, None, call.recipe.wgrad.fast_accum)


def record_backward(call: LinearCall) -> None:
    """Mark the cached weight as used by a backward that has come to its last GEMM."""
    if not call.traced:
        weight_cache.record_backward(call.layer)


def plain(x: Tensor | Quantized, dtype: torch.dtype) -> Tensor:
    """Return an unquantized GEMM operand: the tensor itself, or a `Quantized` dequantized to `dtype`."""
    return x if isinstance(x, Tensor) else ops.DEQUANTIZE(x, dtype)


def matrix(x: Tensor) -> Tensor:
    """Flatten [..., k] to [tokens, k]."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def high_precision(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Compute a [m, k] @ b [n, k].T (+ bias) unquantized, for operands that a recipe does not quantize."""
    if is_tracing():
        # In eager mode the caller has already disabled autocast.
        with torch.autocast(a.device.type, enabled=False):
            return _high_precision(a, b, dtype, bias)
    return _high_precision(a, b, dtype, bias)


def _high_precision(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    if a.dtype is b.dtype is dtype:
        return F.linear(a, b, bias)
    y = a.to(torch.float32) @ b.to(torch.float32).t()
    return (y if bias is None else y + bias).to(dtype)


# ---- quantization of one operand ----


def quantize(
    call: LinearCall, column: int, operand: str, x: Tensor, spec: QuantSpec, transposed: bool | None = None
) -> Quantized:
    """Quantize one operand of a layer, with its delayed scale and its noise if the recipe has them.

    Args:
        column: column of the operand in the scaling history.
        operand: name of the operand, for example "weight.T".
        transposed: used under torch.compile only: True if x is a transposed view of a row-major matrix.
    """
    layer, factor = call.layer, None if call.factors is None else call.factors[column]
    noise, record = _noise(layer, operand, spec), call.training and factor is not None
    if call.traced:
        number = state_of(layer).number if record and column == amax.GRAD_OUTPUT else None
        q, record = ops.QUANTIZE.traced(x, spec, None, factor, noise, number, transposed), record and number is None
    elif call.comm is not None:
        q = call.comm.quantize(operand, x, spec, factor, noise)
    elif call.operations.both is None:
        q = call.operations.quantize(x, spec, None, factor, noise)
    else:
        q = call.operations.quantize(x, spec, None, factor, noise, *_hints(call, column, x))
    _advance_count(layer, operand, spec)
    if record and not q.recorded_amax:
        amax.record(layer, column, q.amax)
    if observer.active.observers and call.is_observable:
        for each in observer.active.observers:
            each.observe_operand(layer, call.recipe, operand, x, q)
    return q


def _noise(layer: nn.Module, operand: str, spec: QuantSpec) -> Noise:
    return NO_NOISE if spec.rounding == "nearest" else draw(layer, operand)


def _advance_count(layer: nn.Module, operand: str, spec: QuantSpec) -> None:
    if spec.rounding != "nearest":
        advance_count(layer, operand)


def _hints(call: LinearCall, column: int, x: Tensor) -> tuple[bool, Tensor | None]:
    """Return whether the column's factor is known to be set, and where a kernel may write the amax (None if not
    recorded).
    """
    if call.factors is None:
        return False, None
    return amax.is_set(column, call.factors), amax.newest(call.layer, column, x) if call.training else None


def both_at_once(call: LinearCall, spec: QuantSpec, other: QuantSpec) -> bool:
    """Return True if `quantize_both` quantizes an operand and its transpose in one call, and faster than two."""
    if call.operations.both is None or observer.active.observers:
        return False
    return not call.traced or spec.rounding == other.rounding == "nearest"


def quantize_both(
    call: LinearCall, column: int, operand: str, x: Tensor, spec: QuantSpec, other: QuantSpec, sums: bool = False
) -> tuple[Quantized, Quantized]:
    """Quantize x by `spec` and its transpose by `other` in one call; otherwise like `quantize`.

    Args:
        sums: True also sums x over its rows if the same kernel can do it: `partial_sums` of the first result.
    """
    assert call.operations.both is not None
    layer = call.layer
    noise = transposed_noise = _noise(layer, operand, spec)
    shared = spec == other and spec.transposable
    if not shared:
        transposed_noise = _noise(layer, operand + ".T", other)
    factor = None if call.factors is None else call.factors[column]
    record = call.training and factor is not None
    if call.traced:
        number = state_of(layer).number if record and column == amax.GRAD_OUTPUT else None
        q, transposed = ops.QUANTIZE_BOTH.traced(x, spec, other, None, factor, number=number)
        record = record and number is None
    else:
        hints = _hints(call, column, x)
        q, transposed = call.operations.both(x, spec, other, None, factor, noise, transposed_noise, *hints, sums)
    if record and not q.recorded_amax:
        amax.record(layer, column, q.amax)
    _advance_count(layer, operand, spec)
    if not shared:
        _advance_count(layer, operand + ".T", other)
    return q, transposed
