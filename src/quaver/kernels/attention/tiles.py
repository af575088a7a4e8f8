"""Tiles of attention's operands: eight bits times their scales, and scores' gradients rounded to such.

A scale is a power of two, so bfloat16 holds code × scale exactly: products of two such tiles are those of the operands,
summed in float32, whatever the block of a scale is. Where one scale serves a whole matrix, tiles are codes alone, as
float16, which holds both formats and takes a sixth of the instructions; products are multiplied by the scales.
"""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import decode_scale, decoded, encode, encode_factor, magnitude_bits
from quaver.kernels.quantizing.decode import decoded_scale

#: What probabilities are multiplied by before they are rounded, as `quaver.core.spec.PROBABILITY_FACTOR`.
FACTOR = tl.constexpr(256.0)
#: Its inverse, which the scales of what probabilities multiply take: in sums it would leave less of float32's range.
#: No scale is below 2^-100, so that codes times such a scale are bfloat16 still.
INVERSE = tl.constexpr(1 / 256.0)
#: The width of a block that is a whole row or matrix: wider than any tile.
UNBOUNDED = tl.constexpr(1 << 30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _times(
    codes, stored, R: tl.constexpr, C: tl.constexpr, NB: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
    BY: tl.constexpr,
):  # fmt: skip
    """bfloat16 [R, C]: codes [R, C] of a format times scales [R, NB] as they are stored, times BY, a power of two."""
    x = decoded(codes.to(tl.uint8, bitcast=True), CODES, INTEGERS)
    if stored.dtype == tl.uint8:
        s = decoded_scale(stored, None, "e8m0", True, INTEGERS)
    else:
        s = stored
    if BY != 1.0:
        s = s * BY
    return tl.reshape(tl.reshape(x, [R, NB, C // NB]) * s[:, :, None], [R, C]).to(tl.bfloat16)


@triton.jit
def half(codes, dtype: tl.constexpr, INTEGERS: tl.constexpr):
    """The values of FP8 codes, uint8, in float16. Exact; NaN stays NaN."""
    if INTEGERS != 2:
        x = codes.to(dtype, bitcast=True).to(tl.float16)
    elif dtype == tl.float8e5:
        x = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        wide = codes.to(tl.uint16)
        magnitude = wide & 0x7F
        # Exponent and mantissa in their places, where subnormals are such too, and the bias of float16 for E4M3's.
        x = ((magnitude << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
        x = tl.where(magnitude == 0x7F, float("nan"), x)
    return x


@triton.jit
def rows_of(
    codes, scales, first, rows, blocks,
    R: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
    HALF: tl.constexpr = False, BY: tl.constexpr = 1.0,
):  # fmt: skip
    """bfloat16 [R, D]: rows from `first` of an operand [rows, D] with scales [rows, blocks], times BY, a power of two;
    blocks 0: one scale for all. HALF: float16, the codes alone."""
    NB: tl.constexpr = D // WIDTH if WIDTH < D else 1
    r = first + tl.arange(0, R)[:, None]
    x = tl.load(codes + r * D + tl.arange(0, D)[None, :], mask=r < rows, other=0.0)
    if HALF:
        tile = half(x.to(tl.uint8, bitcast=True), CODES, INTEGERS)
    else:
        stored = tl.load(scales + r * blocks + tl.arange(0, NB)[None, :], mask=r < rows, other=0)
        tile = _times(x, stored, R, D, NB, CODES, INTEGERS, BY)
    return tile


@triton.jit
def columns_of(
    codes, scales, first, columns, blocks,
    C: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
    BY: tl.constexpr,
):  # fmt: skip
    """bfloat16 [C, D]: columns from `first` of an operand [D, columns] with scales [D, blocks], times BY."""
    NB: tl.constexpr = C // WIDTH if WIDTH < C else 1
    d, c = tl.arange(0, D)[:, None], first + tl.arange(0, C)[None, :]
    x = tl.load(codes + d * columns + c, mask=c < columns, other=0.0)
    b = first // WIDTH + tl.arange(0, NB)[None, :]
    stored = tl.load(scales + d * blocks + b, mask=b < blocks, other=0)
    return tl.trans(_times(x, stored, D, C, NB, CODES, INTEGERS, BY))


@triton.jit
def along_tokens(
    codes, scales, first, tokens, blocks,
    C: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
    TURNED: tl.constexpr, HALF: tl.constexpr = False, BY: tl.constexpr = 1.0,
):  # fmt: skip
    """bfloat16 [C, D] of C tokens, what a sum over tokens takes: of an operand [D, tokens] where TURNED, else of
    [tokens, D]; HALF and BY as `rows_of` has them."""
    if TURNED:
        x = columns_of(codes, scales, first, tokens, blocks, C, D, WIDTH, CODES, INTEGERS, BY)
    else:
        x = rows_of(codes, scales, first, tokens, blocks, C, D, WIDTH, CODES, INTEGERS, HALF, BY)
    return x


@triton.jit
def run_of(runs, i, tokens, others):
    """The first of the `others` that tokens i see, or are seen by, and one past the last; none outside of the tokens.
    runs: int32 [2, tokens], or None for all."""
    if runs is None:
        first, last = i * 0, tl.where(i < tokens, others, 0)
    else:
        first = tl.load(runs + i, mask=i < tokens, other=2147483647)
        last = tl.load(runs + tokens + i, mask=i < tokens, other=0)
    return first, last


@triton.jit
def visible(first, last, hidden, i, j, query_stride, key_stride):
    """Whether queries i, who see keys from `first` up to `last`, see keys j; all broadcast against each other.
    hidden: not 0 where they do not, or None."""
    seen = (j >= first) & (j < last)
    if hidden is not None:
        at = hidden + i.to(tl.int64) * query_stride + j.to(tl.int64) * key_stride
        seen = seen & (tl.load(at, mask=seen, other=1) == 0)
    return seen


@triton.jit
def shift_of(logsumexp, i, queries):
    """The logarithms to base 2 of the softmax's sums, 0 where a query sees nothing: -inf less -inf would be NaN."""
    total = (tl.load(logsumexp + i, mask=i < queries, other=0.0) * LOG2_E).to(tl.float32)
    return tl.where(total == float("-inf"), 0.0, total)


@triton.jit
def probability_codes(p, INTEGERS: tl.constexpr, HALF: tl.constexpr = False):
    """bfloat16, or float16 if HALF: probabilities float32 in E4M3, times `FACTOR`."""
    codes = encode(p * FACTOR, tl.float8e4nv, INTEGERS)
    if HALF:
        p = half(codes, tl.float8e4nv, INTEGERS)
    else:
        p = decoded(codes, tl.float8e4nv, INTEGERS).to(tl.bfloat16)
    return p


@triton.jit
def rounded(
    x, bits, dtype: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr,
):  # fmt: skip
    """float32: x quantized by the bits of amaxes, which broadcast to it."""
    e = encode_factor(bits, True, EMAX, TOP_MANTISSA, MAX)
    return decoded(encode(x * e, dtype, INTEGERS), dtype, INTEGERS) * decode_scale(bits, e, True)


@triton.jit
def rounded_in_blocks(
    x, R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, dtype: tl.constexpr, EMAX: tl.constexpr,
    TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """float32 [R, C]: x in blocks of WIDTH neighbours in a row, each by its own amax."""
    runs = tl.reshape(x, [R, C // WIDTH, WIDTH])
    bits = tl.max(magnitude_bits(runs), 2)[:, :, None]
    return tl.reshape(rounded(runs, bits, dtype, EMAX, TOP_MANTISSA, MAX, INTEGERS), [R, C])
