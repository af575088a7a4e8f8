"""Eight-bit codes to their transpose, four bytes at a time in both memories."""

import triton
import triton.language as tl

from quaver.kernels.quantizing.cast import load4_as_is, store_turned


@triton.jit
def transpose(
    q, qt, rows, columns, q_lines, qt_lines,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """Codes [rows, columns] to [columns, rows], each as int32, rows q_lines and qt_lines times 16 bytes
    long, so that a compiler sees how wide it may read and write.

    What ends the rows of the transpose is zero. Squares of 4 by 4 bytes are turned in registers, in two rounds.
    """
    pm = tl.program_id(0 if TALL else 1)
    pn = tl.program_id(1 if TALL else 0)
    r = pm * BM + 4 * tl.arange(0, BM // 4)
    c4 = pn * (BN // 4) + tl.arange(0, BN // 4)
    q_stride4 = 4 * q_lines
    v0, v1, v2, v3 = load4_as_is(q, r, c4, rows, q_stride4, q_stride4, EVEN)
    even01, odd01 = shuffled(v0, v1)
    even23, odd23 = shuffled(v2, v3)
    r4 = pm * (BM // 4) + tl.arange(0, BM // 4)
    c = 4 * c4
    store_turned(qt, r4, c, columns, 4 * qt_lines, (even01 & 0xFFFF) | (even23 << 16), EVEN)
    store_turned(qt, r4, c + 1, columns, 4 * qt_lines, (odd01 & 0xFFFF) | (odd23 << 16), EVEN)
    store_turned(qt, r4, c + 2, columns, 4 * qt_lines, ((even01 >> 16) & 0xFFFF) | (even23 & -0x10000), EVEN)
    store_turned(qt, r4, c + 3, columns, 4 * qt_lines, ((odd01 >> 16) & 0xFFFF) | (odd23 & -0x10000), EVEN)


@triton.jit
def shuffled(a, b):
    """The even bytes of two int32, a's and b's in turn, and the odd ones."""
    even = (a & 0x00FF00FF) | ((b & 0x00FF00FF) << 8)
    odd = ((a >> 8) & 0x00FF00FF) | (b & -0xFF0100)
    return even, odd
