"""Cross entropy of a chunk of logits, and column sums of matrices, on a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.kernels.cross_entropy import column_sums
from quaver.kernels.cross_entropy import cross_entropy as kernel
from quaver.torch.backends.gpu.buffers import BufferSpec, whole
from quaver.torch.backends.gpu.fused_quantize import DTYPES
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec, aligned, multiprocessors
from quaver.torch.backends.gpu.quantize_launch import QuantizeLaunch

# ---- cross entropy ----

#: Columns of a block, and warps.
BLOCK, WARPS = 4096, 8

#: (ignore_index, label_smoothing, z_loss, soft_cap); 0 disables a term.
Rule = tuple[int, float, float, float]


def reason(x: Tensor, weight: Tensor, *_: Any) -> str:
    """Return why the kernel does not support the logits x @ weight.T, or ""; the caller has checked the device."""
    if x.dtype not in DTYPES:
        return "it takes rows of float32, bfloat16 or float16"
    return "" if max(x.shape[0], weight.shape[0]) < 2**31 else "a side is beyond 2^31 - 1"


def losses(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """Return the logits x @ weight.T + bias, or their gradient if requested, and the losses [rows]; options as in
    `rows`.
    """
    logits = padded_rows(x.shape[0], weight.shape[0], x.dtype, x.device)
    torch.mm(x, weight.t(), out=logits) if bias is None else torch.addmm(bias, x, weight.t(), out=logits)
    return logits, rows(logits, *options, padded=True)


def rows(
    logits: Tensor, targets: Tensor, weights: Tensor | None, gradient: bool, rule: Rule, *, padded: bool = False
) -> Tensor:
    """Return float32 losses [rows] of logits [rows, columns], which are overwritten by their gradient if requested.

    Args:
        targets: int64 [rows].
        weights: float32 [rows] by which the gradient is multiplied, or None.
        padded: True if the memory between rows may be overwritten: see `padded_rows`.
    """
    # A column of a batch of labels is not contiguous.
    targets, weights = targets.contiguous(), None if weights is None else weights.contiguous()
    ignore_index, *terms = rule
    losses: Tensor = _passes((logits, targets, weights), gradient, ignore_index, *map(float, terms), padded)[0]
    return losses


def padded_rows(count: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate logits [count, columns] with a row stride that is a multiple of 16, which allows vectorized reads."""
    return torch.empty((count, -(-columns // 16) * 16), dtype=dtype, device=device)[:, :columns]


@LaunchPlanCache
def _passes(
    tensors_in: Sequence[Any],
    gradient: bool,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float,
    padded: bool,
) -> LaunchPlan:
    logits, targets, weights = tensors_in
    count, columns = logits.shape
    constants = {
        "BLOCK": BLOCK,
        "SMOOTHING": label_smoothing != 0,
        "Z_LOSS": z_loss != 0,
        "CAP": soft_cap != 0,
        "GRADIENT": gradient,
        "RAGGED": columns % BLOCK != 0,
    }
    buffer = logits.stride(0) if padded else columns
    numbers = (columns, buffer, logits.stride(0), ignore_index, label_smoothing, z_loss, soft_cap)
    losses = whole((count,), torch.float32)
    tensors = (logits, targets, losses, weights)
    return LaunchPlan(tensors_in, (losses,), [LaunchSpec(kernel, (count,), tensors, numbers, constants, WARPS)])


# ---- column sums in a fixed order: bias gradients, and partial sums ----

#: Rows, columns and warps of a block that reads a matrix, and of one that adds partial sums.
COLUMN_SUM_BLOCK, LAST_BLOCK = (32, 128, 4), (32, 32, 4)
#: Programs per multiprocessor that keep enough reads in flight.
PROGRAMS = 8
#: Largest number of partial sums that one launch adds quickly.
FEW = 1024


def column_sum_reason(g: Tensor, dtype: torch.dtype) -> str:
    """Return why the kernel does not sum a gradient [tokens, features] over tokens, or ""; the caller has checked the
    device.
    """
    other = {g.dtype, dtype} - {torch.float32, torch.bfloat16, torch.float16}
    if other:
        return f"its kernel is for float32, bfloat16 and float16, not {other.pop()}"
    if not g.numel():
        return "there is nothing to sum"
    return f"a side of {max(g.shape)} elements is too long for its kernel" if max(g.shape) > 2**30 else ""


def column_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum x [rows, columns] over its rows in float32, rounded once to dtype; returns [columns].

    One launch for few rows; otherwise a second one adds the partial sums of the first. The relative RMS error is at
    most 1e-6 against float64 before rounding. Deterministic on the same GPU.
    """
    # The bits must not depend on the address.
    x = x if x.stride(1) == 1 and aligned(x) else x.clone(memory_format=torch.contiguous_format)
    out: Tensor = _sums((x,), dtype, False)[0]
    return out


def sum_rows(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sum a row-major, aligned x over few rows in one launch, otherwise like `column_sum`."""
    out: Tensor = _sums((x,), dtype, True)[0]
    return out


def add_up(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum float32 partial sums [blocks, columns] of another kernel over blocks; returns [columns].

    Same precision as `column_sum` of the matrix, but in another order, so the bits differ. Deterministic.
    """
    return sum_rows(partial, dtype) if partial.shape[0] <= FEW else column_sum(partial, dtype)


@LaunchPlanCache
def _sums(tensors_in: Sequence[Any], dtype: torch.dtype, few: bool) -> LaunchPlan:
    out, launches = _launches(tensors_in[0], tensors_in[0].device, dtype, few)
    return LaunchPlan(tensors_in, (out,), launches)


def _launches(
    x: Tensor | BufferSpec, device: torch.device, dtype: torch.dtype, few: bool
) -> tuple[BufferSpec, list[LaunchSpec]]:
    """Return the spec of the sums, and the launches."""
    rows, columns = x.shape
    row_stride = x.strides[0] if isinstance(x, BufferSpec) else x.stride(0)
    bm, bn, _ = COLUMN_SUM_BLOCK
    out = whole((columns,), dtype)
    if few:
        return out, [sum_launch(x, out, rows, columns)]
    blocks, across = -(-rows // bm), -(-columns // bn)
    programs = max(1, min(blocks // 2, PROGRAMS * multiprocessors(device) // across))
    each = -(-blocks // programs) * bm
    down = -(-rows // each)
    if down == 1:
        return out, [_launch(x, out, (rows, columns, row_stride), each, COLUMN_SUM_BLOCK)]
    partial = whole((down, columns), torch.float32)
    first = _launch(x, partial, (rows, columns, row_stride), each, COLUMN_SUM_BLOCK)
    return out, [first, sum_launch(partial, out, down, columns)]


def summed(quantize_launch: QuantizeLaunch, dtype: torch.dtype) -> QuantizeLaunch:
    """Extend a `QuantizeLaunch` to sum the matrix over its rows, replacing the sums of blocks, as `column_sum` or
    `add_up`.
    """
    x, partial = quantize_launch.inputs[0], quantize_launch.results[4]
    few = partial is not None and partial.shape[0] <= FEW
    out, launches = _launches(x if partial is None else partial, x.device, dtype, few)
    return quantize_launch._replace(
        results=(*quantize_launch.results[:4], out, *quantize_launch.results[5:]),
        launches=lambda key: [*quantize_launch.launches(key), *launches],
    )


def sum_launch(
    partial: Tensor | BufferSpec, out: BufferSpec, rows: int, columns: int, second: BufferSpec | None = None
) -> LaunchSpec:
    """Return the launch that adds row-major partial sums [rows, columns]; the last columns go to `second` if given."""
    each = -(-rows // LAST_BLOCK[0]) * LAST_BLOCK[0]
    return _launch(partial, out, (rows, columns, columns), each, LAST_BLOCK, second)


def _launch(
    x: Tensor | BufferSpec,
    out: BufferSpec,
    extent: tuple[int, int, int],
    each: int,
    block: tuple[int, int, int],
    second: BufferSpec | None = None,
) -> LaunchSpec:
    """Return the launch that sums `each` rows of x at a time to out [columns] or [down, columns], or to out and
    `second`.

    Args:
        extent: rows, columns and row stride.
    """
    rows, columns, _ = extent
    bm, bn, warps = block
    down = -(-rows // each)
    # EVEN (no masks): every program sums whole blocks, also the last.
    constants = {"BM": bm, "BN": bn, "EVEN": rows == each * down and columns % bn == 0}
    numbers = (*extent, each, 0 if second is None else out.shape[0])
    return LaunchSpec(column_sums, (-(-columns // bn), down), (x, out, second), numbers, constants, warps)
