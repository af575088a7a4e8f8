"""Quantization to four and six bits on a CPU, with two-level or E8M0 scales, in pieces that fit the cache.

Codes are looked up. Of a bf16 number x in a block with encode factor 2**p × fl(1 / m), m being one of 1, 1.125, ...,
1.875, the code is found without multiplying: 2**p x has the bits of x plus 128 p, and each m has a table. Of a float32,
the upper half with its last bit set if any lower bit is set determines the code, including sign and NaN.

Stochastic rounding is integer arithmetic. G(y) = min(2 |y|, |y| + 2, |y| / 2 + 4) is the code of an E2M1 value y, and
between two values it is linear. The uniform number of 16 random bits is u = 2**-16 (bits + 1/2), so the code, rounded
up where u is below the fraction of G, is (ceil(2**16 G - 1/2) + 65535 - bits) >> 16.
"""

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from quaver.recipes.formats import E2M1, Format
from quaver.recipes.spec import Block, QuantSpec
from quaver.reference import numerics
from quaver.torch.backends.cpu.noise import bits_of_columns, bits_of_rows
from quaver.torch.backends.cpu.quantize import blocked, buffer, largest_bits, padded_shape
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized, ScalarOverride
from quaver.torch.numerics.rounding import (
    INFINITY_BITS,
    NO_NOISE,
    EagerNoise,
    exponent,
    flush,
    power_of_two,
    rotate,
    tensor_exponent,
)

#: Elements processed at a time.
CHUNK = 1 << 17


def _pieces(x: Tensor, block: Block) -> tuple[Tensor, ...]:
    """Split x into pieces that fit the cache, at boundaries of blocks and of groups of 16 rows."""
    step = math.lcm(block[0] or 1, 16)
    return x.split(max(1, CHUNK // max(x.shape[1], 1) // step) * step)


def _block_bits(x: Tensor, block: Block) -> Tensor:
    """Return the float32 bits of the blocks' amaxes, int32 [blocks of rows, blocks of columns]."""
    return largest_bits(*blocked(x.float() if x.dtype is torch.float16 else x, block))


def _unsqueezed(blocks: Tensor, dims: list[int]) -> Tensor:
    """Give a number per block the dimensions of the view that `blocked` returns."""
    for dim in dims:
        blocks = blocks.unsqueeze(dim)
    return blocks


# ---- codes of bf16 numbers, by their bits and the block's factor ----

#: Numbers in a table for one mantissa, and the index of +0. Bits are those of an int16, so negative numbers are 32768
#: below positive ones, and both move by p × 128.
SIZE, ZERO = 67584, 49152
#: Bounds of the float32 bits of an amax, 2**-80 and 2**100, between which no p leaves a table: p is from -105 to 100.
NORMAL_AMAX = (127 - 80) << 23, (127 + 100) << 23


def _table_inputs() -> tuple[np.ndarray, np.ndarray]:
    """Return magnitude, float32 [SIZE], and sign, bool [SIZE], of the number that each index stands for."""
    bits = np.arange(SIZE) - ZERO
    # Positive numbers begin above -14080, as p > -110, and negative ones end below: scaled numbers are below 2**16.
    negative = bits < -14080
    magnitude = np.clip(np.where(negative, bits + 32768, bits), 0, 0x7F7F)
    return (magnitude.astype(np.uint32) << 16).view(np.float32), negative


@cache
def _nearest_codes(fmt: Format, mantissas: int) -> Tensor:
    """Return the codes of all numbers in blocks of each of the first 1 or 8 mantissas: uint8 [mantissas × SIZE]."""
    magnitude, negative = _table_inputs()
    scaled = [magnitude * (np.float32(1) / np.float32(1 + j / 8)) for j in range(mantissas)]
    values = np.concatenate([np.where(negative, -y, y) for y in scaled])
    return torch.from_numpy(numerics.encode(numerics.round_to(values, fmt), fmt))


@cache
def _stochastic_codes() -> Tensor:
    """Return ceil(2**16 G - 1/2) + 65535 of the same numbers, with the sign in bit 19: int32 [8 × SIZE]."""
    magnitude, negative = _table_inputs()
    codes = []
    for j in range(8):
        y = np.minimum((magnitude * (np.float32(1) / np.float32(1 + j / 8))).astype(np.float64), 6.0)
        g = np.minimum(np.minimum(2 * y, y + 2), y / 2 + 4)
        codes.append(np.ceil(g * 65536 - 0.5).astype(np.int32) + 65535 + (negative.astype(np.int32) << 19))
    return torch.from_numpy(np.concatenate(codes))


def _look_up(piece: Tensor, offsets: Tensor, block: Block, table: Tensor) -> Tensor:
    """Return the entries of a table for bf16 numbers, in a scratch buffer, from the offsets of their blocks."""
    view, dims = blocked(piece, block)
    index = buffer("index", view.shape, torch.int32).copy_(view.view(torch.int16)).add_(_unsqueezed(offsets, dims))
    entries = buffer(f"{table.dtype} entries", view.shape, table.dtype)
    torch.index_select(table, 0, index.view(-1), out=entries.view(-1))
    return entries.view(padded_shape(view, dims))[: piece.shape[0], : piece.shape[1]]


# ---- codes of float32 numbers ----


@cache
def _codes_of_upper_halves(fmt: Format) -> Tensor:
    """Return the codes of all bf16 numbers by their bits plus 32768, for a format of at most eight bits: [65536]."""
    values = (np.roll(np.arange(65536, dtype=np.uint32), 32768) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(numerics.encode(numerics.round_to(values, fmt), fmt))


def _nearest(y: Tensor, fmt: Format) -> Tensor:
    """Encode float32 to nearest even, one code per byte; saturating, NaN becomes the largest code."""
    bits = y.view(torch.int32)
    # Adding 0xFFFF to the lower half carries into bit 16 if any of its bits is set.
    index = torch.bitwise_and(bits, 0xFFFF, out=buffer("index", y.shape, torch.int32))
    index.add_(0xFFFF).bitwise_or_(bits).bitwise_right_shift_(16).add_(32768)
    codes = buffer("codes", y.shape, torch.uint8)
    torch.index_select(_codes_of_upper_halves(fmt), 0, index.view(-1), out=codes.view(-1))
    return codes


def _stochastic(y: Tensor, signs: Tensor, bits: Tensor) -> Tensor:
    """Encode float32 values as E2M1 codes, one per byte, each rounded by 16 random bits.

    Args:
        y: 2**25 times the values; overwritten.
        signs: float32 numbers with the signs of the codes.
        bits: int32 from 0 to 65535.
    """
    # ceil(2**24 G). Where the second or third term of G is the smallest, |y| >= 2, so that halving is exact.
    code = buffer("index", y.shape, torch.int32).copy_(y.abs_().clamp_(max=6.0 * 2**25).ceil_())
    half = torch.bitwise_right_shift(code, 1, out=y.view(torch.int32))
    torch.minimum(code, half.add_(1 << 25), out=code)
    torch.bitwise_right_shift(code, 1, out=half)
    torch.minimum(code, half.add_(3 << 24), out=code)
    # ceil(x / 256 - 1/2) of an integer x is (x + 127) >> 8.
    code.add_(127 + (65535 << 8)).bitwise_right_shift_(8).sub_(bits).bitwise_right_shift_(16)
    code.bitwise_or_(torch.bitwise_right_shift(signs.view(torch.int32), 28, out=half).bitwise_and_(8))
    return buffer("codes", y.shape, torch.uint8).copy_(code)


def _scaled(piece: Tensor, e: Tensor, block: Block) -> Tensor:
    """Multiply a piece by the encode factors of its blocks: contiguous float32 that may be overwritten."""
    view, dims = blocked(piece.float(), block)
    y = torch.mul(view, _unsqueezed(e, dims), out=buffer("scaled", view.shape, torch.float32))
    return y.view(padded_shape(view, dims))[: piece.shape[0], : piece.shape[1]].contiguous()


def _pack(codes: Tensor, out: Tensor) -> None:
    """Pack two neighbours along the last axis to a byte, the lower nibble first."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.contiguous().view(torch.int16)
    out.copy_((pairs >> 4).bitwise_or_(pairs))  # the upper byte is dropped


def _pack_lines(codes: Tensor, out: Tensor) -> None:
    """Pack two neighbours along the first axis, of even length, to a byte, the lower nibble first."""
    torch.bitwise_left_shift(codes[1::2], 4, out=out).bitwise_or_(codes[0::2])


# ---- two-level scales ----


def reason_two_level(x: Tensor, spec: QuantSpec, *_: object) -> str:
    """Return why this implementation does not support the call, or ""."""
    if not x.is_cpu:
        return "the tensor is not on a CPU"
    if not spec.two_level or spec.block[1] != 16:
        return "it supports only E2M1 with two-level scales in blocks of 16"
    return ""


def two_level(
    x: Tensor, spec: QuantSpec, amax: ScalarOverride = None, factor: object = None, noise: EagerNoise = NO_NOISE
) -> Quantized:
    """Quantize x with two-level scales; same bits as `quaver.torch.numerics.reference.quantize`."""
    if x.numel() == 0:
        return reference.quantize(x, spec, amax)
    x, shape = x.detach(), (x.shape[0], spec.padded(x.shape[1]))
    # A transpose is processed in storage order if its groups of 16 are whole lines and no block is ragged.
    transposed = not x.is_contiguous() and x.stride(0) == 1 and spec.block[0] == 1 and shape[1] % 16 == 0
    x, block = (x.t(), spec.block[::-1]) if transposed else (x.contiguous(), spec.block)
    if spec.hadamard:
        x = _rotated_lines(x) if transposed else torch.cat([rotate(piece.float()) for piece in _pieces(x, block)])
    blocks = _block_bits(x, block)
    top = blocks.max().view(1, 1)
    tensor = top if amax is None else reference.override_bits(amax, top)
    largest = top.item()
    of_bits = x.dtype is torch.bfloat16 and amax is None and spec.scale == "two_level"
    of_bits = of_bits and (largest == 0 or NORMAL_AMAX[0] <= largest < NORMAL_AMAX[1])
    encode, finite = _of_bits if of_bits else _of_floats, largest < INFINITY_BITS
    factors, stored, tensor_factor = _two_levels(blocks, tensor, spec, of_bits)
    size = (shape[1] // 2, shape[0]) if transposed else (shape[0], (shape[1] + 1) // 2)
    data = torch.empty(size, dtype=torch.uint8, device="cpu")
    height, at = block[0] or 1, 0
    for piece in _pieces(x, block):
        stop, bits = at + len(piece), None
        if spec.rounding == "stochastic" and transposed:
            bits = bits_of_columns(shape, at, len(piece), noise)
        elif spec.rounding == "stochastic":
            bits = bits_of_rows(at * shape[1], piece.numel(), noise).view(piece.shape)
        codes = encode(piece, factors[at // height : -(-stop // height)], block, bits, finite)
        if transposed:
            _pack_lines(codes, data[at // 2 : stop // 2])
        else:
            _pack(codes, data[at:stop])
        at = stop
    if transposed:
        data, stored = data.t().contiguous(), stored.t().contiguous()
    return Quantized(data, stored, spec, shape, False, tensor_factor, top.view(torch.float32))


def _two_levels(blocks: Tensor, tensor: Tensor, spec: QuantSpec, of_bits: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return `reference.two_levels`, with table offsets in place of encode factors if `of_bits`.

    Reciprocals and offsets of the 256 scale codes are tables, because torch decodes E4M3 one element at a time.
    """
    if spec.scale != "two_level":
        e, stored, tensor_factor = reference.two_levels(blocks.view(1, -1), tensor, spec)
        return e.view_as(blocks), stored.view_as(blocks), tensor_factor
    p = tensor_exponent(tensor)
    big = power_of_two(p)
    sixth = big * torch.tensor(1 / 6, dtype=torch.float32, device="cpu")
    small = (blocks.view(torch.float32) * sixth).clamp_(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    reciprocals, offsets = _of_scale_codes()
    table = offsets + (p.view(()) << 7) if of_bits else reciprocals * big.view(())
    factors = table.index_select(0, small.view(-1).to(torch.int32)).view(blocks.shape)
    if of_bits:
        return factors, small, big
    stored = torch.where(blocks < INFINITY_BITS, small, numerics.NAN_CODE)
    return factors, stored, torch.where(tensor < INFINITY_BITS, big, torch.nan)


@cache
def _of_scale_codes() -> tuple[Tensor, Tensor]:
    """Return encode factor and table offset of a block by its E4M3 scale code, for a tensor factor of 1."""
    scale = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8).view(torch.float8_e4m3fn).float().abs_()
    reciprocals = torch.where(scale == 0, 0.0, 1.0 / scale)
    bits = scale.view(torch.int32)
    offsets = (bits >> 20 & 7) * SIZE + (127 - (bits >> 23) << 7) + ZERO
    # A scale of 0 makes zeros of a whole block. It is below 6 × 2**-10, and 2**-16 of that is never rounded up.
    return reciprocals, torch.where(scale == 0, (-16 << 7) + ZERO, offsets).to(torch.int32)


def _of_bits(piece: Tensor, offsets: Tensor, block: Block, bits: Tensor | None, _: bool) -> Tensor:
    """Return E2M1 codes of bf16 numbers, one per byte, from the table offsets of their blocks."""
    if bits is None:
        return _look_up(piece, offsets, block, _nearest_codes(E2M1, 8))
    sums = _look_up(piece, offsets, block, _stochastic_codes()).sub_(bits)
    return buffer("codes", piece.shape, torch.uint8).copy_(sums.bitwise_right_shift_(16))


def _of_floats(piece: Tensor, e: Tensor, block: Block, bits: Tensor | None, finite: bool) -> Tensor:
    """Return E2M1 codes of any numbers, one per byte, from the encode factors of their blocks."""
    if bits is None:
        return _nearest(_scaled(piece, e, block), E2M1)
    piece = piece.float()
    if finite and e.amax() <= 2.0**100:
        return _stochastic(_scaled(piece, e * 2.0**25, block), piece, bits)
    # Elsewhere a subnormal times its factor may be rounded up, and NaN, whatever its sign, becomes +6.
    y = _scaled(flush(piece), e, block)
    nan = y.isnan()
    codes = _stochastic(y.mul_(2.0**25), piece, bits)
    return codes.masked_fill_(nan, E2M1.max_code)


def _rotated_lines(x: Tensor) -> Tensor:
    """Rotate the transpose of an operand, [k, rows]; same bits as `rotate`.

    Returns:
        float32 [ceil16(k), rows] in a scratch buffer.
    """
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 16)) if x.shape[0] % 16 else x
    k, rows = x.shape
    out, at = buffer("rotated", (k, rows), torch.float32), 0
    signs = torch.tensor(numerics.SIGNS, dtype=torch.float32, device="cpu")[:, None]
    for piece in _pieces(x, (16, 1)):
        a = out[at : at + len(piece)].copy_(piece)
        a.view(-1, 16, rows).mul_(signs)
        b = buffer("butterflies", a.shape, torch.float32)
        for stride in (1, 2, 4, 8):
            shape = (-1, 8 // stride, 2, stride, rows)
            (left, right), (sums, differences) = a.view(shape).unbind(2), b.view(shape).unbind(2)
            torch.add(left, right, out=sums)
            torch.sub(left, right, out=differences)
            a, b = b, a
        a.mul_(0.25)
        at += len(piece)
    return out


# ---- E8M0 scales ----


def reason_e8m0(x: Tensor, spec: QuantSpec, *_: object) -> str:
    """Return why this implementation does not support the call, or ""."""
    if not x.is_cpu:
        return "the tensor is not on a CPU"
    if spec.scale != "e8m0" or spec.hadamard or spec.rounding != "nearest" or spec.format.bits > 6:
        return "it supports only rounding to nearest to six bits or fewer with E8M0 scales"
    return "" if spec.block[0] == 1 and spec.block[1] is not None else "it is for blocks along rows"


def e8m0(
    x: Tensor, spec: QuantSpec, amax: ScalarOverride = None, factor: object = None, noise: object = NO_NOISE
) -> Quantized:
    """Quantize x with E8M0 scales; same bits as `quaver.torch.numerics.reference.quantize`."""
    if x.numel() == 0 or amax is not None:
        return reference.quantize(x, spec, amax)
    x, (rows, k), fmt, width = x.detach(), x.shape, spec.format, spec.block[1]
    assert width is not None
    transposed = not x.is_contiguous() and x.stride(0) == 1 and k % width == 0 and k % 2 == 0
    x, block = (x.t(), (width, 1)) if transposed else (x.contiguous(), (1, width))
    x = x.float() if x.dtype is torch.float16 else x
    bits = _block_bits(x, block)
    p = exponent(bits, fmt)
    e = power_of_two(p)
    scale = reference.stored_scale(bits, bits < INFINITY_BITS, e, spec)
    of_bits = x.dtype is torch.bfloat16 and bits.max().item() < NORMAL_AMAX[1]
    factors = (p << 7) + ZERO if of_bits else torch.where(bits == 0, 0.0, e)
    size = tuple(x.shape) if not fmt.packed else (k // 2, rows) if transposed else (rows, (k + 1) // 2)
    data, at = torch.empty(size, dtype=torch.uint8, device="cpu"), 0
    for piece in _pieces(x, block):
        stop = at + len(piece)
        inside = factors[at // block[0] : -(-stop // block[0])]
        if of_bits:
            codes = _look_up(piece, inside, block, _nearest_codes(fmt, 1))
        else:
            codes = _nearest(_scaled(piece, inside, block), fmt)
        if not fmt.packed:
            data[at:stop] = codes
        elif transposed:
            _pack_lines(codes, data[at // 2 : stop // 2])
        else:
            _pack(codes, data[at:stop])
        at = stop
    measured = bits.view(torch.float32)
    if transposed and fmt.packed:
        data, scale, measured = data.t().contiguous(), scale.t().contiguous(), measured.t()
        transposed = False
    return Quantized(data, scale, spec, (rows, k), transposed, None, measured)
