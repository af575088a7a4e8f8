"""Rows and GPU operations of grouped products.

rows [T, K]  = op(inputs), sorted by group, in high precision or as codes
GROUPED_MATMUL  y [T, N]         of rows and a matrix of each group
GROUPED_WGRAD    y [groups, N, K] of transposes, summed over each group's rows
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu.device import why_no_fp8
from quaver.torch.numerics import grouped
from quaver.torch.numerics.grouped import GroupedOperand
from quaver.torch.numerics.quantized import Quantized, rebuild_operand, split_operand
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Implementation, Operation

# ---- rows of a grouped product ----
# Rows are passed by the caller as values or codes, or computed inside the autograd function. A `RowInputOp` can
# quantize tokens before it moves them; rows then arrive as codes without a high-precision copy and go to fprop
# directly. Its backward receives the gradient of the high-precision rows, as if nothing had been quantized.


class RowInputOp(Protocol):
    """Interface of an operation that computes rows outside of autograd.

    One object may serve many calls, and torch.compile treats equal objects as one. Methods take as many tensors as the
    operation has inputs; some may be None.
    """

    @property
    def recomputes_input(self) -> bool:
        """True if backward recomputes the rows, so that only the tensors saved by `forward` remain."""

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        """Compute the rows [T, K] sorted by group, and the values that the other methods need.

        Args:
            spec: spec of fprop's input; None if it is not quantized.

        Returns:
            Rows quantized by this spec, or in high precision, which are then quantized per group; and saved tensors,
            operands or None.
        """

    def recompute_input(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        """Recompute the rows bit for bit."""
        raise AssertionError("rows that are not recomputed are saved")

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        """Return the high-precision values of rows that are codes, or None if there are none.

        wgrad's operand is quantized from them if it differs from fprop's; without them the values of the codes are
        used.
        """
        return None

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs from the gradient g [T, K] of the high-precision rows.

        Args:
            needs: one flag per input.
        """


@dataclass(frozen=True)
class IdentityRows(RowInputOp):
    """Rows passed by the caller in high precision."""

    recomputes_input: bool = False

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        (value,) = x
        assert value is not None
        return value, ()

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        return (g,)


IDENTITY_ROWS = IdentityRows()


@dataclass(frozen=True)
class PrequantizedRows(RowInputOp):
    """Rows passed by the caller as codes, with the layout to rebuild the operand; they have no gradient."""

    layout: tuple[Any, ...]
    recomputes_input: bool = False

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        return rebuild_operand(self.layout, x), ()

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        return (None,) * len(needs)


def given_rows(x: Tensor | Quantized, dtype: torch.dtype) -> tuple[RowInputOp, Sequence[Tensor | None]]:
    """Return the operation that passes rows from the caller, in `dtype` or as codes, and its tensors."""
    if isinstance(x, Tensor):
        return IDENTITY_ROWS, [x.to(dtype)]
    tensors, layout = split_operand(x.plain())
    assert layout is not None
    return PrequantizedRows(layout), tensors


# ---- quantization and products of all groups on a GPU ----

_MODULE, _QUANTIZE, _BLOCK_SCALED, _CODES = (
    f"{ops.GPU}.{name}" for name in ("grouped_mm", "grouped_quantize", "grouped_block_scaled", "grouped_gemm")
)


def _no_gemms(a: GroupedOperand, *_: Any) -> str:
    return why_no_fp8(a.data.device, "native")


def _no_values(a: GroupedOperand, *_: Any) -> str:
    return ops._reason_not_on_gpu(a)  # type: ignore[arg-type]


def _no_kernels(a: GroupedOperand | Tensor, *_: Any) -> str:
    return ops.no_kernels(a if isinstance(a, Tensor) else a.data)


def _of(name: str, function: str, reason: str = "", place: Any = None) -> Implementation:
    return Implementation(name, f"{_MODULE}:{function}", *([f"{_MODULE}:{reason}", place] if reason else ()))


def _no_quantize_kernels(x: Tensor, *_: Any) -> str:
    return ops.no_kernels(x)


#: (rows [T, k], spec or None, spec of the transposes or None, offsets, factors, noise, noise of the transposes) -> the
#: operands of all groups, None where the spec is None.
GROUPED_QUANTIZE: Operation[tuple[GroupedOperand | None, GroupedOperand | None]] = Operation(
    "grouped_quantize",
    [
        Implementation("triton", f"{_QUANTIZE}:quantize", f"{_QUANTIZE}:reason", _no_quantize_kernels),
        Implementation("triton", f"{_BLOCK_SCALED}:quantize", f"{_BLOCK_SCALED}:reason", _no_quantize_kernels),
        Implementation("reference", grouped.quantize_both),
    ],
)
#: (weights [groups, n, k], spec or None, spec of the transposes or None, factors) -> operands [groups · n, k] and
#: [groups · k, n], each row with its scales; None if no kernel supports them.
GROUPED_WEIGHTS: Operation[tuple[Quantized | None, Quantized | None] | None] = Operation(
    "grouped_weights",
    [
        Implementation("triton", f"{_QUANTIZE}:quantize_weights", f"{_QUANTIZE}:reason_weights", _no_quantize_kernels),
        Implementation(
            "triton", f"{_BLOCK_SCALED}:quantize_weights", f"{_BLOCK_SCALED}:reason_weights", _no_quantize_kernels
        ),
        Implementation("reference", lambda *_: None),
    ],
)
#: Tokens of each group times its matrix: (tokens, matrices, offsets, n, dtype, bias, fast_accum) -> [T, n].
GROUPED_MATMUL: Operation[Tensor] = Operation(
    "grouped_matmul",
    [
        _of("native", "matmul", "reason", _no_gemms),
        Implementation("triton", f"{_CODES}:matmul", f"{_CODES}:reason", _no_kernels),
        _of("decoded", "bf16_matmul", "reason_decoded", _no_values),
        _of("triton", "kernel_matmul", "reason_kernel", _no_kernels),
        _of("group by group", "group_by_group"),
    ],
    parts=ops.MATMUL,
)
#: Transposed operands multiplied per group and summed over its tokens: (one, other, dtype, fast_accum) -> [groups, n,
#: k].
GROUPED_WGRAD: Operation[Tensor] = Operation(
    "grouped_sums",
    [
        _of("native", "sums", "reason_sums", _no_gemms),
        Implementation("triton", f"{_CODES}:sums", f"{_CODES}:reason_sums", _no_kernels),
        _of("decoded", "bf16_sums", "reason_decoded_sums", _no_values),
        _of("triton", "kernel_sums", "reason_kernel", _no_kernels),
        _of("group by group", "sums_group_by_group"),
    ],
    parts=ops.MATMUL,
)
#: Unquantized `GROUPED_MATMUL`: (x [T, k], w [groups, n, k], offsets, dtype, bias) -> [T, n].
HIGH_MATMUL: Operation[Tensor] = Operation(
    "grouped_high",
    [
        _of("torch", "high_matmul", "reason_high"),
        _of("triton", "kernel_high", "reason_kernel", _no_kernels),
        _of("group by group", "high_group_by_group"),
    ],
)
#: Unquantized `GROUPED_WGRAD`: (a [T, n], b [T, k], offsets, dtype) -> [groups, n, k], summed over each group's rows.
HIGH_WGRAD: Operation[Tensor] = Operation(
    "grouped_high_sums",
    [
        _of("torch", "high_sums", "reason_high_sums"),
        _of("triton", "kernel_high_sums", "reason_kernel", _no_kernels),
        _of("group by group", "high_sums_group_by_group"),
    ],
)
