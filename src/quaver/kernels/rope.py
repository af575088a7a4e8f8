"""Rotary positions: rotate queries and keys forward or back in one launch, and copy the values stored beside them.

A pair of features (a, b) becomes (a cos - b sin, b cos + a sin). Launched without floating-point fusion, it gives the
bits of the plain formula. Source: Su et al. 2021, arXiv:2104.09864.
"""

import triton
import triton.language as tl


@triton.jit
def _pair(a, b, c, s, BACK: tl.constexpr):
    # Triton's -s is 0 - s, which loses the sign of zero.
    if BACK:
        return a * c + b * s, b * c - a * s
    return a * c - b * s, b * c + a * s


@triton.jit
def _rotate_heads(
    x, y, c, s, first, heads, head_stride,
    HALF: tl.constexpr, REST: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, EVEN: tl.constexpr, FAR: tl.constexpr, COPY: tl.constexpr = False,
):  # fmt: skip
    """Rotate BH heads of one token from x (head stride `head_stride`) to contiguous y; c, s float32 [1, BD]; COPY: only
    copy.
    """
    WIDTH: tl.constexpr = 2 * HALF + REST
    h = first + tl.arange(0, BH)
    row = x + (h[:, None].to(tl.int64) if FAR else h[:, None]) * head_stride
    out = y + h[:, None] * WIDTH
    inside = h[:, None] < heads
    dtype: tl.constexpr = y.dtype.element_ty
    if INTERLEAVED:
        d = tl.arange(0, 2 * BD)
        mask = inside & (d[None, :] < 2 * HALF)
        v = tl.load(row + d[None, :]) if EVEN else tl.load(row + d[None, :], mask=mask, other=0.0)
        if not COPY:
            a, b = tl.split(tl.reshape(v.to(tl.float32), (BH, BD, 2)))
            a, b = _pair(a, b, c, s, BACK)
            v = tl.reshape(tl.join(a, b), (BH, 2 * BD)).to(dtype)
        if EVEN:
            tl.store(out + d[None, :], v)
        else:
            tl.store(out + d[None, :], v, mask=mask)
    else:
        i = tl.arange(0, BD)
        mask = inside & (i[None, :] < HALF)
        if EVEN:
            a = tl.load(row + i[None, :])
            b = tl.load(row + HALF + i[None, :])
        else:
            a = tl.load(row + i[None, :], mask=mask, other=0.0)
            b = tl.load(row + HALF + i[None, :], mask=mask, other=0.0)
        if not COPY:
            a, b = _pair(a.to(tl.float32), b.to(tl.float32), c, s, BACK)
        if EVEN:
            tl.store(out + i[None, :], a.to(dtype))
            tl.store(out + HALF + i[None, :], b.to(dtype))
        else:
            tl.store(out + i[None, :], a.to(dtype), mask=mask)
            tl.store(out + HALF + i[None, :], b.to(dtype), mask=mask)
    if REST:
        r = tl.arange(0, BR)
        mask = inside & (r[None, :] < REST)
        tl.store(out + 2 * HALF + r[None, :], tl.load(row + 2 * HALF + r[None, :], mask=mask), mask=mask)


@triton.jit
def rope(
    q, k, v, q_out, k_out, v_out, cos, sin,
    inner, q_heads, k_heads, q_blocks, k_blocks, q_row, k_row,
    q_outer, q_inner, q_head, k_outer, k_inner, k_head, v_outer, v_inner, v_head, cos_outer, cos_inner,
    HALF: tl.constexpr, REST: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """Rotate one token (axis 0) and BH of its heads (axis 1): first heads of q [outer, inner, q_heads, D], then of k.

    Then as many heads of v are copied; k and v may be None. cos, sin: float32, 2 HALF values per token, as
    `quaver.torch.nn.attention.rope` creates them: each angle at both positions of its pair, with the sine negated at
    the first. *_outer, *_inner, *_head: strides, 0 if tokens share; *_row: token stride of a result, whose heads are
    contiguous. D = 2 HALF + REST; BD, BR: powers of two at least HALF and REST; EVEN: whole blocks of heads, and BD =
    HALF. FAR: the last head begins 2**31 or more elements after the first. Exact.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    o = token // inner
    n = token % inner
    i = tl.arange(0, BD)
    angle = o * cos_outer + n * cos_inner
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    SECOND: tl.constexpr = 1 if INTERLEAVED else HALF
    if BD == HALF:
        c = tl.load(cos + angle + i * STEP)[None, :]
        s = tl.load(sin + angle + SECOND + i * STEP)[None, :]
    else:
        c = tl.load(cos + angle + i * STEP, mask=i < HALF, other=0.0)[None, :]
        s = tl.load(sin + angle + SECOND + i * STEP, mask=i < HALF, other=0.0)[None, :]
    if block < q_blocks:
        x = q + o * q_outer + n * q_inner
        y = q_out + token * q_row
        _rotate_heads(x, y, c, s, block * BH, q_heads, q_head, HALF, REST, BH, BD, BR, INTERLEAVED, BACK, EVEN_Q, FAR)
    elif k is not None:
        first = (block - q_blocks) * BH
        if block < q_blocks + k_blocks:
            x = k + o * k_outer + n * k_inner
            y = k_out + token * k_row
            _rotate_heads(x, y, c, s, first, k_heads, k_head, HALF, REST, BH, BD, BR, INTERLEAVED, BACK, EVEN_K, FAR)
        elif v is not None:
            first -= k_blocks * BH
            x = v + o * v_outer + n * v_inner
            y = v_out + token * k_row
            _rotate_heads(
                x, y, c, s, first, k_heads, v_head, HALF, REST, BH, BD, BR, INTERLEAVED, BACK, EVEN_K, FAR, True
            )
