"""matmul on a CPU, fast and exact: eight-bit operands are decoded to bf16 values and multiplied with float32 sums.

Every E4M3, E5M2 and E2M1 value is a bf16 value, also after multiplying by a power of two or by an E4M3 scale, and the
product of two of them is exact in float32. So a bf16 GEMM, or a float32 GEMM that works in bf16 inside, adds up
exactly the products that the recipe defines. docs/numerics.md describes the decoding.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quaver.core.formats import Format
from quaver.torch import reference
from quaver.torch.cpu_quantize import scalar
from quaver.torch.quantized import Quantized, e2m1_values

#: Up to this m × n × k a plain float32 GEMM is fastest.
SMALL = 1 << 18
#: GEMMs with an output of at most this many rows or columns are left to float64.
NARROW = 4
#: Exponents of block scales that may be folded into the operands: products and sums stay normal float32 numbers.
FOLD = (-50, 6)
#: Row scales within these go on the output one after the other without leaving the range.
ROWS = (2.0**-60, 2.0**60)

#: A per-tensor operand of at most this many elements remembers its decoded matrix: decoding costs as much as its GEMM.
REMEMBERED = 4096
#: Products of scales within these can be folded into an eight-bit operand: its values and the sums stay normal.
LIFTS = (2.0**-60, 2.0**60)
_precision: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def reason(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None) -> str:
    """Why this implementation does not take the call, or ""."""
    return "" if a.data.is_cpu else "the operands are not on a CPU"


def matmul(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [m, k] @ b [n, k].T + bias.

    Bounded: relative RMS below 1e-6 of float64 on the same operands for float32 output.
    """
    (m, k), n = a.shape, b.shape[0]
    size = m * n * k
    if 0 < size <= SMALL and a.scale.__class__ is float and b.scale.__class__ is float:
        return _small(a, b, a.scale * b.scale, dtype, bias)
    if size == 0 or min(m, n) <= NARROW:
        # A matrix times a few vectors is summed in one long row, whose errors add up: float64 keeps the bound.
        return reference.matmul(a, b, dtype, bias)
    exact = _folds_exactly(a) and _folds_exactly(b)
    tiny = size <= SMALL
    half = dtype is torch.bfloat16 and bias is None and not tiny and _rescales_exactly(a) and _rescales_exactly(b)
    left, right = decode(a, half, tiny), decode(b, half, tiny)
    if left is None or right is None:
        # Scales so far apart, or not finite, that float32 could not hold a product: float64 can.
        return reference.matmul(a, b, dtype, bias)
    x = left[0].t() if a.turned else left[0]
    y = right[0] if b.turned else right[0].t()
    if half or tiny or not exact:
        y = torch.mm(x, y)
    else:
        with bf16_products():
            y = torch.mm(x, y)
    y = rescale(y, left[1], right[1])
    if bias is not None:
        y += bias
    return y if y.dtype is dtype else y.to(dtype)


def _small(a: Quantized, b: Quantized, scale: float, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Per-tensor operands of a few thousand elements: every call counts."""
    left = a.decoded
    if left is None:
        left = _remember(a)
    if a.turned:
        left = left.t()
    exact = LIFTS[0] < scale < LIFTS[1] and a.spec.power_of_two and b.spec.power_of_two
    if exact and b.decoded is not None:
        # Used before, as weights are: the scale is in the operand already, or goes there for the next time.
        y = torch.mm(left, b.right if b.lift == scale and b.right is not None else _lifted(b, b.decoded, scale))
    else:
        right = _remember(b) if b.decoded is None else b.decoded
        y = torch.mm(left, right if b.turned else right.t())
        y = y.mul_(scalar(scale)) if exact else rescale(y, a.scale, b.scale)
    if bias is not None:
        y += bias
    if dtype is torch.float32:
        return y
    return y.bfloat16() if dtype is torch.bfloat16 else y.to(dtype)


def _remember(q: Quantized) -> Tensor:
    decoded = q.data.float()
    if decoded.numel() <= REMEMBERED:
        q.decoded = decoded
    return decoded


def _lifted(b: Quantized, decoded: Tensor, scale: float) -> Tensor:
    """The right side of a product with both scales in it: a power of two, so that every sum is what it would be."""
    right = decoded * scalar(scale)
    b.right, b.lift = right if b.turned else right.t(), scale
    return b.right


@contextmanager
def bf16_products() -> Iterator[None]:
    """float32 GEMMs that multiply in bf16. The setting is the process's, and is put back; no hardware bf16, no
    effect."""
    before = _precision.fp32_precision
    _precision.fp32_precision = "bf16"
    try:
        yield
    finally:
        _precision.fp32_precision = before


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


def decode(q: Quantized, half: bool, tiny: bool) -> tuple[Tensor, Tensor | float] | None:
    """An operand as a matrix of bf16 or float32 values as it lies, and what its product is to be multiplied by.

    Block scales are in the matrix; scales of rows and of the tensor are not. None: the scales are too far apart for
    that.
    """
    if q.spec.two_level:
        return _decode_two_level(q, half)
    if not isinstance(q.scale, Tensor):
        return _values(q, half, tiny), q.scale
    if q.spec.block[1] is not None:
        return _decode_blocks(q, half, tiny)
    low, high = torch.aminmax(q.scale)
    if not (ROWS[0] <= low.item() and high.item() <= ROWS[1]):
        return None
    scale = q.scale.t() if q.turned else q.scale
    return _values(q, half, tiny), reference.spread(scale, q.spec.block, q.shape)


def _decode_blocks(q: Quantized, half: bool, tiny: bool) -> tuple[Tensor, float] | None:
    assert isinstance(q.scale, Tensor)
    # Code 0 of E8M0 becomes 0: its data are zeros.
    scale = (q.scale.to(torch.int32) << 23).view(torch.float32) if q.spec.scale == "e8m0" else q.scale
    low, high = (t.item() for t in torch.aminmax(scale))
    if low == 0.0:
        low = torch.where(scale == 0, high, scale).amin().item()
    if not high < math.inf:
        return None
    bottom, top = math.frexp(low)[1] - 1, math.frexp(high)[1] - 1
    if top - bottom > FOLD[1] - FOLD[0]:
        return None
    shift = 0 if FOLD[0] <= bottom and top <= FOLD[1] else top
    values, lift = (q.data.float(), 0) if tiny else _raw(q.data, q.spec.format, half)
    factor = scale * 2.0**-shift * 2.0**lift
    return fold(values, factor.to(values.dtype), q.lying_block), math.ldexp(1.0, shift)


def _rescales_exactly(q: Quantized) -> bool:
    """Whether its scales can be applied after the one rounding to bf16."""
    return q.spec.power_of_two or q.spec.scale == "two_level"


def _folds_exactly(q: Quantized) -> bool:
    """Whether the decoded matrix holds bf16 values."""
    return q.spec.power_of_two or q.spec.two_level or q.spec.block[1] is None


def fold(values: Tensor, factor: Tensor, block: tuple[int | None, int | None]) -> Tensor:
    """Multiply the blocks of a matrix by a factor each, in place where the blocks divide it."""
    rows, columns = values.shape
    br, bc = block[0] or rows, block[1] or columns
    if rows % br or columns % bc:
        return values * reference.spread(factor, block, (rows, columns))
    if br == 1:
        values.view(rows, columns // bc, bc).mul_(factor[:, :, None])
    elif bc == 1:
        values.view(rows // br, br, columns).mul_(factor[:, None, :])
    else:
        values.view(rows // br, br, columns // bc, bc).mul_(factor[:, None, :, None])
    return values


def _decode_two_level(q: Quantized, half: bool) -> tuple[Tensor, float]:
    assert isinstance(q.scale, Tensor) and q.tensor_factor is not None
    factor = q.scale.view(torch.float8_e4m3fn).to(torch.bfloat16 if half else torch.float32)
    rows, columns = q.lying_shape
    pairs = _e2m1_pairs(half).index_select(0, q.data.reshape(-1).to(torch.int32))
    values = pairs.view(factor.dtype).view(rows, -1)[:, :columns].contiguous()
    return fold(values, factor, q.lying_block), 1.0 / q.tensor_factor.item()


_pairs: dict[bool, Tensor] = {}


def _e2m1_pairs(half: bool) -> Tensor:
    """Both values of every byte of packed E2M1, as one integer each: [256]."""
    if half not in _pairs:
        byte = torch.arange(256)
        values = e2m1_values(torch.device("cpu"))
        both = torch.stack([values[byte & 15], values[byte >> 4]], 1)
        _pairs[half] = both.to(torch.bfloat16).view(torch.int32)[:, 0] if half else both.view(torch.int64)[:, 0]
    return _pairs[half]


def _values(q: Quantized, half: bool, tiny: bool) -> Tensor:
    """FP8 codes to bf16 or float32 values, without scales; NaN codes are not kept: their scale is NaN."""
    if tiny:
        return q.data.float()
    raw, lift = _raw(q.data, q.spec.format, half)
    return raw.mul_(2.0**lift) if lift else raw


def _raw(data: Tensor, fmt: Format, half: bool) -> tuple[Tensor, int]:
    """FP8 codes moved into the bits of a wider type, and the exponent that this leaves out.

    E5M2 is the top byte of a float16; E4M3 shifts into a float16 or a bfloat16 with its sign carried along.
    """
    if fmt.name == "e5m2":
        wide = data.view(torch.uint8).to(torch.int16).bitwise_left_shift_(8).view(torch.float16)
        return wide.to(torch.bfloat16 if half else torch.float32), 0
    bits = data.view(torch.int8).to(torch.int16)
    if half and not _flushes_subnormals():
        return bits.bitwise_left_shift_(4).bitwise_and_(-30721).view(torch.bfloat16), 120
    wide = bits.bitwise_left_shift_(7).bitwise_and_(-16385).view(torch.float16)
    return wide.to(torch.bfloat16 if half else torch.float32), 8


_subnormal = torch.tensor(2.0**-130)


def _flushes_subnormals() -> bool:
    return (_subnormal * 1.0).item() == 0.0
