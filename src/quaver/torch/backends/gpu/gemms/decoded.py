"""matmul where no native GEMM takes the operands: they are decoded to bf16 and multiplied with float32 sums.

Every FP8 and E2M1 value is a bf16 value, also times a power of two or an E4M3 scale, and products of two are exact in
float32. So scales of blocks of k are folded into the values, and those of tensors and rows into the product. What the
library quantizes stays within bf16's normal range, but for values that round up to 2**128, which neither bf16 nor
float32 has: they are held to bf16's largest number. Blocks of k whose scales are no powers of two have no bf16 values:
they are decoded to float32 and multiplied in true float32.
"""

import torch
from torch import Tensor

from quaver.torch.backends.gpu.gemms.products import fills, narrow, wide
from quaver.torch.backends.gpu.launching.device import why_no_kernels
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized, spread

#: What a kernel reads a bias in.
READ = torch.float32, torch.bfloat16, torch.float16


def matmul(
    a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False
) -> Tensor:
    """a [m, k] @ b [n, k].T + bias.

    Bounded: relative RMS below 1e-6 of float64 on the same operands for float32 output.
    """
    if 0 in (a.shape[0], *b.shape):
        return reference.matmul(a, b, dtype, bias)
    (x, of_rows), (y, of_columns) = decode(a), decode(b)
    half = x.dtype is y.dtype is dtype is torch.bfloat16 and (bias is None or bias.dtype is dtype)
    if of_rows is None and of_columns is None and half and fills(a.shape[0], b.shape[0]):
        return narrow(x, y.t(), bias)
    return finished(wide(x, y.t()), dtype, bias, of_rows, of_columns)


def finished(
    z: Tensor, dtype: torch.dtype, bias: Tensor | None, of_rows: Tensor | None = None, of_columns: Tensor | None = None
) -> Tensor:
    """A float32 product [m, n], which may be overwritten, times the scales of a's rows and b's, plus a bias: in dtype,
    by one launch where there are kernels."""
    if of_rows is None and of_columns is None and bias is None:
        return z.to(dtype)
    if not why_no_kernels(z.device) and (bias is None or bias.dtype in READ):
        from quaver.torch.backends.gpu.emulating.folding import fold

        return fold(z, dtype, bias, of_rows, of_columns)
    z = rescale(z, *(s for s in (of_rows, None if of_columns is None else of_columns.t()) if s is not None))
    return (z if bias is None else z.add_(bias)).to(dtype)


def decode(q: Quantized) -> tuple[Tensor, Tensor | None]:
    """An operand as bf16 values [rows, k] (float32 where bf16 cannot hold them), and what multiplies each row of its
    product: float32 [rows or 1, 1], or None."""
    outer = None
    if q.spec.two_level:
        assert q.tensor_factor is not None
        outer = 1.0 / q.tensor_factor
    elif q.spec.block[1] is None:
        outer = q.scales()
        outer = outer if outer.shape[0] == 1 else _of_rows(outer, q)
    half = outer is not None or q.spec.power_of_two
    return _values(q, torch.bfloat16 if half else torch.float32), outer


def _of_rows(scales: Tensor, q: Quantized) -> Tensor:
    """Scales of blocks of rows [blocks, 1] to one a row."""
    return spread(scales, (q.spec.block[0], 1), (q.shape[0], 1))


def _values(q: Quantized, dtype: torch.dtype) -> Tensor:
    """The data [rows, k] times the scales of their blocks of k, without those of rows and of the tensor."""
    if not why_no_kernels(q.device):
        from quaver.torch.backends.gpu.gemms import decoding as kernel

        if not kernel.reason(q, dtype, False):
            return kernel.decode(q, dtype, False)
    if q.spec.block[1] is None:
        values = (q.data if q.data.is_floating_point() else q.lying_values()).to(dtype)
        return values.t() if q.turned else values
    if q.spec.two_level:
        scales = q.plain_scale().view(torch.float8_e4m3fn).to(torch.float32)
        scales = scales.t() if q.turned else scales
    else:
        scales = q.scales()
    most = torch.finfo(dtype).max
    return q.values().mul_(spread(scales, q.spec.block, q.shape)).clamp_(-most, most).to(dtype)


def rescale(y: Tensor, *scales: Tensor) -> Tensor:
    """y × each scale, in place. In halves, since one scale may take a value out of the range where both do not."""
    halves = [_halves(s) for s in scales]
    for part in (0, 1):
        for pair in halves:
            y = y.mul_(pair[part])
    return y


def _halves(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Two factors of about the same size, the first a power of two; NaN in the second."""
    first = ((((scale.view(torch.int32) >> 23) & 0xFF) + 127 >> 1) << 23).view(torch.float32)
    return first, scale / first
