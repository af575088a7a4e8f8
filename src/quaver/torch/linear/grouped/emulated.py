"""Grouped GEMMs on a GPU without native ones: bf16 grouped GEMMs multiply the values that the codes would have.

The counterpart of `quaver.torch.linear.plan_emulated`. One kernel rounds the rows of all groups to the values of their
codes, along rows and along columns. Backward saves codes and scales of the rows, and decodes them in one launch. A
cached weight holds values.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu.device import why_no_kernels
from quaver.torch.linear.grouped.call import GroupedCall, weights
from quaver.torch.linear.grouped.operands import HIGH_MATMUL, HIGH_WGRAD
from quaver.torch.numerics.grouped import GroupOffsets, sum_rows
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import NO_NOISE
from quaver.torch.operations import ops
from quaver.torch.state import observer
from quaver.torch.state.history import amax


class EmulatedRows(NamedTuple):
    """Rows of all groups as bf16 values, and their transposes: values [slots, k], or codes and scales to be decoded."""

    values: Tensor
    transpose: Any = None


def runs_emulated(call: GroupedCall) -> bool:
    """Return `is_emulated` for a call; False for weights stored as codes."""
    device = call.offsets.ends.device
    return call.stored is None and is_emulated(call.recipe, device, call.weight_shape, call.dtype, call.weight_dtype)


class SavedValues(NamedTuple):
    """Codes and scales of transposes, which `gpu.grouped_values.saved_values` decodes."""

    codes: Tensor
    scales: Tensor


#: Results of `is_emulated`, which `ops.only` clears.
_answers: dict[Any, bool] = {}
ops.resolved_caches.append(_answers)


def is_emulated(recipe: Recipe, device: torch.device, weight_shape: Sequence[Any], *dtypes: torch.dtype) -> bool:
    """Return True if the GEMMs of a layer with weights [groups, N, K] run on values.

    Depends on recipe, device, shapes and dtypes alone, so that forward and backward agree, eager or compiled.

    Args:
        dtypes: of rows and weights.
    """
    key = recipe.text, device, *map(int, weight_shape), *dtypes
    answer = _answers.get(key)
    if answer is None:
        answer = _answers[key] = _is_emulated(recipe, device, dtypes, *map(int, weight_shape))
    return answer


def _is_emulated(
    recipe: Recipe, device: torch.device, dtypes: Sequence[torch.dtype], groups: int, n: int, k: int
) -> bool:
    if not recipe.quantizes or recipe.delayed is not None or recipe.dequantized_backward or why_no_kernels(device):
        return False
    from quaver.torch.backends.gpu import grouped_gemm, grouped_mm, grouped_values
    from quaver.torch.backends.gpu.quantize import READ

    if any(dtype not in READ for dtype in dtypes):
        return False
    for gemm in recipe.gemms.values():
        if gemm.a is None or gemm.b is None:
            return False
        if grouped_mm.has(gemm.a, gemm.b, device) or grouped_gemm.scale_kind(gemm.a, gemm.b, device):
            return False
    tokens = (recipe.fprop.a, recipe.wgrad.b), (recipe.dgrad.a, recipe.wgrad.a)
    matrix = recipe.fprop.b, recipe.dgrad.b
    if not all(grouped_values.serves(*pair) for pair in (*tokens, matrix, matrix[::-1])):
        return False
    assert recipe.wgrad.a is not None and recipe.wgrad.b is not None and recipe.dgrad.b is not None
    lines = all(spec is not None and spec.block[0] == 1 for pair in tokens for spec in pair)
    nearest = all(spec is not None and spec.rounding == "nearest" for spec in (*tokens[0], *matrix))
    same_slots = grouped_values.slot_multiple(recipe.wgrad.a) == grouped_values.slot_multiple(recipe.wgrad.b)
    multiple = grouped_values.slot_multiple(recipe.dgrad.b)
    return (
        lines
        and nearest
        and same_slots
        and grouped_values.fits(groups * n, n, k)
        and not (n % multiple or k % multiple)
    )


class EmulatedGroups:
    """Rounding and bf16 GEMMs of one call whose group sizes only the device knows."""

    def __init__(self, call: GroupedCall) -> None:
        self.call = call

    def quantize(
        self, column: int, operand: str, x: Tensor, spec: QuantSpec, for_wgrad: bool = False,
        other: QuantSpec | None = None,
    ) -> Any:  # fmt: skip
        """Return `EmulatedRows` of rows x [T, k], or only their transposes if `for_wgrad`; see `HostGroups`.

        Both are rounded by the recipe's specs; `other` only says that transposes are needed.
        """
        from quaver.torch.backends.gpu import grouped_values

        call, recipe = self.call, self.call.recipe
        is_input = column == amax.INPUT
        spec, transposed = (recipe.fprop.a, recipe.wgrad.b) if is_input else (recipe.dgrad.a, recipe.wgrad.a)  # type: ignore[assignment]
        assert transposed is not None
        name = operand.removesuffix(".T")
        names = ("" if for_wgrad else name), (f"{name}.T" if name and (for_wgrad or other is not None) else "")
        draws = [call.noise(one, each) for one, each in zip(names, (spec, transposed), strict=True)]
        for one, each, draw in zip(names, (spec, transposed), draws, strict=True):
            if one and observer.active.observers:
                self._report(one, x, each, draw)
        row_values, slot_values, saved = grouped_values.values(
            x.detach(),
            spec,
            transposed,
            call.offsets,
            want_rows=not for_wgrad,
            want_transposes=for_wgrad or other is not None,
            saves_codes=is_input,
            noise=draws[0],
            other_noise=draws[1],
        )
        columns = slot_values if saved is None else SavedValues(*saved)
        return columns if for_wgrad else EmulatedRows(row_values, columns)  # type: ignore[arg-type]

    def _report(self, name: str, x: Tensor, spec: QuantSpec, draw: Any) -> None:
        """Report the operand of each group to the observers, which synchronizes; a group alone has the same codes."""
        for group, (start, end) in enumerate(self.call.offsets.bounds()):
            if end > start:
                part = x[start:end].t() if name.endswith(".T") else x[start:end]
                noise = NO_NOISE if draw is None else draw.of(group)
                self.call.note(name, part, ops.QUANTIZE(part, spec, None, None, noise))

    def split(self, q: Quantized) -> EmulatedRows:
        """Return the values of rows that the caller has quantized."""
        return EmulatedRows(ops.DEQUANTIZE(q, torch.bfloat16))

    def multiply(self, a: EmulatedRows, weight: Tensor, side: str, bias: Tensor | None) -> Tensor:
        """Compute fprop or dgrad."""
        call = self.call
        q = weights(call, weight, side, partial(self._weights, weight, side), "values of ")
        groups, n, k = call.weight_shape
        matrices = q.data.view(groups, n, k) if weight.is_contiguous() else q.data.view(groups, k, n).transpose(1, 2)
        return HIGH_MATMUL(
            a.values, matrices if side == "fprop" else matrices.transpose(1, 2), call.offsets, call.dtype, bias
        )

    def wgrad(self, g: Tensor, x: SavedValues, dtype: torch.dtype) -> Tensor:
        """Compute wgrad of values g [slots, N] and saved values of rows [slots, K]."""
        from quaver.torch.backends.gpu import grouped_values

        spec = self.call.recipe.wgrad.b
        assert spec is not None
        values = grouped_values.saved_values(x.codes, x.scales, spec)
        slots = self.call.offsets.slots(grouped_values.slot_multiple(spec))
        one, other = (values, g) if self.call.transposed else (g, values)
        return HIGH_WGRAD(one, other, GroupOffsets(slots.ends, slots.count), dtype)

    def transpose(self, a: EmulatedRows) -> Any:
        return a.transpose

    def bias_gradient(self, g: Tensor, dtype: torch.dtype) -> Tensor:
        return sum_rows(g, self.call.offsets, dtype)

    def _weights(self, weight: Tensor, side: str) -> Quantized:
        """Return the values of the weights in storage order; in training, dgrad's are the transpose of fprop's."""
        call, recipe = self.call, self.call.recipe
        fprop = call.stacks.get("fprop")
        if side == "dgrad" and fprop is not None and fprop.quantized is not None:
            cached: Quantized | None = fprop.quantized.cached_transpose
            if cached is not None:
                return cached
        wanted = side == "fprop", side == "dgrad" or call.training
        if observer.active.observers:
            self._report_weights(weight.detach(), wanted)
        specs, operands = (recipe.fprop.b, recipe.dgrad.b), list[Any]()
        for spec, values in zip(specs, self._values_of_weights(weight.detach(), wanted), strict=True):
            # Values stored in the data field: the cache tracks the tensors of a `Quantized`.
            shape = None if values is None else tuple(values.shape)
            operands.append(None if values is None else Quantized(values, 1.0, spec, shape))  # type: ignore[arg-type]
        q, transposed = operands
        if side == "dgrad":
            return transposed
        q.cached_transpose = transposed
        return q

    def _report_weights(self, weight: Tensor, wanted: tuple[bool, bool]) -> None:
        """Report the operands of fprop and dgrad that are quantized, of each group."""
        recipe = self.call.recipe
        for matrix in weight:
            if wanted[0]:
                self.call.note("weight", matrix, ops.QUANTIZE(matrix, recipe.fprop.b))
            if wanted[1] and not recipe.reuse.weight:
                self.call.note("weight.T", matrix.t(), ops.QUANTIZE(matrix.t(), recipe.dgrad.b))

    def _values_of_weights(self, weight: Tensor, wanted: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
        """Return the values for fprop and for dgrad, [groups · rows, columns] of the stored matrices, if wanted."""
        from quaver.torch.backends.gpu import grouped_quantize, grouped_values

        spec, other = self.call.recipe.fprop.b, self.call.recipe.dgrad.b
        assert spec is not None and other is not None
        is_transposed = not weight.is_contiguous()
        if is_transposed:
            weight, spec, other, wanted = weight.transpose(1, 2), other, spec, wanted[::-1]
        groups, rows, columns = weight.shape
        offsets = GroupOffsets(grouped_quantize.equal_ends(groups, rows, weight.device), groups * rows)
        x = weight.reshape(groups * rows, columns)
        row_values, slot_values, _ = grouped_values.values(
            x, spec, other, offsets, want_rows=wanted[0], want_transposes=wanted[1]
        )
        if spec.block[0] != 1:
            # Squares have the same values in both directions.
            slot_values = row_values
        elif slot_values is not None:
            # Without the slots that only ragged groups would need.
            slot_values = slot_values[: groups * rows]
        return (slot_values, row_values) if is_transposed else (row_values, slot_values)
