"""quantize and matmul in plain torch operations on any device; faster implementations must match their bits."""

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.reference.numerics import FLT_MAX, NAN_CODE, TWO_LEVEL_MAX
from quaver.torch.numerics.quantized import Quantized, ScalarOverride, pack, spread
from quaver.torch.numerics.rounding import (
    INFINITY_BITS,
    NO_NOISE,
    SMALLEST_NORMAL_BITS,
    EagerNoise,
    encode,
    exponent,
    flush,
    magnitude_bits,
    power_of_two,
    ratio,
    rotate,
    tensor_exponent,
    uniform,
)


def quantize(
    x: Tensor,
    spec: QuantSpec,
    amax: ScalarOverride = None,
    factor: ScalarOverride = None,
    noise: EagerNoise | Tensor = NO_NOISE,
    *_: object,
) -> Quantized:
    """Quantize one GEMM operand [rows, k]; see `quaver.reference.quantize`.

    Args:
        factor: encode factor; 0 is unset.
        noise: (seed, tensor id, count), or the result of `uniform` for it.
        *_: hints for kernels, which do not change the result.
    """
    x = x.to(torch.float32)
    if spec.hadamard:
        x = rotate(x)
    rows, k = x.shape
    u = None
    if spec.rounding == "stochastic":
        x = flush(x)
        u = noise if isinstance(noise, Tensor) else uniform(rows, k, *noise, x.device)
    if spec.scale == "unit":
        one = torch.ones(spec.blocks(rows, k), dtype=torch.float32, device=x.device)
        return _finish(x, spec, u, one, one, None, None)
    measured = block_bits(magnitude_bits(x), spec)
    if spec.two_level:
        return two_level(x, spec, amax, measured, u)
    top = measured if amax is None else override_bits(amax, measured)
    e = factors(top, spec)
    if factor is not None:
        exact_factor = torch.as_tensor(factor, dtype=torch.float32, device=x.device)
        e = torch.where(exact_factor == 0, e, exact_factor)
    scale = stored_scale(top, (top < INFINITY_BITS) & (measured < INFINITY_BITS), e, spec)
    if spec.scale == "e8m0":
        e = torch.where(top == 0, 0.0, e)
    return _finish(x, spec, u, e, scale, None, measured)


def stored_scale(bits: Tensor, finite: Tensor, e: Tensor, spec: QuantSpec) -> Tensor:
    """Return stored decode scales of blocks from the bits of their amaxes and their encode factors e."""
    if spec.scale == "e8m0":
        code = torch.where(bits == 0, 0, 127 - exponent(bits, spec.format))
        return torch.where(finite, code, 255).to(torch.uint8)
    return torch.where(finite, 1.0 / e.to(torch.float32), torch.nan)


def factors(bits: Tensor, spec: QuantSpec) -> Tensor:
    """Return float32 encode factors of blocks from the bits of their amaxes."""
    return power_of_two(exponent(bits, spec.format)) if spec.power_of_two else ratio(spec.format.max, bits)


def two_level(x: Tensor, spec: QuantSpec, amax: ScalarOverride, blocks: Tensor, u: Tensor | None = None) -> Quantized:
    """Quantize a rotated float32 x with two-level scales from the amax bits of its blocks.

    For blocks split over several tensors, the bits are those of the whole blocks.

    Args:
        amax: amax of the tensor; None takes the largest of the blocks.
        u: uniform numbers of x's shape for stochastic rounding, or None.
    """
    top = blocks.max().view(1, 1) if blocks.numel() else blocks.new_zeros((1, 1))
    e, stored, tensor_factor = two_levels(blocks, top if amax is None else override_bits(amax, top), spec)
    return _finish(x, spec, u, e, stored, tensor_factor, top)


def two_levels(blocks: Tensor, tensor: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return encode factors of blocks, their stored scales, and the tensor factor, from the bits of their amaxes."""
    big = power_of_two(tensor_exponent(tensor)) if spec.scale == "two_level" else ratio(TWO_LEVEL_MAX, tensor)
    sixth = big * torch.tensor(1 / 6, dtype=torch.float32, device=blocks.device)
    small = (blocks.view(torch.float32) * sixth).clamp_(max=448.0).to(torch.float8_e4m3fn)
    wide = small.to(torch.float32)
    e = (1.0 / (torch.where(wide == 0, 1.0, wide) * (1.0 / big))).clamp(max=float(FLT_MAX))
    stored = torch.where(blocks < INFINITY_BITS, small.view(torch.uint8), NAN_CODE)
    return torch.where(wide == 0, 0.0, e), stored, torch.where(tensor < INFINITY_BITS, big, torch.nan)


def _finish(
    x: Tensor, spec: QuantSpec, u: Tensor | None, e: Tensor, scale: Tensor, tensor: Tensor | None, top: Tensor | None
) -> Quantized:
    shape = (x.shape[0], x.shape[1])
    data = encode(x * spread(e, spec.block, shape), spec, u)
    if spec.format.packed:
        data = pack(data)
    measured = None if top is None else top.view(torch.float32)
    return Quantized(data, scale, spec, shape, False, tensor, measured)


def block_bits(bits: Tensor, spec: QuantSpec) -> Tensor:
    """Return the maximum of each block of int32 magnitude bits [rows, k]; subnormals count as 0."""
    rows, k = bits.shape
    nr, nk = spec.blocks(rows, k)
    br, bk = (min(b or max(n, 1), max(n, 1)) for b, n in zip(spec.block, (rows, k), strict=True))
    if nr * nk == 0 or bits.numel() == 0:
        return bits.new_zeros((nr, nk))
    if (nr * br, nk * bk) != (rows, k):
        bits = torch.nn.functional.pad(bits, (0, nk * bk - k, 0, nr * br - rows))
    top = bits.reshape(nr, br, nk, bk).amax((1, 3))
    return torch.where(top < SMALLEST_NORMAL_BITS, 0, top)


def override_bits(amax: Tensor | float, like: Tensor) -> Tensor:
    """Return the bits of a given amax in the shape of the scales."""
    a = torch.as_tensor(amax, dtype=torch.float32, device=like.device).abs()
    bits = a.expand(like.shape) if a.numel() == 1 else a.reshape(like.shape)
    bits = bits.contiguous().view(torch.int32)
    return torch.where(bits < SMALLEST_NORMAL_BITS, 0, bits)


def matmul(
    a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False
) -> Tensor:
    """Compute a [m, k] @ b [n, k].T + bias in float64, rounded to float32 and then to dtype."""
    y = double(a) @ double(b).t()
    if bias is not None:
        y = y + bias.to(torch.float64)
    return y.to(torch.float32).to(dtype)


def double(q: Quantized) -> Tensor:
    """Return the dequantized operand in float64, where no scale overflows."""
    return q.values().to(torch.float64) * spread(q.scales().to(torch.float64), q.spec.block, q.shape)
