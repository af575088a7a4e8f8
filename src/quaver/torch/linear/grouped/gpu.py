"""Grouped products on a GPU, without copying the group sizes to the host.

Rows of all groups are quantized at once, with the bits of separate groups, and multiplied by one grouped GEMM. Operands
that native GEMMs do not support are decoded and multiplied by torch's bf16 grouped GEMM or a Triton kernel: see
`operands.GROUPED_MATMUL`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.torch.linear.general import LATER, plain
from quaver.torch.linear.grouped import cpu
from quaver.torch.linear.grouped.cpu import WgradOperands, together
from quaver.torch.linear.grouped.operands import (
    GROUPED_MATMUL,
    GROUPED_SUMS,
    HIGH_MATMUL,
    HIGH_SUMS,
    GradientLike,
    GroupedContext,
    GroupedProduct,
    has_tokens,
    of_biases,
    of_weights,
    stack,
)
from quaver.torch.numerics import grouped
from quaver.torch.numerics.grouped import GroupedOperand, GroupOffsets, WeightStack
from quaver.torch.numerics.quantized import Quantized, pack
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import parts
from quaver.torch.state import weight_cache
from quaver.torch.state.history import amax


def forward(
    call: GroupedContext, x: Tensor | Quantized, high: Tensor | None, weight: Tensor, bias: Tensor | None, keeps: bool
) -> tuple[Tensor, WgradOperands | None]:
    """Compute y [T, N] and the wgrad operands; see `cpu.forward`."""
    recipe, offsets = call.recipe, call.offsets
    spec, c, plan = recipe.fprop.a, recipe.wgrad.b, recipe.reuse
    values = x if isinstance(x, Tensor) else high
    n, grouped_operand = cpu.features(call, weight)[0], None
    if spec is None:
        assert isinstance(x, Tensor)
        y = HIGH_MATMUL(x, _matrices(call, weight, x.dtype), offsets, call.dtype, bias)
    else:
        grouped_operand = (
            grouped.from_quantized(x, offsets)
            if isinstance(x, Quantized)
            else _quantize_groups(call, amax.INPUT, "input", x, spec)
        )
        b = _weights(call, weight, "fprop", spec=recipe.fprop.b)
        y = GROUPED_MATMUL(grouped_operand, b.whole, offsets, n, call.dtype, bias, recipe.fprop.fast_accum)
        _note_weights(call, b)
    if not keeps:
        return y, None
    if recipe.saved_input is None:
        return y, WgradOperands(rows=x if values is None else values)
    if c is None:
        return y, WgradOperands(grouped_operand=grouped_operand)
    if plan.input:
        assert grouped_operand is not None
        return y, WgradOperands(grouped_operand=grouped.transposed(grouped_operand, offsets))
    if values is None:
        assert isinstance(x, Quantized)
        values = x.dequantize().to(call.dtype)
    return y, WgradOperands(grouped_operand=_quantize_groups(call, amax.INPUT, "input.T", values, c, True))


def recomputed(call: GroupedContext, x: Tensor | Quantized, high: Tensor | None) -> WgradOperands:
    """Return the wgrad operands of recomputed rows; see `cpu.recomputed`."""
    recipe, offsets = call.recipe, call.offsets
    a, c = recipe.fprop.a, recipe.wgrad.b
    values = x if isinstance(x, Tensor) else high
    if recipe.saved_input is None:
        return WgradOperands(rows=x if values is None else values)
    factors = None if call.factors is None else call.factors[:, amax.INPUT]
    if recipe.reuse.input or c is None:
        assert a is not None
        grouped_operand = (
            grouped.from_quantized(x, offsets)
            if isinstance(x, Quantized)
            else grouped.quantize(x, a, offsets, False, factors)
        )
        return WgradOperands(
            grouped_operand=grouped.transposed(grouped_operand, offsets) if recipe.reuse.input else grouped_operand
        )
    if values is None:
        assert isinstance(x, Quantized)
        values = x.dequantize().to(call.dtype)
    return WgradOperands(grouped_operand=grouped.quantize(values, c, offsets, True, factors))


def backward(
    call: GroupedContext,
    g: Tensor,
    weight: Tensor | None,
    saved_stacks: WgradOperands | None,
    needs: Sequence[Any],
    like: GradientLike,
) -> tuple[Tensor | None, Any, Tensor | None]:
    """Return the needed gradients of rows, weight and bias; see `cpu.backward`."""
    need_input, need_weight, need_bias = needs
    recipe, plan, offsets = call.recipe, call.recipe.reuse, call.offsets
    a, c = recipe.dgrad.a, recipe.wgrad.a
    grad_x = grad_b = grouped_operand = None
    of_weight: Any = None
    if a is not None and (need_input or (need_weight and plan.grad_output)):
        grouped_operand = _quantize_groups(call, amax.GRAD_OUTPUT, "grad_output", g, a)
    if need_bias:
        grad_b = _sum_rows(g, offsets, torch.float32 if need_bias is LATER else like.bias_dtype)
    if need_input:
        assert weight is not None
        if grouped_operand is None:
            w = _of_dgrad(call, weight, g.dtype).transpose(1, 2)
            grad_x = HIGH_MATMUL(g, w, offsets, call.dtype, None)
        else:
            b = _weights(call, weight, "dgrad", spec=recipe.dgrad.b)
            grad_x = GROUPED_MATMUL(
                grouped_operand, b.whole, offsets, like.features, call.dtype, None, recipe.dgrad.fast_accum
            )
    if need_weight:
        transposed: Any = g
        if c is not None and plan.grad_output:
            assert grouped_operand is not None
            transposed = grouped.transposed(grouped_operand, offsets)
        elif c is not None:
            transposed = _quantize_groups(call, amax.GRAD_OUTPUT, "grad_output.T", g, c, True)
        of_weight = of_weights(
            need_weight, partial(_of_weight, call, transposed, saved_stacks, like, dtype=like.weight_dtype)
        )
    return grad_x, of_weight, of_weights(need_bias, partial(of_biases, grad_b, dtype=like.bias_dtype))


def _of_weight(
    call: GroupedContext, g: Any, saved_stacks: WgradOperands | None, like: GradientLike, *, dtype: torch.dtype
) -> Tensor:
    """Compute the weight gradients in the layout of the parameter."""
    assert saved_stacks is not None
    if isinstance(g, GroupedOperand):
        assert saved_stacks.grouped_operand is not None
        fast = call.recipe.wgrad.fast_accum
        if like.transposed:
            # Swapped operands give the gradient in the transposed layout of the parameter.
            y = GROUPED_SUMS(saved_stacks.grouped_operand, g, dtype, fast)
        else:
            y = GROUPED_SUMS(g, saved_stacks.grouped_operand, dtype, fast)
    else:
        rows: Any = saved_stacks.rows
        if saved_stacks.grouped_operand is not None:
            rows = grouped.dequantized(saved_stacks.grouped_operand, call.offsets)
        x = plain(rows, g.dtype) if saved_stacks.grouped_operand is None else rows.to(g.dtype)
        one, other = (x, g) if like.transposed else (g, x)
        y = HIGH_SUMS(one, other, call.offsets, dtype)
    if isinstance(call.owner, GroupedProduct):
        weight_cache.record_backward(call.owner.layer)
    return y


def _quantize_groups(
    call: GroupedContext, column: int, operand: str, x: Tensor, spec: QuantSpec, summed: bool = False
) -> GroupedOperand:
    """Quantize the operand of all groups, and record their amaxes in the column."""
    offsets, draw = call.offsets, call.noise(operand, spec)
    factors = None if call.factors is None else call.factors[:, column]
    if together(spec) and not summed and x.numel():
        q = ops.QUANTIZE(x if x.stride(-1) == 1 else x.contiguous(), spec)
        grouped_operand = grouped.from_quantized(q, offsets)
    else:
        grouped_operand = grouped.quantize(x, spec, offsets, summed, factors, draw)
    if call.factors is not None and call.training:
        assert grouped_operand.amax is not None
        call.amaxes[column] = grouped_operand.amax
    return grouped_operand


def _note_weights(call: GroupedContext, b: WeightStack) -> None:
    """Record the amaxes of the weights of groups that have tokens."""
    if call.factors is not None and call.training and b.amax is not None:
        call.amaxes[amax.WEIGHT] = b.amax.where(has_tokens(call.offsets), 0.0)


def _weights(call: GroupedContext, weight: Tensor, side: str, spec: QuantSpec | None) -> Any:
    """Return the matrices [N, K] of all groups for fprop, or their transposes for dgrad, in one operand."""
    assert spec is not None
    return stack(call, weight, side, partial(_quantized, call, weight, side, spec))


def _quantized(call: GroupedContext, weight: Tensor, side: str, spec: QuantSpec) -> WeightStack:
    owner, groups = call.owner, weight.shape[0]
    shared, transposed = side == "dgrad" and call.recipe.reuse.weight, side == "dgrad"
    layer = owner.layer if isinstance(owner, GroupedProduct) else None
    if torch.is_inference_mode_enabled() and layer is not None and weight_cache.can_cache(layer, weight):
        # Cached tensors must not be inference tensors, because other modes read them too.
        with torch.inference_mode(False), torch.no_grad():
            return _quantized(call, weight, side, spec)
    if shared and "fprop" in call.saved_stacks and call.saved_stacks["fprop"].quantized is not None:
        return _transpose_stack(call.saved_stacks["fprop"].quantized.whole, groups, spec)
    operands: list[Quantized] = []
    if call.codes is not None:
        for group in range(groups):
            q = call.codes.operand(weight, group, transposed and not shared, spec, ops.QUANTIZE)
            operands.append(q.T if shared else q)
        return _in_rows(operands, weight.device)
    w = weight.detach()
    w = w.transpose(1, 2) if transposed and not shared else w
    (n, k), whole = w.shape[1:], None
    if together(spec) and w.is_contiguous() and w.numel():
        # No scale spans two rows.
        return WeightStack((), ops.QUANTIZE(w.view(groups * n, k), spec))
    for group in range(groups):
        factor = None if call.factors is None else call.factors[group, amax.WEIGHT]
        q = ops.QUANTIZE(w[group], spec, None, factor)
        operands.append(q.T if shared else q)
    whole = _in_rows(operands, weight.device)
    if call.factors is not None and operands:
        whole.amax = torch.stack(
            [torch.as_tensor(q.amax, dtype=torch.float32, device=w.device).reshape(()) for q in operands]
        )
    return whole


def _in_rows(operands: Sequence[Quantized], device: torch.device) -> WeightStack:
    """Concatenate the operands of all groups by rows, each row with its own scales."""
    if not operands:
        return WeightStack((), None)
    spec, (rows, k) = operands[0].spec, operands[0].shape
    rowwise = [q.plain() if not q.transposed else _row_major(q) for q in operands]
    of_rows = replace(spec, block=(1, spec.block[1]), rounding="nearest")
    scales = [_of_rows(q, rows) for q in rowwise]
    factors = None
    if spec.two_level:
        factors = torch.cat([q.tensor_factor.expand(rows, 1) for q in rowwise])  # type: ignore[union-attr]
    data = torch.cat([q.data for q in rowwise])
    return WeightStack((), Quantized(data, torch.cat(scales), of_rows, (len(rowwise) * rows, k), tensor_factor=factors))


def _row_major(q: Quantized) -> Quantized:
    """Copy an operand that is stored transposed to row-major codes and scales."""
    data, scale, factor, _ = parts(q)
    return Quantized(data, scale, q.spec, q.shape, False, factor if q.spec.two_level else None)


def _of_rows(q: Quantized, rows: int) -> Tensor:
    """Return the stored scales of each row, [rows, blocks of k]."""
    scale = q.scale
    if not isinstance(scale, Tensor):
        return torch.full((rows, 1), scale, dtype=torch.float32, device=q.device)
    height = q.spec.block[0]
    if height == 1:
        return scale
    return scale.expand(rows, scale.shape[1]) if height is None else scale.repeat_interleave(height, 0)[:rows]


def _transpose_stack(whole: Quantized, groups: int, spec: QuantSpec) -> WeightStack:
    """Transpose the matrices of all groups; their scale blocks must be square."""
    rows, k = whole.shape[0] // max(groups, 1), whole.shape[1]
    side = spec.block[0]
    codes = whole.stored_codes().view(groups, rows, k).transpose(1, 2)
    data = pack(codes.reshape(groups * k, rows)) if spec.format.packed else codes.reshape(groups * k, rows)
    data = data if spec.format.packed else data.view(whole.data.dtype)
    scale = whole.plain_scale().view(groups, rows, -1)
    blocks = scale[:, :1] if side is None else scale[:, ::side]
    transposed = blocks.transpose(1, 2)
    transposed = transposed.expand(groups, k, 1) if side is None else transposed.repeat_interleave(side, 1)[:, :k]
    factor = None
    if whole.tensor_factor is not None:
        factor = whole.tensor_factor.view(groups, rows)[:, :1].expand(groups, k).reshape(-1, 1)
    shape, block = (groups * k, rows), replace(whole.spec, block=(1, side))
    return WeightStack(
        (), Quantized(data, transposed.reshape(groups * k, -1).contiguous(), block, shape, tensor_factor=factor)
    )


# ---- unquantized weights ----


def _of_dgrad(call: GroupedContext, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights for an unquantized dgrad, or fprop's operand dequantized if the recipe says so."""
    if not call.recipe.dequantized_backward:
        return _matrices(call, weight, dtype)
    whole = _weights(call, weight, "fprop", spec=call.recipe.fprop.b).whole
    values: Tensor = whole.dequantize()
    return values.view(weight.shape[0], -1, values.shape[1]).to(dtype)


def _matrices(call: GroupedContext, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights [groups, N, K] in high precision."""
    codes = call.codes
    if codes is None:
        return weight
    return torch.stack([codes.values(weight, group).to(dtype) for group in range(weight.shape[0])])


def _sum_rows(g: Tensor, offsets: GroupOffsets, dtype: torch.dtype) -> Tensor:
    """Sum g [T, N] over each group's rows in float32; returns [groups, N]."""
    total = torch.zeros((offsets.groups + 1, g.shape[1]), dtype=torch.float32, device=g.device)
    return total.index_add_(0, offsets.slots(1).group, g.float())[:-1].to(dtype)
