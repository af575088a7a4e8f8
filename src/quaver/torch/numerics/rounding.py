"""Rounding and scale factors in torch tensors, on any device: the twin of `rounding` and `scaling` of
`quaver.core.numbers`.

Everything works on integers where a compiler or a GPU could round otherwise.
"""

import torch
from torch import Tensor

from quaver.core.numbers.formats import Format
from quaver.core.numbers.rounding import NAN_CODE
from quaver.core.numbers.scaling import FACTOR_EXPONENTS, TENSOR_EXPONENTS
from quaver.core.spec import QuantSpec
from quaver.torch.numerics.quantized import FLOAT8

INFINITY_BITS = 0x7F800000
SMALLEST_NORMAL_BITS = 0x00800000


def magnitude_bits(x: Tensor) -> Tensor:
    """The bits of |float32 x| as int32: they order as NaN > infinity > finite."""
    return x.view(torch.int32) & 0x7FFFFFFF


def exponent(bits: Tensor, fmt: Format) -> Tensor:
    """The largest p in bounds with amax × 2**p <= fmt.max, from amax's bits; 0 where amax is 0 or not finite. int32."""
    p = (fmt.emax + 127) - ((bits + (0x7FFFFF - fmt.max_mantissa)) >> 23)
    return torch.where(usable(bits), p.clamp(*FACTOR_EXPONENTS), 0)


def tensor_exponent(bits: Tensor) -> Tensor:
    """The same for a two-level tensor factor: amax × 2**p <= 2688 = 1.3125 × 2**11."""
    p = (11 + 127) - ((bits + (0x7FFFFF - 0x280000)) >> 23)
    return torch.where(usable(bits), p.clamp(*TENSOR_EXPONENTS), 0)


def usable(bits: Tensor) -> Tensor:
    """Where an amax defines a factor: finite, normal and so not zero."""
    return (bits >= SMALLEST_NORMAL_BITS) & (bits < INFINITY_BITS)


def power_of_two(p: Tensor) -> Tensor:
    """float32 2**p for int32 p in [-126, 127]."""
    return ((p + 127) << 23).view(torch.float32)


def ratio(largest: float, bits: Tensor) -> Tensor:
    """largest / amax, correctly rounded on a CPU and held to normal numbers; 1 where amax is 0 or not finite."""
    amax = torch.where(usable(bits), bits, 0x3F800000).view(torch.float32)
    e = torch.full_like(amax, largest) / amax
    info = torch.finfo(torch.float32)
    return torch.where(usable(bits), e.clamp(info.tiny, info.max), 1.0)


def encode(y: Tensor, spec: QuantSpec, u: Tensor | None) -> Tensor:
    """Scaled float32 values to codes: a tensor of y's shape in float8, or in uint8 where torch has no such dtype."""
    fmt = spec.format
    if fmt.packed:
        return encode_e2m1(y, u)
    dtype = FLOAT8.get(fmt.name)
    if dtype is None:
        return _encode_in_bytes(y, fmt, u)
    if u is not None:
        y = _round_stochastically(y, fmt, u)
    return y.clamp(-fmt.max, fmt.max).to(dtype)


def _encode_in_bytes(y: Tensor, fmt: Format, u: Tensor | None) -> Tensor:
    """float32 to uint8 codes of any format, NaN as 0x7F or the largest code."""
    whole, e = _steps(y, fmt, u)
    # A number of a binade counts 2**mantissa_bits steps from its start, where the field of its exponent begins.
    code = whole.to(torch.int32) + (e + (fmt.mantissa_bits - fmt.emin) << fmt.mantissa_bits)
    code |= torch.signbit(y).to(torch.int32) << (fmt.bits - 1)
    return torch.where(y.isnan(), NAN_CODE if fmt.has_nan else fmt.max_code, code).to(torch.uint8)


def _steps(y: Tensor, fmt: Format, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """|y|, held to the largest, in rounded steps of the format's grid: float32, and the exponent of a step, int32."""
    a = y.abs().clamp(max=fmt.max)
    e = ((a.view(torch.int32) >> 23) - 127).clamp(min=fmt.emin, max=fmt.emax) - fmt.mantissa_bits
    steps = a * power_of_two(-e)
    if u is None:
        return steps.round(), e
    whole = steps.floor()
    return whole + (u < steps - whole).to(torch.float32), e


def encode_e2m1(y: Tensor, u: Tensor | None) -> Tensor:
    """float32 to E2M1 codes, one a byte. The grid has step 1/2 below 2, 1 below 4 and 2 above; NaN becomes +6."""
    a = y.abs().clamp_(max=6.0)
    over2, over4 = (a >= 2.0).to(torch.float32), (a >= 4.0).to(torch.float32)
    # In units of its step a magnitude of the first stretch counts from 0, of the second from 2, of the third from 4.
    first = (over2 + over4).mul_(2.0)
    a.mul_(over4.mul_(0.5).add_(over2).neg_().add_(2.0))
    if u is None:
        code = a.round_().add_(first)
    else:
        whole = a.floor()
        code = whole.add_(u < a.sub_(whole)).add_(first)
    code = code.nan_to_num_(nan=7.0).to(torch.uint8)
    negative = torch.signbit(y) & ~y.isnan()
    return code | negative.to(torch.uint8) << 3


def _round_stochastically(y: Tensor, fmt: Format, u: Tensor) -> Tensor:
    """float32 to the format's grid, away from zero where u is below the fraction of a step."""
    whole, e = _steps(y, fmt, u)
    rounded = whole * power_of_two(e)
    return torch.where(y.isnan(), y, torch.copysign(rounded, y))


def flush(x: Tensor) -> Tensor:
    """Subnormals to zeros of their sign."""
    return torch.where(magnitude_bits(x) < SMALLEST_NORMAL_BITS, x * 0.0, x)
