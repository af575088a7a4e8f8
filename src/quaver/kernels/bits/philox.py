"""Philox4x32-10 inside a kernel: the words of `quaver.core.numbers.philox`, whose constants these are.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import triton
import triton.language as tl

M0, M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
#: Of Philox of two words.
M2 = tl.constexpr(0xD256D193)
W0, W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit
def product(a, m: tl.constexpr):
    """High and low word of uint32 a times m; a GPU computes both by one instruction."""
    wide = a.to(tl.uint64) * m
    return (wide >> 32).to(tl.uint32), wide.to(tl.uint32)


@triton.jit
def whole_word(low, high):
    """uint32 of its halves h, each of which comes as 2 h + 1: odd and small, so that no number is compiled apart."""
    return (low.to(tl.uint32) >> 1) | ((high.to(tl.uint32) >> 1) << 16)


@triton.jit
def philox(g, tensor_id, count, seed_low, seed_high):
    """The four words of counters g, int64 of any shape: uint32 each.

    tensor_id, seed_low, seed_high: 32 bits in an integer; count: any integer, of which the low 32 bits count. Exact.
    """
    c0, c1 = g.to(tl.uint32), (g >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + tensor_id.to(tl.uint32)
    c3 = tl.zeros_like(c0) + count.to(tl.uint32)
    k0, k1 = seed_low.to(tl.uint32), seed_high.to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = product(c0, M0)
        high1, low1 = product(c2, M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += W0
        k1 += W1
    return c0, c1, c2, c3


@triton.jit
def philox_of_two(g, upper, key):
    """The two words of counters g, int64 of any shape: uint32 each.

    upper: uint32 that the counters' upper words are changed by; key: uint32. Exact.
    """
    c0, c1 = g.to(tl.uint32), (g >> 32).to(tl.uint32) ^ upper
    for _ in tl.static_range(10):
        high, low = product(c0, M2)
        c0, c1 = high ^ c1 ^ key, low
        key += W0
    return c0, c1
