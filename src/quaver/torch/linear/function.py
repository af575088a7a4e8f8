"""Autograd function of one linear layer, or of several layers that share an input.

    y = prologue(x)        output_i = y @ weight_i.T + bias_i

y is quantized once and its operand goes to all GEMMs. Backward saves y in eight bits, or recomputes y from tensors that
the prologue saves anyway. The bits equal those of the prologue followed by each layer separately.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.torch.backends.cpu import decode
from quaver.torch.backends.gpu.device import out_of_memory
from quaver.torch.linear.gemms import LinearContext
from quaver.torch.linear.quantized_input import InputOp, LinearSetup, prepare_input, recomputed
from quaver.torch.numerics.quantized import Quantized, rebuild_operand, split_operand
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops, selective_checkpoint
from quaver.torch.operations.autograd import NO_DOUBLE_BACKWARD, add, first_derivative
from quaver.torch.operations.ops import any_autocast_enabled
from quaver.torch.state import counters

#: Context of a call: setup, context of each layer (None under torch.compile), shape and dtype of their input, and
#: dtypes of weights and biases.
CallContext = tuple[
    LinearSetup, Sequence[Any] | None, tuple[int, ...], torch.dtype, Sequence[torch.dtype], Sequence[Any]
]


class LinearFunction(torch.autograd.Function):
    """Apply a prologue and linear layers: takes a `LinearSetup`, the prologue's inputs, the weights, and the biases or
    None.

    Returns the output [..., n] of each layer, preceded by the layers' input if `setup.return_input`. Saves plain
    tensors only, no wrapper subclasses.
    """

    @staticmethod
    def forward(ctx: Any, setup: LinearSetup, *tensors: Tensor | None) -> Any:
        if setup.contexts:
            return _forward_planned(ctx, setup, tensors)
        if not is_tracing() and selective_checkpoint.dispatch_mode_depth() > 0:
            return _forward_checkpointed(ctx, setup, tensors)
        return _forward_unplanned(ctx, setup, tensors)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        if not is_tracing() and any_autocast_enabled():
            with ops.without_autocast(ops.autocast_device(gs[0])):
                return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, *gs)
        return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, *gs)


#: `Function.apply` without its torch.func checks, which the layers have already made. Layers call it directly, and
#: torch.compile calls `LinearFunction.apply`: a helper function around both would be compiled on its own where the
#: calling layer runs eagerly, as it does if compilation would round its weight gradient.
apply: Any = super(torch.autograd.Function, LinearFunction).apply


def _forward_unplanned(ctx: Any, setup: LinearSetup, tensors: Sequence[Any]) -> Any:
    """Run the forward of `LinearFunction` on the slow path."""
    n, input_count, needs, c = len(setup.layers), setup.input_count, ctx.needs_input_grad, setup.recipe.saved_input
    weights, biases = tensors[input_count : input_count + n], tensors[input_count + n :]
    # No recomputation with stochastic rounding (noise is drawn once), nor if the prologue saves nothing for its
    # gradients.
    differentiated = any(needs[1 : 1 + input_count])
    recomputes_input = setup.prologue.recomputes_input and differentiated and (c is None or c.rounding == "nearest")
    keeps_input = setup.training and not recomputes_input and any(needs[1 + input_count : 1 + input_count + n])
    prepared_input = prepare_input(setup, tensors[:input_count], keeps_input)
    contexts, lead, outputs = prepared_input.contexts, prepared_input.shape[:-1], []
    # All layers read this operand, so its decoded values are cached meanwhile.
    shares = n > 1 and not is_tracing()
    if shares:
        decode.cache_decoded(prepared_input.operand, decode.INPUT)
    try:
        for context, weight, bias in zip(contexts, weights, biases, strict=True):
            assert weight is not None
            outputs.append(shaped(context.output(prepared_input.operand, weight, bias), (*lead, weight.shape[0])))
    finally:
        if shares:
            decode.drop_decoded(prepared_input.operand)
    saved_input: tuple[Any, Any] = prepared_input.transposed, None
    if keeps_input and prepared_input.transposed is None:
        saved_input = contexts[0].transposed(prepared_input.matrix, prepared_input.operand)
        if prepared_input.shared_quantization is not None and isinstance(saved_input[0], Quantized):
            prepared_input.shared_quantization.operands = prepared_input.operand, saved_input[0]
    # Only dgrad reads the weights; without it they may be modified before backward.
    of_dgrad = weights if differentiated else (None,) * n
    # torch.compile passes tensors and plain values from forward to backward, but no objects.
    traced = is_tracing()
    factors = [context.factors for context in contexts] if traced else []
    saved, layouts = pack([*saved_input, *factors, *(prepared_input.saved if differentiated else ())])
    ctx.save_for_backward(*of_dgrad, *saved)
    dtypes = [weight.dtype for weight in weights if weight is not None], [b is not None and b.dtype for b in biases]
    ctx.constants = layouts, (setup, None if traced else contexts, prepared_input.shape, prepared_input.dtype, *dtypes)
    return (prepared_input.output, *outputs) if setup.return_input else tuple(outputs)


#: `_forward_unplanned` under a selective checkpoint.
_forward_checkpointed = selective_checkpoint.hide_from_policies(_forward_unplanned)


def _forward_planned(ctx: Any, setup: LinearSetup, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """Run the forward of `LinearFunction` with planned steps."""
    outputs, values, context = _run_planned(setup, tensors)
    layouts: list[tuple[int, Any]] = []
    if PACKED.isdisjoint(map(type, values)):
        ctx.save_for_backward(*values)
    else:
        n = len(setup.contexts)
        saved_input, layouts = pack(values[n:])
        ctx.save_for_backward(*values[:n], *saved_input)
    ctx.constants = layouts, context
    return tuple(outputs)


def _run_planned(
    setup: LinearSetup, tensors: Sequence[Any], flat: bool = False
) -> tuple[list[Tensor], list[Any], CallContext]:
    """Run planned layers; return the outputs (matrices if `flat`), the tensors to save (weights first), and the facts.

    The wgrad operand is always saved, even if the prologue could recompute it: it is small and recomputing costs
    launches.
    """
    contexts, input_count, n = setup.contexts, setup.input_count, len(setup.contexts)
    first, weights = contexts[0], tensors[input_count : input_count + n]
    y, saved = setup.prologue.forward(*tensors[:input_count], implementation=first.step.kernels.implementation)
    # The kernels read rows, so a transposed view must be copied first.
    x = first.readable(y).contiguous()
    try:
        operands = first.quantize_input(x, weights[0])
    except torch.OutOfMemoryError as error:
        raise out_of_memory(y, 2) from error
    outputs, of_biases = [y] if setup.return_input else [], []
    if n > 1:
        decode.cache_decoded(operands[0], decode.INPUT)
    try:
        for context, weight, bias in zip(contexts, weights, tensors[input_count + n :], strict=True):
            if context is not first:
                context.note(operands)
            outputs.append(context.output(operands, weight, bias, flat))
            of_biases.append(bias is not None and bias.dtype)
    finally:
        if n > 1:
            decode.drop_decoded(operands[0])
    saved_input, scale = first.transposed(x, operands)
    # Only tensors; nothing has to be packed.
    values = (
        [*weights, saved_input, *scale, *saved] if scale.__class__ is list else [*weights, saved_input, scale, *saved]
    )
    return outputs, values, (setup, contexts, y.shape, setup.dtype, [setup.dtype] * n, of_biases)


class FusedMLPInput:
    """Prologue made of planned layers and the operation after them: the part of an MLP before its last matrix.

    It allows a single autograd function for the whole MLP.

    Args:
        setup: of the planned layers; their inputs, weights and biases are the inputs of this prologue.
        after: prologue that takes their outputs, such as an activation.
    """

    #: Recompute; large inputs use separate functions, where the last layer's saved tensors are freed earlier.
    recomputes_input = True

    def __init__(self, setup: LinearSetup, after: InputOp) -> None:
        self.setup, self.after = setup, after

    def forward(self, *x: Tensor | None, implementation: int | None = None) -> tuple[Tensor, Sequence[Any]]:
        # Flat outputs, which only `after` reads, save reshapes of each output and gradient.
        outputs, saved, self.context = _run_planned(self.setup, x, True)
        self.own = len(saved)
        y, saved_input = self.after.forward(*outputs, implementation=implementation)
        return y, [*saved, *saved_input]

    def backward(
        self, g: Tensor, saved: Sequence[Any], implementation: int | None = None, needs: Sequence[Any] = ()
    ) -> tuple[Any, ...]:
        gs = self.after.backward(g, saved[self.own :], implementation)
        return _gradients(self.context, saved[: self.own], needs, gs)


def shaped(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape a Function's fresh output so that it stays writable: autograd refuses in-place writes to a returned view.

    nn.ReLU(inplace=True) does such writes.
    """
    if len(shape) == 2:
        return y
    if is_tracing() or not y.is_contiguous():
        return _reshaped(y, shape)
    # torch parses separate ints twice as fast as a shape.
    return y.resize_(*shape)


#: Reshapes a fresh tensor without autograd treating it as a view, as torch.matmul does with its products. With a plain
#: view, compiled layers would refuse in-place writes to their outputs.
_reshaped: Any = getattr(torch.ops.aten, "_unsafe_view", torch.Tensor.view)


#: Layout that `pack` records for a tensor or None.
PLAIN = 1, None
#: Types that `pack` splits into tensors and layout.
PACKED = frozenset((Quantized, float))


def pack(values: Sequence[Any]) -> tuple[Sequence[Tensor | None], list[tuple[int, Any]]]:
    """Split operands into tensors, which autograd can save, and the layouts that `unpack` needs ([] if all are
    tensors).
    """
    if not is_tracing() and PACKED.isdisjoint(map(type, values)):
        return values, []
    tensors: list[Tensor | None] = []
    layouts: list[tuple[int, Any]] = []
    for value in values:
        if isinstance(value, (Quantized, float)):
            parts, layout = split_operand(value)
            layouts.append((len(parts), layout))
            tensors += parts
        else:
            layouts.append(PLAIN)
            tensors.append(value)
    return tensors, layouts


def unpack(tensors: Sequence[Any], layouts: Sequence[tuple[int, Any]]) -> Sequence[Any]:
    """Rebuild the operands that `pack` has split."""
    if not layouts:
        return tensors
    values, at = [], 0
    for size, layout in layouts:
        # Plain tensors are taken as they are, which saves a call.
        values.append(tensors[at] if layout is None else rebuild_operand(layout, tensors[at : at + size]))
        at += size
    return values


def _backward(ctx: Any, tensors: Sequence[Any], *gs: Tensor) -> tuple[Any, ...]:
    layouts, context = ctx.constants
    if layouts:
        n = len(context[0].layers)
        tensors = *tensors[:n], *unpack(tensors[n:], layouts)
    return None, *_gradients(context, tensors, ctx.needs_input_grad[1:], gs)


def _gradients(context: CallContext, values: Sequence[Any], needs: Sequence[Any], gs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the needed gradients of the prologue's inputs, the weights and the biases.

    Args:
        values: the weights, the wgrad operand and its scale, and the tensors that the prologue saved.
        needs: one flag per gradient; `LATER` for a weight returns a function instead of a tensor.
        gs: gradients of the outputs.
    """
    setup, contexts, shape, dtype, weight_dtypes, bias_dtypes = context
    n, input_count = len(setup.layers), setup.input_count
    of_layers, weights, saved = gs[-n:], values[:n], values[n + 2 :]
    saved_input: Any = values[n], values[n + 1]
    if setup.contexts and contexts[0].step.kernels.levels == 2:  # type: ignore[index]
        saved_input, saved = (values[n], values[n + 1 : n + 3]), values[n + 3 :]
    if contexts is None:
        contexts, saved = _rebuild_contexts(setup, of_layers, saved[:n]), saved[n:]
    of_input = any(needs[:input_count])
    recomputed_input: RecomputedInput | None = None
    if saved_input[0] is None and any(needs[input_count : input_count + n]):
        once = n == 1 and of_input and needs[input_count] is True and not setup.return_input
        # Counters expect operands in the order in which a single layer quantizes them.
        if once and ops.on_host(of_layers[0]) and counters.active.counters is None:
            saved_input = recomputed_input = RecomputedInput(setup, saved, contexts[0], shape, dtype)
        else:
            saved_input, _ = recomputed(setup, saved, contexts[0])
    shares = n > 1 and not is_tracing()
    if shares:
        decode.cache_decoded(saved_input[0], decode.INPUT)
    of_y = gs[0].reshape(-1, shape[-1]) if setup.return_input else None
    of_weights: list[Any] = [None] * n
    of_biases: list[Tensor | None] = [None] * n
    # Same order as autograd's accumulation: last computed first.
    try:
        for i in range(n - 1, -1, -1):
            needed = of_input, needs[input_count + i], needs[input_count + n + i]
            part, of_weights[i], of_biases[i] = contexts[i].gradients(
                of_layers[i], weights[i], saved_input, needed, weight_dtypes[i], bias_dtypes[i]
            )
            if part is not None:
                part = part if part.dtype is dtype else part.to(dtype)
                of_y = part if of_y is None else add(of_y, part)
    finally:
        if shares:
            decode.drop_decoded(saved_input[0])
    of_x: Sequence[Tensor | None] = (None,) * input_count
    if recomputed_input is not None and recomputed_input.gradients is not None:
        of_x = recomputed_input.gradients
    elif of_input:
        assert of_y is not None
        # With `return_input` of_y may be the caller's tensor, which resize_ must not change.
        of_y = of_y.view(*shape) if setup.return_input else shaped(of_y, shape)
        implementation = setup.contexts[0].step.kernels.implementation if setup.contexts else None
        of_x = setup.prologue.backward(of_y, saved, implementation, needs[:input_count])
    return *of_x, *of_weights, *of_biases


class RecomputedInput:
    """wgrad operand of a single layer, recomputed as soon as the gradient of its input is available."""

    #: Gradients of the prologue's inputs, if the recomputation produced them too.
    gradients: Sequence[Tensor | None] | None = None

    def __init__(
        self, setup: LinearSetup, saved: Sequence[Any], context: Any, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.of = setup, saved, context
        self.shape, self.dtype = tuple(shape), dtype

    def __call__(self, of_input: Tensor) -> tuple[Any, Any]:
        g = of_input if of_input.dtype is self.dtype else of_input.to(self.dtype)
        saved_input: tuple[Any, Any]
        saved_input, self.gradients = recomputed(*self.of, shaped(g, self.shape))
        return saved_input


def _rebuild_contexts(setup: LinearSetup, gs: Sequence[Tensor], factors: Sequence[Any]) -> list[LinearContext]:
    """Rebuild the contexts of the layers in a backward that torch.compile traces."""
    return [
        LinearContext(layer, setup.recipe, g, setup.dtype, setup.training, of_layer)
        for layer, g, of_layer in zip(setup.layers, gs, factors, strict=True)
    ]
