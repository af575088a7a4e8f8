"""Decode codes to bf16 or float32 values on a CPU, with block scales applied: the operands of `gemm`."""

import math
from functools import cache

import torch
from torch import Tensor

from quaver.recipes.formats import Format
from quaver.reference import numerics
from quaver.torch.backends.cpu import quantize
from quaver.torch.backends.cpu.quantize import scalar
from quaver.torch.numerics.quantized import FLOAT8, Quantized, spread

# ---- decoding ----

#: Range of exponents of block scales that may be multiplied into the operands; products and sums stay normal float32.
FOLD = (-50, 6)
#: Range of row scales that can be applied to the output one after the other without overflow or underflow.
ROWS = (2.0**-60, 2.0**60)


def decode(q: Quantized, as_bf16: bool, tiny: bool, slot: str) -> tuple[Tensor, Tensor | float] | None:
    """Decode an operand [rows, k]; return bf16 or float32 values, and the factor for the product.

    Block scales are multiplied into the values. Row scales and the tensor scale are returned as the factor. Returns
    None if the scales differ too much for that.

    Args:
        as_bf16: True for bf16, False for float32.
        tiny: True if the operand is so small that the plain torch cast is fastest.
        slot: scratch buffer of `quaver.torch.backends.cpu.quantize` that the values may use.
    """
    if q.spec.two_level:
        assert isinstance(q.scale, Tensor) and q.tensor_factor is not None
        factor = 1.0 / q.tensor_factor.item()
        if _scales_per_byte(q):
            return _look_up(q, q.scale, as_bf16, slot), factor
        values, _ = _raw(q, as_bf16, tiny, slot)
        return _folded(q, values, q.scale.view(torch.float8_e4m3fn).to(values.dtype)), factor
    if q.spec.scale == "unit":
        # Unit scales cannot represent NaN, so the values must.
        values = q.values()
        return values.to(torch.bfloat16) if as_bf16 else values, 1.0
    if not isinstance(q.scale, Tensor):
        if not tiny and math.frexp(q.scale)[0] == 0.5 and 2.0 ** FOLD[0] <= q.scale <= 2.0 ** FOLD[1]:
            # Decoding multiplies by a power of two anyway, so the scale costs nothing here and saves a pass over the
            # product.
            return _values(q, as_bf16, tiny, slot, q.scale), 1.0
        return _values(q, as_bf16, tiny, slot), q.scale
    if q.spec.block[1] is not None:
        return _decode_blocks(q, as_bf16, tiny, slot)
    if q.spec.power_of_two:
        # Decoding multiplies by a power of two anyway, so row scales cost nothing here and save two passes over the
        # product.
        folded = _decode_blocks(q, as_bf16, tiny, slot)
        if folded is not None:
            return folded
    scale = q.scales()
    low, high = torch.aminmax(scale)
    if not (ROWS[0] <= low.item() and high.item() <= ROWS[1]):
        return None
    return _values(q, as_bf16, tiny, slot), spread(scale, q.spec.block, q.shape)


def _decode_blocks(q: Quantized, as_bf16: bool, tiny: bool, slot: str) -> tuple[Tensor, float] | None:
    assert isinstance(q.scale, Tensor)
    # E8M0 code 0 becomes 0, because the data of that block are zeros.
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
    if q.spec.scale == "e8m0" and q.spec.format.name not in FLOAT8 and _scales_per_byte(q):
        # Blocks whose code is 0 are zeros, for which any scale will do.
        return _look_up(q, (q.scale.to(torch.int32) - shift).clamp_(min=0), as_bf16, slot), math.ldexp(1.0, shift)
    values, residual_scale = _raw(q, as_bf16, tiny, slot)
    factor = (scale * 2.0**-shift * residual_scale).to(values.dtype)
    return _folded(q, values, factor), math.ldexp(1.0, shift)


def rescales_exactly(q: Quantized) -> bool:
    """Return True if the scales can be applied exactly after the product was rounded to bf16."""
    return q.spec.power_of_two or q.spec.scale == "two_level"


def decodes_exactly_to_bf16(q: Quantized) -> bool:
    """Return True if the decoded matrix consists of bf16 values."""
    return q.spec.power_of_two or q.spec.two_level or q.spec.block[1] is None


def _folded(q: Quantized, values: Tensor, factor: Tensor) -> Tensor:
    """Multiply an operand's values by the factors of their blocks, both in storage order; in place if blocks divide the
    shape.
    """
    (height, width), shape = q.spec.block, q.shape
    if q.transposed:
        values, factor = values.t(), factor.t()
    height, width = min(height or shape[0], shape[0]), min(width or shape[1], shape[1])
    if shape[0] % height or shape[1] % width:
        return values * spread(factor, q.spec.block, shape)
    values.view(-1, height, shape[1] // width, width).mul_(factor[:, None, :, None])
    return values


def _scales_per_byte(q: Quantized) -> bool:
    """Return True if no byte has codes of two blocks."""
    width = q.stored_block[1]
    return not q.spec.format.packed or width is None or width % 2 == 0


def _look_up(q: Quantized, scale: Tensor, as_bf16: bool, slot: str) -> Tensor:
    """Decode codes of four or six bits with the integer codes of their scales, by one table look-up per byte.

    Works in pieces that fit the cache.
    """
    table = _scaled_values(q.spec.format, q.spec.scale == "e8m0", as_bf16)
    (rows, columns), (height, width) = q.stored_shape, q.stored_block
    height, width = min(height or rows, rows), min(width or columns, columns)
    per_byte = 2 if q.spec.format.packed else 1
    offsets = scale.to(torch.int32) << 8
    aligned = rows % height == 0 and columns % width == 0 and columns % per_byte == 0
    if aligned:
        offsets = offsets[:, None, :, None]
    else:
        offsets = spread(offsets, (height, width), (rows, columns))[:, ::per_byte]
    values = quantize.buffer(slot, q.data.shape, table.dtype)
    step = max(1, quantize.PIECE // 4 // max(1, q.data.shape[1]) // height) * height
    for at in range(0, rows, step):
        data, stop = q.data[at : at + step], min(at + step, rows)
        index = quantize.buffer("index", data.shape, torch.int32).copy_(data)
        if aligned:
            blocks = index.view(-1, height, columns // width, width // per_byte)
            blocks.add_(offsets[at // height : stop // height])
        else:
            index.add_(offsets[at:stop])
        torch.index_select(table, 0, index.view(-1), out=values[at:stop].view(-1))
    values = values.view(torch.bfloat16 if as_bf16 else torch.float32)[:, :columns]
    return values.t() if q.transposed else values


@cache
def _scaled_values(fmt: Format, e8m0: bool, as_bf16: bool) -> Tensor:
    """Return the values of a byte of codes, times a scale, at index 256 × scale code + byte: [65536].

    Packed codes have two values, stored as one integer.
    """
    with torch.inference_mode(False):
        byte = torch.arange(256, dtype=torch.int64, device="cpu")
        # Where the exponent code is 0 the codes are zeros.
        scale = (byte << 23).to(torch.int32).view(torch.float32)
        if not e8m0:
            scale = byte.to(torch.uint8).view(torch.float8_e4m3fn).float()
        values = torch.from_numpy(numerics.values(fmt).copy())
        codes = torch.stack([byte & 15, byte >> 4], 1) if fmt.packed else byte[:, None]
        scaled = (values[codes] * scale[:, None, None]).to(torch.bfloat16 if as_bf16 else torch.float32).flatten()
        return scaled if not fmt.packed else scaled.view(torch.int32 if as_bf16 else torch.int64)


def _values(q: Quantized, as_bf16: bool, tiny: bool, slot: str, factor: float = 1.0) -> Tensor:
    """Decode codes to bf16 or float32 values times a power of two, without scales.

    NaN codes need not be preserved, because their scale is NaN.
    """
    raw, residual_scale = _raw(q, as_bf16, tiny, slot, factor)
    values = raw if residual_scale == 1.0 else raw.mul_(scalar(residual_scale))
    return values.t() if q.transposed else values


def _raw(q: Quantized, as_bf16: bool, tiny: bool, slot: str, factor: float = 1.0) -> tuple[Tensor, float]:
    """Convert codes to a wider dtype in storage order; return the values and the remaining power-of-two factor.

    FP8 codes are shifted into the bits of the wider dtype with their sign: E5M2 is the top byte of a float16; E5M2 and
    E4M3 also fit into a bfloat16, and E4M3 into a float16. Other formats use a table.
    """
    data, fmt = q.data, q.spec.format
    if fmt.name not in FLOAT8:
        codes = q.stored_codes()
        return _table(fmt, as_bf16).index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape), factor
    if tiny:
        return data.float(), factor
    if as_bf16 and (fmt.name == "e4m3" or _is_finite(q)) and not _flushes_subnormals():
        shift, mask, lift = INTO_BF16[fmt.name]
        bits = _copied(data.view(torch.int8), torch.int16, slot)
        values = bits.bitwise_left_shift_(_int16(shift)).bitwise_and_(_int16(mask)).view(torch.bfloat16)
        return values, math.ldexp(factor, lift)
    if fmt.name == "e5m2":
        if as_bf16:
            return _through_float32(data, slot, factor), 1.0
        bits, lift = _copied(data.view(torch.uint8), torch.int16, slot).bitwise_left_shift_(_int16(8)), 0
    else:
        bits, lift = _copied(data.view(torch.int8), torch.int16, slot), 8
        bits.bitwise_left_shift_(_int16(7)).bitwise_and_(_int16(-16385))
    return _copied(bits.view(torch.float16), torch.bfloat16 if as_bf16 else torch.float32, slot + ", wide"), math.ldexp(
        factor, lift
    )


#: By format: left shift of a code into a bfloat16, mask of its bits, and the exponent to add afterwards.
INTO_BF16 = {"e4m3": (4, -30721, 120), "e5m2": (5, -28673, 112)}


def _is_finite(q: Quantized) -> bool:
    """Return True if E5M2 codes have no infinity or NaN.

    Uses the measured amax, which compiled code does not pass on, or else the largest codes of either sign. The latter
    costs a quarter of what decoding by bits saves.
    """
    if isinstance(q.amax, float):
        return q.amax < math.inf
    return bool(q.data.view(torch.int8).amax() < INFINITE) and bool(q.data.view(torch.uint8).amax() < 128 + INFINITE)


#: E5M2 code of infinity; larger codes are NaN.
INFINITE = 124


def _through_float32(codes: Tensor, slot: str, factor: float) -> Tensor:
    """Decode E5M2 codes to bf16 values times a power of two, in pieces that fit the cache.

    torch converts float16 to float32 and float32 to bf16 with vector instructions, but float16 to bf16 one element at a
    time.
    """
    out = quantize.buffer(slot, codes.shape, torch.bfloat16)
    codes, step = codes.view(torch.uint8).contiguous(), quantize.PIECE // 4
    for part, values in zip(codes.view(-1).split(step), out.view(-1).split(step), strict=True):
        bits = quantize.buffer("half", part.shape, torch.int16).copy_(part).bitwise_left_shift_(_int16(8))
        wide = quantize.buffer("temporary", part.shape, torch.float32).copy_(bits.view(torch.float16))
        values.copy_(wide if factor == 1.0 else wide.mul_(scalar(factor)))
    return out


def _copied(x: Tensor, dtype: torch.dtype, slot: str) -> Tensor:
    """Convert to another dtype, into a scratch buffer if the result is large."""
    if x.numel() * dtype.itemsize <= quantize.SMALLEST:
        return x.to(dtype)
    return quantize.buffer(slot, x.shape, dtype).copy_(x)


@cache
def _table(fmt: Format, as_bf16: bool) -> Tensor:
    """Return the values of all 256 codes of a format in bf16 or float32."""
    with torch.inference_mode(False):
        return torch.from_numpy(numerics.values(fmt).copy()).to(torch.bfloat16 if as_bf16 else torch.float32)


@cache
def _int16(number: int) -> Tensor:
    """Return a cached 0-dimensional tensor; torch would create one per call from a Python number."""
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int16, device="cpu")


_subnormal = 5e-324


def _flushes_subnormals() -> bool:
    """Return True if this thread flushes subnormals to zero, as set by torch.set_flush_denormal."""
    return _subnormal * 1.0 == 0.0
