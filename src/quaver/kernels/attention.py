"""Attention with quantized GEMMs: forward and backward kernels.

The backward has a sweep over keys for dQ and one over queries for dK and dV. It recomputes scores and probabilities
from the codes. dS = P (dP - Δ) with Δ = rowsum(P dP), so Δ needs its own sweep, and so does an amax of dS beyond a
tile: three sweeps with one scale per row or head, two with a scale per block that fits a tile. The specification is
`quaver.reference.attention`.
"""

import triton
import triton.language as tl

from quaver.kernels.mxfp8 import decoded_scale
from quaver.kernels.numerics import decode_scale, decoded, encode, encode_factor, magnitude_bits

# ---- tiles of operands ----
# SCALES is what one scale of an operand covers, and decides what tensor cores multiply:
#
#     "head"     a matrix: FP8 codes; the float32 product is multiplied by both scales
#     "row"      a row of a tile: the same, with a scale for each row and each column of the product
#     "block"    part of a row: bfloat16, codes times their power of two, which it represents exactly
#
# Without FP8 GEMMs (INTEGERS 2) the codes of "head" are multiplied as float16, which represents both formats. Tensor
# cores of Hopper and Ada sum 32 FP8 products with 13 bits; the sums of tiles are added in float32. FP8 GEMMs need
# operands that are contiguous along the summed axis, so those of sums over tokens are stored transposed.

#: Factor of probabilities before they are rounded, `quaver.recipes.spec.PROBABILITY_FACTOR`.
FACTOR = tl.constexpr(256.0)
#: Its inverse, multiplied into the scales of the other operand; applied to sums it would reduce float32's range. Scales
#: are at least 2^-100, so codes times such a scale are still representable in bfloat16.
INVERSE = tl.constexpr(1 / 256.0)
#: Block width that stands for a whole row or matrix: wider than any tile.
UNBOUNDED = tl.constexpr(1 << 30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def stored_scale(stored, INTEGERS: tl.constexpr):
    """Return float32 scales from stored ones, float32 or E8M0 exponents."""
    if stored.dtype == tl.uint8:
        s = decoded_scale(stored, None, "e8m0", True, INTEGERS)
    else:
        s = stored
    return s


@triton.jit
def _times(
    codes, stored, R: tl.constexpr, C: tl.constexpr, NB: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
    BY: tl.constexpr,
):  # fmt: skip
    """Return bfloat16 [R, C]: codes [R, C] of a format times stored scales [R, NB], times BY, a power of two."""
    x = decoded(codes.to(tl.uint8, bitcast=True), CODES, INTEGERS)
    s = stored_scale(stored, INTEGERS)
    if BY != 1.0:
        s = s * BY
    return tl.reshape(tl.reshape(x, [R, NB, C // NB]) * s[:, :, None], [R, C]).to(tl.bfloat16)


@triton.jit
def multiplied(codes, dtype: tl.constexpr, INTEGERS: tl.constexpr):
    """Return FP8 codes, of their dtype or uint8, as tensor cores multiply them: FP8, or float16. Exact; NaN is
    preserved.
    """
    if INTEGERS != 2:
        x = codes.to(dtype, bitcast=True)
    elif dtype == tl.float8e5:
        x = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        wide = codes.to(tl.uint16)
        magnitude = wide & 0x7F
        # Exponent and mantissa at their float16 positions, where subnormals remain subnormal, then corrected for the
        # bias.
        x = ((magnitude << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
        x = tl.where(magnitude == 0x7F, float("nan"), x)
    return x


@triton.jit
def tokens_from(first, N: tl.constexpr, SCALES: tl.constexpr, INTEGERS: tl.constexpr):
    """Return N tokens from `first` in the order of the columns of a tile of scores.

    In a product's result a thread has two adjacent columns of every eight, in an FP8 operand four of every sixteen.
    With this order both are the same tokens, so the codes of P and dS stay in their threads.
    """
    c = tl.arange(0, N)
    if SCALES != "block" and INTEGERS != 2:
        c = (c & -16) | ((c & 6) << 1) | ((c & 8) >> 2) | (c & 1)
    return first + c


@triton.jit
def per_token(
    x, first, tokens, stride, N: tl.constexpr, SCALES: tl.constexpr, INTEGERS: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """Load x [tokens] at N tokens from `first`, in the order of `tokens_from`; 0 beyond the last. EDGE as in
    `rows_of`.
    """
    r = first + tl.arange(0, N)
    values = tl.load(x + r * stride, mask=r < tokens, other=0) if EDGE else tl.load(x + r * stride)
    if SCALES != "block" and INTEGERS != 2:
        values = tl.reshape(tl.trans(tl.reshape(values, [N // 16, 4, 2, 2]), (0, 2, 1, 3)), [N])
    return values


@triton.jit
def in_order(x, R: tl.constexpr, N: tl.constexpr, SCALES: tl.constexpr, INTEGERS: tl.constexpr):
    """Return [R, N] with columns that were in the order of `tokens_from` in ascending order."""
    if SCALES != "block" and INTEGERS != 2:
        x = tl.reshape(tl.trans(tl.reshape(x, [R, N // 16, 2, 4, 2]), (0, 1, 3, 2, 4)), [R, N])
    return x


@triton.jit
def rows_of(
    codes, scales, r, rows, blocks,
    R: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
    SCALES: tl.constexpr, EDGE: tl.constexpr = True, BY: tl.constexpr = 1.0,
):  # fmt: skip
    """Load rows r [R] of an operand [rows, D], as SCALES says; tiles with scales [rows, blocks] times BY, a power of
    two.

    EDGE: False if all rows exist.
    """
    NB: tl.constexpr = D // WIDTH if WIDTH < D else 1
    r = r[:, None]
    at = codes + r * D + tl.arange(0, D)[None, :]
    x = tl.load(at, mask=r < rows, other=0.0) if EDGE else tl.load(at)
    if SCALES == "block":
        stored = tl.load(scales + r * blocks + tl.arange(0, NB)[None, :], mask=r < rows, other=0)
        tile = _times(x, stored, R, D, NB, CODES, INTEGERS, BY)
    else:
        tile = multiplied(x, CODES, INTEGERS)
    return tile


@triton.jit
def along_tokens(
    codes, scales, first, tokens, blocks, line,
    C: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
    SCALES: tl.constexpr, EDGE: tl.constexpr, BY: tl.constexpr = 1.0,
):  # fmt: skip
    """Load C tokens from `first` as [C, D] for a sum over tokens, from codes stored transposed: [D, tokens] with row
    stride `line`, and scales [D, blocks]. SCALES, EDGE and BY as in `rows_of`.
    """
    NB: tl.constexpr = C // WIDTH if WIDTH < C else 1
    d, c = tl.arange(0, D)[:, None], first + tl.arange(0, C)[None, :]
    at = codes + d.to(tl.int64) * line + c
    x = tl.load(at, mask=c < tokens, other=0.0) if EDGE else tl.load(at)
    if SCALES == "block":
        b = first // WIDTH + tl.arange(0, NB)[None, :]
        tile = _times(x, tl.load(scales + d * blocks + b, mask=b < blocks, other=0), D, C, NB, CODES, INTEGERS, BY)
    else:
        tile = multiplied(x, CODES, INTEGERS)
    return tl.trans(tile)


@triton.jit
def scales_of(scales, r, rows, blocks, INTEGERS: tl.constexpr, SCALES: tl.constexpr):
    """Return the factor of products of rows r [R]: the scale of the head, those of the rows [R], or 1."""
    if SCALES == "head":
        s = stored_scale(tl.load(scales), INTEGERS)
    elif SCALES == "row":
        s = stored_scale(tl.load(scales + r * blocks, mask=r < rows, other=0), INTEGERS)
    else:
        s = 1.0
    return s


@triton.jit
def scales_from(
    scales, first, tokens, blocks, N: tl.constexpr, SCALES: tl.constexpr, INTEGERS: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """Run `scales_of` for N tokens from `first`, in the order of `tokens_from`."""
    if SCALES == "row":
        s = stored_scale(per_token(scales, first, tokens, blocks, N, SCALES, INTEGERS, EDGE), INTEGERS)
    else:
        s = scales_of(scales, first, tokens, blocks, INTEGERS, SCALES)
    return s


@triton.jit
def scales_along(
    scales, first, blocks, D: tl.constexpr, WIDTH: tl.constexpr, INTEGERS: tl.constexpr, SCALES: tl.constexpr
):
    """Return the factor of sums over tokens from `first`, as `scales_of`: a number, or one per feature [D]."""
    return scales_of(scales + first // WIDTH, tl.arange(0, D), D, blocks, INTEGERS, SCALES)


@triton.jit
def each(a, b, SCALES: tl.constexpr):
    """Return the factor of a product from those of its rows and columns.

    They are multiplied with each other first: their product has the range of the result.
    """
    if SCALES == "row":
        a = a[:, None] * b[None, :]
    elif SCALES == "head":
        a = a * b
    return a


@triton.jit
def run_of(runs, i, tokens, others):
    """Return the first of the `others` that tokens i attend to (or are attended by), and one past the last.

    runs: int32 [2, tokens], or None for all. Tokens out of range get an empty run.
    """
    if runs is None:
        first, last = i * 0, tl.where(i < tokens, others, 0)
    else:
        first = tl.load(runs + i, mask=i < tokens, other=2147483647)
        last = tl.load(runs + tokens + i, mask=i < tokens, other=0)
    return first, last


@triton.jit
def inner_tiles(low, high, start, stop, hidden, BLOCK: tl.constexpr, INTEGERS: tl.constexpr):
    """Return the first token of the tiles of BLOCK tokens that need no mask, and one past their last.

    All rows see tokens from `low` up to `high`, some see those from `start` up to `stop`. hidden: further mask, or
    None. Before Ada there are none: with a second loop the registers do not suffice.
    """
    if hidden is None and INTEGERS != 2:
        first = tl.maximum(start, tl.cdiv(tl.minimum(low, stop), BLOCK) * BLOCK)
        last = tl.maximum(first, high // BLOCK * BLOCK)
    else:
        first, last = start, start
    return first, last


@triton.jit
def tiles_of(base, end, first, last, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """Return the first token and the number of tiles between `base` and `end`; and from which token on how many tokens
    are skipped.

    Tiles from `first` up to `last`; or, if EDGE, all others.
    """
    first = tl.minimum(tl.maximum(first, base), tl.cdiv(end, BLOCK) * BLOCK)
    last = tl.maximum(tl.minimum(last, end), first)
    if EDGE:
        count = (first - base) // BLOCK + tl.cdiv(tl.maximum(end - last, 0), BLOCK)
        tiles = base, count, first, last - first
    else:
        tiles = first, (last - first) // BLOCK, end, 0
    return tiles


@triton.jit
def visible(first, last, hidden, i, j, query_stride, key_stride, EDGE: tl.constexpr):
    """Return True where queries i, which attend to keys `first` up to `last`, attend to keys j; all arguments
    broadcast. None unless EDGE: everywhere.

    hidden: nonzero where they do not, or None.
    """
    if EDGE:
        seen = (j >= first) & (j < last)
        if hidden is not None:
            at = hidden + i.to(tl.int64) * query_stride + j.to(tl.int64) * key_stride
            seen = seen & (tl.load(at, mask=seen, other=1) == 0)
    else:
        seen = None
    return seen


@triton.jit
def shift_of(logsumexp, i, queries):
    """Return the base-2 logsumexp of queries, 0 where a query attends to nothing (-inf - -inf would be NaN)."""
    total = (tl.load(logsumexp + i, mask=i < queries, other=0.0) * LOG2_E).to(tl.float32)
    return tl.where(total == float("-inf"), 0.0, total)


@triton.jit
def probability_codes(p, R: tl.constexpr, C: tl.constexpr, SCALES: tl.constexpr, INTEGERS: tl.constexpr):
    """Round float32 probabilities [R, C] to E4M3 and return them times `FACTOR`, as tensor cores multiply them: with
    columns in ascending order.
    """
    codes = encode(p * FACTOR, tl.float8e4nv, INTEGERS)
    if SCALES == "block":
        p = decoded(codes, tl.float8e4nv, INTEGERS).to(tl.bfloat16)
    else:
        p = multiplied(in_order(codes, R, C, SCALES, INTEGERS), tl.float8e4nv, INTEGERS)
    return p


@triton.jit
def rounded(
    x, bits, dtype: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr,
):  # fmt: skip
    """Quantize x with amaxes given by their bits, which broadcast to it, and return the float32 values."""
    e = encode_factor(bits, True, EMAX, TOP_MANTISSA, MAX)
    return decoded(encode(x * e, dtype, INTEGERS), dtype, INTEGERS) * decode_scale(bits, e, True)


@triton.jit
def rounded_in_blocks(
    x, R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, dtype: tl.constexpr, EMAX: tl.constexpr,
    TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Quantize x in blocks of WIDTH neighbours of a row, each with its own amax; return float32 values [R, C]."""
    runs = tl.reshape(x, [R, C // WIDTH, WIDTH])
    bits = tl.max(magnitude_bits(runs), 2)[:, :, None]
    return tl.reshape(rounded(runs, bits, dtype, EMAX, TOP_MANTISSA, MAX, INTEGERS), [R, C])


@triton.jit
def added(a, b, factor, total, SCALES: tl.constexpr):
    """Return total + a b times the factor."""
    if SCALES == "block":
        total = tl.dot(a, b, total)
    else:
        total = tl.fma(tl.dot(a, b), factor, total)
    return total


# ---- backward ----


@triton.jit
def quantized_slopes(
    ds, bits, factor, R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, SCALES: tl.constexpr,
    dtype: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Quantize dS [R, C] in blocks of WIDTH columns, with the bits of the rows' amaxes if blocks are wider than C.

    With a scale per head, dS was multiplied by its encode factor before.

    Returns:
        The operand that tensor cores multiply, columns in ascending order; and the scales of its rows, `factor` with a
        scale per head.
    """
    if SCALES == "block":
        if WIDTH > C:
            ds = rounded(ds, bits[:, None], dtype, EMAX, TOP_MANTISSA, MAX, INTEGERS)
        else:
            ds = rounded_in_blocks(ds, R, C, WIDTH, dtype, EMAX, TOP_MANTISSA, MAX, INTEGERS)
        x = ds.to(tl.bfloat16)
    else:
        if SCALES == "row":
            if WIDTH <= C:
                bits = tl.max(magnitude_bits(ds), 1)
            e = encode_factor(bits, True, EMAX, TOP_MANTISSA, MAX)
            ds, factor = ds * e[:, None], decode_scale(bits, e, True)
        x = multiplied(in_order(encode(ds, dtype, INTEGERS), R, C, SCALES, INTEGERS), dtype, INTEGERS)
    return x, factor


@triton.jit
def _weights(left, right, factor, shift, seen):
    """Return P, float32, from left rightᵀ times factor; 0 where not visible."""
    p = tl.exp2(tl.dot(left, tl.trans(right)) * factor - shift)
    if seen is not None:
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def _slopes(x, y, factor, own, p, seen):
    """Return dS = P (dP - Δ), float32, with dP = x yᵀ times factor; 0 where not visible."""
    ds = tl.fma(tl.dot(x, tl.trans(y)), factor, -own) * p
    if seen is not None:
        ds = tl.where(seen, ds, 0.0)
    return ds


@triton.jit
def attention_rows(
    q, q_scale, k, k_scale, v, v_scale, kt, kt_scale, do, do_scale, runs, hidden, logsumexp, delta, shift, amax_values, dq,  # noqa: E501
    heads, shared, queries, keys, q_blocks, k_blocks, v_blocks, kt_blocks, do_blocks, kt_head, kt_line,
    hidden_batch, hidden_head, hidden_query, hidden_key, dq_batch, dq_head, dq_token, scale, slope,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr,
    GRAD_WIDTH: tl.constexpr, SCALES: tl.constexpr, SUMS: tl.constexpr, GRADIENT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    dtype: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Compute Δ, the amax of dS, and dQ = dS k for BM queries (axis 0) of one head of one batch (axis 1).

    Args:
        q, k, v, do: codes [B, H, queries, D], [B, G, keys, D], [B, G, keys, DV] and [B, H, queries, DV]; scales, heads,
            runs and hidden as in `attention`. GRAD_WIDTH, dtype: blocks and format of do and of dS.
        SCALES: of q, k, v, do and dS, as at the top of this file.
        kt: same as k, or, if TRANSPOSED, codes [D, keys] of each group, `kt_head` apart, with row stride `kt_line`.
        delta, shift: float32 [B, H, queries]; written if SUMS: Δ, and logsumexp to base 2, 0 where nothing is visible.
            Otherwise delta is read.
        amax_values: int32 [B, H]: amax bits of each head's dS, None if its scales are finer; raised if SUMS, else read.
        dq: [B, H, queries, D] with strides `dq_*`; written if GRADIENT.
        scale, slope: factor from scores to base-2 exponents, and factor of dS k.

    Precision as in forward; values of dS near a tie may be rounded the other way.
    """
    start_m, head = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64)
    b = head // heads
    h = head - b * heads
    group = b * (heads // shared) + h // shared
    i = start_m + tl.arange(0, BM)
    q += head * queries * D
    q_scale += head * tl.maximum(queries * q_blocks, 1)
    do += head * queries * DV
    do_scale += head * tl.maximum(queries * do_blocks, 1)
    k += group * keys * D
    k_scale += group * tl.maximum(keys * k_blocks, 1)
    v += group * keys * DV
    v_scale += group * tl.maximum(keys * v_blocks, 1)
    kt += group * kt_head
    kt_scale += group * tl.maximum((D if TRANSPOSED else keys) * kt_blocks, 1)
    if hidden is not None:
        hidden += b * hidden_batch + h * hidden_head
    left = rows_of(q, q_scale, i, queries, q_blocks, BM, D, WIDTH, CODES, INTEGERS, SCALES)
    x = rows_of(do, do_scale, i, queries, do_blocks, BM, DV, GRAD_WIDTH, dtype, INTEGERS, SCALES)
    of_q = scale * scales_of(q_scale, i, queries, q_blocks, INTEGERS, SCALES)
    of_do = scales_of(do_scale, i, queries, do_blocks, INTEGERS, SCALES)
    total = shift_of(logsumexp + head * queries, i, queries)
    if SUMS:
        tl.store(shift + head * queries + i, total, mask=i < queries)
    total = total[:, None]
    first, last = run_of(runs, i, queries, keys)
    start, stop = tl.min(first, 0) // BN * BN, tl.max(last, 0)
    # Keys whose dS share scales need a sweep for their amax; a block within a tile needs none.
    SPANS: tl.constexpr = GRAD_WIDTH > BN and SUMS
    if SPANS and GRAD_WIDTH < UNBOUNDED:
        span = GRAD_WIDTH
        start = start // span * span
    else:
        span = (stop + BN) // BN * BN
    a, z = inner_tiles(tl.max(first, 0), tl.min(last, 0), start, stop, hidden, BN, INTEGERS)
    first, last = first[:, None], last[:, None]
    if SUMS:
        sums = tl.zeros([BM, BN], tl.float32)
        for EDGE in tl.static_range(1 if INTEGERS == 2 else 0, 2):
            base, count, hole, skipped = tiles_of(start, stop, a, z, BN, EDGE)
            for t in tl.range(0, count, num_stages=STAGES):
                n = base + t * BN
                n = tl.multiple_of(tl.where(n >= hole, n + skipped, n), 16)
                j = tokens_from(n, BN, SCALES, INTEGERS)
                seen = visible(first, last, hidden, i[:, None], j[None, :], hidden_query, hidden_key, EDGE)
                right = rows_of(k, k_scale, j, keys, k_blocks, BN, D, WIDTH, CODES, INTEGERS, SCALES, EDGE)
                y = rows_of(v, v_scale, j, keys, v_blocks, BN, DV, WIDTH, CODES, INTEGERS, SCALES, EDGE)
                of_k = scales_from(k_scale, n, keys, k_blocks, BN, SCALES, INTEGERS, EDGE)
                of_v = scales_from(v_scale, n, keys, v_blocks, BN, SCALES, INTEGERS, EDGE)
                p = _weights(left, right, each(of_q, of_k, SCALES), total, seen)
                dp = tl.dot(x, tl.trans(y))
                if SCALES == "row":
                    dp = dp * each(of_do, of_v, SCALES)
                if seen is not None:
                    dp = tl.where(seen, dp, 0.0)
                sums = tl.fma(p, dp, sums)
        own = tl.sum(sums, 1)
        if SCALES == "head":
            own = own * (of_do * scales_of(v_scale, i, keys, v_blocks, INTEGERS, SCALES))
        tl.store(delta + head * queries + i, own, mask=i < queries)
    else:
        own = tl.load(delta + head * queries + i, mask=i < queries, other=0.0)
    own = own[:, None]
    bits = tl.zeros([BM], tl.int32)
    of_ds = 1.0
    if amax_values is not None and not SUMS:
        top = tl.load(amax_values + head)
        bits += top
        if SCALES == "head":
            # One number for all of dS; powers of two commute with its roundings.
            e = encode_factor(top, True, EMAX, TOP_MANTISSA, MAX)
            own, of_ds = own * e, decode_scale(top, e, True)
    # Scales of whole rows are those of the sum.
    LATE: tl.constexpr = SCALES == "row" and WIDTH == UNBOUNDED and GRAD_WIDTH == UNBOUNDED
    dx = tl.zeros([BM, D], tl.float32)
    for begin in range(start, stop, span):
        for WRITES in tl.static_range(0 if SPANS else 1, 2 if GRADIENT else 1):
            if not WRITES:
                bits = tl.zeros([BM], tl.int32)
            for EDGE in tl.static_range(1 if INTEGERS == 2 else 0, 2):
                base, count, hole, skipped = tiles_of(begin, tl.minimum(begin + span, stop), a, z, BN, EDGE)
                for t in tl.range(0, count, num_stages=STAGES):
                    n = base + t * BN
                    n = tl.multiple_of(tl.where(n >= hole, n + skipped, n), 16)
                    j = tokens_from(n, BN, SCALES, INTEGERS)
                    seen = visible(first, last, hidden, i[:, None], j[None, :], hidden_query, hidden_key, EDGE)
                    right = rows_of(k, k_scale, j, keys, k_blocks, BN, D, WIDTH, CODES, INTEGERS, SCALES, EDGE)
                    y = rows_of(v, v_scale, j, keys, v_blocks, BN, DV, WIDTH, CODES, INTEGERS, SCALES, EDGE)
                    of_k = scales_from(k_scale, n, keys, k_blocks, BN, SCALES, INTEGERS, EDGE)
                    of_dp = each(of_do, scales_from(v_scale, n, keys, v_blocks, BN, SCALES, INTEGERS, EDGE), SCALES)
                    if SCALES == "head" and WRITES:
                        of_dp = of_dp * e
                    p = _weights(left, right, each(of_q, of_k, SCALES), total, seen)
                    ds = _slopes(x, y, of_dp, own, p, seen)
                    if WRITES:
                        ds, of_rows = quantized_slopes(
                            ds, bits, of_ds, BM, BN, GRAD_WIDTH, SCALES, dtype, EMAX, TOP_MANTISSA, MAX, INTEGERS
                        )
                        if TRANSPOSED:
                            right = along_tokens(
                                kt, kt_scale, n, keys, kt_blocks, kt_line,
                                BN, D, WIDTH, CODES, INTEGERS, SCALES, EDGE,
                            )  # fmt: skip
                        factor = 1.0
                        if not LATE:
                            of_kt = scales_along(kt_scale, n, kt_blocks, D, WIDTH, INTEGERS, SCALES)
                            factor = each(of_rows, of_kt, SCALES)
                        dx = added(ds, right, factor, dx, SCALES)
                    else:
                        bits = tl.maximum(bits, tl.max(magnitude_bits(ds), 1))
            if not WRITES and amax_values is not None:
                tl.atomic_max(amax_values + head, tl.max(bits, 0), sem="relaxed")
    if GRADIENT:
        if LATE:
            of_rows = decode_scale(bits, encode_factor(bits, True, EMAX, TOP_MANTISSA, MAX), True)
            dx = dx * each(of_rows, scales_along(kt_scale, 0, kt_blocks, D, WIDTH, INTEGERS, SCALES), SCALES)
        at = dq + b * dq_batch + h * dq_head + i[:, None].to(tl.int64) * dq_token + tl.arange(0, D)[None, :]
        tl.store(at, (dx * slope).to(dq.dtype.element_ty), mask=i[:, None] < queries)


@triton.jit
def attention_columns(
    q, q_scale, k, k_scale, v, v_scale, qt, qt_scale, do, do_scale, dot, dot_scale,
    runs, seen_by, hidden, delta, shift, amax_values, dk, dv,
    heads, shared, queries, keys, q_blocks, k_blocks, v_blocks, qt_blocks, do_blocks, dot_blocks,
    qt_head, qt_line, dot_head, dot_line,
    hidden_batch, hidden_head, hidden_query, hidden_key, dk_batch, dk_head, dk_token, dv_batch, dv_head, dv_token,
    scale, slope,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr,
    GRAD_WIDTH: tl.constexpr, GRAD_TRANSPOSED: tl.constexpr, SCALES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    dtype: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Compute dK = dSᵀ q and dV = Pᵀ dO for BN keys (axis 0) of one group of one batch (axis 1), summed over its heads.

    Args:
        qt: same as q, or, if TRANSPOSED, codes [D, queries] of each head, `qt_head` apart, with row stride `qt_line`;
            dot: same as do, or, if GRAD_TRANSPOSED, codes [DV, queries] likewise.
        seen_by: int32 [2, keys]: the first query that attends to a key, and one past the last; None: all.
        amax_values: amax bits of each head's dS, or None.
        dk, dv: [B, G, keys, D] and [B, G, keys, DV] with strides `dk_*` and `dv_*`.

    The other arguments are those of `attention_rows`, or written by it. Same precision.
    """
    start_n, group = tl.program_id(0) * BN, tl.program_id(1).to(tl.int64)
    groups = heads // shared
    b = group // groups
    g = group - b * groups
    j = start_n + tl.arange(0, BN)
    k_scale += group * tl.maximum(keys * k_blocks, 1)
    v_scale += group * tl.maximum(keys * v_blocks, 1)
    left = rows_of(k + group * keys * D, k_scale, j, keys, k_blocks, BN, D, WIDTH, CODES, INTEGERS, SCALES)
    x = rows_of(v + group * keys * DV, v_scale, j, keys, v_blocks, BN, DV, WIDTH, CODES, INTEGERS, SCALES)
    of_k = scale * scales_of(k_scale, j, keys, k_blocks, INTEGERS, SCALES)
    of_v = scales_of(v_scale, j, keys, v_blocks, INTEGERS, SCALES)
    start, stop = run_of(seen_by, j, keys, queries)
    low, high = tl.max(start, 0), tl.min(stop, 0)
    start, stop = tl.min(start, 0), tl.max(stop, 0)
    # Queries whose dS share scales need a sweep for their amax; a block within a tile needs none.
    SPANS: tl.constexpr = GRAD_WIDTH > BM and amax_values is None
    if SPANS and GRAD_WIDTH < UNBOUNDED:
        span = GRAD_WIDTH
        start = start // span * span
    else:
        span = (stop + BM) // BM * BM
        start = start // BM * BM
    a, z = inner_tiles(low, high, start, stop, hidden, BM, INTEGERS)
    dx, dy = tl.zeros([BN, D], tl.float32), tl.zeros([BN, DV], tl.float32)
    # The operand of P is divided by P's factor, before or after the product; a dP from that operand is multiplied by it
    # again, in the same rounding that subtracts Δ.
    SHARED: tl.constexpr = SCALES == "block" and not GRAD_TRANSPOSED
    BY: tl.constexpr = INVERSE if SHARED else 1.0
    for member in range(shared):
        h = g * shared + member
        head = b * heads + h
        q_here, q_scale_here = q + head * queries * D, q_scale + head * tl.maximum(queries * q_blocks, 1)
        do_here, do_scale_here = do + head * queries * DV, do_scale + head * tl.maximum(queries * do_blocks, 1)
        qt_scale_here = qt_scale + head * tl.maximum((D if TRANSPOSED else queries) * qt_blocks, 1)
        dot_scale_here = dot_scale + head * tl.maximum((DV if GRAD_TRANSPOSED else queries) * dot_blocks, 1)
        mask = hidden
        if hidden is not None:
            mask = hidden + b * hidden_batch + h * hidden_head
        for begin in range(start, stop, span):
            bits = tl.zeros([BN], tl.int32)
            of_ds = 1.0
            if amax_values is not None:
                top = tl.load(amax_values + head)
                bits += top
                if SCALES == "head":
                    e = encode_factor(top, True, EMAX, TOP_MANTISSA, MAX)
                    of_ds = decode_scale(top, e, True)
            for WRITES in tl.static_range(0 if SPANS else 1, 2):
                for EDGE in tl.static_range(1 if INTEGERS == 2 else 0, 2):
                    base, count, hole, skipped = tiles_of(begin, tl.minimum(begin + span, stop), a, z, BM, EDGE)
                    for t in tl.range(0, count, num_stages=STAGES):
                        m = base + t * BM
                        m = tl.multiple_of(tl.where(m >= hole, m + skipped, m), 16)
                        i = tokens_from(m, BM, SCALES, INTEGERS)
                        first, last = 0, 0
                        if EDGE:
                            first, last = run_of(runs, i[None, :], queries, keys)
                        seen = visible(first, last, mask, i[None, :], j[:, None], hidden_query, hidden_key, EDGE)
                        right = rows_of(
                            q_here, q_scale_here, i, queries, q_blocks, BM, D, WIDTH, CODES, INTEGERS, SCALES, EDGE
                        )
                        y = rows_of(
                            do_here, do_scale_here, i, queries, do_blocks,
                            BM, DV, GRAD_WIDTH, dtype, INTEGERS, SCALES, EDGE, BY,
                        )  # fmt: skip
                        of_q = scales_from(q_scale_here, m, queries, q_blocks, BM, SCALES, INTEGERS, EDGE)
                        of_do = scales_from(do_scale_here, m, queries, do_blocks, BM, SCALES, INTEGERS, EDGE)
                        of_dp = each(of_v, of_do, SCALES)
                        total = per_token(shift + head * queries, m, queries, 1, BM, SCALES, INTEGERS, EDGE)
                        own = per_token(delta + head * queries, m, queries, 1, BM, SCALES, INTEGERS, EDGE)
                        if SCALES == "head":
                            of_dp, own = of_dp * e, own * e
                        if SHARED:
                            of_dp = FACTOR
                        p = _weights(left, right, each(of_k, of_q, SCALES), total[None, :], seen)
                        ds = _slopes(x, y, of_dp, own[None, :], p, seen)
                        if WRITES:
                            # Both sets of codes before the first sum, which needs registers for as much as dV.
                            p = probability_codes(p, BN, BM, SCALES, INTEGERS)
                            ds, of_rows = quantized_slopes(
                                ds, bits, of_ds, BN, BM, GRAD_WIDTH, SCALES, dtype, EMAX, TOP_MANTISSA, MAX, INTEGERS
                            )
                            if GRAD_TRANSPOSED:
                                y = along_tokens(
                                    dot + head * dot_head, dot_scale_here, m, queries, dot_blocks, dot_line,
                                    BM, DV, GRAD_WIDTH, dtype, INTEGERS, SCALES, EDGE, INVERSE,
                                )  # fmt: skip
                            of_dot = scales_along(dot_scale_here, m, dot_blocks, DV, GRAD_WIDTH, INTEGERS, SCALES)
                            of_dot = of_dot * INVERSE
                            if SCALES == "row":
                                of_dot = of_dot[None, :]
                            dy = added(p, y, of_dot, dy, SCALES)
                            if TRANSPOSED:
                                right = along_tokens(
                                    qt + head * qt_head, qt_scale_here, m, queries, qt_blocks, qt_line,
                                    BM, D, WIDTH, CODES, INTEGERS, SCALES, EDGE,
                                )  # fmt: skip
                            of_qt = scales_along(qt_scale_here, m, qt_blocks, D, WIDTH, INTEGERS, SCALES)
                            dx = added(ds, right, each(of_rows, of_qt, SCALES), dx, SCALES)
                        else:
                            bits = tl.maximum(bits, tl.max(magnitude_bits(ds), 1))
    tokens = j[:, None].to(tl.int64)
    at = dk + b * dk_batch + g * dk_head + tokens * dk_token + tl.arange(0, D)[None, :]
    tl.store(at, (dx * slope).to(dk.dtype.element_ty), mask=j[:, None] < keys)
    at = dv + b * dv_batch + g * dv_head + tokens * dv_token + tl.arange(0, DV)[None, :]
    tl.store(at, dy.to(dv.dtype.element_ty), mask=j[:, None] < keys)


# ---- forward ----
# Keys are swept twice: first for the softmax's sums, then for the probabilities, which are rounded once the sum is
# known. A single sweep would have to round exp(score - running maximum), which is a different number. The specification
# is `quaver.reference.attention`; the sweep over tiles is that of Dao, arXiv:2307.08691.


@triton.jit
def attention(
    q, q_scale, k, k_scale, v, v_scale, runs, hidden, sinks, out, logsumexp,
    heads, shared, queries, keys, q_blocks, k_blocks, v_blocks, v_head, v_line,
    hidden_batch, hidden_head, hidden_query, hidden_key, out_batch, out_head, out_token, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr,
    SCALES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Compute attention for BM queries (axis 0) of one head of one batch (axis 1).

    Args:
        q, k, v: codes [B, H, queries, D], [B, G, keys, D] and [B, G, keys, DV], or, if TRANSPOSED, [DV, keys] of each
            group, `v_head` apart, with row stride `v_line`; H is `heads`, and `shared` of them share a group.
        CODES: format of q, k and v.
        SCALES: of q, k and v, as at the top of this file.
        q_scale, k_scale, v_scale: in blocks of WIDTH along a row, `*_blocks` of them; 0: one for the matrix.
        runs: int32 [2, queries]: the first key that a query attends to, and one past the last, both nondecreasing;
            None: all.
        hidden: uint8, nonzero where a query does not attend to a key, strides `hidden_*`; None: no further mask.
        sinks: float32 [H], logits of an extra column of the softmax; None: none.
        out: [B, H, queries, DV] with strides `out_*`. logsumexp: float64 [B, H, queries], -inf where nothing is
            visible.
        scale: factor of the scores, times log2(e).

    Scores, softmax and sums are float32; a probability near a tie may be rounded the other way.
    """
    start_m, head = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64)
    b = head // heads
    h = head - b * heads
    group = b * (heads // shared) + h // shared
    i = start_m + tl.arange(0, BM)
    q += head * queries * D
    q_scale += head * tl.maximum(queries * q_blocks, 1)
    queried = rows_of(q, q_scale, i, queries, q_blocks, BM, D, WIDTH, CODES, INTEGERS, SCALES)
    of_q = scale * scales_of(q_scale, i, queries, q_blocks, INTEGERS, SCALES)
    k += group * keys * D
    k_scale += group * tl.maximum(keys * k_blocks, 1)
    v += group * v_head
    v_scale += group * tl.maximum((DV if TRANSPOSED else keys) * v_blocks, 1)
    if hidden is not None:
        hidden += b * hidden_batch + h * hidden_head
    first, last = run_of(runs, i, queries, keys)
    start, stop = tl.min(first, 0) // BN * BN, tl.max(last, 0)
    a, z = inner_tiles(tl.max(first, 0), tl.min(last, 0), start, stop, hidden, BN, INTEGERS)
    first, last = first[:, None], last[:, None]
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for EDGE in tl.static_range(1 if INTEGERS == 2 else 0, 2):
        base, count, hole, skipped = tiles_of(start, stop, a, z, BN, EDGE)
        for t in tl.range(0, count, num_stages=STAGES):
            n = base + t * BN
            n = tl.multiple_of(tl.where(n >= hole, n + skipped, n), 16)
            j = tokens_from(n, BN, SCALES, INTEGERS)
            seen = visible(first, last, hidden, i[:, None], j[None, :], hidden_query, hidden_key, EDGE)
            right = rows_of(k, k_scale, j, keys, k_blocks, BN, D, WIDTH, CODES, INTEGERS, SCALES, EDGE)
            s = tl.dot(queried, tl.trans(right))
            s = s * each(of_q, scales_from(k_scale, n, keys, k_blocks, BN, SCALES, INTEGERS, EDGE), SCALES)
            if seen is not None:
                s = tl.where(seen, s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(s - shift[:, None]), 1)
            top = higher
    if sinks is not None:
        sink = tl.load(sinks + h) * LOG2_E
        higher = tl.maximum(top, sink)
        total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
        top = higher
    total = top + tl.log2(total)
    tl.store(logsumexp + head * queries + i, total.to(tl.float64) / LOG2_E, mask=i < queries)
    shift = tl.where(total == float("-inf"), 0.0, total)[:, None]
    # A scale of a whole row of vᵀ is that of the sum.
    LATE: tl.constexpr = SCALES == "row" and WIDTH == UNBOUNDED
    y = tl.zeros([BM, DV], tl.float32)
    for EDGE in tl.static_range(1 if INTEGERS == 2 else 0, 2):
        base, count, hole, skipped = tiles_of(start, stop, a, z, BN, EDGE)
        for t in tl.range(0, count, num_stages=STAGES):
            n = base + t * BN
            n = tl.multiple_of(tl.where(n >= hole, n + skipped, n), 16)
            j = tokens_from(n, BN, SCALES, INTEGERS)
            seen = visible(first, last, hidden, i[:, None], j[None, :], hidden_query, hidden_key, EDGE)
            right = rows_of(k, k_scale, j, keys, k_blocks, BN, D, WIDTH, CODES, INTEGERS, SCALES, EDGE)
            of_k = scales_from(k_scale, n, keys, k_blocks, BN, SCALES, INTEGERS, EDGE)
            p = _weights(queried, right, each(of_q, of_k, SCALES), shift, seen)
            if TRANSPOSED:
                value = along_tokens(
                    v, v_scale, n, keys, v_blocks, v_line, BN, DV, WIDTH, CODES, INTEGERS, SCALES, EDGE, INVERSE
                )
            else:
                value = rows_of(v, v_scale, j, keys, v_blocks, BN, DV, WIDTH, CODES, INTEGERS, SCALES, EDGE, INVERSE)
            of_v = 1.0
            if not LATE:
                of_v = scales_along(v_scale, n, v_blocks, DV, WIDTH, INTEGERS, SCALES) * INVERSE
                if SCALES == "row":
                    of_v = of_v[None, :]
            y = added(probability_codes(p, BM, BN, SCALES, INTEGERS), value, of_v, y, SCALES)
    if LATE:
        y = y * (scales_along(v_scale, 0, v_blocks, DV, WIDTH, INTEGERS, SCALES) * INVERSE)[None, :]
    at = out + b * out_batch + h * out_head + i[:, None].to(tl.int64) * out_token + tl.arange(0, DV)[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=i[:, None] < queries)
