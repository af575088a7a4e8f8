"""Quantize and dequantize optimizer states as torch tensors on any device, with the numbers of
`quaver.reference.optim`.

The code has no data-dependent control flow, so that a compiler can fuse it and eager mode is fast.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.recipes.formats import E4M3
from quaver.reference import optimizer_state
from quaver.reference.optim import LARGEST_SCALE, NOISE_BITS
from quaver.reference.optim import THIRD as _THIRD
from quaver.reference.optimizer_state import INTEGERS, StateCode, StateSpec, boundaries, levels
from quaver.torch.numerics.quantized import FLOAT8
from quaver.torch.numerics.rounding import is_tracing

SMALLEST_NORMAL = 2.0**-126
#: Python floats, because a compiler does not accept numpy scalars as constants.
LARGEST, THIRD = float(LARGEST_SCALE), float(_THIRD)
#: Storage dtype of scales, per tensor or per block.
SCALE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "power_of_two": torch.float32}


def code_dtype(code: StateCode) -> torch.dtype:
    """Return the storage dtype of a code."""
    if not code.scaled or code.kind == "float16":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[code.kind]
    return torch.int8 if code.signed and code.kind in INTEGERS else torch.uint8


def scale_shape(shape: tuple[int, ...], block: int | None, numbers: int = 1) -> tuple[int, ...]:
    """Return the shape of the scales of a state.

    It is [..., ceil(K / block) * numbers], or [] for a single scale; `numbers` counts the values stored per block.
    """
    if block is None:
        return ()
    return (*shape[:-1], -(-shape[-1] // block) * numbers) if shape else (numbers,)


def encode(
    x: Tensor, spec: StateSpec, noise: Tensor | None = None, amax: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Quantize a state; see `quaver.reference.optim.encode`.

    Args:
        x: float32 [..., K].
        spec: format of the state.
        noise: int32 below 2**15 of x's shape, if the spec is stochastic.
        amax: float32 [], largest magnitude of the rounded tensor if x is a chunk of it; for a single scale.
    Returns:
        Codes of x's shape, and scales, or None for formats without.
    Exact, except for the expanded format: a few codes per million differ by one.
    """
    code = spec.of
    if code.kind == "float32":
        return x.clone(), None
    if code.kind == "bfloat16":
        return to_bfloat16(x, noise), None
    if code.kind == "expanded":
        written, params = _expanded(in_blocks(x, spec.block))
        return out_of_blocks(written, x.shape), params.flatten(-2)
    amax = block_amax(x, spec.block) if amax is None else amax
    scale = scale_of(amax, spec)
    inverse = inverse_of(scale)
    blocks = torch.where(inverse > 0, in_blocks(x, spec.block), 0.0)
    y = blocks.abs().mul_(inverse)
    if code.kind != "mitchell":
        y = y.clamp_(max=code.largest)
    if noise is not None:
        noise = in_blocks(noise, spec.block)
    if code.kind == "dynamic":
        edges = _table(code.signed, "boundaries", x.device)
        codes = torch.bucketize(y.copysign_(blocks), edges).to(torch.uint8)
    elif code.kind == "float16":
        codes = y.copysign_(blocks).to(torch.float16)
    else:
        codes = _signed(_magnitude_codes(y, code, noise, spec.floor, blocks), blocks, code)
    return out_of_blocks(codes, x.shape), scale


def inverse_of(scale: Tensor) -> Tensor:
    """Return 1 / scale, or 0 for blocks without a valid scale: float32 [..., 1]."""
    wide = scale.float().unsqueeze(-1)
    usable = (wide > 0) & (wide <= LARGEST)
    return materialized(torch.where(usable, torch.where(usable, wide, 1.0).reciprocal(), 0.0))


def decode(codes: Tensor, scale: Tensor | None, spec: StateSpec) -> Tensor:
    """Dequantize codes to float32 of their shape. Exact."""
    code = spec.of
    if scale is None or not code.scaled:
        return codes.float()
    values = in_blocks(codes, spec.block)
    if code.kind == "expanded":
        return out_of_blocks(_narrowed(values, scale.unflatten(-1, (values.shape[-2], code.numbers))), codes.shape)
    wide = scale.float().unsqueeze(-1)
    return out_of_blocks(values_of(values, code).mul_(wide), codes.shape)


def values_of(codes: Tensor, code: StateCode) -> Tensor:
    """Return values of codes as multiples of their scale, a new float32 tensor. Exact."""
    if code.kind == "float16":
        return codes.float()
    if code.kind == "softsign":
        c = codes.float()
        return c / (254.0 - c.abs())
    if code.kind == "root":
        c = codes.float()
        return (c.abs() * c).mul_(_reciprocal(code.top**2)) if code.signed else (c * c).mul_(_reciprocal(code.top**2))
    if code.kind == "mitchell":
        # Scale by 2**-64 or 2**-96, so that the exponent field can be doubled or quadrupled and zero stays zero.
        c = codes.float().mul_(2.0 ** (-32 * (code.halvings + 1)))
        bits = c.view(torch.int32)
        twice = bits << code.halvings
        # Set the sign by bits, since copysign is a function call in code compiled for CPUs.
        return ((twice & 0x7FFFFFFF) | (bits & -0x80000000) if code.signed else twice).view(torch.float32)
    if code.kind == "dynamic":
        return _table(code.signed, "levels", codes.device)[codes.int()]
    assert code.format is not None
    dtype = FLOAT8.get(code.format.name)
    if code.format == E4M3 and codes.dtype is torch.uint8 and is_tracing() and codes.is_cpu:
        value = e4m3_values(codes)
    elif dtype is not None:
        value = (codes if codes.dtype is dtype else codes.view(dtype)).float()
    else:
        c = codes.int()
        mantissa = code.format.mantissa_bits
        # Shift into float32's fields and correct the bias by an exact multiplication by a power of two, subnormals
        # included.
        value = (c << (23 - mantissa)).view(torch.float32) * 2.0 ** (127 - code.format.bias)
    return value * value if code.root else value


def scale_of(amax: Tensor, spec: StateSpec) -> Tensor:
    """Return the stored scale of each amax: at least amax / largest code; NaN where amax is not finite."""
    return wide_scale_of(amax, spec).to(SCALE_DTYPES[spec.scale])


def wide_scale_of(amax: Tensor, spec: StateSpec) -> Tensor:
    """Return the same scale as `scale_of` in float32."""
    finite = amax < float("inf")
    ratio = torch.where(finite, amax, 0.0) / spec.of.largest
    bits = ratio.view(torch.int32)
    if spec.scale == "bfloat16":
        bits = (bits + 0xFFFF) & ~0xFFFF
    elif spec.scale == "power_of_two":
        bits = (bits + 0x7FFFFF) & ~0x7FFFFF
    bits = torch.where(bits < 0x00800000, 0, bits.clamp(max=0x7E800000))
    return torch.where(finite, bits.view(torch.float32), float("nan"))


def block_amax(x: Tensor, block: int | None) -> Tensor:
    """Return the largest magnitudes of blocks in float32; NaN counts above infinity."""
    magnitudes = in_blocks(x, block).abs()
    if not magnitudes.numel():
        return x.new_zeros(scale_shape(x.shape, block), dtype=torch.float32)
    return magnitudes.amax(-1)


def in_blocks(x: Tensor, block: int | None) -> Tensor:
    """Reshape [..., K] to [..., ceil(K / block), block], padded with zeros; to [n] for a single scale."""
    if block is None:
        return x.reshape(-1)
    x = x if x.dim() else x.reshape(1)
    short = -x.shape[-1] % block
    if short:
        x = F.pad(x, (0, short))
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def out_of_blocks(x: Tensor, shape: torch.Size) -> Tensor:
    if x.dim() == 1:
        return x.view(shape)
    flat = x.flatten(-2)
    return (flat[..., : shape[-1]] if shape else flat[0]) if flat.shape != shape else flat


def to_bfloat16(x: Tensor, noise: Tensor | None) -> Tensor:
    """Round to bfloat16, to nearest or stochastically; infinities and NaN are unchanged. Exact."""
    if noise is None:
        return x.to(torch.bfloat16)
    bits = x.view(torch.int32)
    rounded = ((bits + (noise << 1)) & ~0xFFFF).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def materialized(x: Tensor) -> Tensor:
    """Make a CPU compiler materialize float32 numbers that are broadcast. Exact.

    It would otherwise compute them again for every 16 products; viewed as a narrower dtype they are read from memory.
    """
    if not is_tracing() or not x.is_cpu:
        return x
    return x.view(torch.int16).view(torch.float32)


def e4m3_values(codes: Tensor) -> Tensor:
    """Convert uint8 codes of E4M3 to float32 by operations that CPUs can vectorize.

    Exact, except for NaN codes, whose block has the scale NaN anyway.
    """
    c = codes.int()
    bits = ((c & 0x7F) << 20) + (120 << 23)
    # Subnormals: use the next binade and subtract its first value.
    small = (bits + (1 << 23)).view(torch.float32) - 2.0**-6
    value = torch.where((c & 0x78) == 0, small, bits.view(torch.float32))
    return torch.where(c >= 128, -value, value)


def _magnitude_codes(y: Tensor, code: StateCode, noise: Tensor | None, keep_nonzero: bool, x: Tensor) -> Tensor:
    """Return the codes of y as float32 integers."""
    if code.kind == "softsign":
        c = _softsign(y, noise)
    elif code.kind == "root":
        c = _root(y, float(code.top), noise)
    elif code.kind == "mitchell":
        c = mitchell(y, code.halvings, noise).round_()
    else:
        c = _format(y, code, noise)
    return torch.where(x != 0, c.clamp_min(1.0), c) if keep_nonzero else c


def _softsign(y: Tensor, noise: Tensor | None) -> Tensor:
    c = (y / (y + 1.0)).mul_(254.0)
    if noise is None:
        return c.round_().clamp_(max=127.0)
    low = c.floor_().clamp_(max=126.0)
    wide, narrow = 254.0 - low, 253.0 - low
    step = noise.float().mul_(254 * 2.0**-NOISE_BITS)
    return low + (y * (wide * narrow) > low * narrow + step)


def _root(y: Tensor, top: float, noise: Tensor | None) -> Tensor:
    z = y.mul_(top * top)
    root = z.sqrt()
    if noise is None:
        return root.round_().clamp_(max=top)
    low = root.floor_().clamp_(max=top - 1.0)
    step = (2.0 * low).add_(1.0).mul_(noise.float().mul_(2.0**-NOISE_BITS))
    up = z > step.add_(low * low)
    return low.add_(up)


def mitchell(y: Tensor, halvings: int, noise: Tensor | None) -> Tensor:
    """Return codes of kind "mitchell" in float32 before rounding to nearest."""
    c = ((y.view(torch.int32) >> halvings) + (32 * (halvings + 1) << 23)).view(torch.float32)
    if halvings == 1:
        # Linear segments from code 0 to 1 and from 1 to 2.
        twice = y * 2.0
        c = torch.minimum(c, torch.minimum(twice, (twice + 2.0) * THIRD))
    if noise is not None:
        # Uniform in (-1/2, 1/2), symmetric around 0.
        c = c + (2 * noise + (1 - 2**NOISE_BITS)).float().mul_(2.0 ** -(NOISE_BITS + 1))
    return c


def _format(y: Tensor, code: StateCode, noise: Tensor | None) -> Tensor:
    fmt = code.format
    assert fmt is not None
    value = y.sqrt() if code.root else y
    # Exponent of the code spacing at each value, and the reciprocal of the spacing.
    e = ((value.view(torch.int32) >> 23) - 127).clamp_(min=fmt.emin, max=fmt.emax)
    inverse = ((fmt.mantissa_bits + 127 - e) << 23).view(torch.float32)
    steps = value * inverse
    if noise is None:
        rounded = steps.round()
    else:
        rounded = steps.floor().clamp_(max=2.0 ** (fmt.mantissa_bits + 1) - 1)
        chance = noise.float().mul_(2.0**-NOISE_BITS)
        if code.root:
            rounded = rounded + (y * inverse * inverse > rounded * rounded + (2.0 * rounded + 1.0) * chance)
        else:
            rounded = rounded + (steps > rounded + chance)
    codes = rounded + ((e - fmt.emin) << fmt.mantissa_bits)
    return codes.clamp_(max=float(fmt.max_code))


def _signed(c: Tensor, x: Tensor, code: StateCode) -> Tensor:
    if code.kind in INTEGERS:
        return c.copysign_(x).to(torch.int8) if code.signed else c.to(torch.uint8)
    if not code.signed:
        return c.to(torch.uint8)
    c = c.to(torch.uint8)
    return c | ((torch.signbit(x) & (c > 0)).to(torch.uint8) << 7)


def _expanded(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Encode blocks in the expanded format; returns codes, and k, c and S of each block. See
    `quaver.reference.optimizer_state`.
    """
    a = blocks.abs().double()
    counted = a >= SMALLEST_NORMAL
    finite = a.isfinite().all(-1, keepdim=True)
    usable = finite & counted.any(-1, keepdim=True)
    largest = torch.where(usable, a.amax(-1, keepdim=True) if a.numel() else a.new_ones(usable.shape), 1.0)
    low = torch.where(counted, a, float("inf"))
    smallest = torch.where(usable, low.amin(-1, keepdim=True) if a.numel() else a.new_ones(usable.shape), 1.0)
    spread = (largest / smallest).log2_().clamp_(min=optimizer_state.REACH / optimizer_state.MOST)
    k = (
        (optimizer_state.PARTS * optimizer_state.REACH / spread)
        .floor_()
        .div_(optimizer_state.PARTS)
        .clamp_(min=optimizer_state.LEAST)
    )
    c = (largest * smallest).sqrt_().float()
    s = ((largest / c).log2_().mul_(k).exp2_() / E4M3.max).float()
    power = (torch.where(counted, a, c) / c).log2_().mul_(k).exp2_().div_(s)
    y = torch.where(usable & counted, power, 0.0).float().clamp_(max=E4M3.max).copysign_(blocks)
    codes = y.to(torch.float8_e4m3fn).view(torch.uint8)
    params = torch.cat([k.float(), torch.where(usable, c, 1.0), torch.where(usable, s, 0.0)], -1)
    return torch.where((codes & 0x7F) == 0, 0, codes), torch.where(finite, params, float("nan"))


def _narrowed(codes: Tensor, params: Tensor) -> Tensor:
    k, c, s = params.double().unsqueeze(-2).unbind(-1)
    values = codes.view(torch.float8_e4m3fn).float()
    reached = values.abs() * s
    x = torch.where(reached > 0, reached, 1.0).log2_().div_(k).exp2_().mul_(c)
    x = torch.where(reached > 0, x, torch.where(s.isnan(), s, 0.0))
    return x.copysign_(values).float()


def _reciprocal(number: int) -> float:
    """Return the float32 reciprocal of an integer as a Python float."""
    return _RECIPROCALS[number]


#: Precomputed, so that no tensor is created while a compiler traces.
_RECIPROCALS = {n: float(torch.tensor(1 / n, dtype=torch.float32, device="cpu")) for n in (127**2, 255**2)}


@cache
def _table(signed: bool, which: str, device: torch.device) -> Tensor:
    values = levels(signed) if which == "levels" else boundaries(signed)
    return torch.tensor(values, dtype=torch.float32, device=device)
