"""The three GEMMs of a linear layer as plain functions: the slow path that supports every recipe and device.

    fprop   output      [T, N] = input         [T, K] @ weight   [N, K].T
    dgrad   grad_input  [T, K] = grad_output   [T, N] @ weight.T [K, N].T
    wgrad   grad_weight [N, K] = grad_output.T [N, T] @ input.T  [K, T].T

A `LinearContext` carries the choices of one forward to its backward. Backward saves the quantized operand (8 or 4 bits
an element), and the input in high precision only if the recipe requires it.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.cpu import decode
from quaver.torch.backends.gpu import capture, device
from quaver.torch.linear import stored_weight
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import NO_NOISE, Noise, is_tracing
from quaver.torch.operations import ops, selective_checkpoint
from quaver.torch.state import counters, layer_state, weight_cache
from quaver.torch.state.history import amax, scaling_step
from quaver.torch.state.layer_state import state_of
from quaver.torch.state.noise import draw, drawn

Factors = Tensor | list[float] | None


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

    def quantized_operand(self, call: "LinearContext", side: str) -> Quantized:
        """Return the operand [N, K] for "fprop" or the transpose [K, N] for "dgrad", by the call's recipe and factors.

        Records the weight's amax if the recipe has a history.
        """


def is_prequantized(weight: Any) -> bool:
    """Return True if the weight is a `PrequantizedWeight`; plain parameters are not."""
    return hasattr(weight, "quantized_operand")


#: Value in `needs` for a weight gradient that is computed later. The backward may return a function in its place, which
#: references only what it needs and accepts another `dtype` than the weight's.
LATER: Any = object()
#: Gradients of input, weight and bias; that of the weight is a function if it is needed `LATER`.
Gradients = tuple[Tensor | None, Any, Tensor | None]


#: wgrad operand of an input.
SavedInput = tuple[Tensor | Quantized, None]


class OperandComm(Protocol):
    """Quantization of sharded operands."""

    @property
    def parameter(self) -> Tensor:
        """The full parameter; the layer's weight is a shard of it."""

    def quantize(
        self, operand: str, x: Tensor, spec: QuantSpec, factor: Tensor | float | None, noise: Noise
    ) -> Quantized:
        """Quantize a shard with the codes and scales that it has in the whole operand.

        The amax is that of all shards if they share one scale.
        """


class LinearContext:
    """State that one call of a layer carries from its forward to its backward."""

    __slots__ = (
        *("both", "dtype", "factors", "layer", "matmul", "pending", "parts", "plan", "quantize", "recipe", "record"),
        *("traced", "transposed_weight", "version", "weight"),
    )

    def __init__(
        self, layer: nn.Module, recipe: Recipe, x: Tensor, dtype: torch.dtype, record: bool, factors: Factors
    ) -> None:
        self.layer, self.recipe = layer, recipe
        #: dtype of the activations.
        self.dtype = dtype
        #: True if the forward runs with gradients; delayed scaling then records the amaxes of this call.
        self.record = record
        #: Encode factors of input, weight and grad_output in the forward; None without delayed scaling.
        self.factors = factors
        #: True under torch.compile: operations are opaque and nothing is cached between calls.
        self.traced = is_tracing()
        self.plan = recipe.plan
        self.quantize: Callable[..., Quantized]
        self.matmul: Callable[..., Tensor]
        #: `ops.QUANTIZE_BOTH` if it is faster than two separate calls, else None.
        self.both: Callable[..., tuple[Quantized, Quantized]] | None
        if self.traced:
            self.quantize, self.matmul = ops.QUANTIZE, ops.MATMUL
            self.both = ops.QUANTIZE_BOTH if x.is_cuda else None
        else:
            _, self.quantize, self.matmul, self.both = ops.resolve(recipe, x)
        #: Communication for sharded operands, or None if the layer has whole operands.
        self.parts: OperandComm | None = None
        #: Version of the factors on the device that the forward read.
        self.version: int | None = None
        #: Cache entry of the fprop weight, if dgrad reads the same codes.
        self.weight: weight_cache.CachedWeight | None = None
        #: dgrad operand of the weight, if it was written together with fprop's and is not cached.
        self.transposed_weight: Quantized | None = None
        #: Handle that keeps the delayed-scaling step open until the backward of this call has run.
        self.pending: scaling_step.PendingBackward | None = None

    @property
    def factor_key(self) -> float:
        """Cache key of the weight's encode factor: its value on the host, or the version of the device factors."""
        if self.factors is None:
            return 0.0
        return _version(self) if isinstance(self.factors, Tensor) else self.factors[amax.WEIGHT]

    def output(self, x: Tensor | Quantized, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run fprop: x [T, K], quantized already if the recipe says so, to y [T, N]."""
        b = self.recipe.fprop.b
        if isinstance(x, Tensor):
            w = stored_weight.dequantized(self.layer, weight, x.dtype) if stored_weight.are_codes(weight) else weight
            if self.record and not self.traced and w is weight:
                # Nothing else registers this use of the weight, and the cached dgrad operand must notice a changed
                # weight.
                weight_cache.expire(self.layer, weight)
            if not self.traced and selective_checkpoint.is_hidden():
                return selective_checkpoint.seen(high_precision, x, w, x.dtype, bias)
            return high_precision(x, w, x.dtype, bias)
        assert b is not None
        if weight.is_cuda and (weight.shape[0] | weight.shape[1]) & 15:
            warn_once_features(self.layer, weight)
        wq = quantized_weight(self, weight, "fprop", b)
        if not self.traced and selective_checkpoint.is_hidden():
            return ops.shown_matmul(x, wq, self.dtype, bias, self.recipe.fprop.fast_accum)
        return self.matmul(x, wq, self.dtype, bias, self.recipe.fprop.fast_accum)

    def transposed(self, x: Tensor | None, xq: Tensor | Quantized) -> tuple[Tensor | Quantized, None]:
        """Return the wgrad operand input.T [K, T], from the fprop operand or from x [T, K]; x itself if wgrad is
        unquantized.
        """
        c = self.recipe.wgrad.b
        if self.plan.input:
            assert isinstance(xq, Quantized)
            return xq.T, None
        if c is None and self.recipe.dequantized_backward:
            return xq, None
        assert x is not None
        return x if c is None else quantize(self, amax.INPUT, "input.T", x.t(), c, True), None

    def recomputed(self, x: Tensor) -> tuple[Tensor | Quantized, None]:
        """Return what `transposed` returns for an x that backward has recomputed, without recording or counting it
        again.
        """
        a, c = self.recipe.fprop.a, self.recipe.wgrad.b
        factor = None if self.factors is None else self.factors[amax.INPUT]
        if self.plan.input:
            assert a is not None
            return self.transposed(None, self.quantize_unrecorded(x, a, False, factor))
        if c is None and self.recipe.dequantized_backward:
            assert a is not None
            return self.quantize_unrecorded(x, a, False), None
        if c is None or factor is None:
            return self.transposed(x, x)
        return self.quantize_unrecorded(x.t(), c, True, factor), None

    def quantize_unrecorded(
        self,
        x: Tensor,
        spec: QuantSpec,
        transposed: bool,
        factor: Tensor | float | None = None,
        noise: Noise = NO_NOISE,
    ) -> Quantized:
        """Quantize x without recording its amax or counting it.

        Args:
            transposed: as in `QUANTIZE.traced`.
            noise: used under torch.compile only, to distinguish this quantization from an earlier one of the same
                tensor.
        """
        if self.traced:
            q: Quantized = ops.QUANTIZE.traced(x, spec, None, factor, noise, transposed=transposed)
            return q
        return self.quantize(x, spec, None, factor)

    def gradients(
        self,
        g: Tensor,
        weight: Tensor,
        saved_input: SavedInput | Callable[[Tensor], SavedInput],
        needs: Sequence[Any],
        weight_dtype: torch.dtype,
        bias_dtype: torch.dtype,
    ) -> Gradients:
        """Compute the needed ones of grad_input [T, K], grad_weight [N, K] and grad_bias [N] from grad_output [..., N].

        Args:
            saved_input: what `transposed` returned, or a function of grad_input that returns it.
            needs: one flag per gradient; the weight's may be `LATER`.
        """
        if self.pending is not None:
            self.pending.finish()
        g = matrix(g)
        need_input, need_weight, need_bias = needs
        gq: Tensor | Quantized = g
        transposed: Quantized | None = None
        grad_input = grad_bias = None
        grad_weight: Any = None
        a, c = self.recipe.dgrad.a, self.recipe.wgrad.a
        if a is not None and (need_input or (need_weight and self.plan.grad_output)):
            if self.both is not None and need_input and need_weight and c is not None and both_at_once(self, a, c):
                sums = need_bias and bias_dtype in ops.DTYPES
                gq, transposed = quantize_both(self, amax.GRAD_OUTPUT, "grad_output", g, a, c, sums)
            else:
                gq = quantize(self, amax.GRAD_OUTPUT, "grad_output", g, a, False)
                if need_input and need_weight and self.plan.grad_output and not self.traced and g.is_cpu:
                    decode.cache_decoded(gq, decode.GRADIENT)
        if need_bias:
            grad_bias = ops.bias_gradient(g, bias_dtype, gq.partial_sums if isinstance(gq, Quantized) else None)
        if need_input:
            grad_input = self._dgrad(gq, weight)
        if need_weight:
            if callable(saved_input):
                assert grad_input is not None
                saved_input = saved_input(grad_input)
            gt: Tensor | Quantized
            if transposed is not None:
                gt = transposed
            elif c is None:
                gt = g.t()
            elif self.plan.grad_output:
                gt = gq.T
            else:
                gt = quantize(self, amax.GRAD_OUTPUT, "grad_output.T", g.t(), c, True)
            gives = partial(self._of_weight, gt, saved_input[0], dtype=weight_dtype)
            grad_weight = gives if need_weight is LATER else gives()
        return grad_input, grad_weight, grad_bias

    def _of_weight(self, g: Tensor | Quantized, saved_input: Tensor | Quantized, *, dtype: torch.dtype) -> Tensor:
        """Run `_wgrad`, the last GEMM of a layer's backward, and mark the cached weight as used."""
        grad_weight = self._wgrad(g, saved_input, dtype)
        if not self.traced:
            weight_cache.record_backward(self.layer)
        return grad_weight

    def _dgrad(self, g: Tensor | Quantized, weight: Tensor) -> Tensor:
        """Run dgrad: grad_output [T, N], quantized already if the recipe says so, to grad_input [T, K]."""
        spec = self.recipe.dgrad.b
        if spec is None:
            assert isinstance(g, Tensor)
            return high_precision(g, self.plain_weight(weight, g.dtype).t(), self.dtype)
        assert isinstance(g, Quantized)
        wq = quantized_weight(self, weight, "dgrad", spec)
        return self.matmul(g, wq, self.dtype, None, self.recipe.dgrad.fast_accum)

    def plain_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the unquantized dgrad operand [N, K]: the weight, or the dequantized fprop operand if the recipe says
        so.
        """
        if self.recipe.dequantized_backward:
            spec = self.recipe.fprop.b
            assert spec is not None
            return plain(quantized_weight(self, weight, "fprop", spec), dtype)
        return stored_weight.dequantized(self.layer, weight, dtype) if stored_weight.are_codes(weight) else weight

    def _wgrad(self, g: Tensor | Quantized, saved_input: Tensor | Quantized, dtype: torch.dtype) -> Tensor:
        """Run wgrad: grad_output.T [N, T] and input.T [K, T] to grad_weight [N, K] in `dtype`.

        The gradient of a stored quantized weight is float32; autograd rounds it to the dtype of the parameter's
        gradient.
        """
        if self.layer.__dict__.get("weight_spec") is not None:
            dtype = torch.float32
        if isinstance(g, Tensor):
            return high_precision(g, plain(saved_input, g.dtype).t(), dtype)
        assert isinstance(saved_input, Quantized)
        return self.matmul(g, saved_input, dtype, None, self.recipe.wgrad.fast_accum)


def plain(x: Tensor | Quantized, dtype: torch.dtype) -> Tensor:
    """Return an unquantized GEMM operand: the tensor itself, or a `Quantized` dequantized to `dtype`."""
    return x if isinstance(x, Tensor) else x.dequantize().to(dtype)


def matrix(x: Tensor) -> Tensor:
    """Flatten [..., k] to [tokens, k]."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def begin(layer: nn.Module, recipe: Recipe, x: Tensor, dtype: torch.dtype, training: bool) -> LinearContext:
    """Begin a call of a layer and join the current step of delayed scaling.

    Args:
        x: tensor whose device selects the implementations.
        dtype: dtype of the GEMMs' inputs and outputs.
    """
    factors = None if recipe.delayed is None else scaling_step.factors(layer, training)
    call = LinearContext(layer, recipe, x, dtype, training, factors)
    if factors is not None and training and not call.traced:
        # The step stays open until backward has recorded grad_output.
        call.pending = scaling_step.pending(layer)
    return call


def quantize(
    call: LinearContext, column: int, operand: str, x: Tensor, spec: QuantSpec, transposed: bool | None = None
) -> Quantized:
    """Quantize one operand of a layer, with its delayed scale and its noise if the recipe has them.

    Args:
        column: column of the operand in the scaling history.
        operand: name of the operand, for example "weight.T".
        transposed: as in `QUANTIZE.traced`.
    """
    layer, factor = call.layer, None if call.factors is None else call.factors[column]
    noise, record = _noise(layer, operand, spec), call.record and factor is not None
    if call.traced:
        number = state_of(layer).number if record and column == amax.GRAD_OUTPUT else None
        q, record = ops.QUANTIZE.traced(x, spec, None, factor, noise, number, transposed), record and number is None
    elif call.parts is not None:
        q = call.parts.quantize(operand, x, spec, factor, noise)
    elif call.both is None:
        q = call.quantize(x, spec, None, factor, noise)
    else:
        q = call.quantize(x, spec, None, factor, noise, *_hints(call, column, x))
    _drawn(layer, operand, spec)
    if record:
        amax.record(layer, column, q.amax, q.recorded_amax)
    if counters.active.counters is not None and not layer_state.replaying():
        counters.active.counters.count(layer, operand, x, q)
    return q


def _noise(layer: nn.Module, operand: str, spec: QuantSpec) -> Noise:
    return NO_NOISE if spec.rounding == "nearest" else draw(layer, operand)


def _drawn(layer: nn.Module, operand: str, spec: QuantSpec) -> None:
    if spec.rounding != "nearest":
        drawn(layer, operand)


def _hints(call: LinearContext, column: int, x: Tensor) -> tuple[bool, Tensor | None]:
    """Return whether the column's factor is known to be set, and where a kernel may write the amax (None if not
    recorded).
    """
    if call.factors is None:
        return False, None
    return amax.is_set(column, call.factors), amax.newest(call.layer, column, x) if call.record else None


def both_at_once(call: LinearContext, spec: QuantSpec, other: QuantSpec) -> bool:
    """Return True if `quantize_both` can quantize an operand and its transpose in one call."""
    if counters.active.counters is not None:
        return False
    return not call.traced or spec.rounding == other.rounding == "nearest"


def quantize_both(
    call: LinearContext, column: int, operand: str, x: Tensor, spec: QuantSpec, other: QuantSpec, sums: bool = False
) -> tuple[Quantized, Quantized]:
    """Quantize x by `spec` and its transpose by `other` in one call; otherwise like `quantize`.

    Args:
        sums: True also sums x over its rows if the same kernel can do it: `partial_sums` of the first result.
    """
    assert call.both is not None
    layer = call.layer
    noise = transposed_noise = _noise(layer, operand, spec)
    shared = spec == other and spec.transposable
    if not shared:
        transposed_noise = _noise(layer, operand + ".T", other)
    factor = None if call.factors is None else call.factors[column]
    record = call.record and factor is not None
    if call.traced:
        number = state_of(layer).number if record and column == amax.GRAD_OUTPUT else None
        q, transposed = ops.QUANTIZE_BOTH.traced(x, spec, other, None, factor, number=number)
        record = record and number is None
    else:
        hints = _hints(call, column, x)
        q, transposed = call.both(x, spec, other, None, factor, noise, transposed_noise, *hints, sums)
    if record:
        amax.record(layer, column, q.amax, q.recorded_amax)
    _drawn(layer, operand, spec)
    if not shared:
        _drawn(layer, operand + ".T", other)
    return q, transposed


def _version(call: LinearContext) -> int:
    """Return the version of the device factors that the forward read; the weight cache uses it as a key."""
    if call.version is None:
        factor = call.layer._buffers["factor"]
        assert factor is not None
        call.version = factor._version
        if layer_state.state.replay is not None or layer_state.state.writing:
            call.version = layer_state.logged_or_replayed(call.layer, "version of factors", call.version)
    return call.version


def capturing(x: Tensor) -> bool:
    """Return True while a CUDA graph is captured or rehearsed; the weight cache is then neither read nor written."""
    # On a CPU nothing is captured except in tests that simulate a GPU.
    return bool(
        not x.is_cpu or device.forced_implementations or capture.rehearsed
    ) and capture.is_captured_or_rehearsed(x.device)


def quantized_weight(call: LinearContext, weight: Tensor, side: str, spec: QuantSpec) -> Quantized:
    """Return the weight [N, K] for fprop or its transpose [K, N] for dgrad, from `quaver.torch.state.weight_cache` if
    valid.
    """
    layer = call.layer
    if weight.__class__ is not nn.Parameter and is_prequantized(weight):
        prequantized: Quantized = weight.quantized_operand(call, side)  # type: ignore[attr-defined]
        return prequantized
    shared = side == "dgrad" and call.plan.weight
    q = None if call.weight is None else call.weight.quantized
    if shared and q is not None:
        return q.T
    if side == "dgrad" and call.transposed_weight is not None:
        transposed, call.transposed_weight = call.transposed_weight, None
        return transposed
    if weight.dtype in stored_weight.CODES:
        return stored_weight.operand(layer, weight, side == "dgrad", call.plan.weight, spec, call)
    if call.traced:
        if shared:
            factor = None if call.factors is None else call.factors[amax.WEIGHT]
            return call.quantize_unrecorded(weight, spec, False, factor, ops.NO_NOISE_ID).T
        if side == "fprop":
            return quantize(call, amax.WEIGHT, "weight", weight, spec)
        return quantize(call, amax.WEIGHT, "weight.T", weight.t(), spec, True)
    factor_key = call.factor_key
    cache_name = "fprop" if shared else side
    keeps = not capturing(weight)
    parameter = weight if call.parts is None else call.parts.parameter
    entry = weight_cache.lookup(layer, cache_name, parameter, spec, factor_key, call.record) if keeps else None
    q = None if entry is None else entry.quantized
    if q is None:
        window = weight_cache.begin(layer, parameter, call.record) if keeps else None
        q, other = _quantize_weight(call, weight, side, spec)
        if other is not None and call.plan.weight:
            q.cached_transpose = other
        entry = (
            weight_cache.store(layer, cache_name, parameter, spec, factor_key, q, window)
            if keeps
            else weight_cache.CachedWeight(q)
        )
        if other is not None and not call.plan.weight:
            dgrad_entry = weight_cache.store(layer, "dgrad", parameter, other.spec, factor_key, other, window)
            call.transposed_weight = other if dgrad_entry is None else None
        if not call.record and entry is None:
            weight_cache.count_uncached_forward(layer, parameter)
    elif call.record and call.factors is not None and side == "fprop":
        amax.record(layer, amax.WEIGHT, q.amax)
    if call.plan.weight:
        call.weight = entry
    return q.T if shared else q


def _quantize_weight(
    call: LinearContext, weight: Tensor, side: str, spec: QuantSpec
) -> tuple[Quantized, Quantized | None]:
    """Quantize the weight for `side`, and dgrad's operand too if one read can write both (else None)."""
    parameter = weight if call.parts is None else call.parts.parameter
    if torch.is_inference_mode_enabled() and weight_cache.can_cache(call.layer, parameter):
        # Cached tensors must not be inference tensors, because other modes read them too.
        with torch.inference_mode(False), torch.no_grad():
            return _quantize_weight(call, weight, side, spec)
    if side == "dgrad" and call.plan.weight:
        factor = None if call.factors is None else call.factors[amax.WEIGHT]
        if call.parts is not None:
            return call.parts.quantize("weight", weight, spec, factor, NO_NOISE), None
        return call.quantize(weight, spec, None, factor), None
    if side == "dgrad":
        return quantize(call, amax.WEIGHT, "weight.T", weight.t(), spec), None
    other = call.recipe.dgrad.b
    wanted = call.both is not None and call.record and other is not None and both_at_once(call, spec, other)
    if not wanted:
        return quantize(call, amax.WEIGHT, "weight", weight, spec), None
    assert other is not None
    return quantize_both(call, amax.WEIGHT, "weight", weight, spec, other)


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
