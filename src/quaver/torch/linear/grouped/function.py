"""Autograd function of grouped products: rows from the caller or a `RowInputOp`, times one matrix per group.

rows = made(x)        y[t] = rows[t] @ weight[e].T + bias[e]        row t belongs to group e
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.spec import Recipe
from quaver.torch.linear.autograd import pack, unpack
from quaver.torch.linear.grouped import cpu, gpu
from quaver.torch.linear.grouped.cpu import WgradOperands
from quaver.torch.linear.grouped.custom_ops import BACKWARD, FORWARD, OPERANDS, CustomOpArguments, text_of
from quaver.torch.linear.grouped.operands import (
    GradientLike,
    GroupedContext,
    GroupedProduct,
    NoiseSource,
    RowInputOp,
    begin,
    finish,
    has_tokens,
)
from quaver.torch.linear.stored_weight import CODES, PACKED, stack_codes
from quaver.torch.numerics.grouped import GroupOffsets, rebuild_groups, split_groups
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import first_derivative
from quaver.torch.operations.ops import any_autocast_enabled
from quaver.torch.operations.selective_checkpoint import hide_from_policies
from quaver.torch.state import noise
from quaver.torch.state.history import amax, scaling_step
from quaver.torch.state.layer_state import state_of


class GroupedSetup(NamedTuple):
    """Arguments of one `GroupedLinearFunction` call that are not tensors."""

    rows: RowInputOp
    #: Number of tensors that `rows` takes.
    input_count: int
    owner: NoiseSource | GroupedProduct
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
        if is_tracing():
            return _traced(ctx, setup, tensors)
        return _eager(ctx, setup, tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if is_tracing():
            return first_derivative(_traced_backward, ctx, NO_DOUBLE_BACKWARD, g)
        if not any_autocast_enabled():
            return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, g)
        with ops.without_autocast(ops.autocast_device(g)):
            return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, g)


NO_DOUBLE_BACKWARD = (
    "grouped GEMMs, quantized or not, have no second derivative: rounding has none. Compute the part that is "
    "differentiated twice by torch.nn.functional.linear, group by group"
)


@hide_from_policies
def _eager(ctx: Any, setup: GroupedSetup, tensors: Sequence[Any]) -> Tensor:
    input_count, recipe, rows = setup.input_count, setup.recipe, setup.rows
    weight, bias, ends = tensors[input_count:]
    of_rows, need_weight = _needs(ctx, setup)
    x, saved = rows.forward(*tensors[:input_count], spec=recipe.fprop.a)
    call = begin(setup.owner, recipe, GroupOffsets(ends, x.shape[0]), setup.dtype, setup.training, weight)
    keeps, backend = need_weight and not rows.recomputes_input, _backend_of(ends)
    high = rows.high(saved) if keeps and isinstance(x, Quantized) and _reads_high(recipe) else None
    matrices = view(setup, weight)
    y, wgrad_operands = backend.forward(call, x, high, matrices, bias, keeps)
    finish(call)
    n, k = cpu.features(call, matrices)
    like = GradientLike((len(weight), n, k), weight.dtype, setup.transposed, (len(weight), n), _bias_dtype(bias))
    values = [weight if of_rows else None, *(saved if of_rows or (need_weight and rows.recomputes_input) else ())]
    grouped_operand = None if wgrad_operands is None else wgrad_operands.grouped_operand
    parts: Sequence[Any] = () if wgrad_operands is None else (wgrad_operands.rows, *wgrad_operands.parts)
    split_layouts = None if wgrad_operands is None else split_groups(wgrad_operands.parts)
    if split_layouts is not None:
        parts = split_layouts[0]
    if grouped_operand is not None:
        parts = (None, grouped_operand.data, grouped_operand.scale, grouped_operand.factor)
        grouped_operand = replace(grouped_operand, data=None, scale=None, factor=None)
    packed, layouts = pack([*values, *parts])
    ctx.save_for_backward(*packed)
    ctx.constants = (
        setup,
        call,
        like,
        layouts,
        len(values) - 1,
        wgrad_operands is not None,
        split_layouts and split_layouts[1],
        grouped_operand,
    )
    return y


def view(setup: GroupedSetup, weight: Tensor) -> Tensor:
    """View a weight as [groups, N, K]; four-bit codes are always stored that way."""
    return weight.transpose(1, 2) if setup.transposed and weight.dtype is not PACKED else weight


def _needs(ctx: Any, setup: GroupedSetup) -> tuple[bool, bool]:
    """Return whether gradients of the rows' inputs are needed, and whether that of the weight is."""
    needs = ctx.needs_input_grad[1:]
    return setup.training and any(needs[: setup.input_count]), setup.training and bool(needs[setup.input_count])


def _reads_high(recipe: Recipe) -> bool:
    """Return True if wgrad needs other values of the rows than fprop's operand."""
    return not recipe.reuse.input and (recipe.wgrad.b is not None or not recipe.dequantized_backward)


def _bias_dtype(bias: Tensor | None) -> torch.dtype:
    return torch.float32 if bias is None else bias.dtype


def _backend_of(ends: Tensor) -> Any:
    """Return the module that runs the call: `cpu` if the host knows the offsets, else `gpu`."""
    return cpu if ops.on_host(ends) else gpu


def _backward(ctx: Any, tensors: Sequence[Any], g: Tensor) -> tuple[Any, ...]:
    setup: GroupedSetup
    call: GroupedContext
    setup, call, like, layouts, size, has_wgrad_operands, split_layouts, grouped_operand = ctx.constants
    weight, *values = unpack(tensors, layouts)
    saved, parts = values[:size], values[size:]
    input_count, needs = setup.input_count, ctx.needs_input_grad[1:]
    of_rows, need_weight = any(needs[:input_count]), needs[input_count]
    if call.pending is not None:
        call.pending.finish()
    backend, wgrad_operands = _backend_of(call.offsets.ends), None
    if split_layouts is not None:
        wgrad_operands = WgradOperands(rebuild_groups(parts, split_layouts))
    elif has_wgrad_operands:
        wgrad_operands = WgradOperands(parts[1:], parts[0])
    if grouped_operand is not None:
        _, data, scale, factor = parts
        wgrad_operands = WgradOperands(grouped_operand=replace(grouped_operand, data=data, scale=scale, factor=factor))
    if wgrad_operands is None and need_weight:
        wgrad_operands = backend.recomputed(call, *_recompute_rows(setup, saved))
    matrices = None if weight is None else view(setup, weight)
    of_x, of_weight, of_bias = backend.backward(
        call, g, matrices, wgrad_operands, (of_rows, *needs[input_count : input_count + 2]), like
    )
    finish(call)
    return None, *_input_gradients(setup, of_x, saved, needs), of_weight, of_bias, None


def _recompute_rows(setup: GroupedSetup, saved: Sequence[Any]) -> tuple[Tensor | Quantized, Tensor | None]:
    """Recompute the rows, and their high-precision values if rows are codes and wgrad needs them."""
    x = setup.rows.recompute_input(saved, setup.recipe.fprop.a)
    return x, setup.rows.high(saved) if isinstance(x, Quantized) and _reads_high(setup.recipe) else None


def _input_gradients(
    setup: GroupedSetup, of_x: Tensor | None, saved: Sequence[Any], needs: Sequence[Any]
) -> Sequence[Tensor | None]:
    """Return the gradients of the inputs of `rows`."""
    if not any(needs[: setup.input_count]):
        return (None,) * setup.input_count
    assert of_x is not None
    return setup.rows.backward(of_x, saved, needs[: setup.input_count])


# ---- under torch.compile: opaque operators, and the layer's state as tensors of the graph ----


def _traced(ctx: Any, setup: GroupedSetup, tensors: Sequence[Any]) -> Tensor:
    input_count, recipe, rows, owner = setup.input_count, setup.recipe, setup.rows, setup.owner
    weight, bias, ends = tensors[input_count:]
    of_rows, need_weight = _needs(ctx, setup)
    x, saved = rows.forward(*tensors[:input_count], spec=recipe.fprop.a)
    keeps = need_weight and not rows.recomputes_input
    high = rows.high(saved) if keeps and isinstance(x, Quantized) and _reads_high(recipe) else None
    factors: Any = None
    if isinstance(owner, GroupedProduct) and recipe.delayed is not None:
        factors = scaling_step.factors(owner.layer, setup.training)[_members(owner, ends)]
    kernel_args = _custom_op_arguments(setup, weight, ends, factors, 0)
    codes = _codes(x)
    y, *wgrad_operands, amax_values = FORWARD.operator(*codes, high, bias, keeps, *kernel_args)
    _remember(setup, _drawn(setup, keeps, x), ends)
    if factors is not None and setup.training:
        for column in (amax.INPUT, amax.WEIGHT):
            amax.record_each(owner.layer, column, amax_values[column], owner.first)  # type: ignore[union-attr]
    # wgrad's operand is unquantized, or codes that it decodes.
    unquantized = keeps and recipe.saved_input is None
    plain = (None, None, None) if not unquantized else codes if high is None else (high, None, None)
    recomputes_input = need_weight and rows.recomputes_input
    packed, layouts = pack([factors, *(saved if of_rows or recomputes_input else ())])
    ctx.save_for_backward(weight, ends, *wgrad_operands, *plain, *packed)
    ctx.constants = setup, layouts, keeps, _bias_dtype(bias)
    return y


def _traced_backward(ctx: Any, tensors: Sequence[Any], g: Tensor) -> tuple[Any, ...]:
    setup: GroupedSetup
    setup, layouts, keeps, bias_dtype = ctx.constants
    weight, ends, *wgrad_operands = tensors[:6]
    plain, (factors, *saved) = tensors[6:9], unpack(tensors[9:], layouts)
    input_count, needs, owner = setup.input_count, ctx.needs_input_grad[1:], setup.owner
    of_rows, need_weight, need_bias = any(needs[:input_count]), bool(needs[input_count]), bool(needs[input_count + 1])
    if need_weight and not keeps:
        # Recomputed rows are quantized again by the forward operator; its output is unused.
        x, high = _recompute_rows(setup, saved)
        kernel_args = _custom_op_arguments(setup, weight, ends, factors, 0)
        _, *wgrad_operands, _ = FORWARD.operator(*_codes(x), high, None, True, *kernel_args)
        if setup.recipe.saved_input is None:
            plain = _codes(x) if high is None else (high, None, None)
    kernel_args = _custom_op_arguments(setup, weight, ends, factors, 1)
    number = state_of(owner.layer).number if factors is not None and isinstance(owner, GroupedProduct) else None
    first = owner.first if isinstance(owner, GroupedProduct) else 0
    wanted = [of_rows, need_weight, need_bias]
    of_x, of_weight, of_bias = BACKWARD.operator(
        g, *wgrad_operands, *plain, wanted, bias_dtype, number, first, *kernel_args
    )
    recipe = setup.recipe
    drawn = []
    if recipe.dgrad.a is not None and (of_rows or (need_weight and recipe.reuse.grad_output)):
        drawn += [OPERANDS[1][0]] if recipe.dgrad.a.rounding != "nearest" else []
    if recipe.wgrad.a is not None and need_weight and not recipe.reuse.grad_output:
        drawn += [OPERANDS[1][1]] if recipe.wgrad.a.rounding != "nearest" else []
    _remember(setup, drawn, ends)
    input_gradients = _input_gradients(setup, of_x, saved, needs)
    return None, *input_gradients, of_weight if need_weight else None, of_bias if need_bias else None, None


def _members(owner: GroupedProduct, ends: Tensor) -> slice:
    return slice(owner.first, owner.first + ends.shape[0])


def _codes(x: Tensor | Quantized) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return rows as the operators take them: (data, scale or None, tensor factor or None)."""
    if isinstance(x, Tensor):
        return x, None, None
    scale = x.scale if isinstance(x.scale, Tensor) else x.data.new_full((1, 1), x.scale, dtype=torch.float32)
    return x.data, scale, x.tensor_factor


def _custom_op_arguments(
    setup: GroupedSetup, weight: Tensor, ends: Tensor, factors: Tensor | None, direction: int
) -> CustomOpArguments:
    owner, recipe = setup.owner, setup.recipe
    spec, columns = "", 0
    scale = factor = None
    if weight.dtype in CODES:
        stack_info = stack_codes(owner.layer)  # type: ignore[union-attr]
        spec, columns, scale, factor = stack_info.spec.text, stack_info.columns, stack_info.scale, stack_info.factor
    streams = counts = None
    seed, name = 0, ""
    if recipe.stochastic and isinstance(owner, NoiseSource):
        seed, name = owner.seed, owner.name
        counts = torch.as_tensor(owner.count, dtype=torch.int64, device="cpu").reshape(1)
    elif recipe.stochastic:
        drawn = [noise.draw(owner.layer, operand) for operand in OPERANDS[direction]]  # type: ignore[union-attr]
        members = _members(owner, ends)  # type: ignore[arg-type]
        seed, streams = drawn[0][0], torch.stack([one[1][members] for one in drawn])  # type: ignore[index]
        counts = torch.stack([one[2][members] for one in drawn])  # type: ignore[index]
    return CustomOpArguments(
        weight, scale, factor, ends, factors, streams, counts, seed, name, text_of(recipe), spec, columns,
        setup.transposed, setup.dtype,
    )  # fmt: skip


def _drawn(setup: GroupedSetup, keeps: bool, x: Tensor | Quantized) -> list[str]:
    """Return the names of a forward's operands that are rounded stochastically."""
    a, c, drawn = setup.recipe.fprop.a, setup.recipe.wgrad.b, []
    if a is not None and a.rounding != "nearest" and isinstance(x, Tensor):
        drawn.append(OPERANDS[0][0])
    if keeps and c is not None and c.rounding != "nearest" and not setup.recipe.reuse.input:
        drawn.append(OPERANDS[0][1])
    return drawn


def _remember(setup: GroupedSetup, drawn: Sequence[str], ends: Tensor) -> None:
    """Advance the noise counters of operands that were rounded stochastically."""
    if isinstance(setup.owner, GroupedProduct):
        for operand in drawn:
            noise.drawn(setup.owner.layer, operand, has_tokens(GroupOffsets(ends, 0)), setup.owner.first)
