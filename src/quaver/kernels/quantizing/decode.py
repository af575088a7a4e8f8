"""Codes and scales back to values, for operands that no GEMM of the device takes as they are."""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import NAN_BITS, decoded, held
from quaver.kernels.bits.swizzle import swizzled


@triton.jit
def e2m1(code):
    """The values of E2M1 codes 0 … 15, int32 to float32."""
    m = code & 7
    # 0 and a half, or an exponent and a mantissa bit in their places.
    bits = tl.where(m < 2, m * 0x3F000000, (m << 22) + (126 << 23))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def load_codes(
    q, r, c, columns, rows, stride,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """float32 [BM, BN]: eight-bit codes, or four-bit ones of which two share a byte (CODES None)."""
    PAIRS: tl.constexpr = CODES is None
    at = q + r[:, None].to(tl.int64) * stride + c[None, :]
    if EVEN:
        codes = tl.load(at)
    else:
        wide: tl.constexpr = 2 if PAIRS else 1
        codes = tl.load(at, mask=(r[:, None] < rows) & (wide * c[None, :] < columns), other=0.0)
    codes = codes.to(tl.uint8, bitcast=True)
    if PAIRS:
        byte = codes.to(tl.int32)
        values = tl.reshape(tl.join(e2m1(byte & 15), e2m1(byte >> 4)), [BM, BN])
    else:
        values = decoded(codes, CODES, INTEGERS)
    return values


@triton.jit
def decoded_scale(scale, factor, KIND: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTEGERS: tl.constexpr):
    """Stored scales to float32: as they are, or from E8M0 codes, or from E4M3 codes, over the tensor's factor."""
    if KIND == "e8m0":
        bits = scale.to(tl.int32)
        bits = tl.where(bits == 0, 0x00400000, tl.where(bits == 255, NAN_BITS, bits << 23))
        value = bits.to(tl.float32, bitcast=True)
    elif KIND == "two_level":
        value = decoded(scale, tl.float8e4nv, INTEGERS)
        if factor is not None:
            whole = tl.load(factor)
            if POWER_OF_TWO:
                bits = whole.to(tl.int32, bitcast=True)
                bits = tl.where(whole == whole, 0x7F000000 - bits, NAN_BITS)
                value = value * bits.to(tl.float32, bitcast=True)
            else:
                value = tl.div_rn(value, value * 0.0 + whole)
    else:
        value = scale
    return value


@triton.jit
def decode(
    q, scale, factor, out,
    rows, columns, stride, scale_stride, scale_step, out_stride, across,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
    KIND: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, SWIZZLED: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    CODES: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """q [rows, columns] times its scales to out of the same shape, in out's dtype; both as they lie.

    scale: None leaves it out; of blocks of BR × BC, 0 being the whole axis, `scale_stride` and `scale_step` apart along
    the axes, or SWIZZLED, `across` tiles side by side. factor float32 [1]: of two-level scales, None leaves it out.
    KIND: "float32", "e8m0", "two_level". CODES: the format of q; None: E2M1, two in a byte. A NaN scale makes its block
    NaN. Exact where out's dtype holds the products; what is beyond it becomes its largest number.
    """
    down, right = tl.program_id(0 if TALL else 1), tl.program_id(1 if TALL else 0)
    r = down * BM + tl.arange(0, BM)
    c = right * BN + tl.arange(0, BN)
    if CODES is None:
        p = right * (BN // 2) + tl.arange(0, BN // 2)
        v = load_codes(q, r, p, columns, rows, stride, BM, BN, EVEN, CODES, INTEGERS)
    else:
        v = load_codes(q, r, c, columns, rows, stride, BM, BN, EVEN, CODES, INTEGERS)
    if scale is not None:
        # Scales of a row of this program, and elements that share one.
        WIDTH: tl.constexpr = BN if BC == 0 or BC > BN else BC
        block = (right * (BN // WIDTH) + tl.arange(0, BN // WIDTH)) * WIDTH // (columns if BC == 0 else BC)
        line = r * 0 if BR == 0 else r // BR
        if SWIZZLED:
            at = scale + swizzled(r, block, across)
        else:
            at = scale + line[:, None].to(tl.int64) * scale_stride + block[None, :].to(tl.int64) * scale_step
        if EVEN:
            stored = tl.load(at)
        else:
            first = (right * (BN // WIDTH) + tl.arange(0, BN // WIDTH)) * WIDTH
            stored = tl.load(at, mask=(r[:, None] < rows) & (first[None, :] < columns), other=0)
        s = decoded_scale(stored, factor, KIND, POWER_OF_TWO, INTEGERS)
        v = tl.reshape(tl.reshape(v, [BM, BN // WIDTH, WIDTH]) * s[:, :, None], [BM, BN])
    at = out + r[:, None].to(tl.int64) * out_stride + c[None, :]
    values = held(v, out.dtype.element_ty)
    if EVEN:
        tl.store(at, values)
    else:
        tl.store(at, values, mask=(r[:, None] < rows) & (c[None, :] < columns))
