"""Steps of a scan and the sums of their exponents inside a chunk; and back, the gradients of what they are made of.

A sum of exponents is float64, parted into a multiple of 2^-8 (`high`) and a rest (`low`), float32 both: the difference
of two sums is the difference of their high parts, which is exact, and of their low parts. All three lie as
[chunks, heads, BL]. The specification is `quaver.torch.blocks.state_space.scan.chunked`.
"""

import triton
import triton.language as tl

#: Exponents of one token are held within: exp of what lies beyond is 0 or infinite in float32.
BOUND = tl.constexpr(128.0)
#: The multiples, and how many make 1.
GRID, TO_GRID = tl.constexpr(0.00390625), tl.constexpr(256.0)
#: Above it softplus is its argument, as torch has it.
STRAIGHT = tl.constexpr(20.0)


@triton.jit
def place_of(table, c, per, tokens, BL: tl.constexpr):
    """Of chunk c: where it begins among all tokens, tokens of its sequence from there on and before, and which that is.

    table: int32 [chunks, 4] of these; None where sequences have `tokens` each, in `per` chunks.
    Returns: int64, int32, int32 and int64.
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
    """Where chunk c begins among the tokens, int64, and how many it has."""
    start, rest, _, _ = place_of(table, c, per, tokens, BL)
    return start, tl.minimum(rest, BL)


@triton.jit
def tile(p, start, length, columns, stride, BR: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr):
    """Rows [BR, BC] from `start` on, zeros beyond `length` rows and `columns`."""
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
    """log(1 + exp(x)): the logarithm of the rounded 1 + u, times u over what 1 was raised by."""
    u = tl.exp(x)
    raised = 1.0 + u
    # A u that 1 does not feel is its own logarithm.
    short = tl.where(raised == 1.0, u, tl.log(raised) * (u / (raised - 1.0)))
    return tl.where(x > STRAIGHT, x, short)


@triton.jit
def held(x, least, most):
    """x within bounds; comparisons with NaN are false, and it stays."""
    return tl.where(x < least, least, tl.where(x > most, most, x))


@triton.jit
def unheld(dt, bias, h, heads, SOFTPLUS: tl.constexpr):
    """What is held within the limit, float32 [BL, BH], and what softplus was taken of."""
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
    """dt [tokens, heads] to the steps of a chunk (axis 0) and BH heads (axis 1), and the sums of A times them.

    bias: [heads] or None. A: float32 [heads]. least, most: of a step.
    Bounded: a step within 1e-6 of float64; the sums within 2^-33 of those of the float32 exponents.
    """
    c = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    i = tl.arange(0, BL)
    start, length = chunk_of(table, c, per, tokens, BL)
    here = (i[:, None] < length) & (h[None, :] < heads)
    raw = tl.load(dt + (start + i[:, None]) * dt_stride + h[None, :], mask=here, other=0.0)
    value, _ = unheld(raw, bias, h, heads, SOFTPLUS)
    value = tl.where(here, held(value, least, most), 0.0)
    exponents = value * tl.load(A + h, mask=h < heads, other=0.0)[None, :]
    sums = tl.cumsum(held(exponents, -BOUND, BOUND).to(tl.float64), 0)
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
    """The gradients of dt [tokens, heads], contiguous, and what a chunk adds to those of A, of the bias and of D.

    Args:
        inside: float32 [chunks, heads, BL], of each exponent by way of the chunk's own tokens.
        entered: float32 [parts, chunks, heads, BL], to be summed: of each token by way of the state that enters.
        left: float32 [chunks, heads, BL], of each token by way of what it adds to the state that leaves.
        through: float32 [parts, chunks, heads], to be summed: of the state that goes through.
        direct: float32 [chunks, heads, BL], of the steps by way of their x.
        skipped: float32 [chunks, heads], what the chunk adds to D's gradient, or None.
        sums: float32 [chunks, width], 2 heads wide or, with `skipped`, 3.
    The exponent of token j decays what comes before it on the way to what comes at it and after: outputs from j on and
    additions before j.
    Bounded, as `steps`.
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
    wide, argument = unheld(tl.load(dt + place, mask=here, other=0.0), bias, h, heads, SOFTPLUS)
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
