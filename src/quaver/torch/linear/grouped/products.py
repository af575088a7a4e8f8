"""The three GEMMs of a grouped linear layer: a GEMM for each group of rows, in one call with the groups' `offsets`.

    fprop   y[t]      = x[t] [K] @ weight[e] [N, K].T + bias[e]          row t of group e
    dgrad   grad_x[t] = grad_y[t] [N] @ weight[e] [N, K]
    wgrad   grad_weight[e] [N, K] = grad_y[rows of e].T [N, rows] @ x[rows of e] [rows, K]

Each group has the codes, scales and noise of a linear layer of its own. `HostGroups` computes one group after the
other, because the host knows the sizes: its operand is a list with a `Quantized` for each group, None without rows.
`DeviceGroups` never reads the sizes: its operand is a `GroupedOperand`, quantized at once and multiplied by one grouped
GEMM.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Union

import torch
from torch import Tensor
from torch.nn import functional as F

from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.cpu import gemm
from quaver.torch.linear.general import LATER, high_precision, plain
from quaver.torch.linear.grouped.call import GroupedCall, LayerGroups, outside_inference, weights
from quaver.torch.linear.grouped.emulated import EmulatedGroups, EmulatedRows, SavedValues, runs_emulated
from quaver.torch.linear.grouped.operands import (
    GROUPED_MATMUL,
    GROUPED_QUANTIZE,
    GROUPED_WEIGHTS,
    GROUPED_WGRAD,
    HIGH_MATMUL,
    HIGH_WGRAD,
)
from quaver.torch.numerics import grouped, reference
from quaver.torch.numerics.grouped import GroupedNoise, GroupedOperand, by_rows, in_lines, rows_of
from quaver.torch.numerics.quantized import Quantized, pack
from quaver.torch.numerics.rounding import NO_NOISE
from quaver.torch.operations import ops
from quaver.torch.quantized_tensor import unwrap
from quaver.torch.state import observer, weight_cache
from quaver.torch.state.history import amax

#: Operand of wgrad that forward saves: rows in high precision or as codes that backward decodes, else the operand of
#: all groups, [K, rows] each, or as fprop read them if backward decodes them.
SavedRows = Tensor | Quantized | list[Quantized | None] | GroupedOperand | SavedValues
#: Functions that run a call.
Groups = Union["HostGroups", "DeviceGroups", EmulatedGroups]
#: Largest number of elements that torch operations quantize within the CPU cache.
CACHED = 1 << 18


def forward(
    call: GroupedCall, x: Tensor | Quantized, high: Tensor | None, weight: Tensor, bias: Tensor | None, save: bool
) -> tuple[Tensor, SavedRows | None]:
    """Compute y [T, N], and the operand of wgrad if `save`.

    Args:
        x: rows [T, K] in high precision or quantized.
        high: high-precision values of quantized rows, or None if there are none.
        weight: [groups, N, K], or its codes.
        bias: [groups, N].
    """
    run = backend(call)
    a = _operand(run, x, "input", call.recipe.wgrad.b if save else None)
    y = run.multiply(a, weight, "fprop", bias)
    if observer.active.observers:
        call.observed_input = x if isinstance(x, Tensor) else high
        _observe_gemms(run, "fprop", call.observed_input, weight, bias, y, a)
    return y, _saved(run, x, high, a, "input.T") if save else None


def recomputed(call: GroupedCall, x: Tensor | Quantized, high: Tensor | None) -> SavedRows:
    """Return the operand of wgrad for rows that backward has recomputed, without recording or counting them again."""
    run, recipe = backend(call), call.recipe
    reads_a = recipe.reuse.input or (recipe.wgrad.b is None and recipe.saved_input is not None)
    return _saved(run, x, high, _operand(run, x, "", recipe.wgrad.b) if reads_a else None, "")


def _operand(run: "Groups", x: Tensor | Quantized, name: str, other: QuantSpec | None = None) -> Any:
    """Return the operand of fprop, or x itself if it is not quantized; `name` and `other` as in `quantize`."""
    if isinstance(x, Quantized):
        return run.split(x)
    spec = run.call.recipe.fprop.a
    return x if spec is None else run.quantize(amax.INPUT, name, x, spec, other=other)


def _saved(run: "Groups", x: Tensor | Quantized, high: Tensor | None, a: Any, name: str) -> Any:
    """Return the operand of wgrad, from fprop's operand `a` if the recipe says so."""
    recipe, c, values = run.call.recipe, run.call.recipe.wgrad.b, x if isinstance(x, Tensor) else high
    if recipe.saved_input is None:
        return x if values is None else values
    if isinstance(a, GroupedOperand | EmulatedRows) and a.transpose is not None:
        return a.transpose
    if c is None or recipe.reuse.input:
        return a if c is None else run.transpose(a)
    values = plain(x, run.call.dtype) if values is None else values
    return run.quantize(amax.INPUT, name, values, c, True)


def backward(
    call: GroupedCall, g: Tensor, weight: Tensor | None, saved: SavedRows | None, needs: Sequence[Any]
) -> tuple[Tensor | None, Any, Any]:
    """Return the needed gradients of rows [T, K], weight and bias from grad_output g [T, N].

    Args:
        saved: operand of wgrad.
        needs: one flag per gradient; `LATER` for weight or bias returns a function that takes the gradient's `dtype`.
    """
    (need_input, need_weight, need_bias), recipe, run = needs, call.recipe, backend(call)
    a, c, reuses_grad = recipe.dgrad.a, recipe.wgrad.a, recipe.reuse.grad_output
    rows: Any = g
    if a is not None and (need_input or (need_weight and reuses_grad)):
        rows = run.quantize(amax.GRAD_OUTPUT, "grad_output", g, a, other=c if need_weight else None)
    # A gradient that is computed later may be requested in float32.
    grad_b: Any = run.bias_gradient(g, torch.float32 if need_bias is LATER else call.bias_dtype) if need_bias else None
    grad_x = grad_w = None
    if need_input:
        assert weight is not None
        grad_x = run.multiply(rows, weight, "dgrad", None)
        if observer.active.observers:
            _observe_gemms(run, "dgrad", g, weight, None, grad_x, rows)
    if need_weight:
        # Saved for a weight gradient that is computed later only while it is observed.
        observed = g if observer.active.observers else None
        transposed: Any = g
        if isinstance(rows, GroupedOperand | EmulatedRows) and rows.transpose is not None:
            transposed = rows.transpose
        elif c is not None:
            transposed = (
                run.transpose(rows) if reuses_grad else run.quantize(amax.GRAD_OUTPUT, "grad_output.T", g, c, True)
            )
        grad_w = partial(_weight_gradient, run, transposed, saved, observed, dtype=call.weight_dtype)
    if grad_b is not None:
        grad_b = partial(grad_b.to, dtype=call.bias_dtype) if need_bias is LATER else grad_b
    return grad_x, grad_w if grad_w is None or need_weight is LATER else grad_w(), grad_b


def _weight_gradient(
    run: "Groups",
    g: Any,
    saved: Any,
    observed: Tensor | None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Run wgrad; returns the gradient in the layout of the parameter."""
    y = run.wgrad(g, saved, dtype)
    if observed is not None:
        _observe_gemms(run, "wgrad", observed, run.call.observed_input, None, y, g, saved)
    if run.call.layer is not None:
        weight_cache.record_backward(run.call.layer)
    return y


def _observe_gemms(
    run: "Groups", gemm: str, a: Tensor | None, b: Any, bias: Tensor | None, y: Tensor,
    a_operand: Any, b_operand: Any = None,
) -> None:  # fmt: skip
    """Report the result of each group's GEMM to the active observers.

    Args:
        a, b: rows [T, k] and the weight [groups, N, K] for fprop and dgrad; grad_output [T, N] and the input [T, K] for
            wgrad. Not reported if one of them is None, because it exists only as codes.
        y: the result; of wgrad [groups, N, K], or [groups, K, N] if the weight is stored so.
        a_operand, b_operand: the rows of each group, and of wgrad those of the input, as the GEMM read them.
    """
    call = run.call
    owner = call.owner
    if a is None or b is None or not isinstance(owner, LayerGroups) or not call.is_observable:
        return
    for group, (start, end) in enumerate(call.offsets.bounds()):
        group_a, group_y = a[start:end], y[start:end]
        if gemm == "wgrad":
            group_a, group_b = group_a.t(), b[start:end].t()
            group_y = y[group].t() if call.transposed else y[group]
        else:
            group_b = b[group] if call.stored is None else unwrap(call.stored, group).dequantize()
            group_b = group_b if gemm == "fprop" else group_b.t()
        group_bias = None if bias is None else bias[group]
        quantized: tuple[Quantized | None, Quantized | None] = None, None
        if isinstance(run, HostGroups) and isinstance(a_operand, list) and start < end:
            other = b_operand[group] if gemm == "wgrad" else run.expert(b, group, gemm)
            quantized = a_operand[group], other
        observed = observer.ObservedGemm(
            owner.layer, gemm, group_a, group_b, group_bias, group_y, quantized, owner.name, group
        )
        for each in observer.active.observers:
            each.observe_gemm(observed)


def backend(call: GroupedCall) -> "Groups":
    """Return the functions that run a call: `HostGroups` if the host knows the offsets, else those of a GPU."""
    if ops.on_host(call.offsets.ends):
        return HostGroups(call)
    return EmulatedGroups(call) if runs_emulated(call) else DeviceGroups(call)


def _in_rows(x: Tensor) -> Tensor:
    """Return x, copied if its columns are not contiguous, so that rows can be sliced."""
    return x if x.stride(-1) == 1 or x.numel() < 2 else x.contiguous()


def _quantize_each(
    call: GroupedCall, column: int, operand: str, x: Tensor, spec: QuantSpec, for_wgrad: bool,
    noise: GroupedNoise | None, quantize: Any,
) -> list[Quantized | None]:  # fmt: skip
    """Quantize the rows of each group by themselves, None without rows, and report them to the active observer."""
    parts = list[Quantized | None]([None] * call.offsets.groups)
    for group, (start, end) in enumerate(call.offsets.bounds()):
        if end > start:
            part = x[start:end].t() if for_wgrad else x[start:end]
            arguments = call.factor(group, column), NO_NOISE if noise is None else noise.of(group)
            parts[group] = quantize(part, spec, None, *arguments)
            call.note(operand, part, parts[group])  # type: ignore[arg-type]
    return parts


def _quantized_matrix(call: GroupedCall, weight: Tensor, group: int, side: str, quantize: Any) -> Quantized:
    """Quantize a group's weight [N, K]; for dgrad its transpose [K, N], unless both share codes."""
    transposed = side == "dgrad" and not call.recipe.reuse.weight
    spec = call.recipe.gemms["dgrad" if transposed else "fprop"].b
    assert spec is not None
    if call.stored is not None:
        stored = unwrap(call.stored, group)
        if not transposed and stored.spec == spec:
            return stored
        value = stored.dequantize()
        quantized: Quantized = quantize(value.t() if transposed else value, spec, None, None)
        return quantized
    w = weight.detach()[group]
    q: Quantized = quantize(w.t() if transposed else w, spec, None, call.factor(group, amax.WEIGHT))
    return q


# ---- CPU: one group after the other ----


class HostGroups:
    """Quantization and GEMMs of one call whose group sizes the host knows."""

    def __init__(self, call: GroupedCall) -> None:
        self.call, self.bounds = call, call.offsets.bounds()
        self._quantize, self._matmul = call.operations.quantize, call.operations.matmul

    def quantize(
        self, column: int, operand: str, x: Tensor, spec: QuantSpec, for_wgrad: bool = False,
        other: QuantSpec | None = None,
    ) -> list[Quantized | None]:  # fmt: skip
        """Quantize rows x [T, k] of each group, or their transposes [k, rows] if `for_wgrad`, and record their amaxes.

        Args:
            column: column of the operand in the scaling history.
            operand: name of the operand; "" records nothing.
            other: spec of the transposes if they are needed later; `DeviceGroups` may write them at once.
        """
        call, last, x = self.call, self.bounds[-1][1] if self.bounds else 0, _in_rows(x)
        noise = call.noise(operand, spec)
        # At once it takes 0.1 to 0.7 of the time with kernels, but twice as long with torch operations once the
        # temporaries exceed the cache.
        if (
            by_rows(spec)
            and not for_wgrad
            and (self._quantize is not reference.quantize or x.numel() <= CACHED)
            and last
        ):
            q = self._quantize(x, spec)
            call.note(operand, x[:last], rows_of(q, 0, last))
            return self.split(q)
        parts = _quantize_each(call, column, operand, x, spec, for_wgrad, noise, self._quantize)
        if call.factors is not None:
            call.record(operand, column, [0.0 if q is None else float(q.amax) for q in parts])  # type: ignore[arg-type]
        return parts

    def split(self, q: Quantized) -> list[Quantized | None]:
        """Return the rows of each group of an operand of all rows."""
        return [rows_of(q, start, end) if end > start else None for start, end in self.bounds]

    def transpose(self, parts: Sequence[Quantized | None]) -> list[Quantized | None]:
        return [None if q is None else q.T for q in parts]

    def multiply(self, a: Any, weight: Tensor, side: str, bias: Tensor | None) -> Tensor:
        """Compute fprop or dgrad of rows, which are operands or unquantized; rows of no group give zeros."""
        call, unquantized = self.call, isinstance(a, Tensor)
        if unquantized and bias is None and call.stored is None and not self._dequantizes(side):
            product = self._grouped_mm(a, weight.transpose(1, 2) if side == "fprop" else weight, call.dtype)
            if product is not None:
                return product
        a, columns = _in_rows(a) if unquantized else a, call.weight_shape[2 if side == "dgrad" else 1]
        y = torch.empty((call.offsets.rows, columns), dtype=call.dtype, device=weight.device)
        y[self.bounds[-1][1] if self.bounds else 0 :].zero_()
        for group, (start, end) in enumerate(self.bounds):
            if start == end:
                continue
            b = None if bias is None else bias[group]
            if unquantized:
                self._gemm(side, y[start:end], a[start:end], self._matrix(weight, group, side, a.dtype), b)
            else:
                self._gemm(side, y[start:end], a[group], self.expert(weight, group, side), b)
        if call.factors is not None and side == "fprop" and side in call.stacks:
            pairs = zip(call.stacks[side].quantized, self.bounds, strict=True)
            # Stored codes have no amax.
            amaxes = [0.0 if q is None or q.amax is None or s == e else float(q.amax) for q, (s, e) in pairs]
            call.record("weight", amax.WEIGHT, amaxes)
        return y

    def wgrad(self, g: Any, x: Any, dtype: torch.dtype) -> Tensor:
        """Compute wgrad of operands [N, rows] and [K, rows]; or of unquantized g [T, N], and rows [T, K] that are
        dequantized if they are codes.
        """
        call, unquantized = self.call, isinstance(g, Tensor)
        if unquantized and isinstance(x, Tensor):
            one, other = (x, g) if call.transposed else (g, x)
            y = self._grouped_mm(one.t(), other, dtype)
            if y is not None:
                return y
        (groups, n, k), device = call.weight_shape, call.offsets.ends.device
        y = torch.empty((groups, k, n) if call.transposed else (groups, n, k), dtype=dtype, device=device)
        g, grad = _in_rows(g) if unquantized else g, y.transpose(1, 2) if call.transposed else y
        for group, (start, end) in enumerate(self.bounds):
            if start == end:
                grad[group].zero_()
            elif unquantized:
                part = x[group] if isinstance(x, list) else None
                if part is None:
                    part = x[start:end] if isinstance(x, Tensor) else rows_of(x, start, end)
                self._gemm("wgrad", grad[group], g[start:end].t(), plain(part, g.dtype).t())
            else:
                self._gemm("wgrad", grad[group], g[group], x[group])
        return y

    def bias_gradient(self, g: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum g [T, N] over each group's rows; returns [groups, N]."""
        total = g.new_zeros((len(self.bounds), g.shape[1]), dtype=dtype)
        for group, (start, end) in enumerate(self.bounds):
            if end > start:
                total[group] = ops.bias_gradient(g[start:end], dtype)
        return total

    def _gemm(self, name: str, out: Tensor, a: Any, b: Any, bias: Tensor | None = None) -> None:
        """Compute a [m, k] @ b [n, k].T + bias into `out`, of operands or unquantized with the bits of F.linear."""
        if isinstance(a, Tensor):
            if not (a.dtype is b.dtype is out.dtype) or (bias is not None and bias.dtype is not out.dtype):
                out.copy_(high_precision(a, b, out.dtype, bias))
            elif bias is None:
                torch.mm(a, b.t(), out=out)
            else:
                torch.addmm(bias, a, b.t(), out=out)
            return
        fast = self.call.recipe.gemms[name].fast_accum
        if self._matmul is gemm.matmul:
            self._matmul(a, b, out.dtype, bias, fast, out)
        else:
            out.copy_(self._matmul(a, b, out.dtype, bias, fast))

    def _grouped_mm(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Multiply by torch's grouped GEMM, which has the bits of separate ones; None if it does not support these.

        Args:
            a, b: rows [T, k] and matrices [groups, k, n], giving [T, n]; or [m, T] and rows [T, n], giving [groups, m,
                n].
        """
        if not (a.is_cpu and a.dtype is b.dtype is dtype and dtype in ops.DTYPES) or 0 in (*a.shape, *b.shape):
            return None
        if not (in_lines(a) and in_lines(b)):
            return None
        y: Tensor = F.grouped_mm(a, b, offs=self.call.offsets.ends)
        if b.dim() == 3:
            y[self.bounds[-1][1] :].zero_()
            return y
        for group, (start, end) in enumerate(self.bounds):
            if start == end:
                y[group].zero_()
        return y

    # ---- weights ----

    def _dequantizes(self, side: str) -> bool:
        """Return True if an unquantized dgrad reads the dequantized fprop operand of the weight."""
        return side == "dgrad" and self.call.recipe.dequantized_backward

    def _matrix(self, weight: Tensor, group: int, side: str, dtype: torch.dtype) -> Tensor:
        """Return a group's unquantized weight [N, K] for fprop, or its transpose for dgrad."""
        call = self.call
        if self._dequantizes(side):
            w = plain(self.expert(weight, group, "fprop"), dtype)
        else:
            w = weight[group] if call.stored is None else unwrap(call.stored, group).dequantize().to(dtype)
        return w.t() if side == "dgrad" else w

    def expert(self, weight: Tensor, group: int, side: str) -> Quantized:
        """Return a group's weight [N, K] for fprop, or its transpose [K, N] for dgrad."""
        call, shared = self.call, side == "dgrad" and self.call.recipe.reuse.weight
        parts: list[Any] = weights(call, weight, "fprop" if shared else side, lambda: [None] * len(self.bounds))
        if side == "fprop" and not any(parts) and self._reads_most(weight):
            # 10 to 26 % faster with 64 groups of 16 rows.
            parts[:] = outside_inference(call, weight, partial(self._all, weight))
        if parts[group] is None:
            parts[group] = outside_inference(call, weight, partial(self._quantized, weight, group, side))
        q = parts[group]
        assert q is not None
        return q.T if shared else q

    def _reads_most(self, weight: Tensor) -> bool:
        """Return True if one call can quantize the weights of all groups for fprop, and most groups have rows."""
        call, spec = self.call, self.call.recipe.fprop.b
        if spec is None or spec.rounding != "nearest" or spec.two_level or self._quantize is reference.quantize:
            return False
        if call.stored is not None or call.factors is not None or observer.active.observers:
            return False
        if spec.block[0] is None or weight.shape[1] % spec.block[0] or not weight.is_contiguous():
            return False
        return 4 * sum(end > start for start, end in self.bounds) >= 3 * len(self.bounds)

    def _all(self, weight: Tensor) -> list[Quantized]:
        """Quantize the weights of all groups for fprop."""
        n, q = weight.shape[1], self._quantize(weight.detach().flatten(0, 1), self.call.recipe.fprop.b)
        return [rows_of(q, start, start + n) for start in range(0, n * weight.shape[0], n)]

    def _quantized(self, weight: Tensor, group: int, side: str) -> Quantized:
        call, shared = self.call, side == "dgrad" and self.call.recipe.reuse.weight
        q = _quantized_matrix(call, weight, group, side, self._quantize)
        if call.stored is None and not shared:
            w = weight.detach()[group]
            call.note("weight" if side == "fprop" else "weight.T", w if side == "fprop" else w.t(), q)
        return q


# ---- GPU: all groups at once, without copying their sizes to the host ----


class DeviceGroups:
    """Quantization and GEMMs of one call whose group sizes only the device knows.

    Operands that native GEMMs do not support are decoded and multiplied by torch's bf16 grouped GEMM or a Triton
    kernel: see `operands.GROUPED_MATMUL`.
    """

    def __init__(self, call: GroupedCall) -> None:
        self.call = call

    def quantize(
        self, column: int, operand: str, x: Tensor, spec: QuantSpec, for_wgrad: bool = False,
        other: QuantSpec | None = None,
    ) -> GroupedOperand:  # fmt: skip
        """Quantize the rows of all groups, with their `transpose` if one launch writes both; see `HostGroups`."""
        call, noise = self.call, self.call.noise(operand, spec)
        if operand and observer.active.observers:
            # Each group by itself has the same codes, and counting may wait for the sizes of the groups.
            _quantize_each(call, column, operand, _in_rows(x), spec, for_wgrad, noise, ops.QUANTIZE)
            # Transposes with codes of their own are reported when they are quantized alone.
            other = other if other == spec and spec.transposable else None
        factors = None if call.factors is None else call.factors[:, column]
        specs = (None, spec) if for_wgrad else (spec, other)
        has_kernel = GROUPED_QUANTIZE.pick(x, *specs) is not grouped.quantize_both
        if not has_kernel:
            if by_rows(spec) and not for_wgrad and x.numel():
                return self.split(ops.QUANTIZE(x if x.stride(-1) == 1 else x.contiguous(), spec))
            specs = (None, spec) if for_wgrad else (spec, None)
        second, transposed = noise, specs[1]
        if not for_wgrad and transposed is not None and not (transposed == spec and spec.transposable):
            second = call.noise(f"{operand}.T" * bool(operand), transposed)
        newest = call.newest(operand, column, x)
        rows, columns = GROUPED_QUANTIZE(x, *specs, call.offsets, factors, noise, second, newest)
        q = columns if rows is None else rows
        assert q is not None
        call.record(operand, column, q.amax)
        return q

    def split(self, q: Quantized) -> GroupedOperand:
        return grouped.from_quantized(q, self.call.offsets)

    def transpose(self, a: Any) -> GroupedOperand:
        return grouped.transposed(a, self.call.offsets)

    def multiply(self, a: Any, weight: Tensor, side: str, bias: Tensor | None) -> Tensor:
        """Compute fprop or dgrad of rows, which are an operand or unquantized."""
        call, offsets, w = self.call, self.call.offsets, weight
        if isinstance(a, Tensor):
            if side == "dgrad" and call.recipe.dequantized_backward:
                q = self._weights(weight, "fprop")
                w = ops.DEQUANTIZE(q, a.dtype).view(weight.shape[0], -1, q.shape[1])
            elif call.stored is not None:
                w = torch.stack([ops.DEQUANTIZE(unwrap(call.stored, group), a.dtype) for group in range(w.shape[0])])
            return HIGH_MATMUL(a, w.transpose(1, 2) if side == "dgrad" else w, offsets, call.dtype, bias)
        b, columns = self._weights(weight, side), call.weight_shape[2 if side == "dgrad" else 1]
        y = GROUPED_MATMUL(a, b, offsets, columns, call.dtype, bias, call.recipe.gemms[side].fast_accum)
        if side == "fprop" and call.factors is not None and b.amax is not None:
            newest = call.newest("weight", amax.WEIGHT, b.data)
            if newest is None:
                call.record("weight", amax.WEIGHT, b.amax.where(offsets.has_rows(), 0.0))
            else:
                from quaver.torch.backends.gpu.grouped_quantize import record_amaxes

                record_amaxes(newest, b.amax, offsets.ends)
        return y

    def wgrad(self, g: Any, x: Any, dtype: torch.dtype) -> Tensor:
        """Compute wgrad of operands [N, rows] and [K, rows]; or of unquantized g [T, N], and rows [T, K] that are
        dequantized if they are codes.
        """
        unquantized, offsets = isinstance(g, Tensor), self.call.offsets
        if unquantized:
            x = plain(x, g.dtype) if not isinstance(x, GroupedOperand) else grouped.dequantized(x, offsets).to(g.dtype)
        # Swapped operands give the gradient in the transposed layout of the parameter.
        one, other = (x, g) if self.call.transposed else (g, x)
        if unquantized:
            return HIGH_WGRAD(one, other, offsets, dtype)
        return GROUPED_WGRAD(one, other, dtype, self.call.recipe.wgrad.fast_accum)

    def bias_gradient(self, g: Tensor, dtype: torch.dtype) -> Tensor:
        return grouped.sum_rows(g, self.call.offsets, dtype)

    # ---- weights ----

    def _weights(self, weight: Tensor, side: str) -> Any:
        """Return the matrices [N, K] of all groups for fprop, or their transposes for dgrad, in one operand."""
        return weights(self.call, weight, side, partial(self._quantized, weight, side))

    def _quantized(self, weight: Tensor, side: str) -> Quantized | None:
        call, groups, fprop = self.call, weight.shape[0], self.call.stacks.get("fprop")
        shared, spec = side == "dgrad" and call.recipe.reuse.weight, call.recipe.gemms[side].b
        assert spec is not None
        if fprop is not None and fprop.quantized is not None:
            if fprop.quantized.cached_transpose is not None:
                return fprop.quantized.cached_transpose
            if shared:
                return _transpose_stack(fprop.quantized, groups, spec)
        if call.stored is None and not observer.active.observers:
            q = self._by_kernel(weight.detach(), side)
            if q is not None:
                return q
        w, name = weight, ""
        if call.stored is None and not shared:
            w, name = (weight.detach(), "weight") if side == "fprop" else (weight.detach().transpose(1, 2), "weight.T")
            if by_rows(spec) and w.is_contiguous() and w.numel():
                q = ops.QUANTIZE(w.flatten(0, 1), spec)
                call.note(name, w.flatten(0, 1), q)
                return q
        operands = [_quantized_matrix(call, weight, group, side, ops.QUANTIZE) for group in range(groups)]
        if name and observer.active.observers:
            for matrix, operand in zip(w, operands, strict=True):
                call.note(name, matrix, operand)
        matrices = stacked([q.T for q in operands] if shared else operands)
        if matrices is not None and call.stored is None and call.factors is not None:
            each = [torch.as_tensor(q.amax, dtype=torch.float32, device=weight.device) for q in operands]
            matrices.amax = torch.cat([top.reshape(1) for top in each])
        return matrices

    def _by_kernel(self, weight: Tensor, side: str) -> Quantized | None:
        """Quantize weights in one launch, with their transposes while training; None if no kernel supports them."""
        call, recipe = self.call, self.call.recipe
        spec, other = recipe.fprop.b, recipe.dgrad.b
        one = (spec, None) if side == "fprop" else (None, other)
        both = (spec, other) if side == "fprop" and call.training else one
        for specs in (both, one):
            # A layer in the layout [groups, K, N] stores the transposes.
            swapped = not weight.is_contiguous()
            w, wanted = (weight.transpose(1, 2), specs[::-1]) if swapped else (weight, specs)
            factors = None if call.factors is None else call.factors[:, amax.WEIGHT]
            pair = None if specs == (None, None) else GROUPED_WEIGHTS(w, *wanted, factors)
            if pair is not None:
                fprop, dgrad = pair[::-1] if swapped else pair
                if fprop is not None:
                    fprop.cached_transpose = dgrad
                return fprop if side == "fprop" else dgrad
        return None


def stacked(operands: Sequence[Quantized]) -> Quantized | None:
    """Concatenate the operands of all groups by rows, each row with its own scales."""
    if not operands:
        return None
    spec, (rows, k) = operands[0].spec, operands[0].shape
    upright = [q.upright() for q in operands]
    row_spec, factors = replace(spec, block=(1, spec.block[1]), rounding="nearest"), None
    if spec.two_level:
        factors = torch.cat([q.tensor_factor.expand(rows, 1) for q in upright])  # type: ignore[union-attr]
    data, scale = torch.cat([q.data for q in upright]), torch.cat([_row_scales(q, rows) for q in upright])
    return Quantized(data, scale, row_spec, (len(upright) * rows, k), tensor_factor=factors)


def _row_scales(q: Quantized, rows: int) -> Tensor:
    """Return the stored scales of each row, [rows, blocks of k]."""
    scale, height = q.scale, q.spec.block[0]
    if not isinstance(scale, Tensor):
        return torch.full((rows, 1), scale, dtype=torch.float32, device=q.device)
    if height == 1:
        return scale
    return scale.expand(rows, scale.shape[1]) if height is None else scale.repeat_interleave(height, 0)[:rows]


def _transpose_stack(matrices: Quantized, groups: int, spec: QuantSpec) -> Quantized:
    """Transpose the matrices of all groups; their scale blocks must be square."""
    rows, k, side = matrices.shape[0] // max(groups, 1), matrices.shape[1], spec.block[0]
    codes = matrices.stored_codes().view(groups, rows, k).transpose(1, 2).reshape(groups * k, rows)
    scale = matrices.plain_scale().view(groups, rows, -1)
    blocks = (scale[:, :1] if side is None else scale[:, ::side]).transpose(1, 2)
    row_scales = blocks.expand(groups, k, 1) if side is None else blocks.repeat_interleave(side, 1)[:, :k]
    factor = matrices.tensor_factor
    if factor is not None:
        factor = factor.view(groups, rows)[:, :1].expand(groups, k).reshape(-1, 1)
    data = pack(codes) if spec.format.packed else codes.view(matrices.data.dtype)
    scale, block = row_scales.reshape(groups * k, -1).contiguous(), replace(matrices.spec, block=(1, side))
    return Quantized(data, scale, block, (groups * k, rows), tensor_factor=factor)
