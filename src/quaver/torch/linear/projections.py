"""Several linear layers of one input that is made on the way: by a normalization, by an activation, or given.

    y = prologue(x)        output_i = y @ weight_i.T + bias_i

y is quantized once for all of them and goes to their GEMMs as it is; of it backward keeps eight bits, or nothing where
the prologue makes it again from what it keeps anyway. The same bits as the prologue followed by each layer alone.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quaver.core.spec import Recipe
from quaver.torch.backends.gpu.launching.device import out_of_memory
from quaver.torch.linear.entrance import Prologue, Setup, enter, may_fuse, remade
from quaver.torch.linear.gemms import Call, backward, fprop, kept_input
from quaver.torch.linear.layer import Linear, dtype_sentence, matrix, recipe_of, shaped, weight_and_bias
from quaver.torch.linear.plans import direct
from quaver.torch.linear.plans.step import Step, gradients
from quaver.torch.linear.stored import stored
from quaver.torch.numerics.quantized import put_together, take_apart
from quaver.torch.operations import ops
from quaver.torch.operations.derivatives import NO_DOUBLE_BACKWARD, no_second_derivative, refuse_transforms
from quaver.torch.operations.sums import add
from quaver.torch.state.buffers import prepare
from quaver.torch.state.context import ambient
from quaver.torch.state.history import amax
from quaver.torch.state.layer import state_of
from quaver.torch.state.recomputation import recomputing


def project(
    prologue: Prologue, x: Sequence[Tensor | None], layers: Sequence[Linear], return_input: bool = False
) -> tuple[Tensor, ...]:
    """The outputs of the layers, and before them their input if it is asked for.

    Layers that are called together take one history of their input, the first one's.
    """
    recipe = _shared_recipe(layers)
    if recipe is None or x[0] is None or x[0].dtype not in ops.DTYPES:
        y = prologue(*x)
        outputs = [layer(y) for layer in layers]
        return (y, *outputs) if return_input else tuple(outputs)
    training = torch.is_grad_enabled()
    own = [weight_and_bias(layer) for layer in layers]
    weights, biases = [weight for weight, _ in own], [bias for _, bias in own]
    device = ops.autocast_device(x[0])
    casting = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if casting else x[0].dtype
    refuse_transforms(*x, *weights, *biases)
    for layer, weight in zip(layers, weights, strict=True):
        if weight.dtype in stored.CODES:
            stored.check_gradient(weight)
        elif not casting and weight.dtype is not dtype:
            raise ValueError(dtype_sentence(layer, dtype))
        if training and state_of(layer).prepared is not recipe:
            prepare(layer, recipe)
    setup = Setup(prologue, tuple(layers), recipe, dtype, training, return_input, len(x))
    apply: Any = _Projections.apply if torch.compiler.is_compiling() else _apply
    if not casting:
        outputs = apply(setup, *x, *weights, *biases)
    else:
        with ops.without_autocast(device):
            outputs = apply(setup, *x, *weights, *biases)
    return outputs


def _shared_recipe(layers: Sequence[Linear]) -> Recipe | None:
    """The recipe that all layers quantize by, if nothing about one of them wants it called as a module."""
    recipe = ambient.now[0]
    if recipe is None and layers[0].__dict__.get("recipe") is None and not recomputing():
        return None
    recipe = None
    for layer in layers:
        if layer.__class__ is not Linear or not is_bare(layer):
            return None
        own = recipe_of(layer)
        if own is None or own.fprop.a is None or (recipe is not None and own is not recipe):
            return None
        recipe = own
    return recipe


def is_bare(module: nn.Module) -> bool:
    """True if a call of the module runs its class's forward alone: no hook, no other forward."""
    if (
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return False
    if torch.compiler.is_compiling():
        return True
    of_all = nn.modules.module
    return not (
        of_all._global_forward_hooks
        or of_all._global_forward_pre_hooks
        or of_all._global_backward_hooks
        or of_all._global_backward_pre_hooks
    )


class _Projections(torch.autograd.Function):
    """Saves plain tensors only: no wrapper subclass is on the way."""

    @staticmethod
    def forward(ctx: Any, setup: Setup, *tensors: Tensor | None) -> Any:
        n, recipe = len(setup.layers), setup.recipe
        x, weights, biases = tensors[: setup.taken], tensors[setup.taken : setup.taken + n], tensors[setup.taken + n :]
        needed = ctx.needs_input_grad[1 + setup.taken : 1 + setup.taken + n]
        # Noise is not drawn a second time; and a prologue keeps nothing if none of its own gradients is needed.
        c, differentiated = recipe.wgrad.b, any(ctx.needs_input_grad[1 : 1 + setup.taken])
        remakes = setup.prologue.remakes and differentiated and (c is None or c.rounding == "nearest")
        keeps = any(needed) and setup.training and not remakes
        given = None
        decided = _decided(setup, x, weights, biases, keeps) if differentiated and all(needed) else []
        if decided:
            given = setup.prologue.forward(*x)
            if given[0].is_contiguous() and not given[0].data_ptr() & 15:
                try:
                    return _forward_decided(ctx, setup, decided, given, weights, biases, keeps)
                except torch.OutOfMemoryError as error:
                    raise out_of_memory(given[0], 2) from error
        first, entrance = setup.layers[0], enter(setup, x, keeps, given)
        calls, yq, lead = entrance.calls, entrance.quantized, entrance.shape[:-1]
        outputs = []
        for layer, weight, bias, call in zip(setup.layers, weights, biases, calls, strict=True):
            assert weight is not None
            if layer is not first and call.record and call.factors is not None:
                amax.record(layer, amax.INPUT, yq.amax)
            z = fprop(yq, weight, bias, layer, recipe, call)
            outputs.append(shaped(z, (*lead, weight.shape[0]), call))
        if keeps:
            calls[0].kept = entrance.turned
            if entrance.turned is None:
                assert entrance.matrix is not None
                calls[0].kept = kept_input(entrance.matrix, yq, first, recipe, calls[0])
        ctx.constants = (
            setup,
            entrance.shape,
            entrance.dtype,
            # dgrad alone reads the weights: where it does not run, they may be written before backward.
            _save(ctx, calls, entrance.saved if differentiated else (), weights if differentiated else (None,) * n),
            [weight.dtype for weight in weights if weight is not None],
            [b is not None and b.dtype for b in biases],
        )
        ctx.calls = None if calls[0].traced else calls
        return (entrance.output, *outputs) if setup.return_input else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        device = ops.autocast_device(grads[0])
        if torch.is_autocast_enabled(device) and not torch.compiler.is_compiling():
            with ops.without_autocast(device):
                return _Projections.backward(ctx, *grads)
        if torch.is_grad_enabled():
            with torch.no_grad():
                gradients = _backward(ctx, grads)
            return no_second_derivative(gradients, NO_DOUBLE_BACKWARD, grads[0], *ctx.saved_tensors)
        return _backward(ctx, grads)


#: `Function.apply` without its checks for torch.func, which `project` has made.
_apply: Any = super(torch.autograd.Function, _Projections).apply


def _pack(values: Sequence[Any]) -> tuple[list[Tensor | None], list[tuple[int, Any]]]:
    """The tensors of operands, for autograd, and what `_unpack` needs besides."""
    tensors: list[Tensor | None] = []
    layouts = []
    for value in values:
        parts, layout = take_apart(value)
        layouts.append((len(parts), layout))
        tensors += parts
    return tensors, layouts


def _unpack(tensors: Sequence[Any], layouts: Sequence[tuple[int, Any]]) -> list[Any]:
    """The operands that `_pack` took apart."""
    values = []
    for size, layout in layouts:
        values.append(put_together(layout, tensors[:size]))
        tensors = tensors[size:]
    return values


def _save(ctx: Any, calls: list[Call], saved: Sequence[Any], weights: Sequence[Tensor | None]) -> list[tuple[int, Any]]:
    """Tensors to autograd; what they are of is returned: weights, the kept input, factors, and the prologue's."""
    factors = [call.factors if isinstance(call.factors, Tensor) else None for call in calls]
    tensors, layouts = _pack([*weights, calls[0].kept, *factors, *saved])
    ctx.save_for_backward(*tensors)
    calls[0].kept = None
    return layouts


def _restore(ctx: Any) -> tuple[list[Any], Any, list[Any], list[Any]]:
    """What `_save` saved."""
    setup, _, _, layouts, _, _ = ctx.constants
    values, n = _unpack(ctx.saved_tensors, layouts), len(setup.layers)
    return values[:n], values[n], values[n + 1 : 2 * n + 1], values[2 * n + 1 :]


# Where each layer has a decided step.

#: The largest input that is written and read again where a kernel could quantize it on the way: launches take longer.
LAUNCHES = 1 << 20


def _decided(
    setup: Setup, x: Sequence[Tensor | None], weights: Sequence[Any], biases: Sequence[Tensor | None], keeps: bool
) -> list[Step]:
    """The step of each layer in a training forward; none where one has none, or a fused kernel saves a large pass."""
    recipe, first = setup.recipe, x[0]
    assert recipe.fprop.a is not None and first is not None
    if not setup.training or recipe.delayed is not None or torch.compiler.is_compiling() or direct.disturbed():
        return []
    if first.numel() > LAUNCHES and (recipe.fprop.a.per_tensor or not keeps) and may_fuse(setup.dtype, first):
        return []
    shape = torch.Size((math.prod(first.shape[:-1]), setup.layers[0].in_features))
    steps = []
    for layer, weight, bias in zip(setup.layers, weights, biases, strict=True):
        if not first.dtype is setup.dtype is weight.dtype or not weight.is_contiguous():
            return []
        step = direct.decided(layer, shape, first, weight, bias, recipe)
        if step is None:
            return []
        steps.append(step)
    return steps


def _forward_decided(
    ctx: Any,
    setup: Setup,
    decided: list[Step],
    given: Any,
    weights: Sequence[Any],
    biases: Sequence[Tensor | None],
    keeps: bool,
) -> tuple[Tensor, ...]:
    output, saved = given
    first, outputs, entries = setup.layers[0], [], []
    operands, entry, w = decided[0].operands(matrix(output), weights[0], first, None)
    q, scale, xt, of_xt, _ = operands
    for layer, weight, bias, step in zip(setup.layers, weights, biases, decided, strict=True):
        if layer is not first:
            entry, w = step.weight(weight, layer, None)
        z = step.rows.fprop(q, scale, w.fprop, w.fprop_scale, bias)
        outputs.append(z.resize_(*output.shape[:-1], weight.shape[0]))
        entries.append(entry)
    on_host = of_xt.__class__ is float
    kept = (matrix(output) if xt is None else xt, None if on_host else of_xt) if keeps else (None, None)
    tensors, layouts = _pack(saved)
    ctx.save_for_backward(*weights, *kept, *tensors)
    dtypes = [None if bias is None else bias.dtype for bias in biases]
    ctx.constants = setup, decided, entries, of_xt if on_host else None, output.shape, layouts, dtypes
    return (output, *outputs) if setup.return_input else tuple(outputs)


def _backward_decided(ctx: Any, grads: Sequence[Tensor]) -> Any:
    setup, decided, entries, of_xt, shape, layouts, dtypes = ctx.constants
    n = len(setup.layers)
    weights, (xt, saved_scale, *tensors) = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
    saved = _unpack(tensors, layouts)
    of_xt = saved_scale if of_xt is None else of_xt
    if xt is None:
        y = matrix(setup.prologue.remake(saved))
        _, _, xt, of_xt, _ = decided[0].rows.input(y, None)
        xt = y if xt is None else xt

    def of_layer(i: int, needs: Sequence[bool]) -> Gradients:
        return gradients(grads[i - n], weights[i], xt, of_xt, setup.layers[i], decided[i], entries[i], needs, dtypes[i])

    return _together(ctx, grads, shape, saved, of_layer)


def _backward(ctx: Any, grads: Sequence[Tensor]) -> Any:
    if isinstance(ctx.constants[1], list):
        return _backward_decided(ctx, grads)
    setup, shape, dtype, _, weight_dtypes, bias_dtypes = ctx.constants
    weights, kept, factors, saved = _restore(ctx)
    n, taken = len(setup.layers), setup.taken
    gs = [matrix(g) for g in grads[-n:]]
    calls = ctx.calls or [
        Call(setup.recipe, g, setup.dtype, False, setup.training, f) for g, f in zip(gs, factors, strict=True)
    ]
    if kept is None and any(ctx.needs_input_grad[1 + taken : 1 + taken + n]):
        kept = remade(setup, saved, calls[0])

    def of_layer(i: int, needs: Sequence[bool]) -> Gradients:
        of_input, need_weight, need_bias = needs
        bias_dtype = bias_dtypes[i] if need_bias else None
        layer, needed = setup.layers[i], (of_input, need_weight)
        part, of_weight, of_bias = backward(
            gs[i], weights[i], kept, layer, setup.recipe, calls[i], *needed, weight_dtypes[i], bias_dtype
        )
        return part if part is None or part.dtype is dtype else part.to(dtype), of_weight, of_bias

    return _together(ctx, grads, shape, saved, of_layer)


#: Of the input, the weight and the bias of one layer.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _together(
    ctx: Any,
    grads: Sequence[Tensor],
    shape: tuple[int, ...],
    saved: Sequence[Any],
    of_layer: Callable[[int, Sequence[bool]], Gradients],
) -> tuple[Any, ...]:
    """What backward returns: the gradients of each layer, by its place and which are needed, and of the prologue."""
    setup: Setup = ctx.constants[0]
    n, taken, needs = len(setup.layers), setup.taken, ctx.needs_input_grad[1:]
    of_input = any(needs[:taken])
    of_y = grads[0].reshape(-1, shape[-1]) if setup.return_input else None
    of_weights: list[Tensor | None] = [None] * n
    of_biases: list[Tensor | None] = [None] * n
    # As autograd adds them up: what was computed last comes first.
    for i in reversed(range(n)):
        part, of_weights[i], of_biases[i] = of_layer(i, (of_input, needs[taken + i], needs[taken + n + i]))
        if part is not None:
            of_y = part if of_y is None else add(of_y, part)
    of_x: tuple[Tensor | None, ...] = (None,) * taken
    if of_input:
        assert of_y is not None
        of_x = setup.prologue.backward(of_y.view(shape), saved)
    return None, *of_x, *of_weights, *of_biases
