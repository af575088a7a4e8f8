"""Chunked scan of a state space: steps, states of chunks, outputs, and the backward pass.

Matrices over pairs of tokens have the earlier token along rows. The specification is
`quaver.torch.nn.ssm.chunked_scan`.
"""

import triton
import triton.language as tl

# ---- steps of a scan, cumulative sums of their exponents inside a chunk, and gradients ----
# A sum of exponents is float64, split into a multiple of 2^-8 (`high`) and a rest (`low`), both float32. The difference
# of two sums is the difference of their high parts, which is exact, plus that of their low parts. All three have the
# layout [chunks, heads, BL].

#: Bound of the exponent of one token; exp beyond it is 0 or infinite in float32.
BOUND = tl.constexpr(128.0)
#: The grid 2^-8 of `high`, and its inverse.
GRID, TO_GRID = tl.constexpr(0.00390625), tl.constexpr(256.0)
#: Above it softplus is the identity, as in torch.
STRAIGHT = tl.constexpr(20.0)


@triton.jit
def place_of(table, c, per, tokens, BL: tl.constexpr):
    """Return the start of chunk c among all tokens, its sequence's tokens from there on and before, and its sequence.

    table: int32 [chunks, 4] of these; None if all sequences have `tokens` tokens in `per` chunks. Returns int64, int32,
    int32 and int64.
    """
    if table is None:
        sequence = c // per
        before = (c - sequence * per) * BL
        start = sequence.to(tl.int64) * tokens + before
        rest = tokens - before
    else:
        start = tl.load(table + 4 * c).to(tl.int64)
        rest = tl.load(table + 4 * c + 1)
        before = tl.load(table + 4 * c + 2)
        sequence = tl.load(table + 4 * c + 3)
    return start, rest, before, sequence.to(tl.int64)


@triton.jit
def chunk_of(table, c, per, tokens, BL: tl.constexpr):
    """Return the start of chunk c among the tokens, int64, and its number of tokens."""
    start, rest, _, _ = place_of(table, c, per, tokens, BL)
    return start, tl.minimum(rest, BL)


@triton.jit
def tile(p, start, length, columns, stride, BR: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr):
    """Load rows [BR, BC] from `start` on, zeros beyond `length` rows and `columns`."""
    r, c = tl.arange(0, BR)[:, None], tl.arange(0, BC)[None, :]
    at = p + (start + r) * stride + c
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(r < length) & (c < columns), other=0.0)


@triton.jit
def write_tile(p, value, start, length, columns, stride, BR: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr):
    r, c = tl.arange(0, BR)[:, None], tl.arange(0, BC)[None, :]
    at = p + (start + r) * stride + c
    if EVEN:
        tl.store(at, value.to(p.dtype.element_ty))
    else:
        tl.store(at, value.to(p.dtype.element_ty), mask=(r < length) & (c < columns))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)): the logarithm of the rounded 1 + u, times u over the rounded increase."""
    u = tl.exp(x)
    raised = 1.0 + u
    # If 1 + u rounds to 1, the result is u.
    short = tl.where(raised == 1.0, u, tl.log(raised) * (u / (raised - 1.0)))
    return tl.where(x > STRAIGHT, x, short)


@triton.jit
def clamped(x, least, most):
    """Clamp x to bounds; NaN is preserved, because comparisons with it are false."""
    return tl.where(x < least, least, tl.where(x > most, most, x))


@triton.jit
def unclamped_step(dt, bias, h, heads, SOFTPLUS: tl.constexpr):
    """Return the step before clamping, float32 [BL, BH], and the argument of softplus."""
    before = dt.to(tl.float32)
    if bias is not None:
        before += tl.load(bias + h, mask=h < heads, other=0.0).to(tl.float32)[None, :]
    if SOFTPLUS:
        return softplus(before), before
    return before, before


@triton.jit
def steps(
    dt, bias, A, step, high, low, table,
    heads, dt_stride, per, tokens, least, most,
    BL: tl.constexpr, BH: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Compute the steps of a chunk (axis 0) and BH heads (axis 1) from dt [tokens, heads], and the sums of A times
    them.

    bias: [heads] or None. A: float32 [heads]. least, most: bounds of a step. A step is within 1e-6 of float64; the sums
    are within 2^-33 of those of the float32 exponents.
    """
    c = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    i = tl.arange(0, BL)
    start, length = chunk_of(table, c, per, tokens, BL)
    here = (i[:, None] < length) & (h[None, :] < heads)
    raw = tl.load(dt + (start + i[:, None]) * dt_stride + h[None, :], mask=here, other=0.0)
    value, _ = unclamped_step(raw, bias, h, heads, SOFTPLUS)
    value = tl.where(here, clamped(value, least, most), 0.0)
    exponents = value * tl.load(A + h, mask=h < heads, other=0.0)[None, :]
    sums = tl.cumsum(clamped(exponents, -BOUND, BOUND).to(tl.float64), 0)
    whole = tl.floor(sums * TO_GRID + 0.5) * GRID
    at = (c.to(tl.int64) * heads + h[None, :]) * BL + i[:, None]
    mask = h[None, :] < heads
    tl.store(step + at, value, mask=mask)
    tl.store(high + at, whole.to(tl.float32), mask=mask)
    tl.store(low + at, (sums - whole).to(tl.float32), mask=mask)


@triton.jit
def steps_backward(
    dt, bias, A, step, inside, entered, left, through, direct, skipped, ddt, sums, table,
    heads, dt_stride, per, tokens, width, parts, chunks, least, most,
    BL: tl.constexpr, BH: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of dt [tokens, heads], contiguous, and a chunk's share of those of A, of the bias and of D.

    Args:
        inside: float32 [chunks, heads, BL], gradient of each exponent through the chunk's own tokens.
        entered: float32 [parts, chunks, heads, BL], to be summed: of each token through the state entering the chunk.
        left: float32 [chunks, heads, BL], of each token through its contribution to the state leaving the chunk.
        through: float32 [parts, chunks, heads], to be summed: of the state that passes through the chunk.
        direct: float32 [chunks, heads, BL], of the steps through their x.
        skipped: float32 [chunks, heads], the chunk's share of D's gradient, or None.
        sums: float32 [chunks, width], 2 heads wide, or 3 with `skipped`.

    The exponent of token j decays earlier contributions on their way to token j and later: outputs from j on, and
    contributions before j. Precision as in `steps`.
    """
    c = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    i = tl.arange(0, BL)
    start, length = chunk_of(table, c, per, tokens, BL)
    mask = h[None, :] < heads
    here = (i[:, None] < length) & mask
    lane = c.to(tl.int64) * heads + h
    at = lane[None, :] * BL + i[:, None]
    by_state = tl.zeros([BL, BH], tl.float32)
    gone = tl.zeros([BH], tl.float32)
    part = lane
    for _ in range(0, parts):
        by_state += tl.load(entered + part[None, :] * BL + i[:, None], mask=here, other=0.0)
        gone += tl.load(through + part, mask=h < heads, other=0.0)
        part += chunks * heads
    from_here = tl.cumsum(by_state, 0, reverse=True)
    added = tl.load(left + at, mask=here, other=0.0)
    before = tl.cumsum(added, 0) - added
    of_exponent = tl.load(inside + at, mask=mask, other=0.0) + from_here + before + gone[None, :]
    of_exponent = tl.where(here, of_exponent, 0.0)
    value = tl.load(step + at, mask=mask, other=0.0)
    decay = tl.load(A + h, mask=h < heads, other=0.0)
    of_step = of_exponent * decay[None, :] + tl.load(direct + at, mask=mask, other=0.0)
    place = (start + i[:, None]) * dt_stride + h[None, :]
    wide, argument = unclamped_step(tl.load(dt + place, mask=here, other=0.0), bias, h, heads, SOFTPLUS)
    of_step = tl.where((wide < least) | (wide > most), 0.0, of_step)
    if SOFTPLUS:
        of_step = of_step * (1.0 / (1.0 + tl.exp(-argument)))
    of_step = tl.where(here, of_step, 0.0)
    tl.store(ddt + (start + i[:, None]) * heads + h[None, :], of_step.to(ddt.dtype.element_ty), mask=here)
    out = sums + c.to(tl.int64) * width + h
    tl.store(out, tl.sum(of_exponent * value, 0), mask=h < heads)
    tl.store(out + heads, tl.sum(of_step, 0), mask=h < heads)
    if skipped is not None:
        tl.store(out + 2 * heads, tl.load(skipped + lane, mask=h < heads, other=0.0), mask=h < heads)


# ---- outputs of chunks: from the chunk's own tokens by matrix products, and from the entering state ----


@triton.jit
def decays_between(high, low, lane, LATER_ROWS: tl.constexpr, BL: tl.constexpr):
    """Return exp of the sum at the later token minus that at the earlier, [BL, BL], 0 for pairs in the wrong order.

    LATER_ROWS: True if rows are the later tokens.
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
    """Load the state [BP, BN] of one chunk and head, zeros beyond `columns`."""
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
    """Compute the outputs of one chunk (axis 0) and `each` heads of one group (axis 1).

    Args:
        x: [tokens, heads, dim]; b, c_rows: [tokens, groups, size]; token strides `*_stride`, `shared` heads per group.
        D: [heads] or None. states: [chunks, heads, dim, size], the entering states. y: [tokens, heads, dim].

    Products and sums are float32; operands of products are rounded to x's dtype.
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


# ---- backward inside chunks: pairs of tokens, then x, then B and C ----


@triton.jit
def products_of(
    b, c_rows, group, start, length, size, b_stride, c_stride,
    BL: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return B_s · C_l of a chunk's tokens, float32 [s, l]."""
    earlier = tile(b + group, start, length, size, b_stride, BL, BN, EVEN)
    later = tile(c_rows + group, start, length, size, c_stride, BL, BN, EVEN)
    return tl.dot(earlier, tl.trans(later), input_precision="ieee")


@triton.jit
def remaining(high, low, own, BL: tl.constexpr):
    """Return the decay from each token to the end of the chunk, [BL]."""
    i = own + tl.arange(0, BL)
    last = own + BL - 1
    return tl.exp((tl.load(high + last) - tl.load(high + i)) + (tl.load(low + last) - tl.load(low + i)))


@triton.jit
def chunk_scan_backward_pairs(
    g, x, b, c_rows, step, high, low, of_products, inside, table,
    heads, shared, each, dim, size, g_stride, x_stride, b_stride, c_stride, per, tokens,
    BL: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute gradients through pairs of tokens of one chunk (axis 0), for `each` heads of a group (axis 1).

    Args:
        g: gradient of y, token stride `g_stride`; x, b, c_rows, step, high, low as in `chunk_scan`.
        of_products: float32 [chunks, heads / each, BL, BL], gradients of B_s · C_l, summed over these heads.
        inside: float32 [chunks, heads, BL], gradients of exponents, as `steps_backward` takes them.

    Precision as in `chunk_scan`.
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
        # [s, j]: summed over l ≥ j, then over s < j. A difference of row and column sums would lose the small ones.
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
    """Compute the gradients of x [tokens, heads, dim], contiguous, of one chunk (axis 0) and `each` heads of a group
    (axis 1).

    Args:
        D: [heads] or None.
        leaving: [chunks, heads, dim, size], gradients of the leaving states.
        left, direct: float32 [chunks, heads, BL], and skipped [chunks, heads] or None, as `steps_backward` takes them.

    Precision as in `chunk_scan`.
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
    """Compute the share of `each` heads of a group (axis 1) in the gradients of B and C of a chunk (axis 0), BN
    features (axis 2).

    Args:
        entering, leaving: [chunks, heads, dim, size]: entering states, and gradients of leaving states.
        of_products: written by `chunk_scan_backward_pairs` for the same number of heads.
        db, dc: [shared / each, count, groups, size].
        entered, through: float32 [size / BN, chunks, heads, BL] and [size / BN, chunks, heads], as `steps_backward`
            takes them.

    Precision as in `chunk_scan`.
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


# ---- states: contributions of chunks, and states from chunk to chunk, forward and as gradients ----


@triton.jit
def chunk_states(
    values, rows, step, high, low, out, table,
    heads, shared, dim, size, value_stride, row_stride, per, tokens,
    BL: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, INTO: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute Σ_l w_l values_l ⊗ rows_l of one chunk (axis 0) and head (axis 1), BN features of rows (axis 2).

    Args:
        values: [tokens, heads, dim] with token stride `value_stride`. rows: [tokens, groups, size] with `row_stride`;
            `shared` heads per group.
        out: float32 [chunks, heads, dim, size].
        INTO: False: w is the step times the decay from the token to the end of the chunk. True: w is the decay from the
            start of the chunk to the token, for gradients.

    Sums are float32; weighted values are rounded to their dtype.
    """
    c, h = tl.program_id(0), tl.program_id(1)
    n = tl.program_id(2) * BN
    start, length = chunk_of(table, c, per, tokens, BL)
    lane = (c.to(tl.int64) * heads + h) * BL
    i = tl.arange(0, BL)
    large, small = tl.load(high + lane + i), tl.load(low + lane + i)
    if INTO:
        weight = tl.exp(large + small)
    else:
        last = lane + BL - 1
        weight = tl.exp((tl.load(high + last) - large) + (tl.load(low + last) - small)) * tl.load(step + lane + i)
    x = tile(values + h.to(tl.int64) * dim, start, length, dim, value_stride, BL, BP, EVEN)
    b = tile(rows + (h // shared).to(tl.int64) * size + n, start, length, size - n, row_stride, BL, BN, EVEN)
    weighed = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
    if not EVEN:
        # Padding rows may have an infinite weight.
        weighed = tl.where(i[:, None] < length, weighed, 0.0)
    added = tl.dot(tl.trans(weighed), b, input_precision="ieee")
    p, m = tl.arange(0, BP)[:, None], tl.arange(0, BN)[None, :]
    at = out + ((c.to(tl.int64) * heads + h) * dim + p) * size + n + m
    if EVEN:
        tl.store(at, added)
    else:
        tl.store(at, added, mask=(p < dim) & (n + m < size))


@triton.jit
def pass_states(
    added, high, low, first, states, last, ranges,
    heads, numbers, per,
    BL: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute the states entering the chunks of one sequence and head (axis 0), BLOCK of their `numbers` elements (axis
    1).

    Args:
        added: float32 [chunks, heads, numbers], contribution of each chunk. first: float32 [sequences, heads, numbers],
            or None.
        states: same shape as added, in the dtype that products read. last: float32, final state of each sequence.
        ranges: int32 [sequences + 1], the chunks of each sequence; None if each has `per`.
        BACK: True for gradients, from the last chunk to the first: added are contributions to the gradient of entering
            states, states the gradients of leaving states; first is the gradient of the final state, last that of the
            initial state.
    """
    sequence = tl.program_id(0) // heads
    h = tl.program_id(0) - sequence * heads
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if ranges is None:
        begin, count = sequence * per, per
    else:
        begin = tl.load(ranges + sequence)
        count = tl.load(ranges + sequence + 1) - begin
    state = tl.zeros([BLOCK], tl.float32)
    own = tl.program_id(0).to(tl.int64) * numbers + i
    if first is not None:
        state = tl.load(first + own) if EVEN else tl.load(first + own, mask=i < numbers, other=0.0)
    for k in range(0, count):
        c = begin + count - 1 - k if BACK else begin + k
        lane = c.to(tl.int64) * heads + h
        at = lane * numbers + i
        more = tl.load(added + at) if EVEN else tl.load(added + at, mask=i < numbers, other=0.0)
        decay = tl.exp(tl.load(high + lane * BL + BL - 1) + tl.load(low + lane * BL + BL - 1))
        rounded = state.to(states.dtype.element_ty)
        if EVEN:
            tl.store(states + at, rounded)
        else:
            tl.store(states + at, rounded, mask=i < numbers)
        state = state * decay + more
    if EVEN:
        tl.store(last + own, state)
    else:
        tl.store(last + own, state, mask=i < numbers)
