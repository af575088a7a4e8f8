"""The forward pass of attention with quantized products.

Keys are swept twice: first for the softmax's sums, then for the probabilities, which are rounded as they are once the
sum is known. A single sweep would have to round exp(score - the largest so far), which is another number. The
specification is `quaver.core.reference.dot_product`; the sweep over tiles is that of Dao, arXiv:2307.08691.
"""

import triton
import triton.language as tl

from quaver.kernels.attention.tiles import (
    INVERSE,
    LOG2_E,
    along_tokens,
    probability_codes,
    rows_of,
    run_of,
    visible,
)


@triton.jit
def attention(
    q, q_scale, k, k_scale, v, v_scale, runs, hidden, sinks, out, logsumexp,
    heads, shared, queries, keys, q_blocks, k_blocks, v_blocks,
    hidden_batch, hidden_head, hidden_query, hidden_key, out_batch, out_head, out_token, scale,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, TURNED: tl.constexpr,
    HALF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """BM queries (axis 0) of one head of one batch (axis 1).

    Args:
        q, k, v: codes [B, H, queries, D], [B, G, keys, D] and [B, G, keys, DV], or, TURNED, [B, G, DV, keys]; H is
            `heads`, and `shared` of them share a group.
        CODES: the format of q, k and v.
        HALF: one scale serves each matrix of q, k and v.
        q_scale, k_scale, v_scale: in blocks of WIDTH along a row, `*_blocks` of them; 0: one for the matrix.
        runs: int32 [2, queries]: the first key that a query sees, and one past the last; None: all. Neither falls.
        hidden: uint8, not 0 where a query does not see a key, `hidden_*` apart; None: nothing more.
        sinks: float32 [H], logits of one more column of the softmax; None: none.
        out: [B, H, queries, DV], `out_*` apart. logsumexp: float64 [B, H, queries], -inf where nothing is seen.
        scale: of the scores, times log2(e).
    Bounded: scores, softmax and sums are float32; a probability near a tie may be rounded to its other side.
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
    v_scale += group * tl.maximum((DV if TURNED else keys) * v_blocks, 1)
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
        value = along_tokens(v, v_scale, n, keys, v_blocks, BN, DV, WIDTH, CODES, INTEGERS, TURNED, HALF, INVERSE)
        y = tl.dot(p, value, y)
    at = out + b * out_batch + h * out_head + i[:, None].to(tl.int64) * out_token + tl.arange(0, DV)[None, :]
    tl.store(at, (y * of_v).to(out.dtype.element_ty), mask=i[:, None] < queries)
