"""matmul on a CPU, fast and exact: eight-bit operands are decoded to bf16 values and multiplied with float32 sums.

Every E4M3, E5M2 and E2M1 value is a bf16 value, also after multiplying by a power of two or by an E4M3 scale, and the
product of two of them is exact in float32. So a bf16 GEMM, or a float32 GEMM that works in bf16 inside, adds up
exactly the products that the recipe defines (docs/design/numerics.md). No setting of the process is changed for
that: other threads would multiply by it. Where torch multiplies bf16 without the processor's help, which
takes up to forty times as long as float32, values are decoded to float32.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quaver.torch.backends.cpu import brgemm, narrow, scratch
from quaver.torch.backends.cpu.decoding import ROWS, decode, folds_exactly, rescales_exactly
from quaver.torch.backends.cpu.repeated import values_of
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized

#: Up to this m × n × k a plain float32 GEMM is fastest.
SMALL = 1 << 18
#: Products with at most this many rows or columns are multiplied slice by slice.
NARROW = 4
#: Products with at most so many too, where the other operand has so many elements that decoded it leaves the cache.
NARROW_BESIDE = 16, 1 << 22
#: A per-tensor operand of at most this many elements remembers its decoded matrix: decoding costs as much as its GEMM.
REMEMBERED = 4096
#: Products of scales within these can be folded into an eight-bit operand: its values and the sums stay normal.
LIFTS = (2.0**-60, 2.0**60)
_precision: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def reason(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False) -> str:
    """Why this implementation does not take the call, or ""."""
    if a.swizzled or b.swizzled:
        return "the scales are in the order of a GPU's GEMM"
    return "" if a.data.is_cpu else "the operands are not on a CPU"


def matmul(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """a [m, k] @ b [n, k].T + bias.

    Args:
        out: of this dtype, where the result is written if it is given.
    Bounded: relative RMS below 1e-6 of float64 on the same operands for float32 output.
    """
    (m, k), n = a.shape, b.shape[0]
    size, few = m * n * k, min(m, n)
    if 0 < size <= SMALL and (few > NARROW or (a.scale.__class__ is float and b.scale.__class__ is float)):
        x, y = decoded(a), decoded(b)
        if x is not None and y is not None:
            x, y = x.t() if a.turned else x, y if b.turned else y.t()
            return _written(scaled_product(x, y, _of_rows(a), _of_rows(b), dtype, bias), out)
    if size == 0:
        return _written(reference.matmul(a, b, dtype, bias), out)
    exact = folds_exactly(a) and folds_exactly(b)
    if not exact and _rounds():
        return _written(reference.matmul(a, b, dtype, bias), out)
    if few <= NARROW or (few <= NARROW_BESIDE[0] and max(m, n) * k >= NARROW_BESIDE[1]):
        y = narrow.product(a, b)
        return _written((y if bias is None else y + bias).float().to(dtype), out)
    tiny = size <= SMALL
    # A product that torch rounds to bf16 itself.
    half = dtype is torch.bfloat16 and bias is None and not tiny and rescales_exactly(a) and rescales_exactly(b)
    half = half and multiplies_bf16()
    blocked = exact and not half and size >= brgemm.SMALLEST and brgemm.takes(m, n, k)
    # Most bear no mark, and a call of Python's that decides so is saved.
    left = (decode if a.mark is None else values_of)(a, half or blocked, tiny, "left")
    right = (decode if b.mark is None else values_of)(b, half or blocked, tiny, "right")
    if left is None or right is None:
        # Scales so far apart, or not finite, that float32 could not hold a product: float64 can.
        return _written(reference.matmul(a, b, dtype, bias), out)
    if blocked:
        y = brgemm.product(left[0], right[0], out if dtype is torch.float32 else None)
    elif half or dtype is torch.float32:
        y = torch.mm(left[0], right[0].t(), out=out)
    else:
        y = torch.mm(left[0], right[0].t(), out=scratch.room("product", (m, n), torch.float32))
    y = rescale(y, left[1], right[1])
    if bias is not None:
        y += bias
    return _written(y if y.dtype is dtype or out is not None else y.to(dtype), out)


def _written(y: Tensor, out: Tensor | None) -> Tensor:
    """A result where it is wanted."""
    return y if out is None or y is out else out.copy_(y)


def decoded(q: Quantized) -> Tensor | None:
    """The float32 values, as they lie, of an operand without its scales; remembered where they are few.

    None unless the product can take the scales: one, or one a row within `ROWS`, which also holds no NaN.
    """
    values = q.decoded
    if values is None:
        if isinstance(q.scale, Tensor):
            if q.spec.block not in ((1, None), (None, None)) or q.scale.dtype is not torch.float32:
                return None
            low, high = torch.aminmax(q.scale)
            if not (ROWS[0] <= low.item() and high.item() <= ROWS[1]):
                return None
        values = q.data.float() if q.data.is_floating_point() else q.lying_values()
        if values.numel() <= REMEMBERED:
            q.decoded = values
    return values


def _of_rows(q: Quantized) -> Tensor | float:
    """Its scales in a column, or its one."""
    return q.scale.t() if q.turned and isinstance(q.scale, Tensor) else q.scale


_nothing = torch.zeros((), dtype=torch.float32, device="cpu")


def scaled_product(
    left: Tensor, right: Tensor, a: Tensor | float, b: Tensor | float, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """left [m, k] @ right [k, n] × a × b + bias, of a few thousand elements, where every call counts; see `rescale`."""
    scale = a * b if isinstance(a, float) and isinstance(b, float) else 0.0
    if LIFTS[0] < scale < LIFTS[1] and math.frexp(scale)[0] == 0.5:
        # A power of two: each sum is what it would be without it.
        y = torch.addmm(_nothing, left, right, beta=0, alpha=scale)
    else:
        y = rescale(torch.mm(left, right), a, b)
    if bias is not None:
        y += bias
    if dtype is torch.float32:
        return y
    return y.bfloat16() if dtype is torch.bfloat16 else y.to(dtype)


@cache
def multiplies_bf16() -> bool:
    """Whether torch hands bf16 products on a CPU to oneDNN; else it computes them number by number."""
    return bool(getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)())


def _rounds() -> bool:
    """Whether the process has asked torch to round the operands of float32 products on a CPU."""
    return _precision.fp32_precision not in ("none", "ieee")


def rescale(y: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """y × a × b in place: a number or a column [m, 1], and a number or a column [n, 1]."""
    if isinstance(a, float) and isinstance(b, float):
        return _rescale(y, a * b)
    for s in (a, b.t() if isinstance(b, Tensor) else b):
        y = y.mul_(s) if isinstance(s, Tensor) else _rescale(y, s)
    return y


def _rescale(y: Tensor, s: float) -> Tensor:
    if s == 1.0:
        return y
    if 1e-37 < s < 1e37 or s != s:
        return y.mul_(s)
    # The product of two scales may leave float32 though the result does not: apply it in halves.
    half = math.ldexp(1.0, math.frexp(s)[1] // 2)
    return y.mul_(half).mul_(s / half)
