"""Codes to bf16 or float32 values on a CPU, block scales folded in: what `gemm` multiplies."""

import math
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quaver.recipes.formats import E2M1, Format
from quaver.reference import numerics
from quaver.torch.backends.cpu import quantize
from quaver.torch.backends.cpu.quantize import scalar
from quaver.torch.numerics.quantized import FLOAT8, Quantized, spread

# ---- decoding --------------------------------------------------------------------------------------------

#: Exponents of block scales that may be folded into the operands: products and sums stay normal float32 numbers.
FOLD = (-50, 6)
#: Row scales within these go on the output one after the other without leaving the range.
ROWS = (2.0**-60, 2.0**60)


def decode(q: Quantized, half: bool, tiny: bool, slot: str) -> tuple[Tensor, Tensor | float] | None:
    """An operand [rows, k] as bf16 or float32 values, and what its product is to be multiplied by.

    Block scales are in the matrix; scales of rows and of the tensor are not. None: the scales are too far apart for
    that.

    Args:
        slot: of `quaver.torch.backends.cpu.quantize`, where the matrix may lie.
    """
    if q.spec.two_level:
        return _decode_two_level(q, half)
    if q.spec.scale == "unit":
        # Its scales tell of no NaN, so that the values must.
        values = q.values()
        return values.to(torch.bfloat16) if half else values, 1.0
    if not isinstance(q.scale, Tensor):
        if not tiny and math.frexp(q.scale)[0] == 0.5 and 2.0 ** FOLD[0] <= q.scale <= 2.0 ** FOLD[1]:
            # Decoding multiplies by a power of two anyway, which saves a pass over the product.
            return _values(q, half, tiny, slot, q.scale), 1.0
        return _values(q, half, tiny, slot), q.scale
    if q.spec.block[1] is not None:
        return _decode_blocks(q, half, tiny, slot)
    if q.spec.power_of_two:
        # Decoding multiplies by a power of two anyway: a row's own saves two passes over the product.
        folded = _decode_blocks(q, half, tiny, slot)
        if folded is not None:
            return folded
    scale = q.scales()
    low, high = torch.aminmax(scale)
    if not (ROWS[0] <= low.item() and high.item() <= ROWS[1]):
        return None
    return _values(q, half, tiny, slot), spread(scale, q.spec.block, q.shape)


def _decode_blocks(q: Quantized, half: bool, tiny: bool, slot: str) -> tuple[Tensor, float] | None:
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
    values, left = _raw(q, half, tiny, slot)
    factor = (scale * 2.0**-shift * left).to(values.dtype)
    return _folded(q, values, factor), math.ldexp(1.0, shift)


def rescales_exactly(q: Quantized) -> bool:
    """True if its scales can be applied after the one rounding to bf16."""
    return q.spec.power_of_two or q.spec.scale == "two_level"


def folds_exactly(q: Quantized) -> bool:
    """True if the decoded matrix holds bf16 values."""
    return q.spec.power_of_two or q.spec.two_level or q.spec.block[1] is None


def _folded(q: Quantized, values: Tensor, factor: Tensor) -> Tensor:
    """An operand's values times the factors of their blocks, given as they lie; in place where blocks divide it."""
    (height, width), shape = q.spec.block, q.shape
    if q.transposed:
        values, factor = values.t(), factor.t()
    height, width = min(height or shape[0], shape[0]), min(width or shape[1], shape[1])
    if shape[0] % height or shape[1] % width:
        return values * spread(factor, q.spec.block, shape)
    values.view(-1, height, shape[1] // width, width).mul_(factor[:, None, :, None])
    return values


def _decode_two_level(q: Quantized, half: bool) -> tuple[Tensor, float]:
    assert isinstance(q.scale, Tensor) and q.tensor_factor is not None
    factor = q.scale.view(torch.float8_e4m3fn).to(torch.bfloat16 if half else torch.float32)
    return _folded(q, _pairs_of(q, half), factor), 1.0 / q.tensor_factor.item()


def _pairs_of(q: Quantized, half: bool) -> Tensor:
    """The values of packed codes as they lie, in bf16 or float32."""
    rows, columns = q.lying_shape
    pairs = _e2m1_pairs(half).index_select(0, q.data.reshape(-1).to(torch.int32))
    return pairs.view(torch.bfloat16 if half else torch.float32).view(rows, -1)[:, :columns].contiguous()


_pairs: dict[bool, Tensor] = {}


def _e2m1_pairs(half: bool) -> Tensor:
    """Both values of every byte of packed E2M1, as one integer each: [256]."""
    if half not in _pairs:
        byte = torch.arange(256, dtype=torch.int64, device="cpu")
        values = torch.from_numpy(numerics.values(E2M1).copy())
        both = torch.stack([values[byte & 15], values[byte >> 4]], 1)
        _pairs[half] = both.to(torch.bfloat16).view(torch.int32)[:, 0] if half else both.view(torch.int64)[:, 0]
    return _pairs[half]


def _values(q: Quantized, half: bool, tiny: bool, slot: str, factor: float = 1.0) -> Tensor:
    """Codes to bf16 or float32 values times a power of two, without scales; NaN codes are not kept: their scale is
    NaN."""
    raw, left = _raw(q, half, tiny, slot, factor)
    values = raw if left == 1.0 else raw.mul_(scalar(left))
    return values.t() if q.transposed else values


def _raw(q: Quantized, half: bool, tiny: bool, slot: str, factor: float = 1.0) -> tuple[Tensor, float]:
    """Codes as they lie as values of a wider type, and the power of two by which they are still to be multiplied.

    FP8 codes are moved into its bits: E5M2 is the top byte of a float16, and both shift into a bfloat16, E4M3 into a
    float16 too, with their signs carried along. Those of other formats are looked up.
    """
    data, fmt = q.data, q.spec.format
    if fmt.packed:
        return _pairs_of(q, half), factor
    if fmt.name not in FLOAT8:
        return _table(fmt, half).index_select(0, data.reshape(-1).to(torch.int32)).view(data.shape), factor
    if tiny:
        return data.float(), factor
    if half and (fmt.name == "e4m3" or _is_finite(q)) and not _flushes_subnormals():
        places, mask, lift = INTO_BF16[fmt.name]
        bits = _copied(data.view(torch.int8), torch.int16, slot)
        values = bits.bitwise_left_shift_(_int16(places)).bitwise_and_(_int16(mask)).view(torch.bfloat16)
        return values, math.ldexp(factor, lift)
    if fmt.name == "e5m2":
        if half:
            return _through_float32(data, slot, factor), 1.0
        bits, lift = _copied(data.view(torch.uint8), torch.int16, slot).bitwise_left_shift_(_int16(8)), 0
    else:
        bits, lift = _copied(data.view(torch.int8), torch.int16, slot), 8
        bits.bitwise_left_shift_(_int16(7)).bitwise_and_(_int16(-16385))
    return _copied(bits.view(torch.float16), torch.bfloat16 if half else torch.float32, slot + ", wide"), math.ldexp(
        factor, lift
    )


#: How far codes are shifted into a bfloat16, the bits of it that they take, and how much less its exponent then says.
INTO_BF16 = {"e4m3": (4, -30721, 120), "e5m2": (5, -28673, 112)}


def _is_finite(q: Quantized) -> bool:
    """True if E5M2's codes hold no infinity and no NaN: by a measured amax, which compiled code does not hand on, or by
    the largest codes of either sign, which takes a quarter of what decoding by bits saves."""
    if isinstance(q.amax, float):
        return q.amax < math.inf
    return bool(q.data.view(torch.int8).amax() < INFINITE) and bool(q.data.view(torch.uint8).amax() < 128 + INFINITE)


#: The code of infinity in E5M2; those of NaN are above it.
INFINITE = 124


def _through_float32(codes: Tensor, slot: str, factor: float) -> Tensor:
    """E5M2 codes to bf16 values times a power of two, in pieces that stay in the cache: torch converts float16 to
    float32 and that to bf16 by vectors, but float16 to bf16 number by number."""
    out = quantize.buffer(slot, codes.shape, torch.bfloat16)
    codes, step = codes.view(torch.uint8).contiguous(), quantize.PIECE // 4
    for part, values in zip(codes.view(-1).split(step), out.view(-1).split(step), strict=True):
        bits = quantize.buffer("half", part.shape, torch.int16).copy_(part).bitwise_left_shift_(_int16(8))
        wide = quantize.buffer("temporary", part.shape, torch.float32).copy_(bits.view(torch.float16))
        values.copy_(wide if factor == 1.0 else wide.mul_(scalar(factor)))
    return out


def _copied(x: Tensor, dtype: torch.dtype, slot: str) -> Tensor:
    """In another dtype, and in a slot where that is large."""
    if x.numel() * dtype.itemsize <= quantize.SMALLEST:
        return x.to(dtype)
    return quantize.buffer(slot, x.shape, dtype).copy_(x)


@cache
def _table(fmt: Format, half: bool) -> Tensor:
    """The values of all bytes as codes of a format, bf16 or float32 [256]."""
    with torch.inference_mode(False):
        return torch.from_numpy(numerics.values(fmt).copy()).to(torch.bfloat16 if half else torch.float32)


@cache
def _int16(number: int) -> Tensor:
    """A number as a tensor without dimensions: of one of Python's torch makes such a tensor in each call."""
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int16, device="cpu")


_subnormal = 5e-324


def _flushes_subnormals() -> bool:
    """Whether this thread's arithmetic does, Python's included: what torch.set_flush_denormal asks for."""
    return _subnormal * 1.0 == 0.0


# ---- repeated --------------------------------------------------------------------------------------------
# Operands that several products of one call of a layer read, each decoded once.
#
# Query, key and value projections read one input, and a layer's two products in backward one gradient. Who calls them
# marks that operand; its values then stay in a slot of `scratch` until the next marked operand takes it. The mark is of
# one object in one call: codes that outlive a call, such as a weight's, may be written in between, and bear none.

#: Slots, of a layer's input and of the gradient of its output.
INPUT, GRADIENT = "input", "gradient"


class DecodeCacheKey:
    """Says that an operand, and its transpose that shares the mark, will be read again in this call, by this thread."""

    __slots__ = ("half", "slot", "values")

    def __init__(self, slot: str) -> None:
        self.slot = slot
        #: As they lie, in bf16 or float32, and what the product is to be multiplied by.
        self.values: tuple[Tensor, float] | None = None
        self.half = False


class _DecodeCache(threading.local):
    def __init__(self) -> None:
        self.of: dict[str, DecodeCacheKey] = {}
        #: Codes of which operands are put together anew for each product, and their mark.
        self.codes: tuple[Tensor, DecodeCacheKey] | None = None


thread = _DecodeCache()


def mark(q: Any, slot: str) -> None:
    """Mark a large operand on a CPU, or the codes of which `mark_of` marks this thread's operands; nothing else."""
    data = q.data if isinstance(q, Quantized) else q
    if data is None or not data.is_cpu or data.numel() * 2 < quantize.SMALLEST:
        return
    if data is q:
        thread.codes = data, DecodeCacheKey(slot)
    else:
        q.mark = DecodeCacheKey(slot)


def unmark(q: Any) -> None:
    """End the call, which an operand and codes outlive."""
    if isinstance(q, Quantized):
        q.mark = None
    else:
        thread.codes = None


def mark_of(codes: Tensor) -> DecodeCacheKey | None:
    """The mark of codes in this thread's call."""
    marked = thread.codes
    return marked[1] if marked is not None and marked[0] is codes else None


def values_of(q: Quantized, half: bool, tiny: bool, slot: str) -> tuple[Tensor, Tensor | float] | None:
    """`decode`, or what it gave before; a slot of its own is for operands that bear no mark."""
    own = q.mark
    if own is None or tiny:
        return decode(q, half, tiny, slot)
    assert isinstance(own, DecodeCacheKey)
    if own.values is not None and own.half is half and thread.of.get(own.slot) is own:
        values, factor = own.values
        return values.t() if q.transposed else values, factor
    # Whose values lie there loses them.
    thread.of.pop(own.slot, None)
    result = decode(q, half, tiny, own.slot)
    if result is not None and isinstance(result[1], float) and result[0].nbytes <= quantize.LARGEST:
        values = result[0].t() if q.transposed else result[0]
        own.values, own.half = (values, result[1]), half
        thread.of[own.slot] = own
    return result
