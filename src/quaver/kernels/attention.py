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

# ---- tiles of operands: codes times scales, and quantization of scores' gradients ----
# A scale is a power of two, so bfloat16 represents code × scale exactly: products of two such tiles are those of the
# operands, summed in float32, whatever the block. With one scale per matrix, tiles are the codes alone as float16,
# which represents both formats and needs a sixth of the instructions; the products are multiplied by the scales.

#: Factor of probabilities before they are rounded, `quaver.recipes.spec.PROBABILITY_FACTOR`.
FACTOR = tl.constexpr(256.0)
#: Its inverse, multiplied into the scales of the other operand; applied to sums it would reduce float32's range. Scales
#: are at least 2^-100, so codes times such a scale are still representable in bfloat16.
INVERSE = tl.constexpr(1 / 256.0)
#: Block width that stands for a whole row or matrix: wider than any tile.
UNBOUNDED = tl.constexpr(1 << 30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _times(
    codes, stored, R: tl.constexpr, C: tl.constexpr, NB: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
    BY: tl.constexpr,
):  # fmt: skip
    """Return bfloat16 [R, C]: codes [R, C] of a format times stored scales [R, NB], times BY, a power of two."""
    x = decoded(codes.to(tl.uint8, bitcast=True), CODES, INTEGERS)
    if stored.dtype == tl.uint8:
        s = decoded_scale(stored, None, "e8m0", True, INTEGERS)
    else:
        s = stored
    if BY != 1.0:
        s = s * BY
    return tl.reshape(tl.reshape(x, [R, NB, C // NB]) * s[:, :, None], [R, C]).to(tl.bfloat16)


@triton.jit
def half(codes, dtype: tl.constexpr, INTEGERS: tl.constexpr):
    """Return the values of FP8 codes, uint8, in float16. Exact; NaN is preserved."""
    if INTEGERS != 2:
        x = codes.to(dtype, bitcast=True).to(tl.float16)
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
def rows_of(
    codes, scales, first, rows, blocks,
    R: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
    HALF: tl.constexpr = False, BY: tl.constexpr = 1.0,
):  # fmt: skip
    """Load rows from `first` of an operand [rows, D] with scales [rows, blocks] as bfloat16 [R, D], times BY, a power
    of two.

    blocks 0: one scale for all. HALF: float16, the codes without scales.
    """
    NB: tl.constexpr = D // WIDTH if WIDTH < D else 1
    r = first + tl.arange(0, R)[:, None]
    x = tl.load(codes + r * D + tl.arange(0, D)[None, :], mask=r < rows, other=0.0)
    if HALF:
        tile = half(x.to(tl.uint8, bitcast=True), CODES, INTEGERS)
    else:
        stored = tl.load(scales + r * blocks + tl.arange(0, NB)[None, :], mask=r < rows, other=0)
        tile = _times(x, stored, R, D, NB, CODES, INTEGERS, BY)
    return tile


@triton.jit
def columns_of(
    codes, scales, first, columns, blocks,
    C: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
    BY: tl.constexpr,
):  # fmt: skip
    """Load columns from `first` of an operand [D, columns] with scales [D, blocks] as bfloat16 [C, D], times BY."""
    NB: tl.constexpr = C // WIDTH if WIDTH < C else 1
    d, c = tl.arange(0, D)[:, None], first + tl.arange(0, C)[None, :]
    x = tl.load(codes + d * columns + c, mask=c < columns, other=0.0)
    b = first // WIDTH + tl.arange(0, NB)[None, :]
    stored = tl.load(scales + d * blocks + b, mask=b < blocks, other=0)
    return tl.trans(_times(x, stored, D, C, NB, CODES, INTEGERS, BY))


@triton.jit
def along_tokens(
    codes, scales, first, tokens, blocks,
    C: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, INTEGERS: tl.constexpr,
    TRANSPOSED: tl.constexpr, HALF: tl.constexpr = False, BY: tl.constexpr = 1.0,
):  # fmt: skip
    """Load C tokens as bfloat16 [C, D] for a sum over tokens, from [D, tokens] if TRANSPOSED (stored transposed), else
    [tokens, D].

    HALF and BY as in `rows_of`.
    """
    if TRANSPOSED:
        x = columns_of(codes, scales, first, tokens, blocks, C, D, WIDTH, CODES, INTEGERS, BY)
    else:
        x = rows_of(codes, scales, first, tokens, blocks, C, D, WIDTH, CODES, INTEGERS, HALF, BY)
    return x


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
def visible(first, last, hidden, i, j, query_stride, key_stride):
    """Return True where queries i, which attend to keys `first` up to `last`, attend to keys j; all arguments
    broadcast.

    hidden: nonzero where they do not, or None.
    """
    seen = (j >= first) & (j < last)
    if hidden is not None:
        at = hidden + i.to(tl.int64) * query_stride + j.to(tl.int64) * key_stride
        seen = seen & (tl.load(at, mask=seen, other=1) == 0)
    return seen


@triton.jit
def shift_of(logsumexp, i, queries):
    """Return the base-2 logsumexp of queries, 0 where a query attends to nothing (-inf - -inf would be NaN)."""
    total = (tl.load(logsumexp + i, mask=i < queries, other=0.0) * LOG2_E).to(tl.float32)
    return tl.where(total == float("-inf"), 0.0, total)


@triton.jit
def probability_codes(p, INTEGERS: tl.constexpr, HALF: tl.constexpr = False):
    """Round float32 probabilities to E4M3 and return them times `FACTOR`, as bfloat16, or float16 if HALF."""
    codes = encode(p * FACTOR, tl.float8e4nv, INTEGERS)
    if HALF:
        p = half(codes, tl.float8e4nv, INTEGERS)
    else:
        p = decoded(codes, tl.float8e4nv, INTEGERS).to(tl.bfloat16)
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


# ---- backward ----


@triton.jit
def _both(left, right, x, y, shift, seen, scale, of_dp=1.0, HALF: tl.constexpr = False):
    """Return P and dP, float32, 0 where not visible, from left rightᵀ times scale and x yᵀ (times of_dp if HALF)."""
    s = tl.dot(left, tl.trans(right)) * scale
    p = tl.where(seen, tl.exp2(s - shift), 0.0)
    dp = tl.dot(x, tl.trans(y))
    if HALF:
        dp = dp * of_dp
    return p, tl.where(seen, dp, 0.0)


@triton.jit
def attention_rows(
    q, q_scale, k, k_scale, v, v_scale, kt, kt_scale, do, do_scale, runs, hidden, logsumexp, delta, shift, amax_values, dq,  # noqa: E501
    heads, shared, queries, keys, q_blocks, k_blocks, v_blocks, kt_blocks, do_blocks,
    hidden_batch, hidden_head, hidden_query, hidden_key, dq_batch, dq_head, dq_token, scale, slope,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr,
    GRAD_WIDTH: tl.constexpr, HALF: tl.constexpr, SUMS: tl.constexpr, GRADIENT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    dtype: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Compute Δ, the amax of dS, and dQ = dS k for BM queries (axis 0) of one head of one batch (axis 1).

    Args:
        q, k, v, do: codes [B, H, queries, D], [B, G, keys, D], [B, G, keys, DV] and [B, H, queries, DV]; scales, heads,
            runs and hidden as in `attention`. GRAD_WIDTH, dtype: blocks and format of do and of dS.
        HALF: True if one scale serves each matrix of q, k, v, do and dS.
        kt: same as k, or, if TRANSPOSED (stored transposed), codes [B, G, D, keys].
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
    kt += group * keys * D
    kt_scale += group * tl.maximum((D if TRANSPOSED else keys) * kt_blocks, 1)
    of_dp = 1.0
    if HALF:
        of_k = tl.load(k_scale)
        scale = scale * tl.load(q_scale) * of_k
        of_dp = tl.load(do_scale) * tl.load(v_scale)
    if hidden is not None:
        hidden += b * hidden_batch + h * hidden_head
    left = rows_of(q, q_scale, start_m, queries, q_blocks, BM, D, WIDTH, CODES, INTEGERS, HALF)
    x = rows_of(do, do_scale, start_m, queries, do_blocks, BM, DV, GRAD_WIDTH, dtype, INTEGERS, HALF)
    total = shift_of(logsumexp + head * queries, i, queries)
    if SUMS:
        tl.store(shift + head * queries + i, total, mask=i < queries)
    total = total[:, None]
    first, last = run_of(runs, i, queries, keys)
    start, stop = tl.min(first, 0) // BN * BN, tl.max(last, 0)
    first, last = first[:, None], last[:, None]
    if SUMS:
        own = tl.zeros([BM], tl.float32)
        for n in tl.range(start, stop, BN, num_stages=STAGES):
            seen = visible(first, last, hidden, i[:, None], n + tl.arange(0, BN)[None, :], hidden_query, hidden_key)
            right = rows_of(k, k_scale, n, keys, k_blocks, BN, D, WIDTH, CODES, INTEGERS, HALF)
            y = rows_of(v, v_scale, n, keys, v_blocks, BN, DV, WIDTH, CODES, INTEGERS, HALF)
            p, dp = _both(left, right, x, y, total, seen, scale, of_dp, HALF)
            own += tl.sum(p * dp, 1)
        tl.store(delta + head * queries + i, own, mask=i < queries)
    else:
        own = tl.load(delta + head * queries + i, mask=i < queries, other=0.0)
    bits = tl.zeros([BM], tl.int32)
    if amax_values is not None and not SUMS:
        top = tl.load(amax_values + head)
        bits += top
        if HALF:
            e = encode_factor(top, True, EMAX, TOP_MANTISSA, MAX)
            slope = slope * of_k * decode_scale(top, e, True)
    # Keys whose dS share scales need a sweep for their amax; a block within a tile needs none.
    SPANS: tl.constexpr = GRAD_WIDTH > BN and SUMS
    if SPANS and GRAD_WIDTH < UNBOUNDED:
        span = GRAD_WIDTH
        start = start // span * span
    else:
        span = (stop + BN) // BN * BN
    dx = tl.zeros([BM, D], tl.float32)
    for base in range(start, stop, span):
        if SPANS:
            bits = tl.zeros([BM], tl.int32)
            for n in tl.range(base, tl.minimum(base + span, stop), BN, num_stages=STAGES):
                seen = visible(first, last, hidden, i[:, None], n + tl.arange(0, BN)[None, :], hidden_query, hidden_key)
                right = rows_of(k, k_scale, n, keys, k_blocks, BN, D, WIDTH, CODES, INTEGERS, HALF)
                y = rows_of(v, v_scale, n, keys, v_blocks, BN, DV, WIDTH, CODES, INTEGERS, HALF)
                p, dp = _both(left, right, x, y, total, seen, scale, of_dp, HALF)
                ds = tl.where(seen, (dp - own[:, None]) * p, 0.0)
                bits = tl.maximum(bits, tl.max(magnitude_bits(ds), 1))
            if amax_values is not None:
                tl.atomic_max(amax_values + head, tl.max(bits, 0), sem="relaxed")
        if GRADIENT:
            for n in tl.range(base, tl.minimum(base + span, stop), BN, num_stages=STAGES):
                seen = visible(first, last, hidden, i[:, None], n + tl.arange(0, BN)[None, :], hidden_query, hidden_key)
                right = rows_of(k, k_scale, n, keys, k_blocks, BN, D, WIDTH, CODES, INTEGERS, HALF)
                y = rows_of(v, v_scale, n, keys, v_blocks, BN, DV, WIDTH, CODES, INTEGERS, HALF)
                p, dp = _both(left, right, x, y, total, seen, scale, of_dp, HALF)
                ds = tl.where(seen, (dp - own[:, None]) * p, 0.0)
                if HALF:
                    ds = half(encode(ds * e, dtype, INTEGERS), dtype, INTEGERS)
                elif GRAD_WIDTH > BN:
                    ds = rounded(ds, bits[:, None], dtype, EMAX, TOP_MANTISSA, MAX, INTEGERS)
                else:
                    ds = rounded_in_blocks(ds, BM, BN, GRAD_WIDTH, dtype, EMAX, TOP_MANTISSA, MAX, INTEGERS)
                if TRANSPOSED:
                    right = along_tokens(kt, kt_scale, n, keys, kt_blocks, BN, D, WIDTH, CODES, INTEGERS, TRANSPOSED)
                dx = tl.dot(ds if HALF else ds.to(tl.bfloat16), right, dx)
    if GRADIENT:
        at = dq + b * dq_batch + h * dq_head + i[:, None].to(tl.int64) * dq_token + tl.arange(0, D)[None, :]
        tl.store(at, (dx * slope).to(dq.dtype.element_ty), mask=i[:, None] < queries)


@triton.jit
def attention_columns(
    q, q_scale, k, k_scale, v, v_scale, qt, qt_scale, do, do_scale, dot, dot_scale,
    runs, seen_by, hidden, delta, shift, amax_values, dk, dv,
    heads, shared, queries, keys, q_blocks, k_blocks, v_blocks, qt_blocks, do_blocks, dot_blocks,
    hidden_batch, hidden_head, hidden_query, hidden_key, dk_batch, dk_head, dk_token, dv_batch, dv_head, dv_token,
    scale, slope,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr,
    GRAD_WIDTH: tl.constexpr, GRAD_TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    dtype: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Compute dK = dSᵀ q and dV = Pᵀ dO for BN keys (axis 0) of one group of one batch (axis 1), summed over its heads.

    Args:
        qt: same as q, or, if TRANSPOSED (stored transposed), codes [B, H, D, queries]; dot: same as do, or, if
            GRAD_TRANSPOSED, codes [B, H, DV, queries].
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
    left = rows_of(k + group * keys * D, k_scale, start_n, keys, k_blocks, BN, D, WIDTH, CODES, INTEGERS)
    x = rows_of(v + group * keys * DV, v_scale, start_n, keys, v_blocks, BN, DV, WIDTH, CODES, INTEGERS)
    start, stop = run_of(seen_by, j, keys, queries)
    start, stop = tl.min(start, 0), tl.max(stop, 0)
    j = j[:, None]
    # Queries whose dS share scales need a sweep for their amax; a block within a tile needs none.
    SPANS: tl.constexpr = GRAD_WIDTH > BM and amax_values is None
    if SPANS and GRAD_WIDTH < UNBOUNDED:
        span = GRAD_WIDTH
        start = start // span * span
    else:
        span = (stop + BM) // BM * BM
        start = start // BM * BM
    dx, dy = tl.zeros([BN, D], tl.float32), tl.zeros([BN, DV], tl.float32)
    # The operand of P is divided by P's factor; a dP from that operand is multiplied by it again, in the same rounding
    # that subtracts Δ.
    BY: tl.constexpr = 1.0 if GRAD_TRANSPOSED else INVERSE
    for member in range(shared):
        h = g * shared + member
        head = b * heads + h
        q_here, q_scale_here = q + head * queries * D, q_scale + head * tl.maximum(queries * q_blocks, 1)
        do_here, do_scale_here = do + head * queries * DV, do_scale + head * tl.maximum(queries * do_blocks, 1)
        total, own = shift + head * queries, delta + head * queries
        mask = hidden
        if hidden is not None:
            mask = hidden + b * hidden_batch + h * hidden_head
        for base in range(start, stop, span):
            bits = tl.zeros([BN], tl.int32)
            if amax_values is not None:
                bits += tl.load(amax_values + head)
            if SPANS:
                for m in tl.range(base, tl.minimum(base + span, stop), BM, num_stages=STAGES):
                    i = m + tl.arange(0, BM)[None, :]
                    first, last = run_of(runs, i, queries, keys)
                    seen = visible(first, last, mask, i, j, hidden_query, hidden_key)
                    right = rows_of(q_here, q_scale_here, m, queries, q_blocks, BM, D, WIDTH, CODES, INTEGERS)
                    y = rows_of(do_here, do_scale_here, m, queries, do_blocks, BM, DV, GRAD_WIDTH, dtype, INTEGERS)
                    p, dp = _both(
                        left, right, x, y, tl.load(total + i, mask=i < queries, other=0.0), seen, scale, 1.0, False
                    )
                    ds = tl.where(seen, (dp - tl.load(own + i, mask=i < queries, other=0.0)) * p, 0.0)
                    bits = tl.maximum(bits, tl.max(magnitude_bits(ds), 1))
            for m in tl.range(base, tl.minimum(base + span, stop), BM, num_stages=STAGES):
                i = m + tl.arange(0, BM)[None, :]
                first, last = run_of(runs, i, queries, keys)
                seen = visible(first, last, mask, i, j, hidden_query, hidden_key)
                right = rows_of(q_here, q_scale_here, m, queries, q_blocks, BM, D, WIDTH, CODES, INTEGERS)
                y = rows_of(
                    do_here, do_scale_here, m, queries, do_blocks, BM, DV, GRAD_WIDTH, dtype, INTEGERS, False, BY
                )
                p, dp = _both(
                    left, right, x, y, tl.load(total + i, mask=i < queries, other=0.0), seen, scale, 1.0, False
                )
                if GRAD_TRANSPOSED:
                    at = dot_scale + head * DV * dot_blocks
                    y = along_tokens(
                        dot + head * queries * DV, at, m, queries, dot_blocks, BM, DV, GRAD_WIDTH, dtype, INTEGERS,
                        True, False, INVERSE,
                    )  # fmt: skip
                dy = tl.dot(probability_codes(p, INTEGERS), y, dy)
                less = tl.load(own + i, mask=i < queries, other=0.0)
                dp = dp - less if GRAD_TRANSPOSED else tl.fma(dp, FACTOR, -less)
                ds = tl.where(seen, dp * p, 0.0)
                if GRAD_WIDTH > BM:
                    ds = rounded(ds, bits[:, None], dtype, EMAX, TOP_MANTISSA, MAX, INTEGERS)
                else:
                    ds = rounded_in_blocks(ds, BN, BM, GRAD_WIDTH, dtype, EMAX, TOP_MANTISSA, MAX, INTEGERS)
                if TRANSPOSED:
                    at = qt_scale + head * D * qt_blocks
                    right = along_tokens(
                        qt + head * queries * D, at, m, queries, qt_blocks, BM, D, WIDTH, CODES, INTEGERS, True
                    )
                dx = tl.dot(ds.to(tl.bfloat16), right, dx)
    tokens = j.to(tl.int64)
    at = dk + b * dk_batch + g * dk_head + tokens * dk_token + tl.arange(0, D)[None, :]
    tl.store(at, (dx * slope).to(dk.dtype.element_ty), mask=j < keys)
    at = dv + b * dv_batch + g * dv_head + tokens * dv_token + tl.arange(0, DV)[None, :]
    tl.store(at, dy.to(dv.dtype.element_ty), mask=j < keys)


# ---- forward ----
# Keys are swept twice: first for the softmax's sums, then for the probabilities, which are rounded once the sum is
# known. A single sweep would have to round exp(score - running maximum), which is a different number. The specification
# is `quaver.reference.attention`; the sweep over tiles is that of Dao, arXiv:2307.08691.


@triton.jit
def attention(
    q, q_scale, k, k_scale, v, v_scale, runs, hidden, sinks, out, logsumexp,
    heads, shared, queries, keys, q_blocks, k_blocks, v_blocks,
    hidden_batch, hidden_head, hidden_query, hidden_key, out_batch, out_head, out_token, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr,
    HALF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Compute attention for BM queries (axis 0) of one head of one batch (axis 1).

    Args:
        q, k, v: codes [B, H, queries, D], [B, G, keys, D] and [B, G, keys, DV], or, if TRANSPOSED (stored transposed),
        [B,
            G, DV, keys]; H is `heads`, and `shared` of them share a group.
        CODES: format of q, k and v.
        HALF: True if one scale serves each matrix of q, k and v.
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
    queried = rows_of(
        q + head * queries * D, q_scale + head * tl.maximum(queries * q_blocks, 1), start_m, queries, q_blocks,
        BM, D, WIDTH, CODES, INTEGERS, HALF,
    )  # fmt: skip
    k += group * keys * D
    k_scale += group * tl.maximum(keys * k_blocks, 1)
    v += group * keys * DV
    v_scale += group * tl.maximum((DV if TRANSPOSED else keys) * v_blocks, 1)
    of_v = 1.0
    if HALF:
        scale = scale * tl.load(q_scale + head) * tl.load(k_scale)
        of_v = INVERSE * tl.load(v_scale)
    if hidden is not None:
        hidden += b * hidden_batch + h * hidden_head
    first, last = run_of(runs, i, queries, keys)
    start, stop = tl.min(first, 0) // BN * BN, tl.max(last, 0)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for n in tl.range(start, stop, BN, num_stages=STAGES):
        j = n + tl.arange(0, BN)
        right = rows_of(k, k_scale, n, keys, k_blocks, BN, D, WIDTH, CODES, INTEGERS, HALF)
        s = tl.dot(queried, tl.trans(right)) * scale
        seen = visible(first[:, None], last[:, None], hidden, i[:, None], j[None, :], hidden_query, hidden_key)
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
    shift = tl.where(total == float("-inf"), 0.0, total)
    y = tl.zeros([BM, DV], tl.float32)
    for n in tl.range(start, stop, BN, num_stages=STAGES):
        j = n + tl.arange(0, BN)
        right = rows_of(k, k_scale, n, keys, k_blocks, BN, D, WIDTH, CODES, INTEGERS, HALF)
        s = tl.dot(queried, tl.trans(right)) * scale
        seen = visible(first[:, None], last[:, None], hidden, i[:, None], j[None, :], hidden_query, hidden_key)
        p = probability_codes(tl.where(seen, tl.exp2(s - shift[:, None]), 0.0), INTEGERS, HALF)
        value = along_tokens(v, v_scale, n, keys, v_blocks, BN, DV, WIDTH, CODES, INTEGERS, TRANSPOSED, HALF, INVERSE)
        y = tl.dot(p, value, y)
    at = out + b * out_batch + h * out_head + i[:, None].to(tl.int64) * out_token + tl.arange(0, DV)[None, :]
    tl.store(at, (y * of_v).to(out.dtype.element_ty), mask=i[:, None] < queries)
