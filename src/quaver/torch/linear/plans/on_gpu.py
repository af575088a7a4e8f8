"""A layer's step on Ada and Hopper, which `quaver.torch.linear.plans.direct` chooses where one scale serves a tensor.

Which kernel, which GEMM, which layout is found out once for a layer and a shape; a step then makes room for what is
written, and launches. Kernels, arguments and bits are those of the general way.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.core.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu import choice
from quaver.torch.backends.gpu.families import family_of, quantize
from quaver.torch.backends.gpu.fused.column_sums import add_up, column_sum
from quaver.torch.backends.gpu.gemms.operands import any_matrix, matrix, scales
from quaver.torch.backends.gpu.gemms.scaled_mm import FAST, SCALING, SWIZZLE, Kind, reads_transposes, role, way
from quaver.torch.backends.gpu.launching import capture
from quaver.torch.backends.gpu.quantizing.both_ways import BothWays
from quaver.torch.backends.gpu.quantizing.codes import empty_codes
from quaver.torch.backends.gpu.quantizing.tensor_cast import TensorCast
from quaver.torch.linear.gemms import Call, quantized_weight
from quaver.torch.numerics.quantized import FLOAT8, Quantized
from quaver.torch.operations.derivatives import first_derivative
from quaver.torch.operations.ops import without_autocast
from quaver.torch.state import counters, kept_weights
from quaver.torch.state.history import amax, steps
from quaver.torch.state.layer import state_of


class Gemm(NamedTuple):
    """The arguments that tell a scaled GEMM of its operands' scales, in their order."""

    a: list[int]
    a_swizzle: list[int]
    b: list[int]
    b_swizzle: list[int]
    fast: bool
    kind: Kind
    #: Whether its operands may be transposes that lie as they were written: views.
    views: bool


class Step:
    """How one layer runs on inputs of one shape."""

    __slots__ = ("device", "dgrad", "dtype", "fprop", "grad_output", "input", "recipe", "shape", "wgrad")

    def __init__(
        self, recipe: Recipe, x: Tensor, gemms: dict[str, Gemm | None], of_input: Any, of_grad_output: Any
    ) -> None:
        self.recipe, self.shape, self.dtype, self.device = recipe, x.shape, x.dtype, x.device
        self.fprop: Any = gemms["fprop"]
        self.dgrad: Any = gemms["dgrad"]
        #: None where it is not quantized.
        self.wgrad = gemms["wgrad"]
        self.input, self.grad_output = of_input, of_grad_output

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor | None:
        if x.data_ptr() & 15 or capture.as_captured(self.device):
            return None
        delayed = None
        if self.recipe.delayed is not None:
            delayed = _delayed(layer, x) if state_of(layer).prepared is self.recipe else None
            if delayed is None:
                return None
        try:
            y: Tensor = _apply(x, weight, bias, (layer, self, delayed))
        except torch.OutOfMemoryError as error:
            raise choice.out_of_memory(x, 2) from error
        return y


class Delayed(NamedTuple):
    """The factors and places that delayed scaling gives a step, and the versions by which a change of them is seen."""

    #: `amax.saved_factors`, and which of them are known to be set.
    factors: Tensor
    known: list[bool]
    #: `amax.newest` of each column.
    newest: list[Tensor | None]
    rolled: Tensor | None
    factor: Tensor
    version: int
    history: Tensor
    address: int


class Weight(NamedTuple):
    """Both operands that a kept weight gives, as the right side of a GEMM, and their scales."""

    fprop: Tensor
    fprop_scale: list[Tensor]
    dgrad: Tensor
    dgrad_scale: list[Tensor]
    #: The step in whose history its amax is noted: a kept weight's counts in each.
    noted: Delayed | None
    #: Whose GEMMs read them; another may share the quantized weight.
    recipe: Recipe


def _delayed(layer: nn.Module, x: Tensor) -> Delayed | None:
    """The same as last time until a roll, a load or a move; None where factors are on the host, or on another device
    than x: a kernel is told an address, whatever lies there."""
    steps.join(layer, True)
    buffers, state = layer._buffers, state_of(layer)
    stacked = state.stacked
    factor, history = buffers["factor"], buffers["history"]
    assert factor is not None and history is not None
    seen: Delayed | None = state.factors
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
    known = [amax.is_set(layer, column, factors) for column in range(3)]
    newest = [amax.newest(layer, column, x) for column in range(3)]
    rolled = None if stacked is None else stacked[0].rolled
    delayed = Delayed(factors, known, newest, rolled, factor, factor._version, history, history.data_ptr())
    # Without a roll behind them factors are a copy of their own, to be made anew.
    state.factors = delayed if rolled is not None and hasattr(factors, "known_set") else None
    return delayed


def decide(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Step | None:
    """The step for inputs like x, or None where the general way is the only one."""
    tokens, (n, k) = x.numel() // max(x.shape[-1], 1), weight.shape
    if x.numel() == 0 or any(side & 15 for side in (tokens, n, k)):
        # Sides that need to be filled up.
        return None
    like = x.detach().view(tokens, k)
    specs = [spec for gemm in recipe.gemms.values() for spec in (gemm.a, gemm.b)]
    if any(spec is not None and spec.format.name not in FLOAT8 for spec in specs):
        # No kernel decided beforehand writes codes of other formats.
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
    of_input = _cast(like, recipe.fprop.a, recipe.wgrad.b, views, True)
    g = like.new_empty((tokens, n))
    of_grad_output = _cast(g, recipe.dgrad.a, recipe.wgrad.a, views, False, bias is not None)
    if of_input is None or of_grad_output is None:
        return None
    return Step(recipe, x, gemms, of_input, of_grad_output)


def _cast(
    like: Tensor, spec: QuantSpec | None, other: QuantSpec | None, views: bool, kept: bool, sums: bool = False
) -> TensorCast | BothWays | None:
    """What makes a matrix an operand, and its transpose too if `other` is not None; None where nothing does."""
    if spec is None or choice.why_not_quantize(like, spec):
        return None
    family = family_of(spec, other)
    if family is None or spec.rounding != "nearest" or spec.hadamard:
        return None
    if spec.per_tensor:
        return None if other is None else TensorCast(like, spec, kept, sums, views)
    return None if family.decided is None else family.decided(like, spec, other, kept)


def _gemm(
    name: str, m: int, n: int, k: int, bias: Tensor | None, like: Tensor, recipe: Recipe, views: bool
) -> Gemm | None:
    """How one GEMM is told of its scales; None unless a native one gives the result as it is asked for.

    What is tried is what will run: with views, dgrad's weight and both operands of wgrad are transposes.
    """
    gemm = recipe.gemms[name]
    if gemm.a is None or gemm.b is None:
        return None
    turned = views and name == "wgrad", views and name != "fprop"
    operands = _operand(m, k, gemm.a, like, turned[0]), _operand(n, k, gemm.b, like, turned[1])
    chosen = way(*operands, like.dtype, bias)
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
        # Scales that nothing writes as they are read.
        return None
    a, b = ([scaling.value for scaling in SCALING[side]] for side in (kind.a, kind.b))
    a_swizzle, b_swizzle = ([swizzle.value for swizzle in SWIZZLE.get(side, [])] for side in (kind.a, kind.b))
    return Gemm(a, a_swizzle, b, b_swizzle, gemm.fast_accum and kind.a in FAST, kind, views)


def _operand(rows: int, k: int, spec: QuantSpec, like: Tensor, turned: bool) -> Quantized:
    """Codes of nothing, in the layout of an operand, or in that of its transpose."""
    scale = torch.ones((1, 1), dtype=torch.float32, device=like.device)
    lying = (k, rows) if turned else (rows, k)
    return Quantized(empty_codes(*lying, spec, like.device), scale, spec, (rows, k), turned)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, constants: Any) -> Tensor:
        layer, step, delayed = constants
        cast, gemm = step.input, step.fprop
        entry, w = _weight(weight, layer, step, x, delayed)
        if delayed is None:
            q, scale, xt, of_xt, _ = cast(x)
        else:
            q, scale, xt, of_xt, _ = cast(x, delayed.factors, amax.INPUT, delayed.known[0], delayed.newest[0])
        # The weight itself, so that autograd sees a change of it before backward.
        ctx.save_for_backward(weight, x if xt is None else xt, of_xt)
        owed = None if delayed is None else steps.owed(layer)
        ctx.constants = layer, step, delayed, owed, entry, None if bias is None else bias.dtype
        # torch.nn.functional.scaled_mm without what it does to lists.
        a, a_swizzle, b, b_swizzle, fast, *_ = gemm
        y: Tensor = torch._scaled_mm_v2(
            q, w.fprop, [scale], a, a_swizzle, w.fprop_scale, b, b_swizzle, bias, step.dtype, (), fast
        )
        # A view could not be written to: see `linear.shaped`.
        return y if len(step.shape) == 2 else y.resize_(*step.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return first_derivative(_backward, ctx, g)


#: `Function.apply` without its checks for torch.func, which the layer has made itself.
_apply: Any = super(torch.autograd.Function, _Step).apply


def _backward(ctx: Any, g: Tensor) -> Any:
    layer, step, delayed, owed, entry, bias = ctx.constants
    if owed is not None:
        owed.settle()
    weight, xt, of_xt = ctx.saved_tensors
    cast, dtype = step.grad_output, step.dtype
    if not g.is_contiguous() or g.data_ptr() & 15:
        g = g.clone(memory_format=torch.contiguous_format)
    if delayed is None:
        q, scale, qt, of_qt, sums = cast(g)
    else:
        history, newest = layer._buffers["history"], delayed.newest[2]
        if history is not delayed.history or history.data_ptr() != delayed.address:
            newest = amax.newest(layer, amax.GRAD_OUTPUT, g)
        q, scale, qt, of_qt, sums = cast(g, delayed.factors, amax.GRAD_OUTPUT, delayed.known[2], newest)
    if counters.active.counters is not None:
        _count(layer, step.recipe, g.view(q.shape), q, scale)
    need, multiply = ctx.needs_input_grad, torch._scaled_mm_v2
    of_input = of_weight = of_bias = None
    if need[2]:
        of_bias = column_sum(g.view(q.shape), bias) if sums is None else add_up(sums, bias)
    if need[0]:
        w = entry.ready
        if w is None or w.recipe is not step.recipe:
            w = _weight_operands(weight, layer, step, delayed, False)[1]
        a, a_swizzle, b, b_swizzle, fast, *_ = step.dgrad
        of_input = multiply(q, w.dgrad, [scale], a, a_swizzle, w.dgrad_scale, b, b_swizzle, None, dtype, (), fast)
        if len(step.shape) != 2:
            of_input = of_input.view(step.shape)
    if need[1]:
        entry.window.used = torch._C._current_graph_task_id()
    if need[1] and step.wgrad is None:
        of_weight = _plain_wgrad(g.view(q.shape), xt.view(-1, xt.shape[-1]))
    elif need[1]:
        a, a_swizzle, b, b_swizzle, fast, *_ = step.wgrad
        of_weight = multiply(qt, xt, [of_qt], a, a_swizzle, [of_xt], b, b_swizzle, None, dtype, (), fast)
    return of_input, of_weight, of_bias, None


def _plain_wgrad(g: Tensor, x: Tensor) -> Tensor:
    """grad_weight [n, k] of g [tokens, n] and x [tokens, k], unquantized."""
    with without_autocast(g.device.type):
        return F.linear(g.t(), x.t())


def _count(layer: nn.Module, recipe: Recipe, g: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Note the operands of a grad_output for counters that were opened after its forward."""
    note, a, c = counters.active.counters.note, recipe.dgrad.a, recipe.wgrad.a  # type: ignore[union-attr]
    assert a is not None
    if a.per_tensor:
        note(layer, "grad_output", g, Quantized(codes, scale, a, (g.shape[0], g.shape[1])))
        return
    note(layer, "grad_output", g, quantize(g, a))
    if c is not None:
        note(layer, "grad_output.T", g.t(), quantize(g.t(), c))


def _weight(
    weight: Tensor, layer: nn.Module, step: Step, x: Tensor, delayed: Delayed | None
) -> tuple[kept_weights.Entry, Weight]:
    """The weight's operands; kept until it, or its factor, changes."""
    recipe = step.recipe
    written: float = 0.0 if delayed is None else delayed.version
    entry = kept_weights.lookup(layer, "fprop", weight, recipe.fprop.b, written)  # type: ignore[arg-type]
    if entry is None or entry.ready is None or entry.ready.recipe is not recipe:
        return _weight_operands(weight, layer, step, delayed, True)
    ready: Weight = entry.ready
    if ready.noted is not delayed:
        assert entry.quantized is not None
        amax.record(layer, amax.WEIGHT, entry.quantized.amax)
        ready = entry.ready = ready._replace(noted=delayed)
    return entry, ready


def _weight_operands(
    weight: Tensor, layer: nn.Module, step: Step, delayed: Delayed | None, forward: bool
) -> tuple[kept_weights.Entry, Weight]:
    """The weight's operands, for a forward to keep, or for one backward after they were dropped."""
    recipe = step.recipe
    spec, other = recipe.fprop.b, recipe.dgrad.b
    assert spec is not None and other is not None
    call = Call(recipe, weight, weight.dtype, True, forward, None if delayed is None else delayed.factors)
    q = quantized_weight(layer, weight, "fprop", spec, recipe, call)
    turned = q.T if recipe.plan.weight else quantized_weight(layer, weight, "dgrad", other, recipe, call)
    ready = Weight(*_right(q, step.fprop), *_right(turned, step.dgrad), delayed, recipe)
    written: float = 0.0 if delayed is None else delayed.version
    entry = kept_weights.lookup(layer, "fprop", weight, spec, written, forward) or kept_weights.Entry(q)
    entry.ready = ready
    return entry, ready


def _right(q: Quantized, gemm: Gemm) -> tuple[Tensor, list[Tensor]]:
    """The right side of a GEMM, and its scales."""
    codes = any_matrix(q) if gemm.views else matrix(q)
    return codes.t(), scales(q, gemm.kind.b, True)
