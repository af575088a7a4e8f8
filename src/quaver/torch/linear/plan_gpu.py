"""Planned GEMMs on a GPU: the kernels that write a layer's operands, and the native scaled GEMMs that multiply them.

Kernels, arguments and bits are those of the general plan; they are looked up once per layer shape and input shape.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu import cross_entropy, fused_quantize, quantize
from quaver.torch.backends.gpu.buffers import PACKED4
from quaver.torch.backends.gpu.quantize import family_of
from quaver.torch.backends.gpu.quantize_launch import (
    TOGETHER,
    QuantizeInputs,
    QuantizeLaunch,
    RequestedOperands,
    RowColOperands,
    RowColQuantizer,
    combine_launches,
    delayed_inputs,
    noise_inputs,
    reuse_results,
)
from quaver.torch.backends.gpu.scaled_mm import (
    FAST,
    SCALING,
    SWIZZLE,
    ScaledGemmKind,
    any_matrix,
    by_columns,
    choose_gemm,
    matrix,
    reads_transposes,
    role,
    scales,
)
from quaver.torch.backends.gpu.tensorwise import empty_codes
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
from quaver.torch.linear.plan_emulated import noise_of, write_back_counts
from quaver.torch.numerics.quantized import FLOAT8, Quantized
from quaver.torch.operations import ops
from quaver.torch.state import weight_cache
from quaver.torch.state.history import amax, scaling_step
from quaver.torch.state.history import roll_gpu as histories
from quaver.torch.state.layer_state import LayerState


class ScaledGemmArguments(NamedTuple):
    """Arguments of a scaled GEMM that describe the scales of its operands, in the order of `torch._scaled_mm_v2`."""

    a: list[int]
    a_swizzle: list[int]
    b: list[int]
    b_swizzle: list[int]
    fast: bool
    kind: ScaledGemmKind
    #: True if operands may be transposed views of codes that were written untransposed.
    views: bool


@dataclass(slots=True)
class DelayedState:
    """Factors and history slots of one step under delayed scaling, and the versions that detect a change of them."""

    #: Result of `amax.saved_factors`, and one flag per column for factors known to be set.
    factors: Tensor
    known: list[bool]
    #: Result of `amax.newest` for each column: where a kernel writes the amax.
    newest: list[Tensor | None]
    #: Kernel arguments made of both, per column.
    by_column: list[QuantizeInputs]
    rolled: Tensor | None
    factor: Tensor
    version: int
    history: Tensor
    address: int

    def in_backward(self, layer: nn.Module, g: Tensor) -> "DelayedState":
        history, newest = layer._buffers["history"], self.newest
        if history is not self.history or history.data_ptr() != self.address:
            return _with_newest(self, [*newest[:2], amax.newest(layer, amax.GRAD_OUTPUT, g)])
        return self


def _with_newest(delayed: DelayedState, newest: list[Tensor | None]) -> DelayedState:
    by_column = [
        delayed_inputs(delayed.factors, i, *launch_arguments)
        for i, launch_arguments in enumerate(zip(delayed.known, newest, strict=True))
    ]
    return replace(delayed, newest=newest, by_column=by_column)


def _delayed(layer: nn.Module, x: Tensor) -> DelayedState | None:
    """Return the delayed-scaling state, reused until a roll, load or move changes it.

    Returns None if the factors are on the host or on another device than x, because kernels get raw addresses.
    """
    scaling_step.join(layer, True)
    state: LayerState = layer._state  # type: ignore[assignment]
    stacked, seen = state.stacked, state.factors
    factor: Tensor = layer._buffers["factor"]  # type: ignore[assignment]
    history: Tensor = layer._buffers["history"]  # type: ignore[assignment]
    if (
        seen is not None
        and stacked is not None
        and stacked[0].rolled is seen.rolled
        and factor is seen.factor
        and factor._version == seen.version
        and history is seen.history
        and history.data_ptr() == seen.address
        and not stacked[0].captured
    ):
        return seen
    factors = amax.saved_factors(layer)
    if isinstance(factors, list) or factors.device != x.device or history.device != x.device:
        return None
    known = [amax.is_set(column, factors) for column in range(3)]
    newest = [amax.newest(layer, column, x) for column in range(3)]
    rolled = None if stacked is None else stacked[0].rolled
    delayed = DelayedState(factors, known, [], [], rolled, factor, factor._version, history, history.data_ptr())
    delayed = _with_newest(delayed, newest)
    # Factors not produced by a roll are a private copy, so they are not reused.
    state.factors = delayed if rolled is not None and hasattr(factors, "known_set") else None
    return delayed


def _record_amax(call: LinearCall, column: int, top: Tensor) -> None:
    """Record an amax that another layer's launch has measured."""
    histories.record_amax(call.factors.history, column, top)


def build(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> LinearPlan | None:
    """Plan a layer for inputs like x [..., K], or return None if only the general plan supports them."""
    if not hasattr(torch, "_scaled_mm_v2"):
        # `_scaled_mm_v2` is private; the general plan calls the public function.
        return None
    tokens, (n, k) = x.numel() // max(x.shape[-1], 1), weight.shape
    if x.numel() == 0 or any(side & 15 for side in (tokens, n, k)) or 2 * k > fused_quantize.WIDEST_PRODUCERS:
        # Sides that need padding, or gate and value rows too wide for the kernels before the layer.
        return None
    like = x.detach().view(tokens, k)
    specs = [spec for gemm in recipe.gemms.values() for spec in (gemm.a, gemm.b)]
    if any(spec is not None and spec.format.name not in FLOAT8 and not spec.two_level for spec in specs):
        # Planned kernels write FP8 and two-level codes only.
        return None
    views = all(spec is not None and spec.per_tensor for spec in specs) and reads_transposes(x.device)
    gemms = {
        "fprop": _gemm("fprop", tokens, n, k, bias, like, recipe, views),
        "dgrad": _gemm("dgrad", tokens, k, n, None, like, recipe, views),
        "wgrad": _gemm("wgrad", n, k, tokens, None, like, recipe, views),
    }
    plain = recipe.wgrad.a is None and recipe.wgrad.b is None
    if any(gemm is None and not (plain and name == "wgrad") for name, gemm in gemms.items()):
        return None
    input_launch = _plan_quantization(
        like, recipe.fprop.a, recipe.wgrad.b, RequestedOperands(transpose=True, views=views)
    )
    g = like.new_empty((tokens, n))
    sums = bias is not None and bias.requires_grad and not cross_entropy.column_sum_reason(g, bias.dtype)
    grad_launch = _plan_quantization(g, recipe.dgrad.a, recipe.wgrad.a, RequestedOperands(sums=sums, views=views))
    if input_launch is None or grad_launch is None:
        return None
    if bias is not None and sums:
        grad_launch = cross_entropy.summed(grad_launch, bias.dtype)
    fprop, dgrad = gemms["fprop"], gemms["dgrad"]
    assert fprop is not None and dgrad is not None

    input_quantizer = RowColQuantizer(x.device, input_launch)
    quantize_input = _quantizer(input_quantizer, recipe, amax.INPUT)
    quantize_together = None
    if weight.dtype is x.dtype and x.numel() + weight.numel() <= TOGETHER:
        weight_launch = _plan_quantization(
            weight.detach(), recipe.fprop.b, recipe.dgrad.b, RequestedOperands(transpose=True, views=views), True
        )
        both = None if weight_launch is None else combine_launches(input_launch, weight_launch)
        if both is not None:
            both_cast = RowColQuantizer(x.device, both)
            quantize_together = _quantize_together(both_cast, quantize_input, (fprop, dgrad), views)

    def quantize_weight(call: LinearCall, weight: Tensor) -> WeightOperands:
        return _cached_weight(call, weight) or _weight(call, weight, (fprop, dgrad))

    def transpose_weight(call: LinearCall, weight: Tensor) -> tuple[Tensor, Any]:
        w = saved_operands(call)
        if w is not None:
            return w.dgrad, w.dgrad_scale
        return _right(_quantized_weight(_general_call(call, weight, False), weight, "dgrad"), dgrad)

    return LinearPlan(
        recipe=recipe,
        quantize_input=quantize_input,
        transpose_input=_transpose_input,
        quantize_weight=quantize_weight,
        transpose_weight=transpose_weight,
        quantize_grad=_quantizer(RowColQuantizer(x.device, grad_launch), recipe, amax.GRAD_OUTPUT),
        transpose_grad=_plain_grad if gemms["wgrad"] is None else _transposed_view if views else written_transpose,
        fprop=_gemm_function(fprop, x.dtype, True),
        dgrad=_gemm_function(dgrad, x.dtype, True),
        wgrad=_plain_wgrad if gemms["wgrad"] is None else _wgrad_function(gemms["wgrad"], x.dtype),
        factors=None if recipe.delayed is None else _delayed,
        record_amax=_record_amax,
        quantize_together=quantize_together,
        aligned=True,
        implementation=0,
    )


def _transpose_input(call: LinearCall, x: Tensor, operands: Operands) -> tuple[Tensor, Any]:
    return (x if operands[2] is None else operands[2]), operands[3]


def _transposed_view(call: LinearCall, g: Tensor, operands: Operands) -> tuple[Tensor, Any]:
    return operands[0].t(), operands[3]


def _plain_grad(call: LinearCall, g: Tensor, operands: Operands) -> tuple[Tensor, Any]:
    return general.matrix(g).t(), None


def _plain_wgrad(call: LinearCall, g: Tensor, _: Any, x: Tensor, __: Any, dtype: torch.dtype) -> Tensor:
    return torch.mm(g, general.matrix(x))


def _quantizer(cast: RowColQuantizer, recipe: Recipe, column: int) -> Callable[..., Operands]:
    """Return `LinearPlan.quantize_input` or `quantize_grad`, by column, of kernels that write both operands."""
    grad = column == amax.GRAD_OUTPUT
    if recipe.fprop.a is not None and recipe.fprop.a.two_level:
        specs = (recipe.dgrad.a, recipe.wgrad.a) if grad else ()
        random = any(spec is not None and spec.rounding == "stochastic" for spec in specs)
        return _stochastic_cast(cast) if random else _two_level_cast(cast)
    if recipe.delayed is None:
        return lambda call, x, *_: cast(x)

    def delayed_cast(call: LinearCall, x: Tensor, *_: Any) -> Operands:
        if grad:
            call.factors = call.factors.in_backward(call.layer, x)
        return cast(x, call.factors.by_column[column])

    return delayed_cast


def _two_level_cast(cast: RowColQuantizer) -> Callable[..., Operands]:
    """Return a quantization whose scales are lists [block scales, tensor factor]."""

    def quantized(call: LinearCall, x: Tensor, *_: Any) -> Operands:
        codes, scales, transposed_codes, transposed_scales, sums, inverse, transposed_inverse = cast(x)
        if transposed_codes is not None and torch.are_deterministic_algorithms_enabled():
            # Saved as bytes, because hooks of saved tensors fill new memory in deterministic mode, and packed4 cannot
            # be filled.
            transposed_codes = transposed_codes.view(torch.uint8)
        return codes, [scales, inverse], transposed_codes, [transposed_scales, transposed_inverse], sums

    return quantized


def _stochastic_cast(cast: RowColQuantizer) -> Callable[..., Operands]:
    """Return a two-level quantization of grad_output with stochastic rounding; directions that no gradient needs are
    skipped.
    """

    def quantized(call: LinearCall, x: Tensor, needs: Sequence[Any], _: Any) -> Operands:
        layer = call.layer
        if not (needs[0] or needs[1]):
            return (None,) * 5
        drawn = _noise_inputs(layer, cast.device)[bool(needs[0]), bool(needs[1])]
        codes, scales, transposed_codes, transposed_scales, sums, inverse, transposed_inverse = cast(x, drawn)
        if drawn.values is not layer._buffers.get("count"):
            write_back_counts(layer, drawn.values)
        return codes, [scales, inverse], transposed_codes, [transposed_scales, transposed_inverse], sums

    return quantized


class RngState(NamedTuple):
    """Noise arguments of a layer, valid until its counter, seed or name changes."""

    counts: Tensor
    address: int
    #: (seed, name, serial, device).
    source: tuple[Any, ...]
    #: Arguments by (need matrix, need transpose).
    each: dict[tuple[bool, bool], QuantizeInputs]


def _noise_inputs(layer: nn.Module, device: torch.device) -> dict[tuple[bool, bool], QuantizeInputs]:
    """Return the noise arguments of grad_output by (need matrix, need transpose)."""
    state: LayerState = layer._state  # type: ignore[assignment]
    module_state, count = layer.__dict__, layer._buffers.get("count")
    cached: RngState | None = state.drawn
    source = module_state.get("seed", 0), module_state.get("qualified_name"), state.serial, device
    if cached is not None:
        # Unpacking is faster than reading the fields.
        counts, address, known, each = cached
        if counts is count and known == source and address == counts.data_ptr():
            return each
    seed, stream, transposed_stream, counts = noise_of(layer, device)
    streams = seed, stream, transposed_stream
    each = {wanted: noise_inputs(streams, wanted, counts) for wanted in ((True, True), (True, False), (False, True))}
    # A counter on another device is copied for each call, so it is not reused.
    state.drawn = RngState(counts, counts.data_ptr(), source, each) if counts is count else None
    return each


def _gemm_function(gemm: ScaledGemmArguments, dtype: torch.dtype, cached: bool) -> Callable[..., Tensor]:
    """Return a GEMM that does the work of torch.nn.functional.scaled_mm without its list handling.

    Args:
        cached: True if the right side is a weight, whose scales are a list already; False if it was saved for backward.
    """
    a, a_swizzle, b, b_swizzle, fast, kind, views = gemm
    saved = not cached and not views
    if len(a) == 2:

        def multiply_packed4(
            _: LinearCall, left: Tensor, left_scale: Any, right: Tensor, right_scale: Any, bias: Tensor | None
        ) -> Tensor:
            if saved and right.stride(0) != 1:
                right = _restore_layout(right, right_scale, kind)[0]
            right = right if right.dtype is PACKED4 else right.view(PACKED4)
            # Scales are lists already.
            return torch._scaled_mm_v2(
                left, right, left_scale, a, a_swizzle, right_scale, b, b_swizzle, bias, dtype, (), fast
            )

        return multiply_packed4

    def multiply(
        _: LinearCall, left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Any, bias: Tensor | None
    ) -> Tensor:
        if saved and right.stride(0) != 1:
            right, right_scale = _restore_layout(right, right_scale, kind)
        scales = right_scale if cached else [right_scale]
        return torch._scaled_mm_v2(left, right, [left_scale], a, a_swizzle, scales, b, b_swizzle, bias, dtype, (), fast)

    return multiply


def _wgrad_function(gemm: ScaledGemmArguments, dtype: torch.dtype) -> Callable[..., Tensor]:
    multiply = _gemm_function(gemm, dtype, False)

    def wgrad(call: LinearCall, g: Tensor, g_scale: Any, x: Tensor, x_scale: Any, _: torch.dtype) -> Tensor:
        return multiply(call, g, g_scale, x, x_scale, None)

    return wgrad


def _restore_layout(right: Tensor, right_scale: Any, kind: ScaledGemmKind) -> tuple[Tensor, Any]:
    """Restore the layout that a GEMM needs if a saved-tensor hook has returned codes row-major.

    `torch.autograd.graph.save_on_cpu` with pin_memory=True does that.
    """
    return right.t().contiguous().t(), by_columns(right_scale) if kind.b == "1x128" else right_scale


def _plan_quantization(
    like: Tensor,
    spec: QuantSpec | None,
    other: QuantSpec | None,
    wanted: RequestedOperands,
    saves_codes: bool = False,
) -> QuantizeLaunch | None:
    """Return the launches that quantize a matrix, and its transpose if `other` is given; None if no kernel can."""
    if spec is None or ops.no_kernels(like) or quantize.reason(like, spec):
        return None
    # With two-level scales each direction has its own launches.
    family = family_of(spec, None if spec.two_level else other)
    if family is None or family.plan_launch is None:
        return None
    if not spec.two_level and (spec.rounding != "nearest" or spec.hadamard):
        return None
    one = family.plan_launch(like, spec, other, wanted)
    return None if one is None else reuse_results(one, saves_codes, wanted.transpose)


def _gemm(
    name: str, m: int, n: int, k: int, bias: Tensor | None, like: Tensor, recipe: Recipe, views: bool
) -> ScaledGemmArguments | None:
    """Return the scale arguments of one GEMM, or None unless a native GEMM gives the result in the dtype required.

    Checks the layouts that will run: with `views`, dgrad's weight and both operands of wgrad are transposed views.
    """
    gemm = recipe.gemms[name]
    if gemm.a is None or gemm.b is None:
        return None
    transposed = views and name == "wgrad", views and name != "fprop"
    operands = _operand(m, k, gemm.a, like, transposed[0]), _operand(n, k, gemm.b, like, transposed[1])
    chosen = choose_gemm(*operands, like.dtype, bias)
    kind = chosen.kind
    if (
        kind is None
        or kind.bare
        or (views and not kind.loose)
        or chosen.out is not like.dtype
        or (bias is not None and not chosen.adds)
    ):
        return None
    if kind.a != role(gemm.a) or (name == "wgrad" and kind.b != role(gemm.b)):
        # No kernel writes the scales in the layout that this GEMM reads.
        return None
    a, b = ([scaling.value for scaling in SCALING[side]] for side in (kind.a, kind.b))
    a_swizzle, b_swizzle = ([swizzle.value for swizzle in SWIZZLE.get(side, [])] for side in (kind.a, kind.b))
    return ScaledGemmArguments(a, a_swizzle, b, b_swizzle, gemm.fast_accum and kind.a in FAST, kind, views)


def _operand(rows: int, k: int, spec: QuantSpec, like: Tensor, transposed: bool) -> Quantized:
    """Return a `Quantized` with uninitialized codes in the layout of an operand, or of its transpose."""
    scale = torch.ones((1, 1), dtype=torch.float32, device=like.device)
    layout = (k, rows) if transposed else (rows, k)
    if spec.format.packed:
        codes = torch.empty((rows, -(-k // 32) * 16), dtype=torch.uint8, device=like.device)
    else:
        codes = empty_codes(*layout, spec, like.device)
    return Quantized(codes, scale, spec, (rows, k), transposed)


def _quantize_together(
    both: RowColQuantizer,
    quantize_input: Callable[..., Operands],
    gemms: tuple[ScaledGemmArguments, ScaledGemmArguments],
    views: bool,
) -> Callable[[LinearCall, Tensor, Tensor], tuple[Operands, WeightOperands]]:
    """Return a function that quantizes an input and an uncached weight in shared launches."""

    def together(call: LinearCall, x: Tensor, weight: Tensor) -> tuple[Operands, WeightOperands]:
        w = _cached_weight(call, weight)
        if w is None and weight.data_ptr() & 15:
            w = _weight(call, weight, gemms)
        if w is not None:
            return quantize_input(call, x), w
        x_delayed = None if call.factors is None else call.factors.by_column[amax.INPUT]
        operands: list[Operands] = []

        def quantize_both(
            w: Tensor, spec: QuantSpec, other: QuantSpec, _: None, factor: Tensor | None, *launch_arguments: Any
        ) -> tuple[Quantized, Quantized]:
            w_delayed = None if factor is None else delayed_inputs(factor.view(1), 0, *launch_arguments[2:4])
            written = both(x, x_delayed, w, w_delayed)
            operands.append(written[:5])
            return _quantized(written[5:], spec, other, views, w_delayed is not None and w_delayed.launch_key[1])

        w = _weight(call, weight, gemms, quantize_both)
        return (operands[0] if operands else quantize_input(call, x)), w

    return together


def _cached_weight(call: LinearCall, weight: Tensor) -> WeightOperands | None:
    """Return the operands of the cached weight, and record its amax once per step."""
    factors = call.factors
    w = cached_operands(call, weight, 0.0 if factors is None else factors.version)
    if w is not None and factors is not None and w.factors is not factors.factors:
        amax.record(call.layer, amax.WEIGHT, call.entry.quantized.amax)  # type: ignore[union-attr]
        w.factors = factors.factors
    return w


def _quantized(
    written: RowColOperands, spec: QuantSpec, other: QuantSpec, views: bool, recorded_amax: bool
) -> tuple[Quantized, Quantized]:
    """Return a matrix and its transpose as `Quantized`; with one scale for both they also carry the amax."""
    codes, scale, transposed, transposed_scale, top = written
    assert transposed is not None and transposed_scale is not None
    rows, k = codes.shape
    q = Quantized(codes, scale, spec, (rows, k), amax=top, recorded_amax=recorded_amax)
    if views:
        qt, q.cached_transpose = q.T, None
        # No references between the two, so that each can be freed alone.
        qt.cached_transpose = None
        return q, qt
    transposed_scale = transposed_scale if spec.per_tensor else transposed_scale.t()
    return q, Quantized(transposed.t(), transposed_scale, other, (k, rows), amax=top, recorded_amax=recorded_amax)


def _weight(
    call: LinearCall,
    weight: Tensor,
    gemms: tuple[ScaledGemmArguments, ScaledGemmArguments],
    both: Callable[..., tuple[Quantized, Quantized]] | None = None,
) -> WeightOperands:
    """Return the weight's operands, and cache them for the backward.

    Args:
        both: quantizes the weight and its transpose in place of `ops.QUANTIZE_BOTH`.
    """
    layer, recipe, delayed = call.layer, call.recipe, call.factors
    spec = recipe.fprop.b
    assert spec is not None
    own = _general_call(call, weight, True)
    if both is not None:
        own.operations = own.operations._replace(both=both)
    q = _quantized_weight(own, weight, "fprop")
    transposed = q.T if recipe.reuse.weight else _quantized_weight(own, weight, "dgrad")
    w = WeightOperands(*_right(q, gemms[0]), *_right(transposed, gemms[1]), recipe, own.factors)
    version: float = 0.0 if delayed is None else delayed.version
    call.entry = weight_cache.lookup(layer, "fprop", weight, spec, version) or weight_cache.CachedWeight(q)
    call.entry.fast_operands = w
    return w


def _general_call(call: LinearCall, weight: Tensor, training: bool) -> LinearCall:
    """Return a call by the general plan, which quantizes weights with the same factors."""
    own = LinearCall(general.plan_for(call.recipe, weight), call.layer, training, weight.dtype)
    own.factors = None if call.factors is None else call.factors.factors
    return own


def _quantized_weight(call: LinearCall, weight: Tensor, gemm: str) -> Quantized:
    spec = call.recipe.gemms[gemm].b
    assert spec is not None
    return general.quantized_weight(call, weight, gemm, spec)


def _right(q: Quantized, gemm: ScaledGemmArguments) -> tuple[Tensor, list[Tensor]]:
    """Return the codes as right side of a GEMM, and their scales."""
    codes = any_matrix(q) if gemm.views else matrix(q)
    return codes.t(), scales(q, gemm.kind.b, True)
