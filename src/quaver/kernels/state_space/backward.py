"""The backward pass of the scan inside of chunks: of pairs of tokens, then of x, then of B and C.

All matrices over two tokens lie with the earlier one along rows. The specification is
`quaver.torch.blocks.state_space.scan.chunked`.
"""

import triton
import triton.language as tl

from quaver.kernels.state_space.scan import decays_between, state_of
from quaver.kernels.state_space.steps import chunk_of, tile, write_tile


@triton.jit
def products_of(
    b, c_rows, group, start, length, size, b_stride, c_stride,
    BL: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """B_s · C_l of a chunk's tokens, float32 [s, l]."""
    earlier = tile(b + group, start, length, size, b_stride, BL, BN, EVEN)
    later = tile(c_rows + group, start, length, size, c_stride, BL, BN, EVEN)
    return tl.dot(earlier, tl.trans(later), input_precision="ieee")


@triton.jit
def remaining(high, low, own, BL: tl.constexpr):
    """What is left at the end of a chunk of each of its tokens, [BL]."""
    i = own + tl.arange(0, BL)
    last = own + BL - 1
    return tl.exp((tl.load(high + last) - tl.load(high + i)) + (tl.load(low + last) - tl.load(low + i)))


@triton.jit
def chunk_scan_backward_pairs(
    g, x, b, c_rows, step, high, low, of_products, inside, table,
    heads, shared, each, dim, size, g_stride, x_stride, b_stride, c_stride, per, tokens,
    BL: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What goes by way of pairs of tokens of one chunk (axis 0), for `each` heads of a group (axis 1).

    Args:
        g: of y, tokens `g_stride` apart; x, b, c_rows, step, high, low as of `scan.chunk_scan`.
        of_products: float32 [chunks, heads / each, BL, BL], gradients of B_s · C_l, summed over these heads.
        inside: float32 [chunks, heads, BL], of exponents, as `steps.steps_backward` takes it.
    Bounded, as `scan.chunk_scan`.
    """
    c = tl.program_id(0)
    first = tl.program_id(1) * each
    start, length = chunk_of(table, c, per, tokens, BL)
    group = (first // shared).to(tl.int64) * size
    products = products_of(b, c_rows, group, start, length, size, b_stride, c_stride, BL, BN, EVEN)
    i = tl.arange(0, BL)
    later = i[None, :] > i[:, None]
    from_here_on = (i[:, None] >= i[None, :]).to(tl.float32).to(x.dtype.element_ty)
    total = tl.zeros([BL, BL], tl.float32)
    for k in tl.range(0, each, num_stages=STAGES):
        h = (first + k).to(tl.int64)
        own = (c.to(tl.int64) * heads + h) * BL
        value = tile(x + h * dim, start, length, dim, x_stride, BL, BP, EVEN)
        grad = tile(g + h * dim, start, length, dim, g_stride, BL, BP, EVEN)
        of_pair = tl.dot(value, tl.trans(grad), input_precision="ieee")
        of_pair = of_pair * decays_between(high, low, own, False, BL) * tl.load(step + own + i)[:, None]
        total += of_pair
        apart = tl.where(later, of_pair * products, 0.0)
        # [s, j]: over l ≥ j, and of those s < j. A difference of sums over rows and columns would lose the small ones.
        summed = tl.dot(apart.to(value.dtype), from_here_on, input_precision="ieee")
        tl.store(inside + own + i, tl.sum(tl.where(later, summed, 0.0), 0))
    square = i[:, None] * BL + i[None, :]
    blocks = heads // each
    tl.store(of_products + (c.to(tl.int64) * blocks + tl.program_id(1)) * BL * BL + square, total)


@triton.jit
def chunk_scan_backward(
    g, x, b, c_rows, D, step, high, low, leaving, dx, left, direct, skipped, table,
    heads, shared, each, dim, size, g_stride, x_stride, b_stride, c_stride, per, tokens,
    BL: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of x [tokens, heads, dim], contiguous, of one chunk (axis 0) and `each` heads of a group (axis 1).

    Args:
        D: [heads] or None.
        leaving: [chunks, heads, dim, size], gradients of the states that leave.
        left, direct: float32 [chunks, heads, BL] and skipped [chunks, heads] or None, as `steps.steps_backward` takes
            them.
    Bounded, as `scan.chunk_scan`.
    """
    c = tl.program_id(0)
    first = tl.program_id(1) * each
    start, length = chunk_of(table, c, per, tokens, BL)
    group = (first // shared).to(tl.int64) * size
    products = products_of(b, c_rows, group, start, length, size, b_stride, c_stride, BL, BN, EVEN)
    earlier = tile(b + group, start, length, size, b_stride, BL, BN, EVEN)
    i = tl.arange(0, BL)
    for k in tl.range(0, each, num_stages=STAGES):
        h = (first + k).to(tl.int64)
        lane = c.to(tl.int64) * heads + h
        own = lane * BL
        state = state_of(leaving, lane, dim, size, size, BP, BN, EVEN)
        of_x = tl.dot(earlier, tl.trans(state), input_precision="ieee") * remaining(high, low, own, BL)[:, None]
        value = tile(x + h * dim, start, length, dim, x_stride, BL, BP, EVEN)
        steps = tl.load(step + own + i)
        tl.store(left + own + i, tl.sum(of_x * value.to(tl.float32), 1) * steps)
        grad = tile(g + h * dim, start, length, dim, g_stride, BL, BP, EVEN)
        weights = (products * decays_between(high, low, own, False, BL)).to(grad.dtype)
        of_x = tl.dot(weights, grad, of_x, input_precision="ieee")
        tl.store(direct + own + i, tl.sum(of_x * value.to(tl.float32), 1))
        of_x *= steps[:, None]
        if D is not None:
            of_x += tl.load(D + h).to(tl.float32) * grad.to(tl.float32)
            tl.store(skipped + lane, tl.sum(tl.sum(value.to(tl.float32) * grad.to(tl.float32), 1), 0))
        write_tile(dx + h * dim, of_x, start, length, dim, heads * dim, BL, BP, EVEN)


@triton.jit
def chunk_scan_backward_rows(
    g, x, b, c_rows, step, high, low, entering, leaving, of_products, db, dc, entered, through, table,
    heads, shared, each, dim, size, g_stride, x_stride, b_stride, c_stride, per, tokens, chunks, count,
    BL: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What `each` heads of a group (axis 1) add to gradients of B and C of a chunk (axis 0), BN features (axis 2).

    Args:
        entering, leaving: [chunks, heads, dim, size]: states that enter, and gradients of those that leave.
        of_products: as `chunk_scan_backward_pairs` left it, for as many heads.
        db, dc: [shared / each, count, groups, size].
        entered, through: float32 [size / BN, chunks, heads, BL] and [size / BN, chunks, heads], as
            `steps.steps_backward` takes them.
    Bounded, as `scan.chunk_scan`.
    """
    c = tl.program_id(0)
    first = tl.program_id(1) * each
    n = tl.program_id(2) * BN
    start, length = chunk_of(table, c, per, tokens, BL)
    number = first // shared
    group = number.to(tl.int64) * size + n
    earlier = tile(b + group, start, length, size - n, b_stride, BL, BN, EVEN)
    later = tile(c_rows + group, start, length, size - n, c_stride, BL, BN, EVEN)
    i = tl.arange(0, BL)
    blocks = heads // each
    square = i[:, None] * BL + i[None, :]
    pairs = tl.load(of_products + (c.to(tl.int64) * blocks + tl.program_id(1)) * BL * BL + square).to(later.dtype)
    of_b = tl.dot(pairs, later, input_precision="ieee")
    of_c = tl.dot(tl.trans(pairs), earlier, input_precision="ieee")
    for k in tl.range(0, each, num_stages=STAGES):
        h = (first + k).to(tl.int64)
        lane = c.to(tl.int64) * heads + h
        own = lane * BL
        part = tl.program_id(2).to(tl.int64) * chunks * heads + lane
        large, small = tl.load(high + own + i), tl.load(low + own + i)
        grad = tile(g + h * dim, start, length, dim, g_stride, BL, BP, EVEN)
        into = (grad.to(tl.float32) * tl.exp(large + small)[:, None]).to(grad.dtype)
        state = state_of(entering + n, lane, dim, size, size - n, BP, BN, EVEN)
        by_state = tl.dot(into, state, input_precision="ieee")
        of_c += by_state
        tl.store(entered + part * BL + i, tl.sum(by_state * later.to(tl.float32), 1))
        value = tile(x + h * dim, start, length, dim, x_stride, BL, BP, EVEN)
        weight = remaining(high, low, own, BL) * tl.load(step + own + i)
        out_of = (value.to(tl.float32) * weight[:, None]).to(value.dtype)
        passed = state_of(leaving + n, lane, dim, size, size - n, BP, BN, EVEN)
        of_b = tl.dot(out_of, passed, of_b, input_precision="ieee")
        last = own + BL - 1
        gone = tl.exp(tl.load(high + last) + tl.load(low + last))
        tl.store(through + part, tl.sum(tl.sum(state.to(tl.float32) * passed.to(tl.float32), 1), 0) * gone)
    share = (tl.program_id(1) - number * (shared // each)).to(tl.int64) * count
    groups = heads // shared
    write_tile(db + group, of_b, share + start, length, size - n, groups * size, BL, BN, EVEN)
    write_tile(dc + group, of_c, share + start, length, size - n, groups * size, BL, BN, EVEN)
