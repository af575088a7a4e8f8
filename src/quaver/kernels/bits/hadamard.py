"""The 16-point rotation of `quaver.core.numbers.hadamard` on sixteen tensors, each with one element of every group."""

import triton
import triton.language as tl

#: Bit j is set where element j changes its sign.
NEGATIVE = tl.constexpr(0b1101_0111_1110_1000)


@triton.jit
def rotate(v):
    """Sixteen float32 tensors of one shape, rotated: signs, butterflies of stride 1, 2, 4 and 8, a quarter. Exact."""
    y, out = turned(v), ()
    for j in tl.static_range(16):
        out += (y[j] * 0.25,)
    return out


@triton.jit
def turned(v):
    """Four times what `rotate` gives, for those who need the quarter once in a block: signs and butterflies. Exact."""
    y = ()
    for j in tl.static_range(16):
        if (NEGATIVE >> j) & 1:
            # Not -v, which is 0 - v here and loses the sign of a zero.
            y += (v[j] * -1.0,)
        else:
            y += (v[j],)
    y = butterflies(y, 1)
    y = butterflies(y, 2)
    y = butterflies(y, 4)
    return butterflies(y, 8)


@triton.jit
def butterflies(y, STRIDE: tl.constexpr):
    """a + b and a - b of elements that lie STRIDE apart."""
    out = ()
    for j in tl.static_range(16):
        if (j // STRIDE) % 2 == 0:
            out += (y[j] + y[j + STRIDE],)  # type: ignore[assignment]
        else:
            out += (y[j - STRIDE] - y[j],)  # type: ignore[assignment]
    return out
