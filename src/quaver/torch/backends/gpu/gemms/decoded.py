"""matmul where no native GEMM takes the operands: they are decoded to bf16 and multiplied with float32 sums.

Every FP8 and E2M1 value is a bf16 value, also times a power of two or an E4M3 scale, and products of two are exact in
float32. Scales of tensors and rows go on the result. Scales of blocks are folded into the values, after the largest of
each row has been taken out of them: what is smaller than 2**-117 of it may lose bits, nothing overflows on the way.
"""

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.backends.gpu.launching.device import architecture, why_no_kernels
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized, spread

#: The oldest capability with bf16 tensor cores.
HALF = 80


def matmul(
    a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False
) -> Tensor:
    """a [m, k] @ b [n, k].T + bias.

    Bounded: relative RMS below 1e-6 of float64 on the same operands for float32 output.
    """
    if 0 in (a.shape[0], *b.shape):
        return reference.matmul(a, b, dtype, bias)
    (x, of_rows), (y, of_columns) = decode(a), decode(b)
    z = rescale(product(x, y.t()), of_rows, of_columns.t())
    if bias is not None:
        z = z.add_(bias)
    return z.to(dtype)


def decode(q: Quantized) -> tuple[Tensor, Tensor]:
    """An operand as bf16 values [rows, k] (float32 where bf16 cannot hold them), and what multiplies each row of its
    product: float32 [rows or 1, 1]."""
    if q.spec.two_level:
        assert q.tensor_factor is not None and isinstance(q.scale, Tensor)
        return _values(q, q.plain_scale().view(torch.float8_e4m3fn).to(torch.float32)), 1.0 / q.tensor_factor
    scales = q.scales()
    if q.spec.block[1] is None:
        return _values(q, None), scales if scales.shape[0] == 1 else _of_rows(scales, q)
    top = _power_below(torch.where(scales.isnan(), 0.0, scales).amax(1, keepdim=True))
    within = scales / top
    return _values(q, within.t() if q.turned else within), _of_rows(top, q)


def _of_rows(scales: Tensor, q: Quantized) -> Tensor:
    """Scales of blocks of rows [blocks, 1] to one a row."""
    return spread(scales, (q.spec.block[0], 1), (q.shape[0], 1))


def _values(q: Quantized, scales: Tensor | None) -> Tensor:
    """The data [rows, k] times the scales of their blocks as they lie."""
    half = scales is None or q.spec.power_of_two or q.spec.two_level
    dtype = torch.bfloat16 if half else torch.float32
    if not why_no_kernels(q.device):
        from quaver.torch.backends.gpu.gemms import decoding as kernel

        spec = QuantSpec(q.spec.format, q.spec.block, "power_of_two" if half else "fp32")
        plain = Quantized(q.data, 1.0 if scales is None else scales, spec, q.shape, q.turned)
        if not kernel.reason(plain, dtype, scales is not None):
            return kernel.decode(plain, dtype, scales is not None)
    if scales is None and q.data.is_floating_point():
        values = q.data.to(dtype)
        return values.t() if q.turned else values
    if scales is None:
        return q.values().to(dtype)
    blocks = scales.t() if q.turned else scales
    return q.values().mul_(spread(blocks, q.spec.block, q.shape)).to(dtype)


def _power_below(scales: Tensor) -> Tensor:
    """The largest powers of two that are not above these, and normal."""
    return (scales.view(torch.int32) & 0x7F800000).clamp_(min=0x00800000).view(torch.float32)


def product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y in float32, of two bf16 matrices or in true float32, whatever the process allows torch."""
    if x.is_cuda:
        if x.dtype is y.dtype is torch.bfloat16 and torch.version.hip is None and architecture(x.device) >= HALF:
            return torch.mm(x, y, out_dtype=torch.float32)
        if torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee"):
            # TF32 would round the operands, and the setting is the process's: other threads would see it change.
            return (x.double() @ y.double()).float()
    return x.float() @ y.float()


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
