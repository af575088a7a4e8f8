"""Grouped GEMMs of codes by torch's own functions, without copying the group sizes to the host.

    rows     y[t]    = a[t] @ b[e].T                    of tokens [T, k] and a matrix [n, k] of each group
    sums     y[e]    = a[:, slots of e] @ b[:, slots of e].T    of transposes [n, slots] and [k, slots]

`torch.nn.functional.scaled_grouped_mm` multiplies codes with CUTLASS; supported operands are probed once.

Source: the checks of torch's aten/src/ATen/native/cuda/GroupedBlas.cpp and GroupedMMUtils.h (2.13): compute capability
9 or 10, bf16 results, int32 offsets, features multiples of 16, no bias. E4M3 by E4M3 with one scale per row. MXFP8 and
NVFP4 in builds with FBGEMM_GENAI, with scales swizzled per group, each group's rows padded to 128 and its sums to four
blocks. In bf16 fewer than 1024 groups. Not measured on a GPU yet.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType, pad

from quaver.recipes.formats import E2M1, E4M3
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu import capture, scaled_mm
from quaver.torch.backends.gpu.device import architecture, why_no_kernels
from quaver.torch.backends.gpu.scaled_mm import matrix, role, wide
from quaver.torch.numerics import grouped, reference
from quaver.torch.numerics.grouped import GroupedOperand, GroupOffsets, GroupSlots, gather_groups, in_lines
from quaver.torch.numerics.quantized import BLOCKS, ROWS, Quantized, spread, swizzle

# ---- grouped GEMMs of decoded operands ----
# Codes become bf16 values exactly, or float32 if bf16 cannot represent them, with block scales multiplied in; scales of
# whole rows and groups are applied to the product. torch's bf16 grouped GEMM or a Triton kernel multiplies them;
# neither copies group sizes to the host. Without both, groups are multiplied one by one, which synchronizes.

#: Major compute capabilities on which torch has a bf16 grouped GEMM without synchronization, and its maximum number of
#: groups.
MAJORS, MOST_GROUPS = (9, 10), 1023


def finished_rows(y: Tensor, bias: Tensor | None, offsets: GroupOffsets) -> Tensor:
    """Add the bias, and zero the rows of tokens that belong to no group, which the GEMM leaves uninitialized."""
    if not why_no_kernels(y.device) and y.numel() and offsets.groups:
        from quaver.torch.backends.gpu.grouped_quantize import finish_rows

        return finish_rows(y, bias, offsets.ends)
    group = offsets.slots(1).group
    if bias is not None:
        y = y.add_(gather_groups(bias, group).to(y.dtype))
    return y.masked_fill_((group == offsets.groups).unsqueeze(1), 0.0)


def finished_sums(y: Tensor, slots: GroupSlots) -> Tensor:
    """Zero the sums over groups without rows, which the GEMM leaves uninitialized."""
    if not why_no_kernels(y.device) and y.numel():
        from quaver.torch.backends.gpu.grouped_quantize import finish_groups

        return finish_groups(y, slots.ends)
    return y.masked_fill_((slots.sizes == 0).view(-1, 1, 1), 0.0)


def values_of_rows(a: GroupedOperand, offsets: GroupOffsets) -> tuple[Tensor, Tensor | None]:
    """Decode tokens to bf16 values [T, k] (float32 if needed), and return the row factors float32 [T, 1] or None."""
    a = grouped.unswizzled(a, offsets)
    scale, factor = grouped.row_scales(a, offsets)
    spec = replace(a.spec, block=(1, a.spec.block[1]), rounding="nearest")
    if spec.block[1] is None and spec.scale == "e8m0":
        # One E8M0 scale per row, applied to the product like any other row scale.
        return _plain(a), Quantized(a.data, scale, spec, a.shape).scales()
    return scaled_mm.decode(Quantized(a.data, scale, spec, a.shape, tensor_factor=factor))


def _plain(a: GroupedOperand) -> Tensor:
    return a.data.to(torch.bfloat16) if a.data.is_floating_point() else grouped.values(a).to(torch.bfloat16)


def values_of_sums(a: GroupedOperand) -> tuple[Tensor, Tensor | None]:
    """Decode transposes to values [rows, slots], and return the row factors of each group's product or None.

    Factors are float32 [groups, rows or 1].
    """
    a = grouped.unswizzled(a, GroupOffsets(a.slots.ends, a.slots.count))
    spec, outer = a.spec, None
    if spec.two_level:
        assert a.factor is not None
        outer = 1.0 / a.factor
    elif spec.block[1] is None:
        scale = Quantized(a.data, a.scale, spec, a.shape).scales()
        outer = scale if spec.block[0] in (None, 1) else spread(scale, (1, spec.block[0]), (scale.shape[0], a.shape[0]))
    if spec.block[1] is None or spec.scale == "unit":
        return _plain(a), outer
    half = outer is not None or spec.power_of_two
    inner = _without_factor(a) if spec.two_level else grouped.slot_scales(a)
    inner = inner if spec.block[0] == 1 else spread(inner, (1, spec.block[0]), (inner.shape[0], a.shape[0]))
    dtype = torch.bfloat16 if half else torch.float32
    most = torch.finfo(dtype).max
    return (grouped.values(a) * inner.t()).clamp_(-most, most).to(dtype), outer


def _without_factor(a: GroupedOperand) -> Tensor:
    """Return the decode scales of slots, [slots, blocks of rows], without the factors of groups."""
    assert a.factor is not None
    one = torch.ones_like(a.factor)
    return grouped.slot_scales(GroupedOperand(a.data, a.scale, one, a.spec, True, a.slots, a.k))


def to_common_dtype(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both sides to the wider of their dtypes."""
    dtype = torch.bfloat16 if a.dtype is b.dtype is torch.bfloat16 else torch.float32
    return a.to(dtype).contiguous(), b.to(dtype).contiguous()


def _decoded(
    a: tuple[Tensor, Tensor | None], b: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the values of both sides in one dtype, and their factors."""
    return *to_common_dtype(a[0], b[0]), a[1], b[1]


def reason_decoded(a: Any, b: Any, offsets: GroupOffsets, n: int, dtype: torch.dtype, *_: Any) -> str:
    """Return why torch's bf16 grouped GEMM does not support these decoded operands, or ""."""
    return _why_not_bf16(a, b, dtype, offsets.groups, n)


def reason_decoded_sums(a: GroupedOperand, b: GroupedOperand, dtype: torch.dtype, *_: Any) -> str:
    """Return why torch's bf16 grouped GEMM does not support these sums over the rows of groups, or ""."""
    return _why_not_bf16(a, b, dtype, a.slots.groups, b.data.shape[0], a.data.shape[0])


def _why_not_bf16(a: Any, b: Any, dtype: torch.dtype, groups: int, *features: int) -> str:
    if dtype is not torch.bfloat16:
        return f"it writes bfloat16, and the result must be {dtype}"
    for spec in (a.spec, b.spec):
        if not (spec.power_of_two or spec.scale == "two_level"):
            return f"scales of {spec} are no powers of two, and the result would be rounded before them"
    if any(side % 8 for side in (*features, b.shape[1] if isinstance(b, Quantized) else 8)):
        return "its features must be multiples of 8"
    return _why_not_torch(a.data.device, groups, *a.shape, *b.shape)


def _why_not_torch(device: torch.device, groups: int, *sides: int) -> str:
    arch = architecture(device)
    if arch // 10 not in MAJORS:
        return f"torch multiplies groups in bf16 on compute capabilities 9 and 10, and this GPU is sm_{arch}"
    if not 0 < groups <= MOST_GROUPS:
        return f"it takes from 1 to {MOST_GROUPS} groups, not {groups}"
    return "there is nothing to add up" if 0 in sides else ""


def bf16_matmul(
    a: GroupedOperand, b: Quantized, offsets: GroupOffsets, n: int, dtype: torch.dtype, bias: Tensor | None, *_: Any
) -> Tensor:
    """Run `matmul` on decoded operands by torch's bf16 grouped GEMM.

    Float32 sums are rounded once to bf16; a bias adds a second rounding.
    """
    left, right, row_scales, column_scales = _decoded(values_of_rows(a, offsets), scaled_mm.decode(b))
    y = F.grouped_mm(left, right.view(offsets.groups, n, -1).transpose(1, 2), offs=offsets.ends)
    for scale in (row_scales, None if column_scales is None else _columns(column_scales, offsets, n)):
        # Powers of two, so nothing is rounded again.
        y = y if scale is None else y * scale.to(torch.bfloat16)
    return finished_rows(y, bias, offsets)


def _columns(column_scales: Tensor, offsets: GroupOffsets, n: int) -> Tensor:
    """Return the column scales of each token's group, [T, n]."""
    scale = column_scales.expand(offsets.groups * n, 1) if column_scales.numel() == 1 else column_scales
    return gather_groups(scale.view(offsets.groups, n), offsets.slots(1).group)


def bf16_sums(a: GroupedOperand, b: GroupedOperand, dtype: torch.dtype, *_: Any) -> Tensor:
    """Run `sums` on decoded operands by torch's bf16 grouped GEMM; float32 sums are rounded once."""
    left, right, row_scales, column_scales = _decoded(values_of_sums(a), values_of_sums(b))
    y = F.grouped_mm(left, right.t(), offs=a.slots.ends)
    for scale in (
        None if row_scales is None else row_scales.unsqueeze(2),
        None if column_scales is None else column_scales.unsqueeze(1),
    ):
        y = y if scale is None else y * scale.to(torch.bfloat16)
    return finished_sums(y, a.slots)


# ---- decoded operands by Triton kernels ----


def reason_kernel(a: Any, *_: Any) -> str:
    """Return why the Triton kernels cannot multiply groups, or ""."""
    return why_no_kernels(a.data.device)


def kernel_matmul(
    a: GroupedOperand, b: Quantized, offsets: GroupOffsets, n: int, dtype: torch.dtype, bias: Tensor | None, *_: Any
) -> Tensor:
    """Run `matmul` on decoded operands by a Triton kernel; float32 sums are rounded once."""
    if 0 in (*a.shape, *b.shape):
        return group_by_group(a, b, offsets, n, dtype, bias)
    from quaver.torch.backends.gpu import emulation

    left, right, row_scales, column_scales = _decoded(values_of_rows(a, offsets), scaled_mm.decode(b))
    rows = None if row_scales is None else row_scales.expand(a.shape[0], 1)
    columns = None if column_scales is None else column_scales.expand(b.shape[0], 1)
    return emulation.multiply(left, right, offsets.ends, n, dtype, bias, rows, columns)


def kernel_sums(a: GroupedOperand, b: GroupedOperand, dtype: torch.dtype, *_: Any) -> Tensor:
    """Run `sums` on decoded operands by a Triton kernel; float32 sums are rounded once."""
    m, n, groups_ = a.shape[0], b.shape[0], a.slots.groups
    if 0 in (m, n, groups_, a.slots.count):
        return torch.zeros((groups_, m, n), dtype=dtype, device=a.data.device)
    from quaver.torch.backends.gpu import emulation

    left, right, row_scales, column_scales = _decoded(values_of_sums(a), values_of_sums(b))
    rows, columns = (
        None if scale is None else scale.expand(groups_, size) for scale, size in ((row_scales, m), (column_scales, n))
    )
    return emulation.add_up(left, right, a.slots.ends, a.slots.multiple, dtype, rows, columns)


# ---- one group at a time, which copies the offsets to the host ----


def group_by_group(
    a: GroupedOperand, b: Quantized, offsets: GroupOffsets, n: int, dtype: torch.dtype, bias: Tensor | None, *_: Any
) -> Tensor:
    (x, row_scales), (w, column_scales) = values_of_rows(a, offsets), scaled_mm.decode(b)
    y = torch.zeros((offsets.rows, n), dtype=dtype, device=a.data.device)
    for group, (start, end) in enumerate(offsets.bounds()):
        rows = slice(group * n, (group + 1) * n)
        if end > start and 0 not in (n, a.shape[1]):
            left, right = to_common_dtype(x[start:end], w[rows])
            scales = (
                None if row_scales is None else row_scales if row_scales.shape[0] == 1 else row_scales[start:end],
                None
                if column_scales is None
                else column_scales
                if column_scales.shape[0] == 1
                else column_scales[rows],
            )
            y[start:end] = scaled_mm.finished(
                wide(left, right.t()), dtype, None if bias is None else bias[group], *scales
            )
        elif end > start and bias is not None:
            y[start:end] = bias[group]
    return y


def sums_group_by_group(a: GroupedOperand, b: GroupedOperand, dtype: torch.dtype, *_: Any) -> Tensor:
    (x, row_scales), (w, column_scales) = values_of_sums(a), values_of_sums(b)
    y = torch.zeros((a.slots.groups, a.shape[0], b.shape[0]), dtype=dtype, device=a.data.device)
    if y.is_meta:
        return y
    start = 0
    for group, end in enumerate(a.slots.ends.tolist()):
        if end > start and 0 not in y.shape:
            left, right = to_common_dtype(x[:, start:end], w[:, start:end])
            scales = (None if s is None else s[group].unsqueeze(1) for s in (row_scales, column_scales))
            y[group] = scaled_mm.finished(wide(left, right.t()), dtype, None, *scales)
        start = end
    return y


# ---- native grouped GEMMs ----


class GroupedGemmKind(NamedTuple):
    """Kind of scaled grouped GEMM."""

    #: Major compute capabilities for which torch allows it: 9 is 9.0, and 10 is 10.0 and 10.3.
    majors: tuple[int, ...]
    scaling: tuple[ScalingType, ...]
    swizzle: tuple[SwizzleType, ...] | None


SWIZZLED = SwizzleType.SWIZZLE_32_4_4
KINDS = {
    # On 10.0 torch's wheel has only kernels for 9.0, which trap there and destroy the CUDA context.
    "row": GroupedGemmKind((9,), (ScalingType.RowWise,), None),
    "mx": GroupedGemmKind((10,), (ScalingType.BlockWise1x32,), (SWIZZLED,)),
    "nv": GroupedGemmKind(
        (10,), (ScalingType.BlockWise1x16, ScalingType.TensorWise), (SWIZZLED, SwizzleType.NO_SWIZZLE)
    ),
}

_probes: dict[tuple[torch.device, str, bool, bool], str] = {}


def has(a: QuantSpec, b: QuantSpec, device: torch.device) -> bool:
    """Return True if torch has a grouped GEMM of such operands on this device."""
    name = kind_of(a, b)
    return bool(name) and architecture(device) // 10 in KINDS[name].majors


def kind_of(a: QuantSpec, b: QuantSpec) -> str:
    """Return the key of `KINDS` that multiplies operands of these specs, or ""."""
    kinds = {_kind(a), _kind(b)}
    return kinds.pop() if len(kinds) == 1 else ""


def _kind(spec: QuantSpec) -> str:
    # A scale per group is expanded to one per row.
    name = {"tensor": "row", "row": "row", "mx": "mx", "nv": "nv"}.get(role(spec), "")
    return name if spec.format == (E2M1 if name == "nv" else E4M3) else ""


def reason(a: GroupedOperand, b: Any, offsets: GroupOffsets, n: int, dtype: torch.dtype, *rest: Any) -> str:
    """Return why these operands have no native grouped GEMM, or ""; the caller has checked the device."""
    why = _why_not(a.spec, b.spec, a.data.device, n, dtype)
    if not why and kind_of(a.spec, b.spec) == "mx" and b.shape[1] % 32:
        # torch counts scales of whole blocks, but a partial last block has a scale here.
        why = f"k is {b.shape[1]}; it takes whole blocks of 32"
    if not why and 0 in (*a.shape, *b.shape):
        why = "there is nothing to add up"
    return why or _tried(a.data.device, kind_of(a.spec, b.spec), False, bool(rest[1]))


def reason_sums(a: GroupedOperand, b: GroupedOperand, dtype: torch.dtype, fast_accum: bool = False) -> str:
    """Return why these operands have no native grouped GEMM that sums over the rows of groups, or ""."""
    why = _why_not(a.spec, b.spec, a.data.device, b.data.shape[0], dtype)
    if not why and a.data.shape[0] % 16:
        why = f"the output has {a.data.shape[0]} rows; it takes multiples of 16"
    if not why and 0 in (*a.shape, *b.shape):
        why = "there is nothing to add up"
    return why or _tried(a.data.device, kind_of(a.spec, b.spec), True, fast_accum)


def _why_not(a: QuantSpec, b: QuantSpec, device: torch.device, n: int, dtype: torch.dtype) -> str:
    if not hasattr(F, "scaled_grouped_mm"):
        return f"torch {torch.__version__} has no scaled_grouped_mm"
    name, arch = kind_of(a, b), architecture(device)
    if not name:
        return f"torch has no grouped GEMM for {a} by {b}"
    if arch // 10 not in KINDS[name].majors:
        where = " and ".join(map(str, KINDS[name].majors))
        return f"torch multiplies groups of {a} by {b} on compute capability {where}, and this GPU is sm_{arch}"
    if dtype is not torch.bfloat16:
        return f"it writes bfloat16, and the result must be {dtype}"
    return f"the output has {n} columns; it takes multiples of 16" if n % 16 else ""


def _tried(device: torch.device, name: str, for_wgrad: bool, fast_accum: bool) -> str:
    """Return why a small product failed, or ""; tried once."""
    key = device, name, for_wgrad, fast_accum
    if key not in _probes:
        if capture.capturing(device):
            return "a CUDA graph is being captured before any call has tried it: run a step first"
        _probes[key] = _probe(*key)
    return _probes[key]


def matmul(
    a: GroupedOperand,
    b: Quantized,
    offsets: GroupOffsets,
    n: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """Multiply a [T, k] by each group's transposed matrix of b [groups · n, k]; returns bf16 [T, n].

    Tokens of no group give zeros. Fast accumulation on Hopper keeps 13 bits of a sum; a bias adds a second rounding.
    """
    name, groups = kind_of(a.spec, b.spec), offsets.groups
    left, right = _rows(a), matrix(b).view(groups, n, -1).transpose(1, 2)
    if a.swizzled:
        left_scales = _with_factor(name, a.scale, a.factor)
    else:
        left_scales = _scales_of_rows(name, grouped.row_scales(a, offsets)[0], a.factor, offsets)
    y = _run(name, left, right, left_scales, _scales_of_matrices(name, b, groups, n), offsets.ends, fast_accum)
    return finished_rows(y, bias, offsets)


def sums(a: GroupedOperand, b: GroupedOperand, dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """Multiply a [n, slots] by transposed b [k, slots], summed over each group's slots; returns bf16 [groups, n, k].

    Precision as in `matmul`.
    """
    name = kind_of(a.spec, b.spec)
    left, right = _packed(a), _packed(b).t()
    y = _run(name, left, right, _scales_of_sums(name, a), _scales_of_sums(name, b), a.slots.ends, fast_accum)
    return finished_sums(y, a.slots)


def _run(
    name: str, a: Tensor, b: Tensor, a_scales: list[Tensor], b_scales: list[Tensor], ends: Tensor, fast_accum: bool
) -> Tensor:
    kind, run = KINDS[name], vars(F)["scaled_grouped_mm"]
    swizzles = {} if kind.swizzle is None else {"swizzle_a": [*kind.swizzle], "swizzle_b": [*kind.swizzle]}
    y: Tensor = run(
        a,
        b,
        a_scales,
        [*kind.scaling],
        b_scales,
        [*kind.scaling],
        offs=ends,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
        **swizzles,
    )
    return y


def _rows(a: GroupedOperand) -> Tensor:
    """Return row-major codes as the GEMM needs them."""
    return matrix(Quantized(a.data, 1.0, a.spec, a.shape))


def _packed(a: GroupedOperand) -> Tensor:
    return a.data.view(torch.float4_e2m1fn_x2) if a.spec.format.packed else a.data


def _scales_of_rows(name: str, scale: Tensor, factor: Tensor | None, offsets: GroupOffsets) -> list[Tensor]:
    """Return the scales of tokens: one each, or block scales swizzled per group."""
    if name == "row":
        return [scale.reshape(-1).contiguous()]
    if not why_no_kernels(scale.device) and scale.numel() and offsets.groups:
        from quaver.torch.backends.gpu.grouped_block_scaled import swizzle_groups

        return _with_factor(name, swizzle_groups(scale.contiguous(), offsets), factor)
    filled = offsets.slots(ROWS)
    return _with_factor(name, swizzle(filled.take(scale)).view(filled.count, -1), factor)


def _scales_of_matrices(name: str, b: Quantized, groups: int, n: int) -> list[Tensor]:
    """Return the scales of the groups' matrices, [groups, ...]."""
    if b.swizzled and n % ROWS == 0:
        assert isinstance(b.scale, Tensor)
        blocks = b.scale.view(torch.uint8).view(groups, -1)
    else:
        scale = b.plain_scale()
        if name == "row":
            return [scale.reshape(groups, n).contiguous()]
        tall = pad(scale.view(groups, n, -1), (0, 0, 0, -n % ROWS))
        blocks = swizzle(tall.reshape(-1, tall.shape[2])).view(groups, -1)
    factor = None if b.tensor_factor is None else b.tensor_factor.view(groups, n)[:, :1]
    return _with_factor(name, blocks, factor)


def _scales_of_sums(name: str, a: GroupedOperand) -> list[Tensor]:
    """Return the scales of transposes summed over slots: one per row of each group, or block scales per group."""
    rows, groups = a.data.shape[0], a.slots.groups
    if name == "row":
        return [a.scale.expand(groups, rows).reshape(-1).contiguous()]
    return _with_factor(name, _swizzled(a), a.factor)


def _swizzled(a: GroupedOperand) -> Tensor:
    """Swizzle stored scales [blocks of slots, blocks of rows] into tiles of 128 rows and four blocks of slots.

    All tiles of a group precede those of the next group, ordered by rows within the group.
    """
    if a.swizzled:
        return a.scale
    rows = a.data.shape[0]
    scale = a.scale.t()
    height = a.spec.block[0]
    assert height is not None
    scale = scale if height == 1 else scale.repeat_interleave(height, 0)[:rows]
    tall, across = -(-rows // ROWS), -(-scale.shape[1] // BLOCKS)
    width = a.spec.block[1]
    assert width is not None
    tiles = swizzle(scale).view(tall, across, ROWS * BLOCKS)
    place = grouped.tile_places(a.slots, width, tall)
    out = torch.empty_like(tiles).view(tall * across, -1)
    out[place.reshape(-1)] = tiles.reshape(tall * across, -1)
    return out.view(tall * ROWS, -1)


def _with_factor(name: str, blocks: Tensor, factor: Tensor | None) -> list[Tensor]:
    if name == "mx":
        return [blocks.view(torch.float8_e8m0fnu)]
    assert factor is not None
    return [blocks.view(torch.float8_e4m3fn), (1.0 / factor).reshape(-1).contiguous()]


#: Spec used to probe each kind.
SPECS = {
    "row": QuantSpec(E4M3, (1, None)),
    "mx": QuantSpec(E4M3, (1, 32), "e8m0"),
    "nv": QuantSpec(E2M1, (1, 16), "two_level"),
}


def _probe(device: torch.device, name: str, for_wgrad: bool, fast_accum: bool) -> str:
    """Try a small product with an empty group and tokens of no group; return "" or why it is not used."""
    generator, spec = torch.Generator("cpu").manual_seed(0), SPECS[name]
    x, w = (
        torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu").mul_(
            torch.rand(rows, columns, generator=generator, dtype=torch.float32, device="cpu").add_(0.5)
        )
        for rows, columns in ((48, 288), (48, 32) if for_wgrad else (3 * 32, 288))
    )
    offsets = GroupOffsets(torch.tensor([21, 21, 40], dtype=torch.int32, device=device), 48)
    a = grouped.quantize(x.to(device), spec, offsets, for_wgrad)

    def products() -> tuple[Tensor, Tensor]:
        if for_wgrad:
            b = grouped.quantize(w.to(device), spec, offsets, True)
            return sums(a, b, torch.bfloat16, fast_accum), sums_group_by_group(a, b, torch.float32)
        c = reference.quantize(w.to(device), spec)
        if c.tensor_factor is not None:
            c.tensor_factor = c.tensor_factor.expand(c.shape[0], 1)
        y = matmul(a, c, offsets, 32, torch.bfloat16, None, fast_accum)
        return y, group_by_group(a, c, offsets, 32, torch.float32, None)

    return scaled_mm.compare_products(products, device)


# ---- unquantized grouped GEMMs: torch's in bf16, Triton kernels, or one group at a time ----


def reason_high(x: Tensor, w: Tensor, offsets: GroupOffsets, dtype: torch.dtype, *_: Any) -> str:
    """Return why torch's grouped GEMM cannot multiply these without synchronization, or ""."""
    return _why_not_high(x, w.transpose(1, 2), offsets.groups, dtype)


def reason_high_sums(a: Tensor, b: Tensor, offsets: GroupOffsets, dtype: torch.dtype) -> str:
    """Return why torch's grouped GEMM cannot sum over these groups without synchronization, or ""."""
    return _why_not_high(a.t(), b, offsets.groups, dtype)


def _why_not_high(a: Tensor, b: Tensor, groups: int, dtype: torch.dtype) -> str:
    if not a.dtype is b.dtype is dtype is torch.bfloat16:
        return f"it takes and writes bfloat16, and these are {a.dtype} and {b.dtype}, to be {dtype}"
    if not (in_lines(a) and in_lines(b)):
        return "its rows must begin at multiples of 16 bytes"
    return _why_not_torch(a.device, groups, *a.shape, *b.shape)


def high_matmul(x: Tensor, w: Tensor, offsets: GroupOffsets, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Multiply x [T, k] by each group's transposed w [groups, n, k] in bf16; rows of no group give zeros."""
    return finished_rows(F.grouped_mm(x, w.transpose(1, 2), offs=offsets.ends), bias, offsets)


def high_sums(a: Tensor, b: Tensor, offsets: GroupOffsets, dtype: torch.dtype) -> Tensor:
    """Multiply transposed a [T, n] by b [T, k], summed over each group's rows; returns bf16 [groups, n, k]."""
    return finished_sums(F.grouped_mm(a.t(), b, offs=offsets.ends), offsets.slots(1))


def kernel_high(x: Tensor, w: Tensor, offsets: GroupOffsets, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Run `high_matmul` by a Triton kernel, for any dtype."""
    if 0 in (*x.shape, *w.shape):
        return finished_rows(x.new_zeros((x.shape[0], w.shape[1]), dtype=dtype), bias, offsets)
    from quaver.torch.backends.gpu import emulation

    left, right = to_common_dtype(x, w.reshape(-1, w.shape[2]))
    return emulation.multiply(left, right, offsets.ends, w.shape[1], dtype, bias)


def kernel_high_sums(a: Tensor, b: Tensor, offsets: GroupOffsets, dtype: torch.dtype) -> Tensor:
    """Run `high_sums` by a Triton kernel, for any dtype."""
    if 0 in (*a.shape, *b.shape, offsets.groups):
        return a.new_zeros((offsets.groups, a.shape[1], b.shape[1]), dtype=dtype)
    from quaver.torch.backends.gpu import emulation

    return emulation.add_up(*to_common_dtype(a.t(), b.t()), offsets.ends, 1, dtype)


def high_group_by_group(x: Tensor, w: Tensor, offsets: GroupOffsets, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Run `high_matmul` one group at a time for any dtype; copies the offsets to the host."""
    y = torch.zeros((offsets.rows, w.shape[1]), dtype=dtype, device=x.device)
    for group, (start, end) in enumerate(offsets.bounds()):
        if end > start:
            y[start:end] = _high(x[start:end], w[group], dtype, None if bias is None else bias[group])
    return y


def high_sums_group_by_group(a: Tensor, b: Tensor, offsets: GroupOffsets, dtype: torch.dtype) -> Tensor:
    """Run `high_sums` one group at a time for any dtype; copies the offsets to the host."""
    y = torch.zeros((offsets.groups, a.shape[1], b.shape[1]), dtype=dtype, device=a.device)
    for group, (start, end) in enumerate(offsets.bounds()):
        if end > start:
            y[group] = _high(a[start:end].t(), b[start:end].t(), dtype, None)
    return y


def _high(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    if a.dtype is b.dtype is dtype:
        return F.linear(a, b, bias)
    y = a.float() @ b.float().t()
    return (y if bias is None else y + bias).to(dtype)
