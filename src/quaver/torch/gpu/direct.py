"""A layer's step on Ada and Hopper: what `quaver.torch.direct` decides on where one scale serves a tensor.

Which kernel, which GEMM, which layout is found out once for a layer and a shape; a step then makes room for what is
written, and launches. Kernels, arguments and bits are those of the general way.
"""

from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType

from quaver.core.spec import QuantSpec, Recipe
from quaver.torch import amax, counters, weights
from quaver.torch.gemms import Call, quantized_weight
from quaver.torch.gpu import choice, launch
from quaver.torch.gpu.codes import empty_codes
from quaver.torch.gpu.column_sum import add_up
from quaver.torch.gpu.device import architecture
from quaver.torch.gpu.launch import workspace
from quaver.torch.gpu.operands import transpose
from quaver.torch.gpu.per_tensor import amax_launch, cast_launch, room_for_sums
from quaver.torch.gpu.scaled_mm import way
from quaver.torch.quantized import STORAGE, Quantized
from quaver.torch.second_derivative import NO_DOUBLE_BACKWARD, no_second_derivative

#: How a scaled GEMM's scales are for one tensor, in no special order.
_ONE: list[int] = [ScalingType.TensorWise.value]
_NO: list[int] = []
_empty = torch.empty_strided

#: Up to so many elements codes that nobody keeps are written to a place of their own, again and again; larger ones
#: take memory for as long as they are needed, and their launches wait for the GPU anyway.
SMALL = 1 << 16


class Place(NamedTuple):
    """What one thread on one stream writes and reads before it writes there again."""

    #: Where a launch's programs meet.
    work: Tensor
    #: An amax that a kernel writes and another reads.
    top: Tensor
    #: Codes, codes of the transpose and scale that the next GEMMs read and nobody keeps; None where they are large.
    written: tuple[Tensor, Tensor, Tensor] | None
    #: Sums of blocks of rows, which another kernel adds up at once; None where nobody asks for them.
    partial: Tensor | None


#: By thread, stream, device, shape, dtype and whether there are sums: layers share them.
_places: dict[Any, Place] = {}


class Cast:
    """A matrix [rows, columns] to its codes, those of its transpose, and their scale.

    Args:
        x: a matrix like those to come.
        keeps: whether the transpose and the scale are kept, so that each call must write new ones.
        sums: whether blocks of its rows are summed on the way, for the gradient of a bias.
    """

    __slots__ = ("amax", "card", "device", "dtype", "keeps", "launches", "places", "shape", "spec", "sums", "turned")

    def __init__(self, x: Tensor, spec: QuantSpec, keeps: bool, sums: bool = False) -> None:
        rows, columns = x.shape
        self.sums = sums
        self.spec, self.device, self.dtype, self.keeps = spec, x.device, STORAGE[spec.format.name], keeps
        self.shape, self.turned = (rows, columns), (columns, rows)
        #: Index of the GPU, what tells the current one's, and what tells its stream.
        self.card = launch.card(x.device)[:3]
        #: By thread and stream.
        self.places: dict[tuple[int, int], Place] = {}
        #: By whether a factor is given, whether it is known to be set, and whether the amax is noted.
        self.launches: dict[tuple[bool, bool, bool], Any] = {}
        self.amax: Any = amax_launch(x)

    def __call__(
        self,
        x: Tensor,
        factors: Tensor | None = None,
        column: int = 0,
        known: bool = False,
        newest: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(codes, codes of the transpose, scale [1, 1], sums); `per_tensor` says what the arguments mean.

        A transpose that is kept comes as the right side of a GEMM: [rows, columns], lying as [columns, rows]. Sums are
        those of blocks of rows, to be added up before anything else is quantized.
        """
        index, current, stream_of = self.card
        stream = stream_of(index)
        work, top, written, partial = self.places.get((get_ident(), stream)) or self._place(stream)
        if written is None:
            qt = self._turned_room() if self.keeps else self._room(self.turned)
            q, scale = self._room(self.shape), self._number()
        elif self.keeps:
            q, qt, scale = written[0], self._turned_room(), self._number()
        else:
            q, qt, scale = written
        one_pass = known and factors is not None
        run = self.launches.get((factors is not None, one_pass, newest is not None))
        if run is None or run.parts is None or current() != index:
            factor = None if factors is None else factors[column]
            x = x.detach().view(self.shape)
            turned = qt.t() if self.keeps else qt
            tensors = (x, q, turned, scale, top, factor, None, newest, work if one_pass else None, partial)
            if not one_pass:
                self.amax(x, top, work)
            if run is None:
                run = self._launch(x, tensors, one_pass)
            run(*tensors)
            return q, qt, scale, partial
        at, meeting, of_top = x.data_ptr(), work.data_ptr(), top.data_ptr()
        if not one_pass:
            start, grid, middle, tail = self.amax.parts
            start(*grid, stream, *middle, at, of_top, meeting, *tail)
        start, grid, middle, tail = run.parts
        start(
            *grid,
            stream,
            *middle,
            at,
            q.data_ptr(),
            qt.data_ptr(),
            scale.data_ptr(),
            of_top,
            None if factors is None else factors.data_ptr() + 4 * column,
            None,
            None if newest is None else newest.data_ptr(),
            meeting if one_pass else None,
            None if partial is None else partial.data_ptr(),
            *tail,
        )
        return q, qt, scale, partial

    def _turned_room(self) -> Tensor:
        """[rows, columns] that lies as its transpose does."""
        return _empty(self.shape, (1, self.shape[0]), dtype=self.dtype, device=self.device)

    def _room(self, shape: tuple[int, int]) -> Tensor:
        return _empty(shape, (shape[1], 1), dtype=self.dtype, device=self.device)

    def _number(self) -> Tensor:
        return _empty((1, 1), (1, 1), dtype=torch.float32, device=self.device)

    def _place(self, stream: int) -> Place:
        mine = get_ident(), stream
        shared = *mine, self.device, self.shape, self.dtype, self.sums
        if shared not in _places:
            with torch.inference_mode(False):
                small = self.shape[0] * self.shape[1] <= SMALL
                written = (self._room(self.shape), self._room(self.turned), self._number()) if small else None
                partial = room_for_sums(*self.shape, self.device) if self.sums else None
                _places[shared] = Place(workspace(self.device), self._number(), written, partial)
        made = self.places[mine] = _places[shared]
        return made

    def _launch(self, x: Tensor, tensors: tuple[Any, ...], one_pass: bool) -> Any:
        made: Any = cast_launch(x, self.spec, tensors, not one_pass)
        run = made if hasattr(made, "parts") else _Interpreted(made)
        if not hasattr(self.amax, "parts"):
            self.amax = _Interpreted(self.amax)
        self.launches[tensors[5] is not None, one_pass, tensors[7] is not None] = run
        return run


class _Interpreted(NamedTuple):
    """A launch that takes tensors and no addresses."""

    run: Any
    parts: None = None

    def __call__(self, *tensors: Any) -> None:
        self.run(*tensors)


class Step:
    """What one layer does with inputs of one shape."""

    __slots__ = ("dtype", "grad_output", "input", "recipe", "shape")

    def __init__(self, recipe: Recipe, x: Tensor, of_input: Cast, of_grad_output: Cast) -> None:
        self.recipe, self.shape, self.dtype = recipe, x.shape, x.dtype
        self.input, self.grad_output = of_input, of_grad_output

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor | None:
        if x.data_ptr() & 15 or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        delayed = None
        if self.recipe.delayed is not None:
            delayed = _delayed(layer, x) if layer.__dict__.get("_prepared") is self.recipe else None
            if delayed is None:
                return None
        try:
            y: Tensor = _apply(x, weight, bias, (layer, self, delayed))
        except torch.OutOfMemoryError as error:
            raise choice.out_of_memory(x, 2) from error
        return y


class Delayed(NamedTuple):
    """What delayed scaling gives a step, and by what it is found to hold still."""

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
    """Both operands that a kept weight gives, as the right side of a GEMM."""

    quantized: Quantized
    fprop: Tensor
    dgrad: Tensor
    #: One tensor, as GEMMs take it.
    scale: list[Tensor]
    #: The step in whose history its amax is noted: a kept weight's counts in each.
    noted: Delayed | None


def _delayed(layer: nn.Module, x: Tensor) -> Delayed | None:
    """The same as last time until a roll, a load or a move; None where factors are on the host."""
    buffers, stacked = layer._buffers, layer.__dict__.get("_stacked")
    factor, history = buffers["factor"], buffers["history"]
    assert factor is not None and history is not None
    seen: Delayed | None = layer.__dict__.get("_direct_factors")
    if (
        seen is not None
        and stacked is not None
        and stacked[0].rolled is seen.rolled
        and factor is seen.factor
        and factor._version == seen.version
        and history is seen.history
        and history.data_ptr() == seen.address
        and not stacked[0].capturing
    ):
        return seen
    factors = amax.saved_factors(layer)
    if isinstance(factors, list):
        return None
    known = [amax.is_set(layer, column, factors) for column in range(3)]
    newest = [amax.newest(layer, column, x) for column in range(3)]
    rolled = None if stacked is None else stacked[0].rolled
    made = Delayed(factors, known, newest, rolled, factor, factor._version, history, history.data_ptr())
    # Without a roll behind them factors are a copy of their own, to be made anew.
    layer.__dict__["_direct_factors"] = made if rolled is not None and hasattr(factors, "known_set") else None
    return made


def decide(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Step | None:
    """The step for inputs like x, or None where the general way is the only one."""
    if not _fits(x, weight, recipe):
        return None
    tokens, (n, k) = x.numel() // x.shape[-1], weight.shape
    a, b, g = recipe.fprop.a, recipe.fprop.b, recipe.dgrad.a
    assert a is not None and b is not None and g is not None
    operands = [
        (_operand(tokens, k, a, x), _operand(n, k, b, x), bias),
        (_operand(tokens, n, g, x), _operand(k, n, b, x), None),
        (_operand(n, tokens, g, x), _operand(k, tokens, a, x), None),
    ]
    if not all(_plainly(left, right, x.dtype, added) for left, right, added in operands):
        return None
    like = x.detach().view(tokens, k)
    return Step(recipe, x, Cast(like, a, True), Cast(like.new_empty((tokens, n)), g, False, bias is not None))


def _fits(x: Tensor, weight: Tensor, recipe: Recipe) -> bool:
    """Whether all operands have one scale, the two of a tensor are transposes, and no side needs to be filled up."""
    specs = list(recipe.operands().values())
    if any(s is None or not s.per_tensor or s.format.bits != 8 or s.rounding != "nearest" for s in specs):
        return False
    sides = (x.numel() // max(x.shape[-1], 1), *weight.shape)
    served = not choice.why_not_quantize(x.view(-1, x.shape[-1]), recipe.fprop.a) if x.numel() else False  # type: ignore[arg-type]
    return served and all(recipe.plan) and architecture(x.device) < 100 and not any(side & 15 for side in sides)


def _operand(rows: int, k: int, spec: QuantSpec, like: Tensor) -> Quantized:
    """Codes of nothing, in the layout of an operand."""
    scale = torch.ones((1, 1), device=like.device)
    return Quantized(empty_codes(rows, k, spec, like.device), scale, spec, (rows, k))


def _plainly(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None) -> bool:
    """Whether one native GEMM gives the result as it is asked for."""
    found = way(a, b, dtype, bias)
    kind = found.kind
    return kind is not None and not kind.bare and found.out is dtype and (bias is None or found.adds)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, about: Any) -> Tensor:
        layer, step, delayed = about
        recipe, cast = step.recipe, step.input
        w = _weight(weight, layer, recipe, x, delayed)
        if delayed is None:
            q, xt, scale, _ = cast(x)
        else:
            q, xt, scale, _ = cast(x, delayed.factors, amax.INPUT, delayed.known[0], delayed.newest[0])
        # The weight itself, so that autograd sees a change of it before backward.
        ctx.save_for_backward(weight, xt, scale)
        ctx.about = layer, step, delayed, w, None if bias is None else bias.dtype
        y: Tensor = torch._scaled_mm_v2(
            q, w.fprop, [scale], _ONE, _NO, w.scale, _ONE, _NO, bias, step.dtype, (), recipe.fprop.fast_accum
        )
        return y if len(step.shape) == 2 else y.view(*step.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if torch.is_grad_enabled():
            with torch.no_grad():
                grads = _backward(ctx, g)
            return no_second_derivative(grads, NO_DOUBLE_BACKWARD, g, ctx.saved_tensors[0])
        return _backward(ctx, g)


#: `Function.apply` without its checks for torch.func, which the layer has made itself.
_apply: Any = super(torch.autograd.Function, _Step).apply


def _backward(ctx: Any, g: Tensor) -> Any:
    layer, step, delayed, w, bias = ctx.about
    _, xt, of_x = ctx.saved_tensors
    cast, recipe, dtype = step.grad_output, step.recipe, step.dtype
    if not g.is_contiguous() or g.data_ptr() & 15:
        g = g.clone(memory_format=torch.contiguous_format)
    if delayed is None:
        q, qt, scale, partial = cast(g)
    else:
        history, newest = layer._buffers["history"], delayed.newest[2]
        if history is not delayed.history or history.data_ptr() != delayed.address:
            newest = amax.newest(layer, amax.GRAD_OUTPUT, g)
        q, qt, scale, partial = cast(g, delayed.factors, amax.GRAD_OUTPUT, delayed.known[2], newest)
    if counters.active.counters is not None:
        spec = recipe.dgrad.a
        counters.active.counters.note(layer, "grad_output", g.view(q.shape), Quantized(q, scale, spec, tuple(q.shape)))
    # torch.nn.functional.scaled_mm without what it does to lists.
    scales, need, multiply = [scale], ctx.needs_input_grad, torch._scaled_mm_v2
    of_input = of_weight = of_bias = None
    if partial is not None and need[2]:
        of_bias = add_up(partial, bias)
    if need[0]:
        fast = recipe.dgrad.fast_accum
        of_input = multiply(q, w.dgrad, scales, _ONE, _NO, w.scale, _ONE, _NO, None, dtype, (), fast)
        if len(step.shape) != 2:
            of_input = of_input.view(step.shape)
    if need[1]:
        fast = recipe.wgrad.fast_accum
        of_weight = multiply(qt, xt, scales, _ONE, _NO, [of_x], _ONE, _NO, None, dtype, (), fast)
    return of_input, of_weight, of_bias, None


def _weight(weight: Tensor, layer: nn.Module, recipe: Recipe, x: Tensor, delayed: Delayed | None) -> Weight:
    """The weight's operands; kept until it, or its factor, changes."""
    spec = recipe.fprop.b
    assert spec is not None
    written: float = 0.0 if delayed is None else delayed.version
    q = weights.lookup(layer, "fprop", weight, spec, written)
    ready: Weight | None = layer.__dict__.get("_direct_weight")
    if q is not None and ready is not None and ready.quantized is q:
        if ready.noted is not delayed:
            amax.record(layer, amax.WEIGHT, q.amax)
            ready = layer.__dict__["_direct_weight"] = ready._replace(noted=delayed)
        return ready
    call = Call(recipe, x, x.dtype, True, True, None if delayed is None else delayed.factors)
    q = quantized_weight(layer, weight, "fprop", spec, recipe, call)
    turned = q.T
    if turned.turned:
        turned.data, turned.turned = transpose(q.data), False
    assert isinstance(q.scale, Tensor)
    ready = Weight(q, q.data.t(), turned.data.t(), [q.scale], delayed)
    layer.__dict__["_direct_weight"] = ready
    return ready
