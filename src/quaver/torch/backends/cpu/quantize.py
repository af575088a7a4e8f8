"""Quantization on a CPU: torch's own casts, integer maxima, and Python floats for per-tensor scales.

A bf16 value times a power of two is exact, so bf16 operands stay bf16 until the cast. torch's cast saturates only in
newer releases and only for E4M3, so values that can overflow are clipped first. Transposes are read in storage order:
an operand whose columns are contiguous is stored transposed.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from functools import cache, reduce

import numpy as np
import torch
from torch import Tensor

from quaver.recipes.formats import Format
from quaver.recipes.spec import Block, QuantSpec
from quaver.reference.numerics import FACTOR_EXPONENTS, FLT_MAX
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import FLOAT8, Quantized, ScalarOverride
from quaver.torch.numerics.rounding import INFINITY_BITS, SMALLEST_NORMAL_BITS, usable

# ---- scratch buffers ----
# The system hands out a fresh tensor's pages one by one, each with a fault, and takes them back when it is freed. That
# costs several times as much as computing the contents, so intermediate results reuse buffers.

#: Smallest size in bytes that gets a scratch buffer, and largest that a thread keeps.
SMALLEST, LARGEST = 1 << 16, 1 << 23
#: Bytes of a piece that stays in a core's cache from one operation to the next.
PIECE = 1 << 20


class _ScratchBuffers(threading.local):
    def __init__(self) -> None:
        self.slots: dict[str, Tensor] = {}


_scratch = _ScratchBuffers()


def buffer(slot: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized contiguous tensor, this thread's until it requests the same slot again.

    Must not be returned to callers.
    """
    size = math.prod(shape) * dtype.itemsize
    if not SMALLEST <= size <= LARGEST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    scratch = _scratch.slots.get(slot)
    if scratch is None or scratch.numel() < size:
        with torch.inference_mode(False):
            scratch = _scratch.slots[slot] = torch.empty(size, dtype=torch.uint8, device="cpu")
    return scratch[:size].view(dtype).view(shape)


def scratch_rows(x: Tensor) -> int:
    """Return how many rows of a tensor make a piece of `PIECE` bytes, at least one."""
    return max(1, PIECE * x.shape[0] // max(1, x.numel() * x.itemsize))


# ---- FP8 ----

SMALLEST_NORMAL = 2.0**-126
#: Bits of float32 1.0, and of NaN.
ONE_BITS, NAN_BITS = 0x3F800000, 0x7FC00000


def reason(x: Tensor, spec: QuantSpec, *_: object) -> str:
    """Return why this implementation does not support the call, or ""."""
    if not x.is_cpu:
        return "the tensor is not on a CPU"
    if spec.format.name not in FLOAT8 or spec.hadamard or spec.rounding != "nearest" or spec.scale == "unit":
        return "it supports only rounding to nearest to FP8 with one level of scales"
    return "its per-tensor scales are float32, not E8M0" if spec.per_tensor and spec.scale == "e8m0" else ""


def quantize(
    x: Tensor, spec: QuantSpec, amax: ScalarOverride = None, factor: ScalarOverride = None, noise: object = None
) -> Quantized:
    """Quantize x; same arguments and bits as `quaver.torch.numerics.reference.quantize`."""
    transposed = not x.is_contiguous() and x.stride(1) != 1 and x.stride(0) == 1
    if not spec.per_tensor:
        return _blocks(x, spec, amax, transposed)
    data, scale, measured_amax = per_tensor(x.t() if transposed else x, spec, amax, factor)
    return Quantized(data, scale, spec, (x.shape[0], x.shape[1]), transposed, None, measured_amax)


def per_tensor(
    x: Tensor, spec: QuantSpec, amax: ScalarOverride = None, factor: ScalarOverride = None
) -> tuple[Tensor, float, float]:
    """Quantize by a spec with one scale; return codes in storage order, decode scale and amax."""
    fmt, exact = spec.format, spec.power_of_two
    measured_amax = scaling_amax = host_amax(x)
    if amax is not None:
        scaling_amax = float(amax)
    e = float(factor) if factor is not None else 0.0
    if e == 0.0:
        e = host_factor(scaling_amax, fmt, exact)
    elif math.frexp(e)[0] != 0.5:
        # The caller's factor need not be a power of two; it may be an average.
        e, exact = float(np.float32(e)), False
    if not (measured_amax < math.inf and scaling_amax < math.inf):
        scale = math.nan
    else:
        scale = 1.0 / e if exact else float(np.float32(1.0 / e))
    clips = not measured_amax * e <= fmt.max
    if not exact or x.dtype is torch.float16:
        return _codes(x.float(), e, fmt, clips), scale, measured_amax
    if x.dtype is torch.bfloat16 and 1.0 <= e <= LIFT and not clips and x.numel() * x.itemsize >= SMALLEST:
        return _lifted(x.detach(), math.frexp(e)[1] - 1, fmt), scale, measured_amax
    if clips or x.numel() * x.itemsize >= SMALLEST:
        return _codes(x, scalar(e), fmt, clips), scale, measured_amax
    return (x * scalar(e)).type(FLOAT8[fmt.name]), scale, measured_amax


def _codes(x: Tensor, e: Tensor | float, fmt: Format, clips: bool) -> Tensor:
    """Encode x × e in pieces that fit the cache; e has one factor, or in each dimension one or as many as x."""
    if x.numel() * x.itemsize < SMALLEST:
        y = x * e
        return (y.clamp_(-fmt.max, fmt.max) if clips else y).type(FLOAT8[fmt.name])
    x, out = x.detach(), torch.empty(x.shape, dtype=FLOAT8[fmt.name], device="cpu")
    rows = scratch_rows(x)
    parts = x.split(rows)
    factors = e.split(rows) if isinstance(e, Tensor) and e.dim() and e.shape[0] > 1 else (e,) * len(parts)
    for part, factor, codes in zip(parts, factors, out.split(rows), strict=True):
        y = torch.mul(part, factor, out=buffer("temporary", part.shape, part.dtype))
        codes.copy_(y.clamp_(-fmt.max, fmt.max) if clips else y)
    return out


#: Largest factor for which bf16 subnormals stay below half of any format's smallest code.
LIFT = 2.0**100


def _lifted(x: Tensor, exponent: int, fmt: Format) -> Tensor:
    """Encode bf16 x times 2**exponent in pieces that fit the cache; the result must be within the format's range.

    Adding to the exponent bits takes a quarter of the time of a multiplication. Zeros and subnormals become numbers
    below 2**(exponent - 126), which round to zeros of the same sign.
    """
    out, steps = torch.empty(x.shape, dtype=FLOAT8[fmt.name], device="cpu"), _steps(exponent)
    rows = scratch_rows(x)
    for part, codes in zip(x.split(rows), out.split(rows), strict=True):
        if exponent:
            bits = buffer("temporary", part.shape, torch.int16)
            part = torch.add(part.view(torch.int16), steps, out=bits).view(torch.bfloat16)
        codes.copy_(part)
    return out


@cache
def _steps(exponent: int) -> Tensor:
    """Return an exponent at its position in bf16 bits, as a 0-dimensional tensor."""
    with torch.inference_mode(False):
        return torch.tensor(exponent << 7, dtype=torch.int16, device="cpu")


#: Powers of two as 0-dimensional tensors, by which torch multiplies twice as fast as by a Python number.
_scalars: dict[float, Tensor] = {}


def scalar(e: float) -> Tensor:
    """Return a power of two as a cached 0-dimensional tensor."""
    cached = _scalars.get(e)
    if cached is None:
        with torch.inference_mode(False):
            cached = _scalars[e] = torch.tensor(e, dtype=torch.float32, device="cpu")
    return cached


def host_amax(x: Tensor) -> float:
    """Return the largest magnitude as a Python float: NaN if there is one, 0 for subnormals and empty tensors."""
    if x.numel() == 0:
        return 0.0
    low, high = torch.aminmax(x)
    a, b = low.item(), high.item()
    top = b if b != b or b >= -a else -a
    return 0.0 if top < SMALLEST_NORMAL else top


def host_factor(amax: float, fmt: Format, power_of_two: bool) -> float:
    """Return the encode factor of an amax (1 for 0, infinity and NaN), as `reference.numerics.encode_factor`."""
    if not SMALLEST_NORMAL <= amax < math.inf:
        return 1.0
    if power_of_two:
        # The double quotient is exact up to its last bits, and those cannot reach a power of two from below: only amax
        # = fmt.max / 2**p gives one, exactly.
        p = math.frexp(fmt.max / amax)[1] - 1
        return (
            2.0**p if -100 < p < FACTOR_EXPONENTS[1] else 2.0 ** min(max(p, FACTOR_EXPONENTS[0]), FACTOR_EXPONENTS[1])
        )
    # A float32 quotient computed in double and rounded to float32 is correctly rounded.
    return float(np.float32(min(max(fmt.max / amax, SMALLEST_NORMAL), float(FLT_MAX))))


def _blocks(x: Tensor, spec: QuantSpec, amax: ScalarOverride, transposed: bool) -> Quantized:
    if x.numel() == 0:
        return reference.quantize(x, spec, amax)
    x = x.detach()
    base, block = (x.t(), spec.block[::-1]) if transposed else (x, spec.block)
    if x.dtype is torch.float16 or (not spec.power_of_two and x.dtype is not torch.float32):
        base = base.float()
    view, dims = blocked(base, block)
    bits = largest_bits(view, dims)
    measured = bits
    if amax is None and spec.power_of_two:
        e, scale, finite = _powers_of_two(bits, spec)
    else:
        bits, e = _override_scales(bits, amax, spec, transposed)
        finite_blocks = (bits < INFINITY_BITS) & (measured < INFINITY_BITS)
        scale, finite = (
            reference.stored_scale(bits, finite_blocks, e, spec),
            amax is None and bool(finite_blocks.all().item()),
        )
    for dim in dims:
        e = e.unsqueeze(dim)
    e = e.to(view.dtype)
    # Clip if a block has an infinity, or if its factor comes from another amax than its own.
    data = _codes(*((view[0], e[0]) if view.shape[0] == 1 else (view, e)), spec.format, not finite)
    data = data.view(padded_shape(view, dims))
    if data.shape != base.shape:
        # Copied, so that backward does not keep the padding alive.
        data = data[: base.shape[0], : base.shape[1]].clone(memory_format=torch.contiguous_format)
    return Quantized(data, scale, spec, (x.shape[0], x.shape[1]), transposed, None, measured.view(torch.float32))


def _override_scales(bits: Tensor, amax: ScalarOverride, spec: QuantSpec, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the bits of the amaxes to use, in storage order of the blocks, and their encode factors."""
    if amax is None:
        return bits, reference.factors(bits, spec)
    amax_bits = reference.override_bits(amax, bits.t() if transposed else bits)
    amax_bits = (amax_bits.t() if transposed else amax_bits).contiguous()
    e = reference.factors(amax_bits, spec)
    # The passed amax is 0 but the data may not be: they become zeros of their sign.
    return amax_bits, torch.where(amax_bits == 0, 0.0, e) if spec.scale == "e8m0" else e


def _powers_of_two(bits: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor, bool]:
    """Return encode factors, stored scales, and whether all amaxes are finite, from the bits of the amaxes.

    Exponents stay at their bit position; blocks without a factor are handled only if there are any.
    """
    fmt = spec.format
    low, high = (bound.item() for bound in torch.aminmax(bits))
    # Factors are at most 2**100.
    exponent_bits = bits.clamp(min=((127 - FACTOR_EXPONENTS[1] + fmt.emax) << 23) - 0x7FFFFF + fmt.max_mantissa)
    exponent_bits = exponent_bits.add_(0x7FFFFF - fmt.max_mantissa - (fmt.emax << 23)).bitwise_and_(0x7F800000)
    e, scale_bits = ONE_BITS * 2 - exponent_bits, exponent_bits
    if low == 0 or high >= INFINITY_BITS:
        known = usable(bits)
        e = torch.where(known, e, ONE_BITS)
        # Exponent fields 0 and 255 are themselves the E8M0 codes; a float32 scale is 1 or NaN.
        other = bits if spec.scale == "e8m0" else torch.where(bits == 0, ONE_BITS, bits | NAN_BITS)
        scale_bits = torch.where(known, exponent_bits, other)
    scale = (scale_bits >> 23).to(torch.uint8) if spec.scale == "e8m0" else scale_bits.view(torch.float32)
    return e.view(torch.float32), scale, high < INFINITY_BITS


def blocked(base: Tensor, block: Block) -> tuple[Tensor, list[int]]:
    """View a matrix as blocks, zero-padded at ragged edges; return the view and its dimensions within a block."""
    rows, columns = base.shape
    br, bc = min(block[0] or rows, rows), min(block[1] or columns, columns)
    nr, nc = -(-rows // br), -(-columns // bc)
    if (nr * br, nc * bc) != (rows, columns):
        base = torch.nn.functional.pad(base, (0, nc * bc - columns, 0, nr * br - rows))
    base = base.contiguous()
    if br == 1:
        return base.view(rows, nc, bc), [2]
    if bc == 1:
        return base.view(nr, br, columns), [1]
    return base.view(nr, br, nc, bc), [1, 3]


def largest_bits(view: Tensor, dims: list[int]) -> Tensor:
    """Return the float32 bits of each block's largest magnitude as int32; integers reduce several times faster than
    floats.
    """
    if view.dtype is torch.bfloat16:
        bits, mask = view.view(torch.int16), 0x7FFF
    else:
        bits, mask = view.view(torch.int32), 0x7FFFFFFF
    if bits.numel() * bits.itemsize < SMALLEST:
        top = _amax(torch.bitwise_and(bits, mask), dims)
    elif bits.shape[0] > 1:
        top = torch.cat([_amax(part, dims) for part in _masked(bits, mask)])
    else:
        # A single row of blocks is cut within the blocks.
        within = [dim - 1 for dim in dims]
        amax_values = [_amax(part, within) for part in _masked(bits[0], mask)]
        top = (reduce(torch.maximum, amax_values) if 0 in within else torch.cat(amax_values))[None]
    if view.dtype is torch.bfloat16:
        top = top.to(torch.int32) << 16
    return torch.where(top < SMALLEST_NORMAL_BITS, 0, top)


def _masked(bits: Tensor, mask: int) -> Iterator[Tensor]:
    """Yield bits & mask in pieces that fit the cache; each is valid until the next."""
    for part in bits.split(scratch_rows(bits)):
        yield torch.bitwise_and(part, mask, out=buffer("temporary", part.shape, part.dtype))


def _amax(bits: Tensor, dims: list[int]) -> Tensor:
    # The outer dimension first, which reduces whole vectors.
    for reduced, dim in enumerate(dims):
        bits = bits.amax(dim - reduced)
    return bits


def padded_shape(view: Tensor, dims: list[int]) -> tuple[int, int]:
    s = view.shape
    return (s[0], s[1] * s[2]) if dims == [2] else (s[0] * s[1], math.prod(s[2:]))
