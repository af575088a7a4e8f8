"""The scan inside of chunks: outputs of the chunk's own tokens by products of matrices, and of the state that enters.

The specification is `quaver.torch.blocks.state_space.scan.chunked`.
"""

import triton
import triton.language as tl

from quaver.kernels.state_space.steps import chunk_of, tile, write_tile


@triton.jit
def decays_between(high, low, lane, LATER_ROWS: tl.constexpr, BL: tl.constexpr):
    """exp of the sum at the later token less that at the earlier, [BL, BL], 0 where the later one is earlier.

    LATER_ROWS: whether rows are the later tokens, or columns.
    """
    i = tl.arange(0, BL)
    large, small = tl.load(high + lane + i), tl.load(low + lane + i)
    if LATER_ROWS:
        exponents = (large[:, None] - large[None, :]) + (small[:, None] - small[None, :])
        seen = i[:, None] >= i[None, :]
    else:
        exponents = (large[None, :] - large[:, None]) + (small[None, :] - small[:, None])
        seen = i[None, :] >= i[:, None]
    return tl.where(seen, tl.exp(exponents), 0.0)


@triton.jit
def state_of(states, lane, dim, size, columns, BP: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr):
    """[BP, BN] of one chunk and head, zeros beyond `columns`."""
    p, n = tl.arange(0, BP)[:, None], tl.arange(0, BN)[None, :]
    at = states + (lane * dim + p) * size + n
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(p < dim) & (n < columns), other=0.0)


@triton.jit
def chunk_scan(
    x, b, c_rows, D, step, high, low, states, y, table,
    heads, shared, each, dim, size, x_stride, b_stride, c_stride, per, tokens,
    BL: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The outputs of one chunk (axis 0) and `each` heads of one group (axis 1).

    Args:
        x: [tokens, heads, dim]; b, c_rows: [tokens, groups, size]; tokens `*_stride` apart, `shared` heads a group.
        D: [heads] or None. states: [chunks, heads, dim, size], those that enter. y: [tokens, heads, dim].
    Bounded: products and sums are float32; what is multiplied is rounded to x's dtype.
    """
    c = tl.program_id(0)
    first = tl.program_id(1) * each
    start, length = chunk_of(table, c, per, tokens, BL)
    group = (first // shared).to(tl.int64) * size
    rows = tile(c_rows + group, start, length, size, c_stride, BL, BN, EVEN)
    columns = tile(b + group, start, length, size, b_stride, BL, BN, EVEN)
    products = tl.dot(rows, tl.trans(columns), input_precision="ieee")
    i = tl.arange(0, BL)
    for k in tl.range(0, each, num_stages=STAGES):
        h = first + k
        lane = c.to(tl.int64) * heads + h
        own = lane * BL
        state = state_of(states, lane, dim, size, size, BP, BN, EVEN)
        out = tl.dot(rows, tl.trans(state), input_precision="ieee")
        out = out * tl.exp(tl.load(high + own + i) + tl.load(low + own + i))[:, None]
        weights = products * decays_between(high, low, own, True, BL) * tl.load(step + own + i)[None, :]
        value = tile(x + h.to(tl.int64) * dim, start, length, dim, x_stride, BL, BP, EVEN)
        out = tl.dot(weights.to(value.dtype), value, out, input_precision="ieee")
        if D is not None:
            out += tl.load(D + h).to(tl.float32) * value.to(tl.float32)
        write_tile(y + h.to(tl.int64) * dim, out, start, length, dim, heads * dim, BL, BP, EVEN)
