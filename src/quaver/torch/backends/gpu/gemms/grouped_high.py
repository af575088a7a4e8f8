"""Grouped GEMMs of what is not quantized, by torch's in bf16, by kernels of any dtype, or group by group."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quaver.torch.backends.gpu.gemms.grouped_values import MAJORS, MOST_GROUPS, alike, finished_rows
from quaver.torch.backends.gpu.launching.device import architecture
from quaver.torch.numerics.groups import Offsets, in_lines


def reason_high(x: Tensor, w: Tensor, offsets: Offsets, dtype: torch.dtype, *_: Any) -> str:
    """Why torch's grouped GEMM does not multiply these without waiting, or ""."""
    return _why_not_high(x, w.transpose(1, 2), offsets.groups, dtype)


def reason_high_sums(a: Tensor, b: Tensor, offsets: Offsets, dtype: torch.dtype) -> str:
    """Why torch's grouped GEMM does not sum over these groups without waiting, or ""."""
    return _why_not_high(a.t(), b, offsets.groups, dtype)


def _why_not_high(a: Tensor, b: Tensor, groups: int, dtype: torch.dtype) -> str:
    arch = architecture(a.device)
    if arch // 10 not in MAJORS:
        return f"torch multiplies groups in bf16 on compute capabilities 9 and 10, and this GPU is sm_{arch}"
    if not a.dtype is b.dtype is dtype is torch.bfloat16:
        return f"it takes and writes bfloat16, and these are {a.dtype} and {b.dtype}, to be {dtype}"
    if 0 in (*a.shape, *b.shape):
        return "there is nothing to add up"
    if not 0 < groups <= MOST_GROUPS:
        return f"it takes from 1 to {MOST_GROUPS} groups, not {groups}"
    return "" if in_lines(a) and in_lines(b) else "its rows begin at multiples of 16 bytes"


def high_matmul(x: Tensor, w: Tensor, offsets: Offsets, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """x [T, k] by each group's w [groups, n, k], transposed, in bf16: zeros for rows of no group."""
    return finished_rows(F.grouped_mm(x, w.transpose(1, 2), offs=offsets.ends), bias, offsets)


def high_sums(a: Tensor, b: Tensor, offsets: Offsets, dtype: torch.dtype) -> Tensor:
    """a [T, n] by b [T, k], transposed, summed over each group's rows: bf16 [groups, n, k]."""
    y = F.grouped_mm(a.t(), b, offs=offsets.ends)
    return y.masked_fill_((offsets.slots(1).sizes == 0).view(-1, 1, 1), 0.0)


def reason_kernel_high(x: Tensor, w: Tensor, *_: Any) -> str:
    """Why no kernel of ours multiplies these, or ""; the device has been asked before."""
    return "there is nothing to add up" if 0 in (*x.shape, *w.shape) else ""


def kernel_high(x: Tensor, w: Tensor, offsets: Offsets, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """`high_matmul` of any dtype."""
    from quaver.torch.backends.gpu.emulating import groups

    left, right = alike(x, w.reshape(-1, w.shape[2]))
    return groups.multiply(left, right, offsets.ends, w.shape[1], dtype, bias)


def kernel_high_sums(a: Tensor, b: Tensor, offsets: Offsets, dtype: torch.dtype) -> Tensor:
    """`high_sums` of any dtype."""
    from quaver.torch.backends.gpu.emulating import groups

    return groups.add_up(*alike(a.t(), b.t()), offsets.ends, 1, dtype)


def high_group_by_group(x: Tensor, w: Tensor, offsets: Offsets, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """`high_matmul` of any dtype, which waits for the offsets."""
    y = torch.zeros((offsets.rows, w.shape[1]), dtype=dtype, device=x.device)
    for group, (start, end) in enumerate(offsets.bounds()):
        if end > start:
            y[start:end] = _high(x[start:end], w[group], dtype, None if bias is None else bias[group])
    return y


def high_sums_group_by_group(a: Tensor, b: Tensor, offsets: Offsets, dtype: torch.dtype) -> Tensor:
    """`high_sums` of any dtype, which waits for the offsets."""
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
