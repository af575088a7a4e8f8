"""`LinearFunction`, the autograd function of linear layers: of one layer, or of several that share an input.

    x = op(inputs)        y_i = x @ weight_i.T + bias_i

x is quantized once and its operand goes to all GEMMs. The functions that quantize and multiply are those of each
layer's `LinearPlan`. Saved for backward: the weights (a reference), the wgrad operand of x (8 or 4 bits an element with
scales, or x itself if the recipe leaves wgrad unquantized), and what `op` saves. If backward recomputes x, as most
activations let it, the operand is not saved. The bits equal those of `op` followed by each layer separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.torch.backends.gpu import capture, device, fused_quantize
from quaver.torch.backends.gpu.device import out_of_memory
from quaver.torch.linear import general, plan_traced, stored_weight
from quaver.torch.linear.plan import LinearCall, LinearPlan, Operands, WeightOperands
from quaver.torch.numerics.quantized import Quantized, of_host, rebuild_operand, split_operand
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import functional, ops
from quaver.torch.operations.autograd import NO_DOUBLE_BACKWARD, add, first_derivative
from quaver.torch.operations.ops import any_autocast_enabled
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state import observer, selective_checkpoint, weight_cache
from quaver.torch.state.context import active_context
from quaver.torch.state.history import amax

# ---- fused input operations ----


class InputOp(fused_quantize.QuantizingProducer, Protocol):
    """Interface of a fused input operation, such as a norm or an activation.

    Methods take as many tensors as the operation has inputs; some may be None.
    """

    @property
    def recomputes_input(self) -> bool:
        """True if backward recomputes the input, so that it is not saved."""

    def __call__(self, *x: Tensor | None) -> Tensor:
        """Compute the input differentiably, for layers that are not quantized."""

    def forward(
        self, *x: Tensor | None, implementation: int | None = None
    ) -> tuple[Tensor, tuple[Tensor | Quantized | None, ...]]:
        """Compute the input outside of autograd; return it and the tensors that backward needs.

        Args:
            implementation: the index of the implementation to run before layers with fast plans, else None.
        """

    def recompute_input(self, saved: Sequence[Any], g: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...] | None]:
        """Recompute the input bit for bit; also return the result of `backward` for g if both share work."""

    def backward(self, g: Tensor, saved: Sequence[Any], implementation: int | None = None) -> tuple[Any, ...]:
        """Return the gradients of the operation's inputs; `implementation` is as in `forward`."""


@dataclass(frozen=True)
class IdentityInput:
    """Operation that returns its input unchanged and saves nothing."""

    recomputes_input: bool = False

    def __call__(self, *x: Tensor | None) -> Tensor:
        (value,) = x
        assert value is not None
        return value

    def forward(self, *x: Tensor | None, implementation: int | None = None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return self(*x), ()

    def quantized(self, *_: Any) -> None:
        return None

    def recompute_input(self, saved: Sequence[Any], g: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...] | None]:
        raise AssertionError("the caller's input is saved")

    def backward(self, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return (g,)


IDENTITY_INPUT = IdentityInput()


class LinearSetup(NamedTuple):
    """Arguments of a call of several layers, or of one layer with an operation before it, that are not tensors."""

    op: InputOp
    layers: tuple[nn.Linear, ...]
    recipe: Recipe
    #: dtype of the GEMMs' inputs and outputs.
    dtype: torch.dtype
    training: bool
    #: Number of tensors that the operation takes.
    input_count: int = 1
    return_input: bool = False
    #: Call of each layer, if all have fast or tensor-parallel plans; empty for general plans, whose calls begin later.
    calls: Sequence[LinearCall] = ()


# ---- autograd function ----


class LinearFunction(torch.autograd.Function):
    """Apply one or more linear layers to an input.

    Takes a `LinearCall`, x, weight and bias (or None), and returns y [..., n]. Or takes a `LinearSetup`, the inputs of
    its operation, the weights and the biases (or None), and returns the output of each layer, preceded by the layers'
    input if `return_input`. Saves plain tensors, and a stored weight as the `QuantizedTensor` that it is.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Any) -> Any:
        if call.__class__ is LinearCall:
            if selective_checkpoint.dispatch_mode_depth() > 0:
                return _forward_one_hidden(ctx, call, *tensors)
            return _forward_one(ctx, call, *tensors)
        if is_tracing():
            return _forward(ctx, call, tensors)
        # The gradient of an output that nothing reads is None, and its layer has no GEMMs in backward.
        ctx.set_materialize_grads(False)
        if selective_checkpoint.dispatch_mode_depth() > 0:
            return _forward_hidden(ctx, call, tensors)
        return _forward(ctx, call, tensors)

    @staticmethod
    def backward(ctx: Any, *gs: Any) -> Any:
        one = ctx.constants[0].__class__ is LinearCall
        if (one or not is_tracing()) and any_autocast_enabled():
            with ops.without_autocast(ops.autocast_device(next(g for g in gs if g is not None))):
                return first_derivative(_backward_one if one else _backward, ctx, NO_DOUBLE_BACKWARD, *gs)
        return first_derivative(_backward_one if one else _backward, ctx, NO_DOUBLE_BACKWARD, *gs)


#: `Function.apply` without its torch.func checks, which the layers have already made. Layers call it directly, and
#: torch.compile calls `LinearFunction.apply`: a helper function around both would be compiled on its own where the
#: calling layer runs eagerly, as it does if compilation would round its weight gradient.
apply: Any = super(torch.autograd.Function, LinearFunction).apply


def eager_apply() -> Any:
    """Return `apply`, or what stands in for it where the backward is split or weight gradients are taken away."""
    override = active_context.apply_override
    return apply if override is None else override(LinearFunction, apply)


# ---- one layer ----


def _forward_one(ctx: Any, call: LinearCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run one layer; as `_forward` without lists, which would take a tenth of a small layer's time."""
    plan, needs = call.plan, ctx.needs_input_grad
    shape = call.shape = x.shape
    y = readable(plan, x)
    save = call.training and needs[2]
    source = x if call.source is None else call.source()
    # Only tensors of the graph are shared.
    if source is None or source.is_leaf:
        shared, (operands, w) = None, _quantize(call, y, weight, save)
    else:
        operands, w, shared = _quantize_shared(call, source, y, weight, save)
    value = weight if call.comm is None else call.comm.local_weight
    if w is None:
        w = plan.quantize_weight(call, value)
    output = plan.fprop(call, operands[0], operands[1], w.fprop, w.fprop_scale, bias)
    if observer.active.observers:
        _observe_fprop(call, y, operands[0], value, w.fprop, bias, output)
    # Only dgrad reads the weight; without it the weight may be modified before backward.
    dgrad_weight = value if needs[1] else None
    tensors: Sequence[Any] = ()
    layout = None
    if save:
        saved, scale = plan.transpose_input(call, y, operands)
        if shared is not None:
            _share_transpose(shared, operands, saved)
        tensors, layout = flatten(saved, scale)
    weight_dtype = weight.dtype
    codes: Sequence[Tensor] = ()
    if weight.__class__ is QuantizedTensor:
        weight_dtype, codes = torch.float32, stored_weight.saved_codes([dgrad_weight], [call.layer])
    ctx.save_for_backward(dgrad_weight, *codes, *tensors)
    ctx.constants = call, layout, weight_dtype, None if bias is None else bias.dtype, 1 + len(codes)
    if call.comm is not None:
        return shaped(output, call.comm.shape(shape, output.shape[-1]))
    return output if len(shape) == 2 else shaped(output, (*shape[:-1], output.shape[-1]))


#: `_forward_one` under a selective checkpoint.
_forward_one_hidden = selective_checkpoint.hide_from_policies(_forward_one)


def _backward_one(ctx: Any, tensors: Sequence[Any], g: Tensor) -> Any:
    call, layout, weight_dtype, bias_dtype, first = ctx.constants
    needs = ctx.needs_input_grad[1:]
    if observer.active.observers:
        call.began_backward = True
    saved_input = unflatten(tensors[first:], layout) if needs[1] else None
    if saved_input is not None and call.plan.load_input is not None:
        saved_input = call.plan.load_input(call, saved_input[0])
    grads = gradients(call, g, tensors[0], saved_input, needs, weight_dtype, bias_dtype)
    grad_input = grads[0]
    if grad_input is not None:
        grad_input = grad_input if grad_input.dtype is call.dtype else grad_input.to(call.dtype)
        grad_input = grad_input if len(call.shape) == 2 else shaped(grad_input, call.shape)
    return None, grad_input, grads[1], grads[2]


# ---- several layers, or an operation before them ----


def _forward(ctx: Any, setup: LinearSetup, tensors: Sequence[Any]) -> Any:
    n, count, needs = len(setup.layers), setup.input_count, ctx.needs_input_grad
    weights, biases = tensors[count : count + n], tensors[count + n :]
    differentiated = any(needs[1 : 1 + count])
    # No recomputation if the operation saves nothing for its gradients, nor for fast plans: their inputs are small, and
    # recomputing costs launches.
    recomputes = not setup.calls and setup.op.recomputes_input and differentiated
    recomputes = recomputes and general.can_recompute(setup.recipe)
    save = setup.training and not recomputes and any(needs[1 + count : 1 + count + n])
    inputs = _quantized_input(setup, tensors[:count], weights, save)
    calls, operands, outputs = inputs.calls, inputs.operands, [inputs.output] if setup.return_input else []
    traced, w, lead = is_tracing(), inputs.weight, inputs.shape[:-1]
    values = weights
    if calls[0].comm is not None:
        values, lead = [call.comm.local_weight for call in calls], calls[0].comm.shape(inputs.shape, 0)[:-1]
    for call, weight, bias in zip(calls, values, biases, strict=True):
        w = call.plan.quantize_weight(call, weight) if w is None else w
        y = call.plan.fprop(call, operands[0], operands[1], w.fprop, w.fprop_scale, bias)
        if not traced and observer.active.observers:
            _observe_fprop(call, inputs.matrix, operands[0], weight, w.fprop, bias, y)
        outputs.append(shaped(y, (*lead, weight.shape[0])))
        w = None
    saved: Sequence[Any] = (None,)
    layout: Any = NOTHING_SAVED
    if save:
        operand, scale = calls[0].plan.transpose_input(calls[0], inputs.matrix, operands)
        if inputs.shared is not None:
            _share_transpose(inputs.shared, operands, operand)
        saved, layout = flatten(operand, scale)
    # torch.compile passes tensors and plain values from forward to backward, but no objects.
    factors = [call.factors for call in calls] if traced else []
    rest, layouts = pack([*factors, *(inputs.saved if differentiated else ())])
    codes = stored_weight.saved_codes(weights, setup.layers) if differentiated else ()
    ctx.save_for_backward(*(values if differentiated else (None,) * n), *saved, *codes, *rest)
    dtypes = [stored_weight.gradient_dtype(w) for w in weights], [None if b is None else b.dtype for b in biases]
    emulated = calls[0].plan.quantize_input is plan_traced.quantize_input
    context = setup, None if traced else calls, emulated, inputs.shape, inputs.dtype, *dtypes
    ctx.constants = context, len(saved), len(codes), layout, layouts
    return tuple(outputs)


#: `_forward` under a selective checkpoint.
_forward_hidden = selective_checkpoint.hide_from_policies(_forward)


def _backward(ctx: Any, tensors: Sequence[Any], *gs: Any) -> tuple[Any, ...]:
    (setup, calls, emulated, shape, dtype, weight_dtypes, bias_dtypes), size, skipped, layout, layouts = ctx.constants
    n, count, needs = len(setup.layers), setup.input_count, ctx.needs_input_grad[1:]
    layer_grads, weights, saved = gs[-n:], tensors[:n], unpack(tensors[n + size + skipped :], layouts)
    if calls is None:
        calls, saved = _rebuild_calls(setup, layer_grads, saved[:n], emulated), saved[n:]
    elif observer.active.observers:
        for call in calls:
            call.began_backward = True
    used = any(g is not None for g in layer_grads)
    saved_input: Any = unflatten(tensors[n : n + size], layout) if used and layout != NOTHING_SAVED else None
    if saved_input is not None and calls is not None and calls[0].plan.load_input is not None:
        saved_input = calls[0].plan.load_input(calls[0], saved_input[0])
    need_input = any(needs[:count])
    recomputed: RecomputedInput | None = None
    if used and saved_input is None and any(needs[count : count + n]):
        once = n == 1 and need_input and needs[count] is True and not setup.return_input
        # Observers expect operands in the order in which a single layer quantizes them.
        if once and ops.on_host(layer_grads[0]) and not observer.active.observers:
            saved_input = recomputed = RecomputedInput(setup, saved, calls[0], shape, dtype)
        else:
            saved_input, _ = recompute(setup, saved, calls[0])
    grad_y = general.matrix(gs[0]) if setup.return_input and gs[0] is not None else None
    grad_weights: list[Any] = [None] * n
    grad_biases: list[Tensor | None] = [None] * n
    # Same order as autograd's accumulation: last computed first.
    for i in range(n - 1, -1, -1):
        if layer_grads[i] is None:
            if calls[i].pending is not None:
                calls[i].pending.finish()
            continue
        needed = need_input, needs[count + i], needs[count + n + i]
        part, grad_weights[i], grad_biases[i] = gradients(
            calls[i], layer_grads[i], weights[i], saved_input, needed, weight_dtypes[i], bias_dtypes[i]
        )
        if part is not None:
            part = part if part.dtype is dtype else part.to(dtype)
            grad_y = part if grad_y is None else add(grad_y, part)
    grad_inputs: Sequence[Tensor | None] = (None,) * count
    if recomputed is not None and recomputed.gradients is not None:
        grad_inputs = recomputed.gradients
    elif need_input and grad_y is not None:
        # With `return_input` grad_y may be the caller's tensor, which resize_ must not change.
        grad_y = grad_y.view(*shape) if setup.return_input else shaped(grad_y, shape)
        grad_inputs = setup.op.backward(grad_y, saved, calls[0].plan.implementation)
    return None, *grad_inputs, *grad_weights, *grad_biases


def _rebuild_calls(
    setup: LinearSetup, gs: Sequence[Tensor], factors: Sequence[Any], emulated: bool
) -> list[LinearCall]:
    """Rebuild the calls of the layers in a backward that torch.compile traces.

    Args:
        emulated: True if their forward ran by `plan_traced`.
    """
    calls = []
    for layer, g, layer_factors in zip(setup.layers, gs, factors, strict=True):
        plan = plan_traced.plan_of(setup.recipe) if emulated else general.plan_for(setup.recipe, g)
        call = LinearCall(plan, layer, setup.training, setup.dtype, True)
        call.factors = layer_factors
        calls.append(call)
    return calls


# ---- backward of one layer ----

#: Gradients of input, weight and bias; that of the weight is a function if it is needed `LATER`.
Gradients = tuple[Tensor | None, Any, Tensor | None]


def gradients(
    call: LinearCall,
    g: Tensor,
    weight: Tensor,
    saved_input: Any,
    needs: Sequence[Any],
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> Gradients:
    """Compute the needed ones of grad_input [T, K], grad_weight [N, K] and grad_bias [N] from grad_output [..., N].

    Args:
        saved_input: wgrad operand and its scale, as `transpose_input` returned them, or a function of grad_input that
            returns both.
        needs: one flag per gradient; the weight's may be `LATER`.
    """
    plan, grad_output = call.plan, g
    if call.pending is not None:
        call.pending.finish()
    g = readable(plan, g)
    if plan.aligned:
        # As in `_quantize`: a CPU backward may run in the thread of the forward.
        functional.thread.last = None
    operands = plan.quantize_grad(call, g, needs, bias_dtype)
    observed = not call.traced and observer.active.observers != ()
    if observed and plan.operations is None:
        _observe_grad_output(call, general.matrix(g))
    grad_input: Any = None
    grad_weight: Any = None
    grad_bias = operands[4]
    if needs[2] and grad_bias is None:
        assert bias_dtype is not None
        grad_bias = ops.bias_gradient(general.matrix(grad_output), bias_dtype)
    if needs[0]:
        w, scale = plan.transpose_weight(call, weight)
        grad_input = plan.dgrad(call, operands[0], operands[1], w, scale, None)
        if observed:
            gathered = general.is_prequantized(weight)
            b = general.plain(w, g.dtype) if gathered else stored_weight.plain_values(weight, g.dtype).t()
            _observe_gemm(call, "dgrad", general.matrix(g), b, None, grad_input, operands[0], w)
    if needs[1]:
        if callable(saved_input):
            saved_input = saved_input(grad_input)
        gt, scale = plan.transpose_grad(call, g, operands)
        # Saved for a weight gradient that is computed later only while it is observed.
        observed_g = general.matrix(g) if observed else None
        run_wgrad = partial(_weight_gradient, call, gt, scale, *saved_input, dtype=weight_dtype, observed=observed_g)
        grad_weight = run_wgrad if needs[1] is general.LATER else run_wgrad()
    if plan.finish is not None:
        grad_input, grad_weight = plan.finish(grad_input, grad_weight)
    return grad_input, grad_weight, grad_bias


def _weight_gradient(
    call: LinearCall, g: Any, g_scale: Any, x: Any, x_scale: Any, *, dtype: torch.dtype, observed: Tensor | None
) -> Tensor:
    """Run wgrad, the last GEMM of a layer's backward, and mark the cached weight as used.

    Args:
        observed: grad_output [T, N] in high precision, to report the result; else None.
    """
    if call.plan.operations is None:
        call.entry.parameter_version.last_backward_id = weight_cache.backward_id()  # type: ignore[union-attr]
    y = call.plan.wgrad(call, g, g_scale, x, x_scale, dtype)
    if observed is not None and call.observed_input is not None:
        _observe_gemm(call, "wgrad", observed.t(), call.observed_input.t(), None, y, g, x)
    return y


# ---- observation ----


def _observe_fprop(
    call: LinearCall, x: Tensor | None, x_operand: Any, weight: Tensor, operand: Any, bias: Tensor | None, y: Tensor
) -> None:
    """Report fprop, and remember its input for the report of wgrad.

    Args:
        x_operand: the input as fprop read it.
        operand: the weight as fprop read it. A weight that was gathered as codes has no other values.
    """
    assert x is not None  # only fused kernels give codes alone, and they do not run while a layer is observed
    call.observed_input = general.matrix(x)
    if call.is_observable:
        gathered = general.is_prequantized(weight)
        b = general.plain(operand, call.dtype) if gathered else stored_weight.plain_values(weight, call.dtype)
        _observe_gemm(call, "fprop", call.observed_input, b, bias, y, x_operand, operand)


def _observe_gemm(
    call: LinearCall, gemm: str, a: Tensor, b: Tensor, bias: Tensor | None, y: Tensor, *operands: Any
) -> None:
    """Report the result y [m, n] of a GEMM with operands a [m, k] and b [n, k] before quantization.

    Of a sharded layer it is the GEMM of this rank.

    Args:
        operands: a and b as the GEMM read them.
    """
    if call.comm is not None:
        local = call.comm.local_gemm(gemm, a, b, bias, y)
        if local is None:
            return
        a, b, bias, y = local
    quantized_a, quantized_b = (each if isinstance(each, Quantized) else None for each in operands)
    observed = observer.ObservedGemm(call.layer, gemm, a, b, bias, general.matrix(y), (quantized_a, quantized_b))
    for each in observer.active.observers:
        each.observe_gemm(observed)


def _observe_grad_output(call: LinearCall, g: Tensor) -> None:
    """Quantize grad_output again and report it, if the forward ran by a fast plan before an observer was active."""
    a, c = call.recipe.dgrad.a, call.recipe.wgrad.a
    assert a is not None
    factors = call.factors
    factor = None
    if factors is not None:
        factor = (factors if factors.__class__ is list else factors.factors)[amax.GRAD_OUTPUT]
    operands = [("grad_output", g, ops.QUANTIZE(g, a, None, factor))]
    if c is not None and not call.recipe.reuse.grad_output:
        operands.append(("grad_output.T", g.t(), ops.QUANTIZE(g.t(), c)))
    for each in observer.active.observers:
        for name, x, q in operands:
            each.observe_operand(call.layer, call.recipe, name, x, q)


# ---- quantization of the input ----


def readable(plan: LinearPlan, x: Tensor) -> Tensor:
    """Return x as the plan's kernels read it: a matrix, or for aligned ones a contiguous tensor at a multiple of 16
    bytes.
    """
    if not plan.aligned:
        return x if x.dim() == 2 else general.matrix(x)
    if x.is_contiguous() and not x.data_ptr() & 15:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _quantize(call: LinearCall, y: Tensor, weight: Tensor, save: bool) -> tuple[Operands, WeightOperands | None]:
    """Quantize the input, and the weight too if the plan has launches for both."""
    plan = call.plan
    if plan.aligned:
        # The kernels may overwrite the buffers with the last shared input, so no other layer may reuse it.
        functional.thread.last = None
    if plan.quantize_together is not None:
        return plan.quantize_together(call, y, weight)
    # A weight that is not cached is quantized first where kernels run, so that fprop finds the input's codes in the L2
    # cache.
    w = plan.quantize_weight(call, weight) if plan.aligned else None
    return plan.quantize_input(call, y, save), w


def _quantize_shared(
    call: LinearCall, source: Tensor, y: Tensor, weight: Tensor, save: bool
) -> tuple[Operands, WeightOperands | None, functional.Quantization | None]:
    """Return the operands that another layer has made of the same `source`, or quantize y and remember the operands."""
    plan, conditions = call.plan, share_conditions(call, source, y)
    if conditions is None:
        return *_quantize(call, y, weight, save), None
    last = functional.lookup(source, conditions, plan, LinearPlan.quantizes_like)
    if last is not None and last.operands is not None:
        record_input((call,), last.operands[4])
        return last.operands, None, last
    operands, w = _quantize(call, y, weight, save)
    return operands, w, functional.remember(source, conditions, plan, operands)


def _share_transpose(shared: functional.Quantization, operands: Operands, transposed: Any) -> None:
    """Remember the wgrad operand too, so that no other layer quantizes it again."""
    # Where wgrad reads x itself, remembering it would extend its lifetime.
    if operands[2] is None and isinstance(transposed, Quantized):
        shared.operands = (*operands[:2], transposed, *operands[3:])


def share_conditions(call: LinearCall, source: Tensor, y: Tensor) -> tuple[Any, ...] | None:
    """Return the values on which the operands of y, a matrix of `source`, depend, or None if no layer may share them.

    Not shared while `count` or `only` is active, during a CUDA-graph capture, for inputs that autograd did not compute,
    with stochastic rounding, and if the encode factor is not known on the host.
    """
    if source.is_leaf or source.__class__ is not Tensor:
        return None
    factors, general_plan = call.factors, call.plan.operations is not None
    if factors is not None and factors.__class__ is not list:
        return None
    if general_plan and not _may_share(call, y):
        return None
    if not call.plan.training_only and general.capturing(y):
        return None
    factor = 0.0 if factors is None else factors[amax.INPUT]
    conditions = source._version, source.data_ptr(), factor, stream_of(source), source.shape, y.dtype
    key = None if call.comm is None else call.comm.key
    return (*conditions, source.stride(), key) if general_plan else conditions


def stream_of(x: Tensor) -> int:
    """Return the current stream of a GPU tensor; 0 on a CPU."""
    return capture.stream_of(x.device) if x.is_cuda else 0


def _may_share(call: LinearCall, y: Tensor) -> bool:
    a, c = call.recipe.fprop.a, call.recipe.wgrad.b
    if call.traced or not call.training or a is None:
        return False
    if a.rounding != "nearest" or (c is not None and c.rounding != "nearest"):
        return False
    if (
        observer.active.observers != ()
        or ops.QUANTIZE.enabled is not ops.QUANTIZE.implementations
        or device.forced_implementations
    ):
        return False
    return not general.capturing(y)


def record_input(calls: Sequence[LinearCall], top: Any) -> None:
    """Record the amax of a shared input in the histories of other layers too."""
    for call in calls:
        if call.training and call.factors is not None:
            call.plan.record_amax(call, amax.INPUT, top)  # type: ignore[misc]


class QuantizedInput(NamedTuple):
    """Input of the layers in the forms that the GEMMs and the backward read."""

    calls: Sequence[LinearCall]
    #: The input as the operation computed it, or None if the kernel wrote codes only.
    output: Tensor | None
    #: The input in the dtype of the GEMMs: a matrix [tokens, features], or [..., features] for aligned plans.
    matrix: Tensor | None
    shape: Sequence[int]
    dtype: torch.dtype
    operands: Operands
    #: Tensors that the operation's backward needs.
    saved: Sequence[Any]
    #: Operands of the first weight, if the same launches quantized it.
    weight: WeightOperands | None = None
    #: Record through which other layers with the same input reuse the operands; None if they may not.
    shared: functional.Quantization | None = None


def _quantized_input(setup: LinearSetup, x: Sequence[Any], weights: Sequence[Any], save: bool) -> QuantizedInput:
    """Compute the layers' input and quantize it, in one kernel if there is one, else in two."""
    calls = setup.calls
    general_plan = not calls or calls[0].plan.operations is not None
    if general_plan and setup.op is not IDENTITY_INPUT and may_fuse(setup.dtype, x[0]):
        calls = calls or _begin_all(setup, x[0])
        fused = _fused(setup, x, save, calls)
        if fused is not None:
            return fused
    if calls:
        output, saved = setup.op.forward(*x, implementation=calls[0].plan.implementation)
    else:
        output, saved = setup.op.forward(*x)
    shape, dtype = output.shape, output.dtype
    first = setup.layers[0]
    # A module with several matrices of its own has no in_features.
    if shape[-1] != getattr(first, "in_features", shape[-1]):
        # Kernels read rows of the planned width.
        raise ValueError(
            f"Linear({first.in_features} → {first.out_features}) got an input of shape {tuple(shape)}; its last axis "
            f"must be {first.in_features}"
        )
    y = output if dtype is setup.dtype else output.to(setup.dtype)
    calls = calls or _begin_all(setup, y, weights)
    y = readable(calls[0].plan, y)
    source = x[0] if setup.op is IDENTITY_INPUT else None
    try:
        if source is None or source.is_leaf:
            shared, (operands, w) = None, _quantize(calls[0], y, weights[0], save)
        else:
            operands, w, shared = _quantize_shared(calls[0], source, y, weights[0], save)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(output, 2) from error
    record_input(calls[1:], operands[4])
    return QuantizedInput(calls, output, y, shape, dtype, operands, saved, w, shared)


def _begin_all(setup: LinearSetup, y: Tensor, weights: Sequence[Any] = ()) -> list[LinearCall]:
    return [general.begin(layer, setup.recipe, y, setup.dtype, setup.training, weights) for layer in setup.layers]


def may_fuse(dtype: torch.dtype, x: Tensor) -> bool:
    """Return True if kernels that compute and quantize in one launch may run for x and this operand dtype."""
    if ops.on_host(x) or x.dtype is not dtype or is_tracing():
        return False
    allowed = any(impl.name == "triton" for impl in ops.QUANTIZE.enabled)
    return allowed and not observer.active.observers and not fused_quantize.reason_unsupported(x)


def _fused(setup: LinearSetup, x: Sequence[Any], save: bool, calls: Sequence[LinearCall]) -> QuantizedInput | None:
    """Compute and quantize the input in one kernel; None if no kernel does both."""
    first, a = calls[0], setup.recipe.fprop.a
    assert a is not None
    factor, is_set = _known_factor(first)
    want_output = setup.return_input or (save and not first.recipe.reuse.input)
    want_transpose = save and first.recipe.reuse.input
    features = setup.layers[0].in_features
    agree = None
    if first.comm is not None:
        agree = first.comm.agreed_of
        first.comm.check("input", x[0].shape[:-1].numel(), a, 0)
    fused = fused_quantize.operand(setup.op, x, features, a, factor, is_set, want_output, want_transpose, agree)
    if fused is None:
        return None
    result, q, transposed = fused
    record_input(calls, q.amax)
    shape = (*x[0].shape[:-1], q.shape[1])
    y = None if result.y is None else general.matrix(result.y)
    operands: Operands = q, None, transposed, None, q.amax
    if first.plan.gather_input is not None:
        operands = first.plan.gather_input(first, y, operands, save)
    return QuantizedInput(calls, result.y, y, shape, x[0].dtype, operands, result.saved)


def _known_factor(call: LinearCall) -> tuple[Tensor | float | None, bool]:
    """Return the encode factor of the layer's input, and whether it is known to be nonzero."""
    if call.factors is None:
        return None, False
    return call.factors[amax.INPUT], amax.is_set(amax.INPUT, call.factors)


# ---- recomputation of the input in backward ----


def recompute(setup: LinearSetup, saved: Sequence[Any], call: LinearCall, g: Tensor | None = None) -> tuple[Any, Any]:
    """Recompute the wgrad operand from the tensors that the operation saved.

    If the gradient g of the input is passed, the second result may hold the gradients of the operation's inputs, as
    `InputOp.recompute_input` returns them.
    """
    c = setup.recipe.wgrad.b
    if c is not None and call.recipe.reuse.input and may_fuse(setup.dtype, saved[0]):
        q = fused_quantize.recomputed(setup.op, saved, c, *_known_factor(call))
        if q is not None:
            return (q, None), None
    y, grads = setup.op.recompute_input(saved, g)
    recomputed_input = call.plan.recomputed_input
    assert recomputed_input is not None
    return recomputed_input(call, general.matrix(y.to(setup.dtype))), grads


class RecomputedInput:
    """wgrad operand of a single layer, recomputed as soon as the gradient of its input is available."""

    #: Gradients of the operation's inputs, if the recomputation produced them too.
    gradients: Sequence[Tensor | None] | None = None

    def __init__(
        self, setup: LinearSetup, saved: Sequence[Any], call: LinearCall, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.of = setup, saved, call
        self.shape, self.dtype = tuple(shape), dtype

    def __call__(self, grad_output: Tensor) -> tuple[Any, Any]:
        g = grad_output if grad_output.dtype is self.dtype else grad_output.to(self.dtype)
        saved_input: tuple[Any, Any]
        saved_input, self.gradients = recompute(*self.of, shaped(g, self.shape))
        return saved_input


# ---- tensors for autograd ----


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


#: Layout of a call that saves no input.
NOTHING_SAVED = "nothing saved"


def flatten(operand: Any, scale: Any) -> tuple[Sequence[Any], Any]:
    """Split an operand and its scale into tensors that autograd can save, and the layout for `unflatten`."""
    kind = scale.__class__
    if kind is Tensor:
        return (operand, scale), None
    if kind is list:
        return (operand, *scale), list
    if kind is float:
        return (operand, of_host(scale)), float
    if isinstance(operand, Quantized):
        return split_operand(operand)
    return (operand,), None


def unflatten(tensors: Sequence[Any], layout: Any) -> tuple[Any, Any]:
    """Rebuild the operand and scale that `flatten` has split."""
    if layout is None:
        return tensors[0], tensors[1] if len(tensors) > 1 else None
    if layout is list:
        return tensors[0], [*tensors[1:]]
    if layout is float:
        return tensors[0], tensors[1].item()
    return rebuild_operand(layout, tensors), None


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
