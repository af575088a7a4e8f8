"""Linear layers that share an input, which a norm, an activation or the caller provides.

`project` decides whether the layers can share the quantized input and finds their plans. The computation itself is in
`quaver.torch.linear.autograd`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.torch.backends.gpu import capture, device
from quaver.torch.linear import linear, stored_weight
from quaver.torch.linear.autograd import InputOp, LinearFunction, LinearSetup, eager_apply, may_fuse
from quaver.torch.linear.general import can_recompute, is_prequantized
from quaver.torch.linear.linear import Linear, check_weight, dtype_sentence, recipe_of, weight_and_bias
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import forward_level, refuse_transforms, transforms_active
from quaver.torch.operations.ops import any_autocast_enabled
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state.buffers import create_state_buffers
from quaver.torch.state.context import active_context
from quaver.torch.state.layer_state import recomputing


def project(
    op: InputOp, x: Sequence[Tensor | None], layers: Sequence[Linear], return_input: bool = False
) -> tuple[Tensor, ...]:
    """Run an input operation and all layers on its result; return their outputs, preceded by that result if
    `return_input`.

    All layers quantize their input by the scaling history of the first one.
    """
    recipe = _shared_recipe(layers)
    fast = None
    if recipe is not None and not is_tracing():
        training = torch.is_grad_enabled()
        may_be_fast = training or (x[0] is not None and linear.may_have_kernels(x[0]))
        if may_be_fast and not linear.needs_general_plan(layers[0]):
            fast = _begin_fast_calls(op, x, layers, recipe, training, return_input)
        if not training:
            layers[0]._state.is_observed = None
    if fast is None:
        return _run_general(op, x, layers, recipe, return_input)
    run = eager_apply()
    outputs: tuple[Tensor, ...] = run(fast[0], *fast[1])
    return outputs


def _run_general(
    op: InputOp,
    x: Sequence[Tensor | None],
    layers: Sequence[Linear],
    recipe: Recipe | None,
    return_input: bool,
) -> tuple[Tensor, ...]:
    if recipe is None or x[0] is None or x[0].dtype not in ops.DTYPES:
        y = op(*x)
        each = [layer(y) for layer in layers]
        return (y, *each) if return_input else tuple(each)
    training = torch.is_grad_enabled()
    dtype, casting = x[0].dtype, False
    if is_tracing() or any_autocast_enabled():
        kind = ops.autocast_device(x[0])
        casting = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if casting else dtype
    weights, biases = [], []
    for layer in layers:
        weight, bias = weight_and_bias(layer)
        if weight.__class__ is not nn.Parameter and is_prequantized(weight):
            if is_tracing():
                prequantized: Any = weight.__class__
                eager: tuple[Tensor, ...] = prequantized.eagerly(_run_general, op, x, layers, recipe, return_input)
                return eager
            weight.check_recipe(layer, recipe)  # type: ignore[attr-defined]
        elif weight.__class__ is not nn.Parameter and not is_tracing():
            check_weight(layer, weight)
        weights.append(weight)
        biases.append(bias)
        if training and layer._state.buffers_recipe is not recipe:
            create_state_buffers(layer, recipe)
    if is_tracing() or transforms_active() or forward_level() >= 0:
        refuse_transforms(*x, *weights, *biases)
    for layer, weight in zip(layers, weights, strict=True):
        if isinstance(weight, QuantizedTensor):
            stored_weight.check_gradient(weight)
        elif not casting and weight.dtype is not dtype:
            raise ValueError(dtype_sentence(layer, dtype))
    setup = LinearSetup(op, tuple(layers), recipe, dtype, training, len(x), return_input)
    run: Any = LinearFunction.apply
    if not is_tracing():
        run = eager_apply()
    outputs: tuple[Tensor, ...]
    if not casting:
        outputs = run(setup, *x, *weights, *biases)
    else:
        with ops.without_autocast(kind):
            outputs = run(setup, *x, *weights, *biases)
    return outputs


def _shared_recipe(layers: Sequence[Linear]) -> Recipe | None:
    """Return the recipe that all layers quantize by, or None if one of them must be called as a module."""
    recipe = active_context.now[0]
    if recipe is None and layers[0].__dict__.get("recipe") is None and not recomputing():
        return None
    if not is_bare(*layers):
        return None
    recipe, compiling = None, is_tracing()
    for layer in layers:
        if layer.__class__ is not Linear and not _is_over(layer):
            return None
        if layer.weight_spec is not None and not is_prequantized(weight := weight_and_bias(layer)[0]):
            stored_weight.check_stored(layer, weight)
        own = recipe_of(layer, compiling)
        if own is None or own.fprop.a is None or (recipe is not None and own is not recipe):
            return None
        recipe = own
    return recipe


def _is_over(layer: nn.Module) -> bool:
    """Return True if a subclass computes the same as `Linear`; `convert` marks such classes with `_over`."""
    kind = layer.__class__
    marked = getattr(kind, "_over", None) is Linear and kind.forward is Linear.forward
    return marked and "parametrizations" not in layer._modules


def is_bare(*modules: nn.Module) -> bool:
    """Return True if calling each module runs only its class's forward: no hooks and no replaced forward."""
    for module in modules:
        if (
            "forward" in module.__dict__
            or module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        ):
            return False
    if is_tracing():
        return True
    of_all = nn.modules.module
    return not (
        of_all._global_forward_hooks
        or of_all._global_forward_pre_hooks
        or of_all._global_backward_hooks
        or of_all._global_backward_pre_hooks
    )


#: Largest input in elements for which fast plans are preferred to a fused kernel, and to recomputation in backward.
#: Below it launches cost more than the memory traffic.
LAUNCHES = 1 << 20
#: The same limit for recomputation on a CPU, where nothing is launched.
ON_HOST = 1 << 14


def _begin_fast_calls(
    op: InputOp,
    x: Sequence[Tensor | None],
    layers: Sequence[Linear],
    recipe: Recipe,
    training: bool,
    return_input: bool = False,
) -> tuple[LinearSetup, Sequence[Tensor | None]] | None:
    """Return setup and tensors for `LinearFunction` if every layer has a fast plan in this call.

    Returns None if the state of a layer requires the general plan, or if a fused kernel or recomputation saves a large
    pass over memory.
    """
    first = x[0]
    if first is None or first.dtype not in ops.DTYPES:
        return None
    differentiated = training and any(t is not None and t.requires_grad for t in x)
    a, shape, features = recipe.fprop.a, first.shape, layers[0].in_features
    assert a is not None
    if shape[-1] != features:
        shape = torch.Size((*shape[:-1], features))
    if shape.numel() > (ON_HOST if first.is_cpu and not device.forced_implementations else LAUNCHES):
        recomputes = differentiated and op.recomputes_input and can_recompute(recipe)
        if recomputes or (a.per_tensor and may_fuse(first.dtype, first)):
            return None
    calls, weights, biases = [], [], []
    for layer in layers:
        weight, bias = weight_and_bias(layer)
        if weight.dtype is not first.dtype or not weight.is_contiguous():
            return None
        if weight.__class__ is not nn.Parameter and weight.__class__ is not Tensor:
            return None
        if training and layer._state.buffers_recipe is not recipe:
            create_state_buffers(layer, recipe)
        chosen = linear.fast_plan(shape, first, weight, bias, recipe, layer)
        if chosen is None:
            return None
        captured = chosen.aligned and capture.is_captured_or_rehearsed(first.device)
        if chosen.training_only and (captured or not (differentiated and weight.requires_grad)):
            return None
        call = linear.begin_call(chosen, layer, first, training)
        if call is None:
            return None
        calls.append(call)
        weights.append(weight)
        biases.append(bias)
    setup = LinearSetup(op, tuple(layers), recipe, first.dtype, training, len(x), return_input, calls)
    return setup, (*x, *weights, *biases)
