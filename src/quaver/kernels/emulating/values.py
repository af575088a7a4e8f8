"""What values of codes are on the way to a bf16 GEMM: rounded to a format, without codes."""

import triton
import triton.language as tl

#: The sign's bit, and bf16's largest number.
SIGN, LARGEST = tl.constexpr(-0x7FFFFFFF - 1), tl.constexpr(3.3895313892515355e38)


@triton.jit
def rounded(y, MANTISSA: tl.constexpr, EMIN: tl.constexpr):
    """The magnitude of float32 y, within a format's range, as the nearest of its values, ties to even; of what is not
    finite anything.

    MANTISSA: bits of the format's mantissa. EMIN: exponent of its smallest normal number.
    """
    # A number whose ulp is the format's step where y lies: adding it rounds to the step. The bits are y's, not |y|'s,
    # which would be made for them first.
    exponent = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, (EMIN + 127) << 23)
    magic = (exponent + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True)
    return (tl.abs(y) + magic) - magic


@triton.jit
def signed(v, y):
    """v, not negative, with the sign of y."""
    bits = v.to(tl.int32, bitcast=True) | (y.to(tl.int32, bitcast=True) & SIGN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def inverse(e):
    """1 / e of a power of two from 2**-126 to 2**126, by its exponent."""
    return (0x7F000000 - e.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
