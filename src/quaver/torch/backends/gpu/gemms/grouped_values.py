"""Grouped GEMMs of decoded operands, where no native one takes or writes what is wanted.

Codes become bf16 values, exactly, or float32 where bf16 does not hold them, with the scales of blocks folded in; those
of whole rows and groups go on the product. They are multiplied by torch's grouped GEMM in bf16, or by kernels of our
own, neither of which asks the host how many rows a group has. Without both it is done group by group, which waits.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quaver.torch.backends.gpu.gemms import decoded
from quaver.torch.backends.gpu.gemms.products import wide
from quaver.torch.backends.gpu.launching.device import architecture, why_no_kernels
from quaver.torch.numerics import grouped
from quaver.torch.numerics.groups import Laid, Offsets, of_groups
from quaver.torch.numerics.quantized import Quantized, spread

#: Compute capabilities of which torch multiplies groups in bf16 without waiting, whole; and how many groups, at most.
MAJORS, MOST_GROUPS = (9, 10), 1023


def finished_rows(y: Tensor, bias: Tensor | None, offsets: Offsets) -> Tensor:
    """A bias, and zeros for tokens of no group: what was not written may be anything, NaN too."""
    group = offsets.slots(1).group
    if bias is not None:
        y = y.add_(of_groups(bias, group).to(y.dtype))
    return y.masked_fill_((group == offsets.groups).unsqueeze(1), 0.0)


def values_of_rows(a: Laid, offsets: Offsets) -> tuple[Tensor, Tensor | None]:
    """Tokens as bf16 values [T, k] (float32 where bf16 cannot hold them), and what multiplies each row of a product:
    float32 [T, 1], or None."""
    scale, factor = grouped.row_scales(a, offsets)
    spec = replace(a.spec, block=(1, a.spec.block[1]), rounding="nearest")
    if spec.block[1] is None and spec.scale == "e8m0":
        # A scale a row, as its code: folded into the product as any other.
        return _plain(a), Quantized(a.data, scale, spec, a.shape).scales()
    return decoded.decode(Quantized(a.data, scale, spec, a.shape, tensor_factor=factor))


def _plain(a: Laid) -> Tensor:
    return grouped.values(a).to(torch.bfloat16)


def values_of_sums(a: Laid) -> tuple[Tensor, Tensor | None]:
    """Transposes as values [rows, slots], and what multiplies each row of a group's product: float32
    [groups, rows or 1], or None."""
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


def _without_factor(a: Laid) -> Tensor:
    """Decode scales of slots, [slots, blocks of rows], without those of groups."""
    assert a.factor is not None
    one = torch.ones_like(a.factor)
    return grouped.slot_scales(Laid(a.data, a.scale, one, a.spec, True, a.slots, a.k))


def alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides in the wider of their dtypes."""
    dtype = torch.bfloat16 if a.dtype is b.dtype is torch.bfloat16 else torch.float32
    return a.to(dtype).contiguous(), b.to(dtype).contiguous()


def reason_decoded(a: Any, b: Any, offsets: Offsets, n: int, dtype: torch.dtype, *_: Any) -> str:
    """Why torch's bf16 GEMM does not multiply the values of these, or ""."""
    return _why_not_bf16(a, b, dtype, n, offsets.groups)


def reason_decoded_sums(a: Laid, b: Laid, dtype: torch.dtype, *_: Any) -> str:
    """The same of what is summed over the rows of groups."""
    return _why_not_bf16(a, b, dtype, b.data.shape[0], a.slots.groups, a.data.shape[0])


def _why_not_bf16(a: Any, b: Any, dtype: torch.dtype, *sides: int) -> str:
    arch = architecture(a.data.device)
    if arch // 10 not in MAJORS:
        return f"torch multiplies groups in bf16 on compute capabilities 9 and 10, and this GPU is sm_{arch}"
    if dtype is not torch.bfloat16:
        return f"it writes bfloat16, and the result is to be {dtype}"
    for spec in (a.spec, b.spec):
        if not (spec.power_of_two or spec.scale == "two_level"):
            return f"scales of {spec} are no powers of two, and the result would be rounded before them"
    *features, groups = sides[0], *sides[2:], sides[1]
    if any(side % 8 for side in (*features, b.shape[1] if isinstance(b, Quantized) else 8)):
        return "its features are multiples of 8"
    if groups > MOST_GROUPS or not groups:
        return f"it takes from 1 to {MOST_GROUPS} groups, not {groups}"
    return "there is nothing to add up" if 0 in (*a.shape, *b.shape) else ""


def bf16_matmul(
    a: Laid,
    b: Quantized,
    offsets: Offsets,
    n: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """`matmul` of decoded operands by torch's grouped GEMM in bf16.

    Bounded: one rounding of float32 sums to bf16; a bias is a second one.
    """
    (x, of_rows), (w, of_columns) = values_of_rows(a, offsets), decoded.decode(b)
    left, right = alike(x, w)
    y = F.grouped_mm(left, right.view(offsets.groups, n, -1).transpose(1, 2), offs=offsets.ends)
    for scale in (of_rows, None if of_columns is None else _columns(of_columns, offsets, n)):
        # Powers of two: nothing is rounded again.
        y = y if scale is None else y * scale.to(torch.bfloat16)
    return finished_rows(y, bias, offsets)


def _columns(of_columns: Tensor, offsets: Offsets, n: int) -> Tensor:
    """Scales of the columns of each token's group, [T, n]."""
    scale = of_columns.expand(offsets.groups * n, 1) if of_columns.numel() == 1 else of_columns
    return of_groups(scale.view(offsets.groups, n), offsets.slots(1).group)


def bf16_sums(a: Laid, b: Laid, dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """`sums` of decoded operands by torch's grouped GEMM in bf16. Bounded: one rounding of float32 sums."""
    (x, of_rows), (w, of_columns) = values_of_sums(a), values_of_sums(b)
    left, right = alike(x, w)
    y = F.grouped_mm(left, right.t(), offs=a.slots.ends)
    for scale in (
        None if of_rows is None else of_rows.unsqueeze(2),
        None if of_columns is None else of_columns.unsqueeze(1),
    ):
        y = y if scale is None else y * scale.to(torch.bfloat16)
    return y.masked_fill_((a.slots.sizes == 0).view(-1, 1, 1), 0.0)


# Their values, by kernels.


def reason_kernel(a: Any, *_: Any) -> str:
    """Why no kernel of ours multiplies groups, or ""."""
    return why_no_kernels(a.data.device)


def kernel_matmul(
    a: Laid,
    b: Quantized,
    offsets: Offsets,
    n: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """`matmul` of decoded operands by a kernel. Bounded: one rounding of float32 sums."""
    if 0 in (*a.shape, *b.shape):
        return group_by_group(a, b, offsets, n, dtype, bias)
    from quaver.torch.backends.gpu.emulating import groups

    (x, of_rows), (w, of_columns) = values_of_rows(a, offsets), decoded.decode(b)
    left, right = alike(x, w)
    rows = None if of_rows is None else of_rows.expand(a.shape[0], 1)
    columns = None if of_columns is None else of_columns.expand(b.shape[0], 1)
    return groups.multiply(left, right, offsets.ends, n, dtype, bias, rows, columns)


def kernel_sums(a: Laid, b: Laid, dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """`sums` of decoded operands by a kernel. Bounded: one rounding of float32 sums."""
    (m, _), (n, _), groups_ = a.shape, b.shape, a.slots.groups
    if 0 in (m, n, groups_, a.slots.count):
        return torch.zeros((groups_, m, n), dtype=dtype, device=a.data.device)
    from quaver.torch.backends.gpu.emulating import groups

    (x, of_rows), (w, of_columns) = values_of_sums(a), values_of_sums(b)
    left, right = alike(x, w)
    rows, columns = (
        None if scale is None else scale.expand(groups_, size) for scale, size in ((of_rows, m), (of_columns, n))
    )
    return groups.add_up(left, right, a.slots.ends, a.slots.multiple, dtype, rows, columns)


# Group by group, which waits for the offsets.


def group_by_group(
    a: Laid,
    b: Quantized,
    offsets: Offsets,
    n: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:
    (x, of_rows), (w, of_columns) = values_of_rows(a, offsets), decoded.decode(b)
    y = torch.zeros((offsets.rows, n), dtype=dtype, device=a.data.device)
    for group, (start, end) in enumerate(offsets.bounds()):
        rows = slice(group * n, (group + 1) * n)
        if end > start and 0 not in (n, a.shape[1]):
            left, right = alike(x[start:end], w[rows])
            scales = (
                None if of_rows is None else of_rows if of_rows.shape[0] == 1 else of_rows[start:end],
                None if of_columns is None else of_columns if of_columns.shape[0] == 1 else of_columns[rows],
            )
            y[start:end] = decoded.finished(
                wide(left, right.t()), dtype, None if bias is None else bias[group], *scales
            )
        elif end > start and bias is not None:
            y[start:end] = bias[group]
    return y


def sums_group_by_group(a: Laid, b: Laid, dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    (x, of_rows), (w, of_columns) = values_of_sums(a), values_of_sums(b)
    y = torch.zeros((a.slots.groups, a.shape[0], b.shape[0]), dtype=dtype, device=a.data.device)
    if y.is_meta:
        return y
    start = 0
    for group, end in enumerate(a.slots.ends.tolist()):
        if end > start and 0 not in y.shape:
            left, right = alike(x[:, start:end], w[:, start:end])
            scales = (None if s is None else s[group].unsqueeze(1) for s in (of_rows, of_columns))
            y[group] = decoded.finished(wide(left, right.t()), dtype, None, *scales)
        start = end
    return y
