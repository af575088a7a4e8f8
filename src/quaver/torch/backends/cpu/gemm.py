"""GEMMs on a CPU, fast and exact: eight-bit operands are decoded to bf16 values and multiplied with float32 sums.

Every E4M3, E5M2 and E2M1 value is a bf16 value, also after multiplication by a power of two or an E4M3 scale, and the
product of two of them is exact in float32. So a float32 GEMM of the decoded values, or a bf16 GEMM if the output is
bf16, sums exactly the products that the recipe defines (docs/design/numerics.md). Without bf16 instructions, bf16 GEMMs
would be up to forty times slower than float32.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quaver.torch.backends.cpu import quantize
from quaver.torch.backends.cpu.decode import ROWS, decode, decodes_exactly_to_bf16, rescales_exactly
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized

# ---- narrow products: few rows or few columns ----
# Such a product reads its wide operand once, so its cost is decoding. The wide operand is decoded in slices that fit
# the cache, and multiplied in float32 at once. The errors of one long float32 sum would add up, so k is cut into
# pieces, whose sums are added in float64.

#: Elements decoded at a time: 3 MB including temporaries.
SLICE = 1 << 19
#: Longest float32 sum: 256 terms lose at most 5e-7 even if one product dominates.
PIECE = 256
#: The same for sums along contiguous memory, which run in as many parallel sums as a vector has lanes.
CONTIGUOUS_PIECE = 1024
#: Largest number of outputs for which all may cancel by chance, so that float64 is used.
EXACT = 16


def narrow_matmul(a: Quantized, b: Quantized) -> Tensor:
    """Multiply a [m, k] @ b [n, k].T with scales for small m or small n; returns contiguous float64 [m, n].

    The relative RMS error is below 1e-6 against float64 on the same operands.
    """
    return _narrow_matmul(a, b) if a.shape[0] <= b.shape[0] else _narrow_matmul(b, a).t().contiguous()


def _narrow_matmul(few: Quantized, wide: Quantized) -> Tensor:
    exact = few.shape[0] * wide.shape[0] <= EXACT
    left = None if exact else decode(few, as_bf16=False, tiny=False, slot="left")
    if left is None:
        return reference.double(few) @ reference.double(wide).t()
    x = left[0]  # [m, k]
    rows, columns = wide.stored_shape
    step = _step(wide, columns)
    if wide.transposed:
        y = torch.zeros(x.shape[0], columns, dtype=torch.float64, device="cpu")
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            y += _times(x[:, start:stop], _stored_rows(wide, start, stop), PIECE)
    else:
        y = torch.empty(x.shape[0], rows, dtype=torch.float64, device="cpu")
        piece = CONTIGUOUS_PIECE if x.shape[0] == 1 else PIECE
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            y[:, start:stop] = _times(x, _stored_rows(wide, start, stop), piece)
    return y.mul_(left[1])


def _step(q: Quantized, columns: int) -> int:
    """Return the rows of one slice, a multiple of the block height."""
    block = q.stored_block[0] or 1
    return max(SLICE // columns // block, 1) * block


def _stored_rows(q: Quantized, start: int, stop: int) -> Quantized:
    """Return a range of stored rows of an operand, starting at a block boundary."""
    scale, block = q.scale, q.stored_block[0]
    if isinstance(scale, Tensor) and block is not None:
        scale = scale[start // block : -(-stop // block)]
    shape = stop - start, q.stored_shape[1]
    return Quantized(
        q.data[start:stop], scale, q.spec, shape[::-1] if q.transposed else shape, q.transposed, q.tensor_factor
    )


def _times(x: Tensor, part: Quantized, piece: int) -> Tensor:
    """Multiply x [m, k] @ part [r, k].T; returns float64 [m, r]."""
    decoded = decode(part, as_bf16=False, tiny=False, slot="right")
    if decoded is None:
        # float32 cannot represent the products of scales that differ this much or are not finite.
        return x.double() @ reference.double(part).t()
    values, scale = decoded
    v = values.t()  # [k, r]
    k = v.shape[0]
    y = torch.mm(x[:, :piece], v[:piece]).double()
    for start in range(piece, k, piece):
        y += torch.mm(x[:, start : start + piece], v[start : start + piece])
    return y.mul_(scale.t() if isinstance(scale, Tensor) else scale)


# ---- matmul ----

#: Largest m × n × k for which a plain float32 GEMM is fastest.
SMALL = 1 << 18
#: Largest number of rows or columns for which a product is computed slice by slice.
NARROW = 4
#: The same limit if the other operand has at least this many elements, so that it exceeds the cache when decoded.
NARROW_LARGE = 16, 1 << 22
#: Largest per-tensor operand in elements whose decoded values are cached; decoding costs as much as such a GEMM.
REMEMBERED = 4096
#: Range of scale products that addmm receives as alpha: if BLAS multiplies alpha into an eight-bit operand, its
#: values and the sums stay normal.
LIFTS = (2.0**-60, 2.0**60)
_precision: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def reason(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False) -> str:
    """Return why this implementation does not support the call, or ""."""
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
    """Compute a [m, k] @ b [n, k].T + bias in `dtype`.

    The relative RMS error is below 1e-6 against float64 on the same operands for float32 output.

    Args:
        out: tensor of this dtype to write to, or None.
    """
    (m, k), n = a.shape, b.shape[0]
    size, few = m * n * k, min(m, n)
    if 0 < size <= SMALL and (few > NARROW or (a.scale.__class__ is float and b.scale.__class__ is float)):
        x, y = decoded(a), decoded(b)
        if x is not None and y is not None:
            x, y = x.t() if a.transposed else x, y if b.transposed else y.t()
            return _written(scaled_product(x, y, _of_rows(a), _of_rows(b), dtype, bias), out)
    if size == 0:
        return _written(reference.matmul(a, b, dtype, bias), out)
    exact = decodes_exactly_to_bf16(a) and decodes_exactly_to_bf16(b)
    if not exact and _rounds():
        return _written(reference.matmul(a, b, dtype, bias), out)
    if few <= NARROW or (few <= NARROW_LARGE[0] and max(m, n) * k >= NARROW_LARGE[1]):
        y = narrow_matmul(a, b)
        return _written((y if bias is None else y + bias).float().to(dtype), out)
    tiny = size <= SMALL
    # torch rounds the product to bf16 itself.
    as_bf16 = dtype is torch.bfloat16 and bias is None and not tiny and rescales_exactly(a) and rescales_exactly(b)
    as_bf16 = as_bf16 and multiplies_bf16()
    left, right = decode(a, as_bf16, tiny, "left"), decode(b, as_bf16, tiny, "right")
    if left is None or right is None:
        # float32 cannot represent the products of scales that differ this much or are not finite.
        return _written(reference.matmul(a, b, dtype, bias), out)
    into = out if as_bf16 or dtype is torch.float32 else quantize.buffer("product", (m, n), torch.float32)
    if _scales_exactly(left[1], right[1]):
        # The GEMM applies the scale at no cost.
        nothing = _nothing.to(left[0].dtype)
        y = torch.addmm(nothing, left[0], right[0].t(), beta=0, alpha=left[1] * right[1], out=into)  # type: ignore[arg-type]
    else:
        y = rescale(torch.mm(left[0], right[0].t(), out=into), left[1], right[1])
    if bias is not None:
        y += bias
    return _written(y if y.dtype is dtype or out is not None else y.to(dtype), out)


def _written(y: Tensor, out: Tensor | None) -> Tensor:
    """Return the result, copied to `out` if one was passed."""
    return y if out is None or y is out else out.copy_(y)


def decoded(q: Quantized) -> Tensor | None:
    """Return the float32 values of an operand without its scales in storage order, cached if there are few.

    Returns None unless scales can be applied to the product: one scale, or one per row within `ROWS` and no NaN.
    """
    values = q.decoded
    if values is None:
        if isinstance(q.scale, Tensor):
            if q.spec.block not in ((1, None), (None, None)) or q.scale.dtype is not torch.float32:
                return None
            low, high = torch.aminmax(q.scale)
            if not (ROWS[0] <= low.item() and high.item() <= ROWS[1]):
                return None
        values = q.data.float() if q.data.is_floating_point() else q.stored_values()
        if values.numel() <= REMEMBERED:
            q.decoded = values
    return values


def _of_rows(q: Quantized) -> Tensor | float:
    """Return the row scales as a column, or the single scale."""
    return q.scale.t() if q.transposed and isinstance(q.scale, Tensor) else q.scale


_nothing = torch.zeros((), dtype=torch.float32, device="cpu")


def scaled_product(
    left: Tensor, right: Tensor, a: Tensor | float, b: Tensor | float, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Compute left [m, k] @ right [k, n] × a × b + bias for a few thousand elements, with as few torch calls as
    possible.
    """
    if _scales_exactly(a, b):
        y = torch.addmm(_nothing, left, right, beta=0, alpha=a * b)  # type: ignore[arg-type]
    else:
        y = rescale(torch.mm(left, right), a, b)
    if bias is not None:
        y += bias
    if dtype is torch.float32:
        return y
    return y.bfloat16() if dtype is torch.bfloat16 else y.to(dtype)


def _scales_exactly(a: Tensor | float, b: Tensor | float) -> bool:
    """Return True if sums times both scales equal the sums of scaled products bit for bit: for a power of two."""
    scale = a * b if isinstance(a, float) and isinstance(b, float) else 0.0
    return LIFTS[0] < scale < LIFTS[1] and math.frexp(scale)[0] == 0.5


@cache
def multiplies_bf16() -> bool:
    """Return True if torch uses oneDNN for bf16 products on a CPU; otherwise it computes them one element at a time."""
    return bool(getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)())


def _rounds() -> bool:
    """Return True if the process lets torch round the operands of float32 products on a CPU."""
    return _precision.fp32_precision not in ("none", "ieee")


def rescale(y: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """Compute y × a × b in place; a is a number or a column [m, 1], b a number or a column [n, 1]."""
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
    # The product of two scales may leave float32 though the result does not, so it is applied in halves.
    half = math.ldexp(1.0, math.frexp(s)[1] // 2)
    return y.mul_(half).mul_(s / half)
