"""The products of groups on a GPU, each with its implementations in order of preference."""

from typing import Any

from torch import Tensor

from quaver.torch.backends.gpu.launching.device import why_no_fp8
from quaver.torch.numerics.groups import Laid
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Impl, Operation

_GEMMS, _VALUES, _HIGH = (f"{ops.GPU}.gemms.grouped_{name}" for name in ("mm", "values", "high"))


def _no_gemms(a: Laid, *_: Any) -> str:
    return why_no_fp8(a.data.device, "native")


def _no_values(a: Laid, *_: Any) -> str:
    return ops._off_a_gpu(a)  # type: ignore[arg-type]


def _no_kernels(a: Laid, *_: Any) -> str:
    return ops.no_kernels(a.data)


#: Tokens of all groups by each group's matrix: (tokens, matrices, offsets, n, dtype, bias, fast_accum) to [T, n].
GROUPED_MATMUL: Operation[Tensor] = Operation(
    "grouped_matmul",
    [
        Impl("native", f"{_GEMMS}:matmul", f"{_GEMMS}:reason", _no_gemms),
        Impl("decoded", f"{_VALUES}:bf16_matmul", f"{_VALUES}:reason_decoded", _no_values),
        Impl("triton", f"{_VALUES}:kernel_matmul", f"{_VALUES}:reason_kernel", _no_kernels),
        Impl("group by group", f"{_VALUES}:group_by_group"),
    ],
    parts=ops.MATMUL,
)
#: Transposes by transposes, summed over each group's slots: (one, other, dtype, fast_accum) to [groups, n, k].
GROUPED_SUMS: Operation[Tensor] = Operation(
    "grouped_sums",
    [
        Impl("native", f"{_GEMMS}:sums", f"{_GEMMS}:reason_sums", _no_gemms),
        Impl("decoded", f"{_VALUES}:bf16_sums", f"{_VALUES}:reason_decoded_sums", _no_values),
        Impl("triton", f"{_VALUES}:kernel_sums", f"{_VALUES}:reason_kernel", _no_kernels),
        Impl("group by group", f"{_VALUES}:sums_group_by_group"),
    ],
    parts=ops.MATMUL,
)


def _no_kernels_high(x: Tensor, *_: Any) -> str:
    return ops.no_kernels(x)


#: The same of what is not quantized: (x [T, k], w [groups, n, k], offsets, dtype, bias) to [T, n].
HIGH_MATMUL: Operation[Tensor] = Operation(
    "grouped_high",
    [
        Impl("torch", f"{_HIGH}:high_matmul", f"{_HIGH}:reason_high"),
        Impl("triton", f"{_HIGH}:kernel_high", f"{_HIGH}:reason_kernel_high", _no_kernels_high),
        Impl("group by group", f"{_HIGH}:high_group_by_group"),
    ],
)
#: (a [T, n], b [T, k], offsets, dtype) to [groups, n, k], summed over each group's rows.
HIGH_SUMS: Operation[Tensor] = Operation(
    "grouped_high_sums",
    [
        Impl("torch", f"{_HIGH}:high_sums", f"{_HIGH}:reason_high_sums"),
        Impl("triton", f"{_HIGH}:kernel_high_sums", f"{_HIGH}:reason_kernel_high", _no_kernels_high),
        Impl("group by group", f"{_HIGH}:high_sums_group_by_group"),
    ],
)
