"""Autograd function of grouped linear layers: rows from the caller or a `RowInputOp`, times one matrix per group.

    rows = op(inputs)     y[t] = rows[t] @ weight[e].T + bias[e]        row t belongs to group e

Saved for backward: the weight (a reference), the wgrad operand of the rows in 8 or 4 bits an element with its scales
(see `saved`), and what `op` saves. If `op` can recompute the rows, their operand is not saved but quantized again,
unless it is rounded stochastically.
torch.compile sees the products as two opaque operators, and the layer's state as tensors of the graph.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.linear.autograd import pack, unpack
from quaver.torch.linear.general import can_recompute
from quaver.torch.linear.grouped import products
from quaver.torch.linear.grouped.call import GroupedCall, LayerGroups, NoiseSource
from quaver.torch.linear.grouped.custom_ops import BACKWARD, FORWARD, OPERANDS, arguments, flat_rows
from quaver.torch.linear.grouped.operands import RowInputOp
from quaver.torch.linear.grouped.saved import SavedLayout
from quaver.torch.linear.stored_weight import saved_codes
from quaver.torch.numerics.grouped import GroupOffsets
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import first_derivative
from quaver.torch.operations.ops import any_autocast_enabled
from quaver.torch.state import observer
from quaver.torch.state.history import amax
from quaver.torch.state.layer_state import state_of
from quaver.torch.state.selective_checkpoint import hide_from_policies


class GroupedSetup(NamedTuple):
    """Arguments of one `GroupedLinearFunction` call that are not tensors."""

    rows: RowInputOp
    #: Number of tensors that `rows` takes.
    input_count: int
    owner: NoiseSource | LayerGroups
    recipe: Recipe
    #: dtype of the products.
    dtype: torch.dtype
    #: True if gradients are enabled; `ctx.needs_input_grad` does not show that.
    training: bool
    #: True if the weight is stored as [groups, K, N].
    transposed: bool = False


class GroupedLinearFunction(torch.autograd.Function):
    """Compute y [T, N] from a `GroupedSetup`, the inputs of its rows, the weight, the bias [groups, N] or None, and
    offsets.

    Saves plain tensors only, no wrapper subclasses.
    """

    @staticmethod
    def forward(ctx: Any, setup: GroupedSetup, *tensors: Tensor | None) -> Tensor:
        return _forward(ctx, setup, tensors) if is_tracing() else _forward_hidden(ctx, setup, tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if is_tracing() or not any_autocast_enabled():
            return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, g)
        with ops.without_autocast(ops.autocast_device(g)):
            return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, g)


NO_DOUBLE_BACKWARD = (
    "grouped GEMMs, quantized or not, have no second derivative: rounding has none. Compute the part that is "
    "differentiated twice by torch.nn.functional.linear, group by group"
)


def _forward(ctx: Any, setup: GroupedSetup, tensors: Sequence[Any]) -> Tensor:
    count, recipe, rows, needs = setup.input_count, setup.recipe, setup.rows, ctx.needs_input_grad
    weight, bias, ends = tensors[count:]
    need_rows, need_weight = setup.training and any(needs[1 : count + 1]), setup.training and bool(needs[count + 1])
    observed = observer.active.observers and not is_tracing()
    # An observer sees the rows before they are quantized.
    x, saved = rows.forward(*tensors[:count], spec=None if observed else recipe.fprop.a)
    recomputes = rows.recomputes_input and can_recompute(recipe)
    save = need_weight and not recomputes
    high = rows.high(saved) if save and _reads_high(x, recipe) else None
    like, bias_dtype = x if isinstance(x, Tensor) else x.data, torch.float32 if bias is None else bias.dtype
    call = _call(setup, ends, like, setup.training, weight, bias_dtype).begin()
    operand: Sequence[Any] = ()
    if call.traced:
        y, *tensors_of_operand, amaxes = FORWARD.operator(*flat_rows(x), high, bias, save, *arguments(call, weight, 0))
        operand = tensors_of_operand if save else ()
        call.amaxes = {amax.INPUT: amaxes[amax.INPUT], amax.WEIGHT: amaxes[amax.WEIGHT]}
        specs = recipe.fprop.a if isinstance(x, Tensor) else None, recipe.wgrad.b if save else None
        call.drawn = _drawn(0, *specs, recipe.reuse.input)
    else:
        y, operands = products.forward(call, x, high, call.view(weight), bias, save)
        if save and recipe.saved_input is not None:
            operand = SavedLayout.of(call).flat(operands)  # type: ignore[arg-type]
    call.finish()
    if save and recipe.saved_input is None:
        operand = (x if high is None else high,)
    # torch.compile passes tensors and plain values from forward to backward, but no objects.
    saved_rows = saved if need_rows or (need_weight and recomputes) else ()
    packed, layouts = pack([call.factors if call.traced else None, *operand, *saved_rows])
    # Without dgrad the weight may be modified before backward.
    graph_tensors = (weight, ends) if call.traced else (weight if need_rows else None, None)
    codes = saved_codes([weight], [call.layer]) if need_rows else ()
    ctx.save_for_backward(*graph_tensors, *codes, *packed)
    ctx.constants = setup, None if call.traced else call, bias_dtype, layouts, len(operand), 2 + len(codes)
    return y


#: `_forward` under a selective checkpoint.
_forward_hidden = hide_from_policies(_forward)


def _call(
    setup: GroupedSetup, ends: Tensor, like: Tensor, training: bool, weight: Tensor, bias_dtype: torch.dtype
) -> GroupedCall:
    offsets = GroupOffsets(ends, like.shape[0])
    return GroupedCall(
        setup.owner, setup.recipe, offsets, like, setup.dtype, training, weight, bias_dtype, setup.transposed
    )


def _reads_high(x: Tensor | Quantized, recipe: Recipe) -> bool:
    """Return True if wgrad needs other values of the rows than fprop's operand, and those are codes."""
    reads = not recipe.reuse.input and (recipe.wgrad.b is not None or not recipe.dequantized_backward)
    return reads and isinstance(x, Quantized)


def _drawn(direction: int, a: QuantSpec | None, c: QuantSpec | None, shared: bool) -> list[str]:
    """Return the names of operands that are rounded stochastically: quantized by a, and their transposes by c unless
    both share codes.
    """
    names = zip(OPERANDS[direction], (a, None if shared else c), strict=True)
    return [name for name, spec in names if spec is not None and spec.rounding != "nearest"]


def _backward(ctx: Any, tensors: Sequence[Any], g: Tensor) -> tuple[Any, ...]:
    setup: GroupedSetup
    setup, call, bias_dtype, layouts, size, first = ctx.constants
    weight, ends = tensors[:2]
    factors, *values = unpack(tensors[first:], layouts)
    operand, saved, count, needs = values[:size], values[size:], setup.input_count, ctx.needs_input_grad[1:]
    needed = any(needs[:count]), *needs[count : count + 2]
    if call is not None and observer.active.observers:
        call.began_backward = True
    x, high = None, None
    if needed[1] and not operand:
        x = setup.rows.recompute_input(saved, setup.recipe.fprop.a)
        high = setup.rows.high(saved) if _reads_high(x, setup.recipe) else None
    if call is None:
        call = _call(setup, ends, g, True, weight, bias_dtype)
        call.factors = factors
        grads: Sequence[Any] = _traced_backward(call, g, weight, operand, x, high, needed)
    else:
        if call.pending is not None:
            call.pending.finish()
        saved_rows: Any = operand[0] if len(operand) == 1 else None
        if x is not None:
            saved_rows = products.recomputed(call, x, high)
        elif len(operand) > 1:
            saved_rows = SavedLayout.of(call).operand(operand, call.offsets)
        grads = products.backward(call, g, None if weight is None else call.view(weight), saved_rows, needed)
    call.finish()
    grad_x, *grads = grads
    grad_inputs = setup.rows.backward(grad_x, saved, needs[:count]) if needed[0] else (None,) * count
    return None, *grad_inputs, *grads, None


def _traced_backward(
    call: GroupedCall, g: Tensor, weight: Tensor, operand: Sequence[Any], x: Tensor | Quantized | None,
    high: Tensor | None, needs: tuple[Any, ...],
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of rows, weight and bias by the operator."""
    recipe, owner = call.recipe, call.owner
    if x is not None:
        # The forward operator quantizes recomputed rows again; its output is unused.
        _, *operand, _ = FORWARD.operator(*flat_rows(x), high, None, True, *arguments(call, weight, 0))
        operand = operand if recipe.saved_input is not None else (x if high is None else high,)
    if len(operand) < 4:
        operand = (*flat_rows(operand[0] if operand else g), None)
    number, first = None, 0
    if isinstance(owner, LayerGroups):
        number, first = None if call.factors is None else state_of(owner.layer).number, owner.first
    needed = [bool(need) for need in needs]
    grads = BACKWARD.operator(g, *operand, needed, call.bias_dtype, number, first, *arguments(call, weight, 1))
    reads_a = needed[0] or (needed[1] and recipe.reuse.grad_output)
    specs = recipe.dgrad.a if reads_a else None, recipe.wgrad.a if needed[1] else None
    call.drawn = _drawn(1, *specs, recipe.reuse.grad_output)
    return [grad if need else None for grad, need in zip(grads, needed, strict=True)]
