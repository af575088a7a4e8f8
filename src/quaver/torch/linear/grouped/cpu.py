"""Grouped products on a CPU, one group after the other, because the host knows the size of each group.

Each group is computed like a linear layer of its own, with the same bits. Its rows are quantized, multiplied and
written while they are in the cache. Rows of all groups are quantized at once if no scale spans two rows.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.cpu import decode, gemm, quantize
from quaver.torch.linear.general import LATER, high_precision, plain
from quaver.torch.linear.grouped.operands import (
    GradientLike,
    GroupedContext,
    GroupedProduct,
    of_biases,
    of_weights,
    stack,
)
from quaver.torch.numerics import reference
from quaver.torch.numerics.grouped import GroupedNoise, GroupedOperand, WeightStack, in_lines, rows_of
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import NO_NOISE
from quaver.torch.operations import ops
from quaver.torch.state import weight_cache
from quaver.torch.state.history import amax

#: Largest number of elements that torch operations quantize within the CPU cache.
CACHED = 1 << 18


class WgradOperands(NamedTuple):
    """Operands that wgrad reads.

    `parts` has for each group an operand [K, tokens] or fprop's operand [tokens, K], or None without tokens. Otherwise
    `rows` has the rows of all groups in high precision, or as codes that backward decodes.
    """

    parts: Sequence[Quantized | None] = ()
    rows: Tensor | Quantized | None = None
    #: Operand of all groups on a GPU, in place of `parts`.
    grouped_operand: GroupedOperand | None = None


def together(spec: QuantSpec) -> bool:
    """Return True if rows of all groups can be quantized at once: no two rows share a scale or noise."""
    return spec.block[0] == 1 and spec.rounding == "nearest" and not spec.two_level


def forward(
    call: GroupedContext, x: Tensor | Quantized, high: Tensor | None, weight: Tensor, bias: Tensor | None, keeps: bool
) -> tuple[Tensor, WgradOperands | None]:
    """Compute y [T, N], and the operands of wgrad if `keeps`.

    Args:
        x: rows [T, K] in high precision or quantized.
        high: high-precision values of quantized rows, or None if there are none.
        weight: [groups, N, K], or its codes.
        bias: [groups, N].
    """
    recipe, bounds = call.recipe, call.offsets.bounds()
    spec, c, plan = recipe.fprop.a, recipe.wgrad.b, recipe.reuse
    if isinstance(x, Tensor) and not recipe.quantizes and bias is None and call.codes is None:
        y = all_groups(call, x, weight.transpose(1, 2))
        if y is not None:
            return y, WgradOperands(rows=x) if keeps else None
    prequantized = isinstance(x, Quantized)
    rows: Any = _in_rows(x) if isinstance(x, Tensor) else x
    values = rows if isinstance(x, Tensor) else high
    y = _empty(rows, (call.offsets.rows, features(call, weight)[0]), call.dtype, bounds)
    run = _HostRun(call, rows.data if prequantized else rows)
    noise = None if spec is None or prequantized else call.noise("input", spec)
    separate_transpose = keeps and c is not None and not plan.input
    transposed_noise = call.noise("input.T", c) if separate_transpose and c is not None else None
    parts: list[Quantized | None] = [None] * len(bounds)
    whole = rows if prequantized else None
    if spec is not None and not prequantized and run.at_once(rows, spec) and bounds and bounds[-1][1]:
        whole = run.quantize(rows, spec)
        call.note("input", rows[: bounds[-1][1]], rows_of(whole, 0, bounds[-1][1]))
    amax_values = [0.0] * len(bounds)
    for group, (start, end) in enumerate(bounds):
        if start == end:
            continue
        b = None if bias is None else bias[group]
        if spec is None:
            run.high(rows[start:end], run.weight(weight, group, rows.dtype), y[start:end], b)
            q = None
        else:
            if whole is None:
                q = run.quantized(group, amax.INPUT, "input", rows[start:end], spec, noise, amax_values)
            else:
                q = rows_of(whole, start, end)
            run.multiply(q, run.expert(weight, group, "fprop"), y[start:end], b, recipe.fprop.fast_accum)
        if separate_transpose:
            assert c is not None
            part = plain(q, call.dtype) if values is None else values[start:end]  # type: ignore[arg-type]
            parts[group] = run.quantized(group, amax.INPUT, "input.T", part.t(), c, transposed_noise, amax_values)
        elif keeps and recipe.saved_input is not None:
            # fprop's operand, or its transposed view.
            assert q is not None
            parts[group] = q.T if plan.input else q
    run.finish(amax.INPUT, amax_values if not prequantized else None)
    if not keeps:
        return y, None
    if recipe.saved_input is None:
        return y, WgradOperands(rows=x if values is None else values)
    return y, WgradOperands(parts)


def recomputed(call: GroupedContext, x: Tensor | Quantized, high: Tensor | None) -> WgradOperands:
    """Return the wgrad operands of recomputed rows, without recording amaxes or counting them again."""
    recipe, bounds = call.recipe, call.offsets.bounds()
    a, c = recipe.fprop.a, recipe.wgrad.b
    values = x if isinstance(x, Tensor) else high
    if recipe.saved_input is None:
        return WgradOperands(rows=x if values is None else values)
    run, parts = _HostRun(call, x if isinstance(x, Tensor) else x.data), list[Quantized | None]([None] * len(bounds))
    for group, (start, end) in enumerate(bounds):
        if start == end:
            continue
        q = rows_of(x, start, end) if isinstance(x, Quantized) else None
        factor = call.factor(group, amax.INPUT)
        if recipe.reuse.input or c is None:
            if q is None:
                assert a is not None and values is not None
                q = run.quantize(values[start:end], a, None, factor)
            parts[group] = q.T if recipe.reuse.input else q
        else:
            part = plain(q, call.dtype) if values is None else values[start:end]  # type: ignore[arg-type]
            parts[group] = run.quantize(part.t(), c, None, factor)
    return WgradOperands(parts)


def backward(
    call: GroupedContext,
    g: Tensor,
    weight: Tensor | None,
    saved_stacks: WgradOperands | None,
    needs: Sequence[Any],
    like: GradientLike,
) -> tuple[Tensor | None, Any, Tensor | None]:
    """Return the needed gradients of rows [T, K], weight and bias from grad_output g [T, N].

    Args:
        needs: one flag per gradient; `LATER` for the weight returns a function instead of a tensor.
        like: shapes and dtypes of the gradients of weight and bias.
    """
    need_input, need_weight, need_bias = needs
    recipe, plan, bounds = call.recipe, call.recipe.reuse, call.offsets.bounds()
    a, c = recipe.dgrad.a, recipe.wgrad.a
    unquantized = _unquantized(call, g, weight, saved_stacks, needs, like)
    if unquantized is not None:
        return unquantized
    run, g = _HostRun(call, g), _in_rows(g)
    quantizes = a is not None and (need_input or (need_weight and plan.grad_output))
    separate_transpose = bool(need_weight) and c is not None and not plan.grad_output
    noise = call.noise("grad_output", a) if quantizes and a is not None else None
    transposed_noise = call.noise("grad_output.T", c) if separate_transpose and c is not None else None
    grad_x = _empty(g, (g.shape[0], like.features), call.dtype, bounds) if need_input else None
    grad_w = like.new_weight(g.device, like.weight_dtype) if need_weight and need_weight is not LATER else None
    # A gradient that is computed later may be requested in float32.
    bias_dtype = torch.float32 if need_bias is LATER else like.bias_dtype
    grad_b = g.new_zeros(like.bias, dtype=bias_dtype) if need_bias else None
    whole = None
    if quantizes and a is not None and run.at_once(g, a) and bounds and bounds[-1][1]:
        whole = run.quantize(g, a)
        call.note("grad_output", g[: bounds[-1][1]], rows_of(whole, 0, bounds[-1][1]))
    amax_values, transposed = [0.0] * len(bounds), list[Any]([None] * len(bounds))
    for group, (start, end) in enumerate(bounds):
        if start == end:
            if grad_w is not None:
                grad_w[group].zero_()
            continue
        part, gq = g[start:end], None
        if whole is not None:
            gq = rows_of(whole, start, end)
        elif quantizes and a is not None:
            gq = run.quantized(group, amax.GRAD_OUTPUT, "grad_output", part, a, noise, amax_values)
            if need_input and need_weight and plan.grad_output and g.is_cpu:
                decode.cache_decoded(gq, decode.GRADIENT)
        if grad_b is not None:
            grad_b[group] = ops.bias_gradient(part, bias_dtype)
        if grad_x is not None:
            assert weight is not None
            if gq is None or recipe.dgrad.b is None:
                run.high(part, run.of_dgrad(weight, group, g.dtype).t(), grad_x[start:end])
            else:
                run.multiply(gq, run.expert(weight, group, "dgrad"), grad_x[start:end], None, recipe.dgrad.fast_accum)
        if not need_weight:
            continue
        if c is None:
            transposed[group] = part.t()
        elif plan.grad_output:
            assert gq is not None
            transposed[group] = gq.T
        else:
            transposed[group] = run.quantized(
                group, amax.GRAD_OUTPUT, "grad_output.T", part.t(), c, transposed_noise, amax_values
            )
        if need_weight is not LATER:
            _of_weight(run, transposed[group], saved_stacks, group, (start, end), grad_w)
            transposed[group] = None
    run.finish(amax.GRAD_OUTPUT, amax_values)
    return (
        grad_x,
        of_weights(
            need_weight, partial(_weights, run, transposed, saved_stacks, like, grad_w, dtype=like.weight_dtype)
        ),
        of_weights(need_bias, partial(of_biases, grad_b, dtype=like.bias_dtype)),
    )


def _unquantized(
    call: GroupedContext,
    g: Tensor,
    weight: Tensor | None,
    saved_stacks: WgradOperands | None,
    needs: Sequence[Any],
    like: GradientLike,
) -> tuple[Tensor | None, Any, Tensor | None] | None:
    """Run `backward` by `all_groups`, or return None if that does not support the call."""
    need_input, need_weight, need_bias = needs
    if call.recipe.quantizes or call.codes is not None or need_bias or need_weight is LATER:
        return None
    grad_x = grad_w = None
    if need_input:
        assert weight is not None
        grad_x = all_groups(call, g, weight)
        if grad_x is None:
            return None
    if need_weight:
        assert saved_stacks is not None and isinstance(saved_stacks.rows, Tensor)
        one, other = (saved_stacks.rows, g) if like.transposed else (g, saved_stacks.rows)
        grad_w = all_groups(call, one.t(), other)
        if grad_w is None:
            return None
        if isinstance(call.owner, GroupedProduct):
            weight_cache.record_backward(call.owner.layer)
    return grad_x, grad_w, None


def all_groups(call: GroupedContext, a: Tensor, b: Tensor) -> Tensor | None:
    """Multiply unquantized operands by torch's grouped GEMM, or return None if it does not support them.

    On a CPU it multiplies group by group, with the bits of separate GEMMs.

    Args:
        a, b: rows [T, k] and matrices [groups, k, n], giving [T, n]; or [m, T] and rows [T, n], giving [groups, m, n].
    """
    if not (a.is_cpu and a.dtype is b.dtype is call.dtype and a.dtype in ops.DTYPES) or 0 in (*a.shape, *b.shape):
        return None
    if not (in_lines(a) and in_lines(b)):
        return None
    bounds = call.offsets.bounds()
    y: Tensor = F.grouped_mm(a, b, offs=call.offsets.ends)
    if b.dim() == 3:
        y[bounds[-1][1] :].zero_()
    else:
        for group, (start, end) in enumerate(bounds):
            if start == end:
                y[group].zero_()
    return y


def features(call: GroupedContext, weight: Tensor) -> tuple[int, int]:
    """Return N and K of a weight [groups, N, K], including one stored as codes."""
    return (weight.shape[1], weight.shape[2]) if call.codes is None else call.codes.shape(weight)


def _weights(
    run: "_HostRun",
    transposed: list[Any],
    saved_stacks: WgradOperands | None,
    like: GradientLike,
    grad: Tensor | None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the missing weight gradients, and return all of them in the layout of the parameter."""
    later = grad is None
    grad = like.new_weight(run.call.offsets.ends.device, dtype) if grad is None else grad
    for group, bounds in enumerate(run.call.offsets.bounds()):
        if transposed[group] is not None:
            _of_weight(run, transposed[group], saved_stacks, group, bounds, grad)
        elif later:
            grad[group].zero_()
    if isinstance(run.call.owner, GroupedProduct):
        weight_cache.record_backward(run.call.owner.layer)
    return like.in_parameter_layout(grad)


def _of_weight(
    run: "_HostRun",
    g: Any,
    saved_stacks: WgradOperands | None,
    group: int,
    bounds: tuple[int, int],
    grad: Tensor | None,
) -> None:
    """Compute the weight gradient of one group: grad_output.T [N, tokens] times input.T [K, tokens]."""
    assert saved_stacks is not None and grad is not None
    operand, rows = saved_stacks.parts[group] if saved_stacks.parts else None, saved_stacks.rows
    if isinstance(g, Quantized):
        assert operand is not None
        run.multiply(g, operand, grad[group], None, run.call.recipe.wgrad.fast_accum)
        return
    if operand is None:
        assert rows is not None
        operand = rows_of(rows, *bounds) if isinstance(rows, Quantized) else None
    x = rows[slice(*bounds)] if operand is None else plain(operand, g.dtype)  # type: ignore[index]
    run.high(g, x.t(), grad[group])


def _in_rows(x: Tensor) -> Tensor:
    """Return x, copied if its columns are not contiguous, so that rows can be sliced."""
    return x if x.stride(-1) == 1 or x.numel() < 2 else x.contiguous()


def _empty(like: Any, shape: tuple[int, int], dtype: torch.dtype, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """Return an uninitialized [T, N] tensor, with zeros after the last group."""
    y = torch.empty(shape, dtype=dtype, device=like.device)
    y[bounds[-1][1] if bounds else 0 :].zero_()
    return y


class _HostRun:
    """Quantization and GEMM functions of one call, chosen once for all groups."""

    def __init__(self, call: GroupedContext, like: Tensor) -> None:
        self.call = call
        _, self.quantize, self.matmul, _ = ops.resolve(call.recipe, like)
        #: True if the GEMM can write to a given output tensor.
        self.places = self.matmul is gemm.matmul

    def at_once(self, x: Tensor, spec: QuantSpec) -> bool:
        """Return True if the rows of all groups should be quantized in one call.

        With kernels that takes 0.1 to 0.7 of the time. With torch operations it takes about twice as long once the
        temporaries exceed the cache.
        """
        return together(spec) and (self.quantize is not reference.quantize or x.numel() <= CACHED)

    def quantized(
        self,
        group: int,
        column: int,
        operand: str,
        x: Tensor,
        spec: QuantSpec,
        noise: GroupedNoise | None,
        amax_values: list[float],
    ) -> Quantized:
        """Quantize the operand of one group, and add its amax to the column's."""
        call = self.call
        q = self.quantize(x, spec, None, call.factor(group, column), NO_NOISE if noise is None else noise.of(group))
        if call.factors is not None:
            amax_values[group] = float(q.amax)  # type: ignore[arg-type]
        call.note(operand, x, q)
        return q

    def finish(self, column: int, amax_values: list[float] | None) -> None:
        """Record a column's amaxes, together with those of the weights where they are first read."""
        call = self.call
        if call.factors is None or not call.training:
            return
        if amax_values is not None:
            call.amaxes[column] = amax_values
        if column == amax.INPUT and "fprop" in call.saved_stacks:
            parts, bounds = call.saved_stacks["fprop"].quantized.parts, call.offsets.bounds()
            # Codes that are stored have no amax.
            amax_values = [0.0 if q is None or q.amax is None else float(q.amax) for q in parts]
            call.amaxes[amax.WEIGHT] = [
                top if end > start else 0.0 for top, (start, end) in zip(amax_values, bounds, strict=True)
            ]

    def expert(self, weight: Tensor, group: int, side: str) -> Quantized:
        """Return a group's weight [N, K] for fprop, or its transpose [K, N] for dgrad."""
        call, plan = self.call, self.call.recipe.reuse
        shared = side == "dgrad" and plan.weight
        saved_stacks = stack(call, weight, "fprop" if shared else side)
        q = saved_stacks.parts[group]
        if q is None:
            if side == "fprop" and self._fills(weight, saved_stacks):
                saved_stacks.parts[:] = self._all(weight)
                saved_stacks.unread = set(range(len(saved_stacks.parts)))
            else:
                saved_stacks.parts[group] = self._quantized(weight, group, side, shared)
            q = saved_stacks.parts[group]
            assert q is not None
        if group in saved_stacks.unread:
            saved_stacks.unread.discard(group)
            call.note("weight", weight.detach()[group], q)
        return q.T if shared else q

    def _fills(self, weight: Tensor, saved_stacks: WeightStack) -> bool:
        """Return True if all groups' weights should be quantized for fprop in one call.

        Most groups must have tokens, no operand may be cached, and no scale may span two groups.
        """
        call = self.call
        spec, bounds, rows = call.recipe.fprop.b, call.offsets.bounds(), weight.shape[1]
        if spec is None or call.codes is not None or call.factors is not None or not weight.is_contiguous():
            return False
        height = spec.block[0]
        if height is None or rows % height or spec.rounding != "nearest" or self.quantize is reference.quantize:
            return False
        if spec.two_level and (self.quantize is not quantize.two_level or spec.hadamard):
            return False
        return 4 * sum(end > start for start, end in bounds) >= 3 * len(bounds) and not any(saved_stacks.parts)

    def _all(self, weight: Tensor) -> list[Quantized]:
        """Quantize the weights of all groups for fprop."""
        layer = self.call.owner.layer if isinstance(self.call.owner, GroupedProduct) else None
        if torch.is_inference_mode_enabled() and layer is not None and weight_cache.can_cache(layer, weight):
            with torch.inference_mode(False), torch.no_grad():
                return self._all(weight)
        spec, (groups, n, k) = self.call.recipe.fprop.b, weight.shape
        assert spec is not None
        w = weight.detach()
        if spec.two_level:
            whole = quantize.two_level(w.view(groups * n, k), spec, parts=groups)
        else:
            whole = self.quantize(w.view(groups * n, k), spec)
        each = [rows_of(whole, group * n, group * n + n) for group in range(groups)]
        for group, q in enumerate(each):
            if spec.two_level:
                assert whole.tensor_factor is not None
                q.tensor_factor = whole.tensor_factor[group : group + 1]
        return each

    def _quantized(self, weight: Tensor, group: int, side: str, shared: bool) -> Quantized:
        call = self.call
        owner, transposed = call.owner, side == "dgrad" and not shared
        spec = call.recipe.dgrad.b if transposed else call.recipe.fprop.b
        assert spec is not None
        if call.codes is not None:
            return call.codes.operand(weight, group, transposed, spec, self.quantize)
        layer = owner.layer if isinstance(owner, GroupedProduct) else None
        if torch.is_inference_mode_enabled() and layer is not None and weight_cache.can_cache(layer, weight):
            # Cached tensors must not be inference tensors, because other modes read them too.
            with torch.inference_mode(False), torch.no_grad():
                return self._quantized(weight, group, side, shared)
        w = weight.detach()[group]
        w = w.t() if transposed else w
        q: Quantized = self.quantize(w, spec, None, call.factor(group, amax.WEIGHT))
        if not shared or side == "fprop":
            call.note("weight.T" if transposed else "weight", w, q)
        return q

    def weight(self, weight: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """Return a group's weight [N, K] in high precision."""
        codes = self.call.codes
        return weight[group] if codes is None else codes.values(weight, group).to(dtype)

    def of_dgrad(self, weight: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """Return a group's weight for an unquantized dgrad: the weight, or the dequantized fprop operand if the recipe
        says so.
        """
        if self.call.recipe.dequantized_backward:
            return plain(self.expert(weight, group, "fprop"), dtype)
        return self.weight(weight, group, dtype)

    def multiply(self, a: Quantized, b: Quantized, out: Tensor, bias: Tensor | None, fast: bool) -> None:
        """Compute a [m, k] @ b [n, k].T + bias into `out`."""
        if self.places:
            self.matmul(a, b, out.dtype, bias, fast, out)
        else:
            out.copy_(self.matmul(a, b, out.dtype, bias, fast))

    def high(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Compute a [m, k] @ b [n, k].T + bias into `out` unquantized, with the bits of F.linear."""
        if not (a.dtype is b.dtype is out.dtype) or (bias is not None and bias.dtype is not out.dtype):
            out.copy_(high_precision(a, b, out.dtype, bias))
        elif bias is None:
            torch.mm(a, b.t(), out=out)
        else:
            torch.addmm(bias, a, b.t(), out=out)
