"""Planned step of a linear layer: one autograd function for its three GEMMs on any device.

`PlannedKernels` holds the functions that quantize each operand and run each GEMM; `plan`, `plan_gpu` and
`plan_emulated` fill it. The step calls them, saves what backward reads, and updates the layer's scaling state.
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

#: Scale as a GEMM takes it: a float on the CPU, a tensor on a GPU, or a list [block scales, tensor scale].
Scale = Any
#: Codes as a GEMM takes them: a tensor, or a `Quantized` that includes its scale.
Operand = Any
#: Result of quantizing a matrix [rows, columns]: operand, its scale, operand of the transpose, its scale, extra.
#: The transpose is laid out as the right side of a GEMM; it is None if no GEMM reads it. `extra` of an input is its
#: amax if a history needs it; `extra` of a grad_output is the bias gradient, or None if that is still to be summed.
Operands = tuple[Operand, Scale, Operand, Scale, Any]


class CachedWeightOperands:
    """Operands and scales of a cached weight for fprop and dgrad; those of dgrad are None until a backward quantizes
    them.
    """

    __slots__ = ("dgrad", "dgrad_scale", "factors_at_recording", "fprop", "fprop_scale", "reader")

    def __init__(
        self,
        fprop: Operand,
        fprop_scale: Scale,
        dgrad: Operand,
        dgrad_scale: Scale,
        factors_at_recording: object,
        recipe: Recipe,
        form: str = "",
    ) -> None:
        self.fprop, self.fprop_scale, self.dgrad, self.dgrad_scale = fprop, fprop_scale, dgrad, dgrad_scale
        #: Encode factors of the call that recorded the weight's amax, so that a cached weight records it once per step.
        #: Only the factors are referenced; the object returned by `PlannedKernels.factors` may reference the layer.
        self.factors_at_recording = factors_at_recording
        #: `PlannedLinear.reader` of the steps whose GEMMs read these operands; other steps may share the quantized
        #: weight.
        self.reader = recipe, form


#: GEMM called as (a, scale of a, b, scale of b, bias) -> product.
Multiply = Callable[[Operand, Scale, Operand, Scale, Tensor | None], Tensor]


@dataclass(slots=True)
class PlannedKernels:
    """Functions chosen for the operands and GEMMs of a layer; slots are read twice as fast as the fields of a tuple."""

    #: Quantize the input or grad_output x [..., features]: called as (x, factors), with factors from `factors` below.
    input: Callable[[Tensor, Any], Operands]
    grad_output: Callable[[Tensor, Any], Operands]
    #: Quantizes the weight: (weight, layer, factors, is_forward) -> cache entry and GEMM operands.
    weight: Callable[[Tensor, nn.Module, Any, bool], tuple[weight_cache.CachedWeight, CachedWeightOperands]]
    #: Quantizes an input and an uncached weight in shared launches: (input, weight, layer, factors) -> operands of the
    #: input, cache entry and operands of the weight. None if there is no shared launch.
    shared: (
        Callable[[Tensor, Tensor, nn.Module, Any], tuple[Operands, weight_cache.CachedWeight, CachedWeightOperands]]
        | None
    )
    #: Delayed scaling: (layer, x) -> scale factors of this step, or None if the slow path must read them. The result
    #: has the fields `factors` (encode factors of input, weight, grad_output in the forward), `of_input` (the input's
    #: factor, None if not known on the host) and `version` (changes with the weight's factor), and the methods
    #: `note(layer, column, amax)` and `in_backward(layer, g)`, which returns the factors for a backward, when the
    #: buffers may have been replaced.
    factors: Callable[[nn.Module, Tensor], Any]
    fprop: Multiply
    dgrad: Multiply
    #: wgrad, or None if it is not quantized; the input is then saved in high precision.
    wgrad: Multiply | None
    #: True if the kernels require addresses that are multiples of 16 bytes.
    aligned: bool
    #: Index of the implementation that prologue operations use together with these kernels.
    implementation: int
    #: Quantizes the transpose in a separate launch: matrix -> operand and scale. None if `input` or `grad_output`
    #: writes it.
    transposed_input: Callable[[Tensor], tuple[Tensor, Scale]] | None = None
    transposed_grad_output: Callable[[Tensor], tuple[Operand, Scale]] | None = None
    #: Layout of the weight operands; plans of other shapes may need another layout.
    form: str = ""
    #: Name of the weight's cache entry: "fprop" if the slow path reads the same entry.
    cache_name: str = "fprop"
    #: Number of tensors in a scale; two levels are passed as a list.
    levels: int = 1
    #: True if `grad_output` may round stochastically; it then gets (layer, recipe, needs) in place of the factors.
    rounds_stochastically: bool = False
    #: Converts the results of dgrad and wgrad (or None) to gradients; None if they already are gradients.
    finish: Callable[[Tensor | None, Tensor | None], tuple[Tensor | None, ...]] | None = None


class PlannedLinear:
    """Planned step of one layer shape for inputs of one shape."""

    __slots__ = ("delayed", "device", "gpu", "kernels", "of_output", "reader", "recipe", "separate_transpose", "shape")

    def __init__(self, recipe: Recipe, x: Tensor, features: int, kernels: PlannedKernels) -> None:
        self.recipe, self.shape, self.device, self.kernels = recipe, x.shape, x.device, kernels
        #: Key by which this step recognizes cached weight operands that its GEMMs can read.
        self.reader = recipe, kernels.form
        #: Shape of the output [..., features].
        self.of_output = (*x.shape[:-1], features)
        self.delayed = recipe.delayed is not None
        #: CUDA device index, or None on a CPU.
        self.gpu = x.device.index if x.is_cuda else None
        #: True if the transposed input is quantized in a separate launch.
        self.separate_transpose = kernels.transposed_input is not None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor | None:
        """Run the layer and return y [..., n], or None if x, the weight or the state requires the slow path."""
        if not weight.is_contiguous():
            return None
        if self.recipe.stochastic and layer._buffers.get("count") is None:
            # The recipe was set after construction, so the noise counter is missing; the slow path creates it.
            return None
        if self.kernels.aligned and (x.data_ptr() & 15 or capture.is_captured_or_rehearsed(self.device)):
            return None
        run = self.run(x, layer) if self.delayed else PlannedContext(self, layer, None)
        if run is None:
            return None
        try:
            run_step = (
                _apply
                if active_context.apply_override is None
                else active_context.apply_override(_PlannedLinearFunction, _apply)
            )
            y: Tensor = run_step(x, weight, bias, run)
        except torch.OutOfMemoryError as error:
            raise device.out_of_memory(x, 2) from error
        return y

    def quantizes_as(self, other: object) -> bool:
        """Return True if the other step quantizes an input to the same operands."""
        if (
            not isinstance(other, PlannedLinear)
            or self.shape != other.shape
            or self.kernels.aligned is not other.kernels.aligned
        ):
            return False
        if self.recipe is other.recipe:
            return True
        # CPU GEMMs read the same codes whatever layout they use for the weight.
        form = not self.kernels.aligned or self.kernels.form == other.kernels.form
        return form and functional.same_input_quantization(self.recipe, other.recipe)

    def run(self, x: Tensor, layer: nn.Module) -> "PlannedContext | None":
        """Return the context of one call, or None if the layer's scaling state requires the slow path."""
        if not self.delayed:
            return PlannedContext(self, layer, None)
        factors = self.kernels.factors(layer, x) if layer._state.buffers_recipe is self.recipe else None  # type: ignore[union-attr]
        return None if factors is None else PlannedContext(self, layer, factors)


class PlannedContext:
    """State of one call of a planned step; the counterpart of `linear.gemms.LinearContext` on the slow path."""

    __slots__ = ("entry", "factors", "layer", "pending", "planned_operands", "step")

    #: Cache entry of the weight, or an entry made for this call only.
    entry: weight_cache.CachedWeight
    #: Handle that keeps the delayed-scaling step open until the backward of this call has run.
    pending: scaling_step.PendingBackward | None

    def __init__(self, step: PlannedLinear, layer: nn.Module, factors: Any) -> None:
        self.step, self.layer, self.factors = step, layer, factors
        #: Operands of the weight, set between `quantize_input` and `output`.
        self.planned_operands: CachedWeightOperands | None = None
        if factors is not None:
            self.pending = scaling_step.pending(layer)

    def quantize_input(self, x: Tensor, weight: Tensor) -> Operands:
        """Quantize x [..., features] for fprop and wgrad, and the weight if it is not cached, in shared launches if
        possible.
        """
        kernels, layer, factors, cached_weight = (
            self.step.kernels,
            self.layer,
            self.factors,
            self._cached_weight(weight),
        )
        if kernels.aligned:
            # The kernels may overwrite the buffers with the last shared input, so no other layer may reuse it.
            functional.thread.last = None
        if cached_weight is None and kernels.shared is not None and not weight.data_ptr() & 15:
            operands, self.entry, self.planned_operands = kernels.shared(x, weight, layer, factors)
            return operands
        self.entry, self.planned_operands = cached_weight or kernels.weight(weight, layer, factors, True)
        return kernels.input(x, factors)

    def quantize_shared_input(self, x: Tensor, weight: Tensor) -> tuple[Operands, tuple[Tensor, Scale]]:
        """Quantize a non-leaf x for fprop and wgrad, reusing the operands of another layer that has just quantized the
        same x.

        Returns what `quantize_input` and `transposed` return. New operands are remembered for the next layer.
        """
        step, factors = self.step, self.factors
        factor = 0.0 if factors is None else factors.of_input
        if factor is None or x.__class__ is not Tensor:
            operands = self.quantize_input(x, weight)
            return operands, self.transposed(x, operands)
        conditions: tuple[Any, ...] = x._version, x.data_ptr(), factor
        if step.gpu is not None:
            conditions = *conditions, raw_stream(step.gpu)
        last = functional.thread.last
        if last is not None and last() is x:
            last = functional.lookup(x, conditions, step, PlannedLinear.quantizes_as)
            if last is not None:
                operands, saved_input = last.operands
                self.note(operands)
                return operands, saved_input or self.transposed(x, operands)
        operands = self.quantize_input(x, weight)
        saved_input = self.transposed(x, operands)
        # Where wgrad reads x itself, remembering it would extend its lifetime.
        functional.remember(x, conditions, step, (operands, saved_input if step.separate_transpose else None))
        return operands, saved_input

    def transposed(self, x: Tensor, operands: Operands) -> tuple[Tensor, Scale]:
        """Return the operand and scale that wgrad reads: the transpose of x, or x itself if wgrad is unquantized."""
        if self.step.kernels.transposed_input is not None:
            return self.step.kernels.transposed_input(x)
        xt = operands[2]
        return x if xt is None else xt, operands[3]

    def note(self, operands: Operands) -> None:
        """Record the amax of an input that another layer has quantized."""
        if self.factors is not None:
            self.factors.note(self.layer, amax.INPUT, operands[4])

    def output(self, operands: Operands, weight: Tensor, bias: Tensor | None, flat: bool = False) -> Tensor:
        """Run fprop and return y [..., n], or [tokens, n] if `flat`."""
        step, w = self.step, self.planned_operands
        kernels, shape = step.kernels, step.of_output
        if w is None:
            # The input was quantized by another layer, so `quantize_input` was not called.
            self.entry, w = self._cached_weight(weight) or kernels.weight(weight, self.layer, self.factors, True)
        # Drop the reference, so that the cached weight can be freed before backward.
        self.planned_operands = None
        y = kernels.fprop(operands[0], operands[1], w.fprop, w.fprop_scale, bias)
        # resize_ instead of view, because autograd refuses writes to a view (see `linear.function`). Separate ints
        # parse faster.
        return y if flat or len(shape) == 2 else y.resize_(*shape)

    def _cached_weight(self, weight: Tensor) -> tuple[weight_cache.CachedWeight, CachedWeightOperands] | None:
        """Return the cached weight and its operands if weight, factor and layout are unchanged, else None."""
        step, factors = self.step, self.factors
        version = 0.0 if factors is None else factors.version
        entry = weight_cache.lookup(self.layer, step.kernels.cache_name, weight, step.recipe.fprop.b, version)  # type: ignore[arg-type]
        if entry is None or entry.planned_operands is None or entry.planned_operands.reader != step.reader:
            return None
        planned_operands: CachedWeightOperands = entry.planned_operands
        if factors is not None and planned_operands.factors_at_recording is not factors.factors:
            assert entry.quantized is not None
            amax.record(self.layer, amax.WEIGHT, entry.quantized.amax)
            planned_operands.factors_at_recording = factors.factors
        return entry, planned_operands

    def readable(self, x: Tensor) -> Tensor:
        """Return x as the kernels read it: a matrix, or on a GPU a contiguous tensor at a multiple of 16 bytes."""
        if not self.step.kernels.aligned:
            return _matrix(x)
        if x.is_contiguous() and not x.data_ptr() & 15:
            return x
        return x.clone(memory_format=torch.contiguous_format)

    def gradients(
        self,
        g: Tensor,
        weight: Tensor | None,
        saved_input: tuple[Tensor | None, Scale],
        needs: Sequence[Any],
        weight_dtype: torch.dtype,
        bias_dtype: torch.dtype | None,
    ) -> Gradients:
        """Return the needed gradients of input [T, K], weight and bias.

        Args:
            g: grad_output [..., n].
            saved_input: operand of wgrad and its scale, as `transposed` returned them in the forward.
            needs: one flag per gradient; `LATER` for the weight returns a function that computes that gradient.
        """
        step, layer, factors, original_g = self.step, self.layer, self.factors, g
        kernels, g = step.kernels, self.readable(g)
        if factors is not None:
            if self.pending is not None:
                self.pending.finish()
            factors = factors.in_backward(layer, g)
        kernel_args = (layer, step.recipe, needs) if kernels.rounds_stochastically else factors
        if kernels.aligned:
            # As in `quantize_input`: a CPU backward may run in the thread of the forward.
            functional.thread.last = None
        q, scale, qt, of_qt, of_bias = kernels.grad_output(g, kernel_args)
        if counters.active.counters is not None:
            _count(layer, step.recipe, g.view(-1, g.shape[-1]), factors)
        of_input: Tensor | None = None
        of_weight: Any = None
        if needs[2] and of_bias is None:
            assert bias_dtype is not None
            of_bias = ops.bias_gradient(original_g.reshape(-1, original_g.shape[-1]), bias_dtype)
        if needs[0]:
            w = self.entry.planned_operands
            if w is None or w.reader != step.reader or w.dgrad is None:
                assert weight is not None
                w = kernels.weight(weight, layer, factors, False)[1]
            of_input = kernels.dgrad(q, scale, w.dgrad, w.dgrad_scale, None)
        if needs[1]:
            if kernels.wgrad is None:
                qt = _matrix(g)
            elif kernels.transposed_grad_output is not None:
                qt, of_qt = kernels.transposed_grad_output(g)
            if needs[1] is LATER:
                # Only for kernels that do not reuse their buffers; the others never get `LATER`.
                of_weight = partial(self._of_weight, qt, of_qt, saved_input)
            else:
                of_weight = self._of_weight(qt, of_qt, saved_input)
        if kernels.finish is not None:
            of_input, of_weight = kernels.finish(of_input, of_weight)
        return of_input, of_weight, of_bias

    def _of_weight(self, g: Operand, scale: Scale, transposed: tuple[Any, Scale]) -> Tensor:
        """Run wgrad on the transposed grad_output (grad_output itself if unquantized) and the saved input."""
        self.entry.parameter_version.last_backward_id = graph_task_id()
        wgrad, (saved_input, saved_scale) = self.step.kernels.wgrad, transposed
        return (
            torch.mm(g.t(), _matrix(saved_input)) if wgrad is None else wgrad(g, scale, saved_input, saved_scale, None)
        )


def _matrix(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


class _PlannedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, run: PlannedContext) -> Tensor:
        if x.is_leaf:
            operands = run.quantize_input(x, weight)
            saved_input, scale = run.transposed(x, operands)
        else:
            operands, (saved_input, scale) = run.quantize_shared_input(x, weight)
        on_host = scale.__class__ is float
        # Save the weight itself, so that autograd detects in-place changes before backward.
        if scale.__class__ is list:
            ctx.save_for_backward(weight, saved_input, *scale)
        else:
            ctx.save_for_backward(weight, saved_input, of_host(scale) if on_host else scale)
        ctx.constants = run, on_host, bias is not None and bias.dtype
        return run.output(operands, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if any_autocast_enabled():
            with ops.without_autocast(ops.autocast_device(g)):
                return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, g)
        return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, g)


#: `Function.apply` without its torch.func checks, which the layer has already made.
_apply: Any = super(torch.autograd.Function, _PlannedLinearFunction).apply


def _backward(ctx: Any, saved: Sequence[Any], g: Tensor) -> Any:
    run, on_host, bias_dtype = ctx.constants
    weight, saved_input, scale, *second = saved
    if second:
        scale = [scale, *second]
    saved_input, shape = (saved_input, scale.item() if on_host else scale), run.step.shape
    of_x, *others = run.gradients(g, weight, saved_input, ctx.needs_input_grad, weight.dtype, bias_dtype)
    return of_x if of_x is None or len(shape) == 2 else of_x.resize_(*shape), *others, None


def _count(layer: nn.Module, recipe: Recipe, g: Tensor, factors: Any) -> None:
    """Report the grad_output operands to counters that were opened after the forward."""
    count, a, c = counters.active.counters.count, recipe.dgrad.a, recipe.wgrad.a  # type: ignore[union-attr]
    assert a is not None
    factor = None if factors is None else factors.factors[amax.GRAD_OUTPUT]
    count(layer, "grad_output", g, ops.QUANTIZE(g, a, None, factor))
    if c is not None and not recipe.plan.grad_output:
        count(layer, "grad_output.T", g.t(), ops.QUANTIZE(g.t(), c))
