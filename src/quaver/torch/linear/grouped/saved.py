"""Operand of wgrad of all groups as four tensors, which autograd saves and operators return.

    data      codes of all groups
    scale     their stored scales
    factor    factors of two-level scales, by group
    flags     for each group: 1 if its operand is stored transposed (CPU only)

Under torch.compile and on a GPU, sizes depend only on the numbers of rows and groups. On a CPU codes and scales of the
groups are concatenated as bytes; torch.compile gets buffers large enough for any distribution of rows. On a GPU they
are the tensors of a `GroupedOperand`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu.device import why_no_kernels
from quaver.torch.linear.grouped.call import GroupedCall
from quaver.torch.linear.grouped.emulated import SavedValues, is_emulated
from quaver.torch.numerics.grouped import GroupedOperand, GroupOffsets, multiple, row_scales, slots
from quaver.torch.numerics.quantized import Quantized, storage
from quaver.torch.operations import ops


def dtype_of_scales(spec: QuantSpec) -> torch.dtype:
    """Return the dtype in which stored scales are saved for backward on a CPU.

    Power-of-two scales are saved as float8_e8m0fnu, which is exact for all of them (2**-127 to 2**126, and NaN).
    Otherwise a float32 per 16 elements would be a fifth of the saved bytes.
    """
    if spec.scale == "power_of_two" and not spec.per_tensor:
        return torch.float8_e8m0fnu
    return torch.uint8 if spec.scale == "e8m0" or spec.two_level else torch.float32


def form_of(recipe: Recipe, device: torch.device, weight_shape: Sequence[Any], *dtypes: torch.dtype) -> str:
    """Return the form of a layer's saved operand on a GPU, eager or compiled.

    It is "values" for `emulated.SavedValues`, with the layouts of `gpu.grouped_values`; "swizzled" for
    `gpu.grouped_block_scaled`; or "".

    Args:
        weight_shape: [groups, N, K].
        dtypes: of rows and weights, without the latter if the weights are stored as codes.
    """
    if len(dtypes) == 2 and is_emulated(recipe, device, weight_shape, *dtypes):
        return "values"
    if why_no_kernels(device) or recipe.wgrad.b is None:
        return ""
    from quaver.torch.backends.gpu import grouped_block_scaled
    from quaver.torch.backends.gpu.quantize import READ

    served = dtypes[0] in READ and grouped_block_scaled.serves(None, recipe.wgrad.b, device, int(weight_shape[2]))
    return "swizzled" if served and recipe.wgrad.b.block[0] == 1 else ""


class SavedLayout(NamedTuple):
    """Layout of the four tensors for rows [T, K]."""

    spec: QuantSpec
    #: True if the operands are rows exactly as fprop read them, which backward decodes; else [K, rows].
    fprop_rows: bool
    #: True if a CPU stores them by rows: `fprop_rows` ones, and transposed views of fprop's.
    stored_by_rows: bool
    rows: Any
    groups: Any
    k: Any
    #: Layout on a GPU: see `form_of`.
    form: str = ""

    @staticmethod
    def of(call: GroupedCall) -> "SavedLayout":
        form, ends = "", call.offsets.ends
        if not ops.on_host(ends):
            dtypes = (call.dtype, call.weight_dtype) if call.stored is None else (call.dtype,)
            form = form_of(call.recipe, ends.device, call.weight_shape, *dtypes)
        return SavedLayout.by(call.recipe, call.offsets.rows, call.offsets.groups, call.weight_shape[2], form)

    @staticmethod
    def by(recipe: Recipe, rows: Any, groups: Any, k: Any, form: str) -> "SavedLayout":
        spec, fprop_rows = recipe.saved_input, recipe.wgrad.b is None
        assert spec is not None
        return SavedLayout(spec, fprop_rows, recipe.reuse.input or fprop_rows, rows, groups, k, form)

    def sizes(self) -> tuple[Any, Any]:
        """Return the numbers of bytes of codes and scales that suffice for any sizes of the groups, on a CPU."""
        spec, rows, groups, k = self.spec, self.rows, self.groups, self.k
        tokens = rows + (15 * groups if spec.hadamard else 0)
        # Scale blocks are counted as (tokens, K) for rows, and as (K, tokens) for transposes.
        along, across = spec.block[0 if self.stored_by_rows else 1], spec.block[1 if self.stored_by_rows else 0]
        blocks = (groups if along is None else tokens // along + groups) * (1 if across is None else -(-k // across))
        data = tokens * k
        if spec.format.packed:
            data = tokens * ((k + 1) // 2) if self.stored_by_rows else (tokens + groups) // 2 * k
        return data, blocks * dtype_of_scales(spec).itemsize

    def shapes(self, on_host: bool) -> tuple[tuple[tuple[Any, ...], ...], tuple[torch.dtype, ...]]:
        """Return shapes and dtypes of the four tensors under torch.compile."""
        spec, groups, k = self.spec, self.groups, self.k
        if on_host:
            data, scales = self.sizes()
            shapes = ((data,), (scales,), (groups if spec.two_level else 0,), (groups,))
            return shapes, (torch.uint8, torch.uint8, torch.float32, torch.uint8)
        if self.form == "values":
            from quaver.torch.backends.gpu.grouped_values import saved_shapes

            shapes, dtypes = saved_shapes(spec, self.rows, groups, k)
            return (*shapes, (0,), (0,)), (*dtypes, torch.float32, torch.uint8)
        count = slots(self.rows, groups, multiple(spec))
        lines, deep = (self.rows, k) if self.fprop_rows else (k, count)
        height, width = spec.block if self.fprop_rows else spec.block[::-1]
        factor_shape = (groups, 1) if spec.two_level else (0,)
        if self.form == "swizzled":
            from quaver.torch.backends.gpu.grouped_block_scaled import transposed_scale_shape

            codes = (k, (count + 1) // 2 if spec.format.packed else count)
            swizzled = codes, transposed_scale_shape(spec, self.rows, groups, k), factor_shape, (0,)
            return swizzled, (storage(spec.format), torch.uint8, torch.float32, torch.uint8)
        segments = groups if height is None else self.rows if self.fprop_rows and height == 1 else count // height
        narrow = torch.uint8 if spec.scale == "e8m0" or spec.two_level else torch.float32
        scale_shape = segments, 1 if width is None else -(-k // width)
        if spec.per_tensor:
            scale_shape = (self.rows, 1) if self.fprop_rows else (groups, k)
        return (
            (lines, (deep + 1) // 2 if spec.format.packed else deep),
            scale_shape,
            factor_shape,
            (0,),
        ), (storage(spec.format), narrow, torch.float32, torch.uint8)

    def flat(
        self, saved: Sequence[Quantized | None] | GroupedOperand | SavedValues, padded: bool = False
    ) -> tuple[Tensor, ...]:
        """Return the four tensors of an operand; `padded` to the sizes of `shapes`."""
        if isinstance(saved, SavedValues):
            return *saved, *(saved.codes.new_empty(0, dtype=dtype) for dtype in (torch.float32, torch.uint8))
        if isinstance(saved, GroupedOperand):
            none = saved.data.new_empty(0, dtype=torch.float32)
            factor, scale = none if saved.factor is None else saved.factor.contiguous(), saved.scale
            if self.spec.per_tensor:
                # One for each row of the operand, as kernels write them.
                offsets = GroupOffsets(saved.slots.ends, self.rows)
                scale = row_scales(saved, offsets)[0] if self.fprop_rows else scale.expand(self.groups, self.k)
            return saved.data, scale.contiguous(), factor, none.to(torch.uint8)
        full, spec = [q for q in saved if q is not None], self.spec
        scales = [
            q.scale if isinstance(q.scale, Tensor) else q.data.new_full((1,), q.scale, dtype=torch.float32)
            for q in full
        ]
        codes = [q.data.contiguous().view(torch.uint8).view(-1) for q in full]
        sizes = self.sizes() if padded else (None, None)
        data = _concatenated(codes, torch.uint8, sizes[0])
        scale = _concatenated([scale.reshape(-1) for scale in scales], dtype_of_scales(spec), sizes[1])
        factors = torch.ones(len(saved) if spec.two_level else 0, dtype=torch.float32, device="cpu")
        for group, q in enumerate(saved):
            if q is not None and q.tensor_factor is not None:
                factors[group] = q.tensor_factor.reshape(())
        flags = torch.tensor([q is not None and q.transposed for q in saved], dtype=torch.uint8, device="cpu")
        return data, scale, factors, flags

    def operand(
        self, tensors: Sequence[Tensor], offsets: GroupOffsets
    ) -> list[Quantized | None] | GroupedOperand | SavedValues:
        """Rebuild the operand from its four tensors."""
        data, scales, factors, flags = tensors
        if self.form == "values":
            return SavedValues(data, scales)
        spec, kind = self.spec, dtype_of_scales(self.spec)
        if not ops.on_host(offsets.ends):
            places = offsets.slots(1 if self.fprop_rows else multiple(spec))
            deep, factor = self.k if self.fprop_rows else places.count, factors if spec.two_level else None
            swizzled = self.form == "swizzled"
            spec = replace(spec, block=(1, None)) if spec.per_tensor else spec
            return GroupedOperand(data, scales, factor, spec, not self.fprop_rows, places, deep, swizzled=swizzled)
        scales = scales.view(kind)
        scales = scales.to(torch.float32) if kind is torch.float8_e8m0fnu else scales
        at, after, parts = 0, 0, list[Quantized | None]()
        for (start, end), transposed in zip(offsets.bounds(), flags.tolist(), strict=True):
            if start == end:
                parts.append(None)
                continue
            shape = (end - start, self.k) if self.fprop_rows else (self.k, spec.padded(end - start))
            blocks = spec.blocks(*shape)
            lines, columns = shape[::-1] if transposed else shape
            columns = (columns + 1) // 2 if spec.format.packed else columns
            size, count = lines * columns, blocks[0] * blocks[1]
            codes = data[at : at + size].view(storage(spec.format)).view(lines, columns)
            scale: Any = scales[after : after + count].view(blocks[::-1] if transposed else blocks)
            scale = scale.item() if spec.per_tensor and kind is torch.float32 else scale
            factor = factors[len(parts)].view(1, 1) if spec.two_level else None
            parts.append(Quantized(codes, scale, spec, shape, bool(transposed), factor))
            at, after = at + size, after + count
        return parts


def _concatenated(tensors: list[Tensor], dtype: torch.dtype, size: Any) -> Tensor:
    """Return the bytes of flat tensors in one dtype, one after the other, in a buffer of `size` bytes if given."""
    joined = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype, device="cpu")
    joined = joined.to(dtype).view(torch.uint8)
    if size is None:
        return joined
    buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
    buffer[: len(joined)] = joined
    return buffer
