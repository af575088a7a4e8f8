"""The backward pass of attention with quantized products: a sweep over keys for dQ, one over queries for dK and dV.

Scores and probabilities are made again from the codes. dS = P (dP - Δ) with Δ = rowsum(P dP), so Δ takes a sweep of its
own, and so does an amax that reaches beyond a tile: three sweeps where a scale serves a row or a head, two where it
serves a block that a tile holds. The specification is `quaver.core.reference.dot_product`.
"""

import triton
import triton.language as tl

from quaver.kernels.attention.tiles import (
    FACTOR,
    INVERSE,
    UNBOUNDED,
    along_tokens,
    half,
    probability_codes,
    rounded,
    rounded_in_blocks,
    rows_of,
    run_of,
    shift_of,
    visible,
)
from quaver.kernels.bits.numbers import decode_scale, encode, encode_factor, magnitude_bits


@triton.jit
def _both(left, right, x, y, shift, seen, scale, of_dp=1.0, HALF: tl.constexpr = False):
    """P and dP, float32, 0 where not seen: of left rightᵀ times scale and of x yᵀ, if HALF times of_dp."""
    s = tl.dot(left, tl.trans(right)) * scale
    p = tl.where(seen, tl.exp2(s - shift), 0.0)
    dp = tl.dot(x, tl.trans(y))
    if HALF:
        dp = dp * of_dp
    return p, tl.where(seen, dp, 0.0)


@triton.jit
def attention_rows(
    q, q_scale, k, k_scale, v, v_scale, kt, kt_scale, do, do_scale, runs, hidden, logsumexp, delta, shift, tops, dq,
    heads, shared, queries, keys, q_blocks, k_blocks, v_blocks, kt_blocks, do_blocks,
    hidden_batch, hidden_head, hidden_query, hidden_key, dq_batch, dq_head, dq_token, scale, slope,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, TURNED: tl.constexpr,
    GRAD_WIDTH: tl.constexpr, HALF: tl.constexpr, SUMS: tl.constexpr, GRADIENT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    dtype: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """BM queries (axis 0) of one head of one batch (axis 1): Δ, the amax of dS, and dQ = dS k.

    Args:
        q, k, v, do: codes [B, H, queries, D], [B, G, keys, D], [B, G, keys, DV] and [B, H, queries, DV]; scales, heads,
            runs and hidden as `forward.attention` takes them. GRAD_WIDTH, dtype: the blocks and format of do and of dS.
        HALF: one scale serves each matrix of q, k, v, do and dS.
        kt: k as it is, or, TURNED, codes [B, G, D, keys].
        delta, shift: float32 [B, H, queries]; written where SUMS: Δ and logsumexp to base 2, 0 where nothing is seen.
            Else delta is read.
        tops: int32 [B, H]: bits of the amax of each head's dS, None where its scales are finer; raised where SUMS, else
            read.
        dq: [B, H, queries, D], `dq_*` apart; written where GRADIENT.
        scale, slope: what makes exponents to base 2 of scores, and what dS k is multiplied by.
    Bounded: as forward; dS near a tie may be rounded to its other side.
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
    kt_scale += group * tl.maximum((D if TURNED else keys) * kt_blocks, 1)
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
    if tops is not None and not SUMS:
        top = tl.load(tops + head)
        bits += top
        if HALF:
            e = encode_factor(top, True, EMAX, TOP_MANTISSA, MAX)
            slope = slope * of_k * decode_scale(top, e, True)
    # Keys whose dS shares scales, and with them a sweep for their amax; a block within a tile needs none.
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
            if tops is not None:
                tl.atomic_max(tops + head, tl.max(bits, 0), sem="relaxed")
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
                if TURNED:
                    right = along_tokens(kt, kt_scale, n, keys, kt_blocks, BN, D, WIDTH, CODES, INTEGERS, TURNED)
                dx = tl.dot(ds if HALF else ds.to(tl.bfloat16), right, dx)
    if GRADIENT:
        at = dq + b * dq_batch + h * dq_head + i[:, None].to(tl.int64) * dq_token + tl.arange(0, D)[None, :]
        tl.store(at, (dx * slope).to(dq.dtype.element_ty), mask=i[:, None] < queries)


@triton.jit
def attention_columns(
    q, q_scale, k, k_scale, v, v_scale, qt, qt_scale, do, do_scale, dot, dot_scale,
    runs, seen_by, hidden, delta, shift, tops, dk, dv,
    heads, shared, queries, keys, q_blocks, k_blocks, v_blocks, qt_blocks, do_blocks, dot_blocks,
    hidden_batch, hidden_head, hidden_query, hidden_key, dk_batch, dk_head, dk_token, dv_batch, dv_head, dv_token,
    scale, slope,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, TURNED: tl.constexpr,
    GRAD_WIDTH: tl.constexpr, GRAD_TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    dtype: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """BN keys (axis 0) of one group of one batch (axis 1): dK = dSᵀ q and dV = Pᵀ dO, summed over the group's heads.

    Args:
        qt: q as it is, or, TURNED, codes [B, H, D, queries]; dot: do, or, GRAD_TURNED, codes [B, H, DV, queries].
        seen_by: int32 [2, keys]: the first query that sees a key, and one past the last; None: all.
        tops: bits of the amax of each head's dS, or None.
        dk, dv: [B, G, keys, D] and [B, G, keys, DV], `dk_*` and `dv_*` apart.
        The rest is as `attention_rows` takes it, or as it left it.
    Bounded: as there.
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
    # Queries whose dS shares scales, and with them a sweep for their amax; a block within a tile needs none.
    SPANS: tl.constexpr = GRAD_WIDTH > BM and tops is None
    if SPANS and GRAD_WIDTH < UNBOUNDED:
        span = GRAD_WIDTH
        start = start // span * span
    else:
        span = (stop + BM) // BM * BM
        start = start // BM * BM
    dx, dy = tl.zeros([BN, D], tl.float32), tl.zeros([BN, DV], tl.float32)
    # What P multiplies has P's factor taken off; a dP of that has it put back, in the rounding that Δ is taken off by.
    BY: tl.constexpr = 1.0 if GRAD_TURNED else INVERSE
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
            if tops is not None:
                bits += tl.load(tops + head)
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
                if GRAD_TURNED:
                    at = dot_scale + head * DV * dot_blocks
                    y = along_tokens(
                        dot + head * queries * DV, at, m, queries, dot_blocks, BM, DV, GRAD_WIDTH, dtype, INTEGERS,
                        True, False, INVERSE,
                    )  # fmt: skip
                dy = tl.dot(probability_codes(p, INTEGERS), y, dy)
                less = tl.load(own + i, mask=i < queries, other=0.0)
                dp = dp - less if GRAD_TURNED else tl.fma(dp, FACTOR, -less)
                ds = tl.where(seen, dp * p, 0.0)
                if GRAD_WIDTH > BM:
                    ds = rounded(ds, bits[:, None], dtype, EMAX, TOP_MANTISSA, MAX, INTEGERS)
                else:
                    ds = rounded_in_blocks(ds, BN, BM, GRAD_WIDTH, dtype, EMAX, TOP_MANTISSA, MAX, INTEGERS)
                if TURNED:
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
