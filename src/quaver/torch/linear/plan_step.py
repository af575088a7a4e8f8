"""A decided step: the three GEMMs of a layer by what was chosen for it, as one autograd function on any machine.

What quantizes an operand and what multiplies two is a row, `Rows`: `on_cpu` and `on_gpu` fill it. The step calls them,
saves what backward reads, and moves on the state that a layer keeps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.torch.backends.gpu import capture, device
from quaver.torch.backends.gpu.capture import raw_stream
from quaver.torch.linear.gemms import LATER, Gradients
from quaver.torch.numerics.quantized import of_host
from quaver.torch.operations import functional, ops
from quaver.torch.operations.autograd import NO_DOUBLE_BACKWARD, first_derivative
from quaver.torch.operations.ops import any_autocast_enabled
from quaver.torch.state import counters, weight_cache
from quaver.torch.state.context import active_context
from quaver.torch.state.history import amax, scaling_step
from quaver.torch.state.layer_state import graph_task_id

#: A scale as a GEMM takes it: a number of the host's, a tensor on a GPU, or a list of two, its blocks' and its own.
Scale = Any
#: Codes as a GEMM takes them: a tensor, or a `Quantized`, which has its scale within.
Operand = Any
#: What a matrix [rows, columns] became: an operand and its scale, the transpose's and its scale, of the right side of a
#: GEMM where they are kept (None and None where no GEMM takes them), and what was found on the way: of an input the
#: amax where a history wants it, of a grad_output the gradient of the bias, or None where that is to be summed yet.
Operands = tuple[Operand, Scale, Operand, Scale, Any]


class CachedWeightOperands:
    """Both operands of a kept weight, as the right sides of GEMMs, and their scales; dgrad's is None until a backward
    quantizes it."""

    __slots__ = ("dgrad", "dgrad_scale", "fprop", "fprop_scale", "reader", "recorded_amax")

    def __init__(
        self,
        fprop: Operand,
        fprop_scale: Scale,
        dgrad: Operand,
        dgrad_scale: Scale,
        recorded_amax: object,
        recipe: Recipe,
        form: str = "",
    ) -> None:
        self.fprop, self.fprop_scale, self.dgrad, self.dgrad_scale = fprop, fprop_scale, dgrad, dgrad_scale
        #: The encode factors of the call that noted its amax: a kept weight's counts in each step. What `Rows.factors`
        #: gave, which may hold the layer, is not held.
        self.recorded_amax = recorded_amax
        #: `Step.reader` of the steps whose GEMMs read them; others may share the quantized weight.
        self.reader = recipe, form


#: a, its scale, b, its scale, bias.
Multiply = Callable[[Operand, Scale, Operand, Scale, Tensor | None], Tensor]


@dataclass(slots=True)
class PlannedKernels:
    """What was chosen for a layer's operands and GEMMs; slots are read in half the time of a tuple's fields."""

    #: A matrix [..., features] and the factors to its operands.
    input: Callable[[Tensor, Any], Operands]
    grad_output: Callable[[Tensor, Any], Operands]
    #: (weight, layer, factors, whether it is a forward) to what is kept of the weight and its operands.
    weight: Callable[[Tensor, nn.Module, Any, bool], tuple[weight_cache.CachedWeight, CachedWeightOperands]]
    #: (input, weight, layer, factors) to the input's operands and what `weight` gives in a forward, for a weight that
    #: is not kept: by launches that both share; None where they share none.
    shared: (
        Callable[[Tensor, Tensor, nn.Module, Any], tuple[Operands, weight_cache.CachedWeight, CachedWeightOperands]]
        | None
    )
    #: (layer, x) to what delayed scaling gives one step of a layer; None where the general way must read it. Of that
    #: `factors` are the encode factors of input, weight and grad_output, as the forward saw them, `of_input` is the
    #: first where the host knows it, else None, `version` shows that the weight's is another,
    #: `note(layer, column, amax)` notes what another layer's operand was, and
    #: `in_backward(layer, g)` is the same for a backward: buffers may be others by then.
    factors: Callable[[nn.Module, Tensor], Any]
    fprop: Multiply
    dgrad: Multiply
    #: None where it is not quantized: then the input is kept as it is.
    wgrad: Multiply | None
    #: Whether kernels read addresses that are multiples of 16.
    aligned: bool
    #: Which implementation of another operation runs beside them, by its place among its own.
    implementation: int
    #: A matrix to what `input` and `grad_output` leave out, since it takes a pass of its own: its transpose's operand
    #: and scale. None where they do not.
    transposed_input: Callable[[Tensor], tuple[Tensor, Scale]] | None = None
    transposed_grad_output: Callable[[Tensor], tuple[Operand, Scale]] | None = None
    #: What operands of a weight are: rows for a shape may take others than those for another shape.
    form: str = ""
    #: What a weight is kept as: "fprop" of what the general way reads too.
    kept_as: str = "fprop"
    #: Tensors of a scale: a list of them where it is two.
    levels: int = 1
    #: Whether `grad_output` may round at random: then it is told the layer, the recipe and which gradients are needed.
    draws: bool = False
    #: What `dgrad` and `wgrad` gave, or None, to the gradients; None where they gave those.
    finish: Callable[[Tensor | None, Tensor | None], tuple[Tensor | None, ...]] | None = None


class PlannedLinear:
    """How one layer runs on inputs of one shape."""

    __slots__ = ("delayed", "device", "gpu", "of_output", "reader", "recipe", "rows", "shape", "turns")

    def __init__(self, recipe: Recipe, x: Tensor, features: int, rows: PlannedKernels) -> None:
        self.recipe, self.shape, self.device, self.rows = recipe, x.shape, x.device, rows
        #: By what it knows the operands of a weight that its GEMMs read.
        self.reader = recipe, rows.form
        #: The shape of its output, of so many features.
        self.of_output = (*x.shape[:-1], features)
        self.delayed = recipe.delayed is not None
        #: The device's index; None off a GPU.
        self.gpu = x.device.index if x.is_cuda else None
        #: Whether what wgrad reads of an input takes a pass of its own.
        self.turns = rows.transposed_input is not None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor | None:
        """y [..., n], or None where this x, weight or state is for the general way."""
        if not weight.is_contiguous():
            return None
        if self.recipe.stochastic and layer._buffers.get("count") is None:
            # A layer that met its recipe after it was made: the general way gives it the count of its noise.
            return None
        if self.rows.aligned and (x.data_ptr() & 15 or capture.as_captured(self.device)):
            return None
        run = self.run(x, layer) if self.delayed else PlannedContext(self, layer, None)
        if run is None:
            return None
        try:
            run_step = _apply if active_context.split is None else active_context.split(_PlannedLinearFunction, _apply)
            y: Tensor = run_step(x, weight, bias, run)
        except torch.OutOfMemoryError as error:
            raise device.out_of_memory(x, 2) from error
        return y

    def quantizes_as(self, other: object) -> bool:
        """Whether another step makes the same operands of an input."""
        if (
            not isinstance(other, PlannedLinear)
            or self.shape != other.shape
            or self.rows.aligned is not other.rows.aligned
        ):
            return False
        if self.recipe is other.recipe:
            return True
        # What multiplies on a CPU reads codes alike, whatever it takes of a weight.
        form = not self.rows.aligned or self.rows.form == other.rows.form
        return form and functional.alike(self.recipe, other.recipe)

    def run(self, x: Tensor, layer: nn.Module) -> "PlannedContext | None":
        """This step in one call, or None where what the layer remembers is for the general way."""
        if not self.delayed:
            return PlannedContext(self, layer, None)
        factors = self.rows.factors(layer, x) if layer._state.prepared is self.recipe else None  # type: ignore[union-attr]
        return None if factors is None else PlannedContext(self, layer, factors)


class PlannedContext:
    """A decided step in one call of its layer: what `linear.gemms.LinearContext` is to the general way."""

    __slots__ = ("entry", "factors", "layer", "pending", "ready", "step")

    #: What is kept of the weight, or was for this call.
    entry: weight_cache.CachedWeight
    #: Under delayed scaling, what keeps its step from being over until the backward has run.
    pending: scaling_step.PendingBackward | None

    def __init__(self, step: PlannedLinear, layer: nn.Module, factors: Any) -> None:
        self.step, self.layer, self.factors = step, layer, factors
        #: The weight's operands, between `entered` and `output`.
        self.ready: CachedWeightOperands | None = None
        if factors is not None:
            self.pending = scaling_step.pending(layer)

    def entered(self, x: Tensor, weight: Tensor) -> Operands:
        """What x [..., features] is to fprop and wgrad; what the weight is too, by launches that both share if it is
        not kept."""
        rows, layer, factors, kept = self.step.rows, self.layer, self.factors, self._kept(weight)
        if rows.aligned:
            # Codes of the last tensor, which another layer might take, may lie where these go.
            functional.thread.last = None
        if kept is None and rows.shared is not None and not weight.data_ptr() & 15:
            operands, self.entry, self.ready = rows.shared(x, weight, layer, factors)
            return operands
        self.entry, self.ready = kept or rows.weight(weight, layer, factors, True)
        return rows.input(x, factors)

    def taken(self, x: Tensor, weight: Tensor) -> tuple[Operands, tuple[Tensor, Scale]]:
        """`entered` and `transposed` of an x that autograd has computed: another layer's, if that has just quantized
        this
        very tensor so; else other layers may take them."""
        step, factors = self.step, self.factors
        factor = 0.0 if factors is None else factors.of_input
        if factor is None or x.__class__ is not Tensor:
            operands = self.entered(x, weight)
            return operands, self.transposed(x, operands)
        facts: tuple[Any, ...] = x._version, x.data_ptr(), factor
        if step.gpu is not None:
            facts = *facts, raw_stream(step.gpu)
        last = functional.thread.last
        if last is not None and last() is x:
            last = functional.lookup(x, facts, step, PlannedLinear.quantizes_as)
            if last is not None:
                operands, kept = last.operands
                self.note(operands)
                return operands, kept or self.transposed(x, operands)
        operands = self.entered(x, weight)
        kept = self.transposed(x, operands)
        # Where wgrad reads x as it is, that would be held.
        functional.remember(x, facts, step, (operands, kept if step.turns else None))
        return operands, kept

    def transposed(self, x: Tensor, operands: Operands) -> tuple[Tensor, Scale]:
        """What wgrad consumes: the transpose, or x where it is not quantized, and a scale."""
        if self.step.rows.transposed_input is not None:
            return self.step.rows.transposed_input(x)
        xt = operands[2]
        return x if xt is None else xt, operands[3]

    def note(self, operands: Operands) -> None:
        """Note the amax of an input that another layer's run has quantized."""
        if self.factors is not None:
            self.factors.note(self.layer, amax.INPUT, operands[4])

    def output(self, operands: Operands, weight: Tensor, bias: Tensor | None, flat: bool = False) -> Tensor:
        """[..., n], or if `flat` [tokens, n]."""
        step, w = self.step, self.ready
        rows, shape = step.rows, step.of_output
        if w is None:
            # The input is another layer's.
            self.entry, w = self._kept(weight) or rows.weight(weight, self.layer, self.factors, True)
        # What is kept of the weight may be freed before backward.
        self.ready = None
        y = rows.fprop(operands[0], operands[1], w.fprop, w.fprop_scale, bias)
        # No view, which could not be written to: see `linear.function`. torch reads numbers faster than a shape.
        return y if flat or len(shape) == 2 else y.resize_(*shape)

    def _kept(self, weight: Tensor) -> tuple[weight_cache.CachedWeight, CachedWeightOperands] | None:
        """What is kept of the weight until it, or its factor, changes."""
        step, factors = self.step, self.factors
        version = 0.0 if factors is None else factors.version
        entry = weight_cache.lookup(self.layer, step.rows.kept_as, weight, step.recipe.fprop.b, version)  # type: ignore[arg-type]
        if entry is None or entry.ready is None or entry.ready.reader != step.reader:
            return None
        ready: CachedWeightOperands = entry.ready
        if factors is not None and ready.recorded_amax is not factors.factors:
            assert entry.quantized is not None
            amax.record(self.layer, amax.WEIGHT, entry.quantized.amax)
            ready.recorded_amax = factors.factors
        return entry, ready

    def readable(self, x: Tensor) -> Tensor:
        """x as the rows read it: a matrix, or where kernels read it row by row from a multiple of 16."""
        if not self.step.rows.aligned:
            return _matrix(x)
        if x.is_contiguous() and not x.data_ptr() & 15:
            return x
        return x.clone(memory_format=torch.contiguous_format)

    def gradients(
        self,
        g: Tensor,
        weight: Tensor | None,
        kept: tuple[Tensor | None, Scale],
        needs: Sequence[Any],
        weight_dtype: torch.dtype,
        bias_dtype: torch.dtype | None,
    ) -> Gradients:
        """Those that are needed of input [T, K], weight and bias, of grad_output [..., n] and what `transposed` gave;
        the
        weight's may be needed `LATER`."""
        step, layer, factors, given = self.step, self.layer, self.factors, g
        rows, g = step.rows, self.readable(g)
        if factors is not None:
            if self.pending is not None:
                self.pending.settle()
            factors = factors.in_backward(layer, g)
        kernel_args = (layer, step.recipe, needs) if rows.draws else factors
        if rows.aligned:
            # As in `entered`: without threads of its own a backward runs in that of the forwards.
            functional.thread.last = None
        q, scale, qt, of_qt, of_bias = rows.grad_output(g, kernel_args)
        if counters.active.counters is not None:
            _count(layer, step.recipe, g.view(-1, g.shape[-1]), factors)
        of_input: Tensor | None = None
        of_weight: Any = None
        if needs[2] and of_bias is None:
            assert bias_dtype is not None
            of_bias = ops.bias_gradient(given.reshape(-1, given.shape[-1]), bias_dtype)
        if needs[0]:
            w = self.entry.ready
            if w is None or w.reader != step.reader or w.dgrad is None:
                assert weight is not None
                w = rows.weight(weight, layer, factors, False)[1]
            of_input = rows.dgrad(q, scale, w.dgrad, w.dgrad_scale, None)
        if needs[1]:
            if rows.wgrad is None:
                qt = _matrix(g)
            elif rows.transposed_grad_output is not None:
                qt, of_qt = rows.transposed_grad_output(g)
            if needs[1] is LATER:
                # Kernels write to the same places again: where those run, no gradient is needed later.
                of_weight = partial(self._of_weight, qt, of_qt, kept)
            else:
                of_weight = self._of_weight(qt, of_qt, kept)
        if rows.finish is not None:
            of_input, of_weight = rows.finish(of_input, of_weight)
        return of_input, of_weight, of_bias

    def _of_weight(self, g: Operand, scale: Scale, transposed: tuple[Any, Scale]) -> Tensor:
        """wgrad, of grad_output's transpose, or of that itself where it is not quantized, and of what `transposed`
        gave.
        """
        self.entry.window.used = graph_task_id()
        wgrad, (kept, of_kept) = self.step.rows.wgrad, transposed
        return torch.mm(g.t(), _matrix(kept)) if wgrad is None else wgrad(g, scale, kept, of_kept, None)


def _matrix(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


class _PlannedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, run: PlannedContext) -> Tensor:
        if x.is_leaf:
            operands = run.entered(x, weight)
            kept, scale = run.transposed(x, operands)
        else:
            operands, (kept, scale) = run.taken(x, weight)
        on_host = scale.__class__ is float
        # The weight itself, so that autograd sees a change of it before backward.
        if scale.__class__ is list:
            ctx.save_for_backward(weight, kept, *scale)
        else:
            ctx.save_for_backward(weight, kept, of_host(scale) if on_host else scale)
        ctx.constants = run, on_host, bias is not None and bias.dtype
        return run.output(operands, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if any_autocast_enabled():
            with ops.without_autocast(ops.autocast_device(g)):
                return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, g)
        return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, g)


#: `Function.apply` without its checks for torch.func, which the layer has made itself.
_apply: Any = super(torch.autograd.Function, _PlannedLinearFunction).apply


def _backward(ctx: Any, saved: Sequence[Any], g: Tensor) -> Any:
    run, on_host, bias_dtype = ctx.constants
    weight, kept, scale, *second = saved
    if second:
        scale = [scale, *second]
    kept, shape = (kept, scale.item() if on_host else scale), run.step.shape
    of_x, *others = run.gradients(g, weight, kept, ctx.needs_input_grad, weight.dtype, bias_dtype)
    return of_x if of_x is None or len(shape) == 2 else of_x.resize_(*shape), *others, None


def _count(layer: nn.Module, recipe: Recipe, g: Tensor, factors: Any) -> None:
    """Note the operands of a grad_output for counters that were opened after its forward."""
    note, a, c = counters.active.counters.note, recipe.dgrad.a, recipe.wgrad.a  # type: ignore[union-attr]
    assert a is not None
    factor = None if factors is None else factors.factors[amax.GRAD_OUTPUT]
    note(layer, "grad_output", g, ops.QUANTIZE(g, a, None, factor))
    if c is not None and not recipe.plan.grad_output:
        note(layer, "grad_output.T", g.t(), ops.QUANTIZE(g.t(), c))
