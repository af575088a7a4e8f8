"""Triton launches that move the rows of a mixture of experts: sort, gather, weighted sum, and dot products.

A choice is a token and one of its experts, numbered token · k + j.

The host reads neither the choices nor the sizes of the groups. Results are bitwise those of plain torch in
`quaver.torch.nn.moe.permutation`, except that dot products are summed in another order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.kernels import permutation as kernels
from quaver.torch.backends.gpu.buffers import BufferSpec, whole
from quaver.torch.backends.gpu.launch import FP8, TYPES, LaunchPlan, LaunchPlanCache, LaunchSpec, power_above

#: Bytes of a row of a program's block, bytes of the block, maximum number of rows, and warps.
BLOCK = 1024, 8192, 128, 4
#: Rows and columns of a block of dot products, and warps of a program.
DOT_BLOCK = 4, 512, 4
#: Choices per block of the sort, and warps of a program; blocks and experts per tile of counts.
ORDER_BLOCK, SCAN_BLOCK = (128, 8), (64, 16)
#: Maximum number of choices; ranks and counts of choices are int32.
MAX_CHOICES = 2**30
#: Maximum number of elements of a tensor, so that the number of programs fits a grid.
MAX_ELEMENTS = 2**38
#: dtypes that the kernels read.
DTYPES = set(TYPES) - {torch.float64, *FP8}


def reason(rows: Tensor, *others: Any) -> str:
    """Return why the kernels do not support these rows, or ""."""
    tensors = [x for x in (rows, *others) if isinstance(x, Tensor)]
    unsupported = next((x.dtype for x in tensors if x.dtype not in DTYPES), None)
    if unsupported is not None:
        return f"its kernels compute in float32 and do not take {unsupported}"
    if not all(0 < x.numel() <= MAX_ELEMENTS for x in tensors):
        return f"rows of shape {tuple(rows.shape)} are empty or too many"
    return ""


def reason_order(indices: Tensor, *_: Any) -> str:
    """Return why the kernels do not sort these choices, or ""."""
    return "" if 0 < indices.numel() <= MAX_CHOICES else f"{indices.numel()} choices are none or too many"


def order(indices: Tensor, experts: int, pad: int, capacity: int | None, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort choices by expert; arguments and results as for `quaver.torch.nn.moe.permutation.ORDER`."""
    capacity = MAX_CHOICES if capacity is None else min(capacity, MAX_CHOICES)
    ends, places, sources, *_ = _order((indices.contiguous(),), experts, pad, capacity, total)
    return ends, places, sources


@LaunchPlanCache
def _order(tensors_in: Sequence[Any], experts: int, pad: int, capacity: int, total: int) -> LaunchPlan:
    (indices,) = tensors_in
    choices = indices.shape[0]
    blocks, (b, warps), (scan_blocks, scan_experts) = -(-choices // ORDER_BLOCK[0]), ORDER_BLOCK, SCAN_BLOCK
    ends, starts, totals = (whole((experts,), torch.int32) for _ in range(3))
    places, sources = whole((choices,), torch.int64), whole((total,), torch.int64)
    ranks, counts = whole((choices,), torch.int32), whole((blocks, experts), torch.int32)._replace(zeros=True)
    fill_chunk, numbers = power_above(-(-total // blocks)), (choices, experts)
    launches = [
        LaunchSpec(
            kernels.count_choices, (blocks,), (indices, ranks, counts, sources), (*numbers, total),
            {"B": b, "CHUNK": fill_chunk}, warps,
        ),
        LaunchSpec(
            kernels.scan_counts, (-(-experts // scan_experts),), (counts, totals), (blocks, experts),
            {"B": scan_blocks, "BE": scan_experts}, warps,
        ),
        LaunchSpec(
            kernels.expert_ends, (1,), (totals, starts, ends), (experts, pad, capacity),
            {"BE": min(power_above(experts), 1024)}, warps,
        ),
        LaunchSpec(
            kernels.place_choices, (blocks,), (indices, ranks, counts, starts, places, sources), (*numbers, capacity),
            {"B": b}, warps,
        ),
    ]  # fmt: skip
    return LaunchPlan(tensors_in, (ends, places, sources, starts, totals, ranks, counts), launches)


def gather(x: Tensor, sources: Tensor, k: int, weights: Tensor | None = None, fill: float = 0) -> Tensor:
    """Gather rows of x; arguments and result as for `quaver.torch.nn.moe.permutation.GATHER_ROWS`."""
    y: Tensor = _gather((_in_rows(x), _contiguous(weights), _contiguous(sources)), k, fill)[0]
    return y


@LaunchPlanCache
def _gather(tensors_in: Sequence[Any], k: int, fill: float) -> LaunchPlan:
    x, weights, sources = tensors_in
    y = whole((sources.shape[0], x.shape[1]), x.dtype)
    grid, across, constants, warps = _blocks(y)
    numbers = (*y.shape, x.stride(0), k, across)
    tensors = (x, weights, sources, y)
    launch = LaunchSpec(kernels.gather_rows, grid, tensors, numbers, {**constants, "FILL": fill}, warps)
    return LaunchPlan(tensors_in, (y,), [launch])


def combine(rows: Tensor, places: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
    """Sum rows per token; arguments and result as for `quaver.torch.nn.moe.permutation.COMBINE_ROWS`."""
    y: Tensor = _combine((_in_rows(rows), _contiguous(weights), _contiguous(places)), k)[0]
    return y


@LaunchPlanCache
def _combine(tensors_in: Sequence[Any], k: int) -> LaunchPlan:
    rows, weights, places = tensors_in
    y = whole((places.shape[0] // k, rows.shape[1]), rows.dtype)
    grid, across, constants, warps = _blocks(y)
    numbers = (rows.shape[0], *y.shape, rows.stride(0), k, across)
    launch = LaunchSpec(kernels.combine_rows, grid, (rows, weights, places, y), numbers, constants, warps)
    return LaunchPlan(tensors_in, (y,), [launch])


def dots(x: Tensor, rows: Tensor, places: Tensor, k: int) -> Tensor:
    """Compute dot products of rows; arguments and result as for `quaver.torch.nn.moe.permutation.DOT_ROWS`."""
    y: Tensor = _dots((_in_rows(x), _in_rows(rows), _contiguous(places)), k)[0]
    return y.view(-1, k)


@LaunchPlanCache
def _dots(tensors_in: Sequence[Any], k: int) -> LaunchPlan:
    x, rows, places = tensors_in
    y = whole(tuple(places.shape), torch.float32)
    (bm, bn, warps), choices = DOT_BLOCK, places.shape[0]
    numbers = (rows.shape[0], choices, x.shape[1], x.stride(0), rows.stride(0), k)
    grid, constants = (-(-choices // bm),), {"BM": bm, "BN": bn}
    return LaunchPlan(
        tensors_in, (y,), [LaunchSpec(kernels.dot_rows, grid, (*tensors_in, y), numbers, constants, warps)]
    )


def _blocks(y: BufferSpec) -> tuple[tuple[int], int, dict[str, int], int]:
    """Return the grid for a matrix, the number of blocks side by side, the size of a block, and its warps."""
    (rows, columns), size = y.shape, y.dtype.itemsize
    row_bytes, block_bytes, max_rows, warps = BLOCK
    bn = min(row_bytes // size, power_above(columns))
    bm = min(block_bytes // size // bn, max_rows)
    across = -(-columns // bn)
    return (-(-rows // bm) * across,), across, {"BM": bm, "BN": bn}, warps


def _in_rows(x: Tensor) -> Tensor:
    """Return x with a contiguous last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None else x.contiguous()
