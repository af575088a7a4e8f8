"""Products of rows that lie group by group, each group by a matrix of its own, and sums over each group's rows.

A program finds its group by the groups' ends, which lie on the device, so the host need not know how many rows each
has. There are as many programs as any distribution of the rows may need.
"""

import triton
import triton.language as tl


@triton.jit
def multiply_groups(
    x, w, y, of_rows, of_columns, bias, ends,
    groups, n, k, x_stride, w_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """y[r] = x[r] @ w[g].T for row r of group g, times scales of rows and of the group's columns, plus its bias.

    x: [rows, k]; w: [groups · n, k], both bf16 or both float32. of_rows: float32 [rows]; of_columns: float32
    [groups · n]; bias: [groups · n]; each may be None. ends: int32 [groups]. y: [rows, n], not written for rows of no
    group. BM rows and BN columns of one group a program; EVEN: k is a multiple of BK and n of BN.
    Bounded: products exact, sums in float32, one rounding.
    """
    tile, pn = tl.program_id(0), tl.program_id(1)
    first, last, group, start, tiles = 0, 0, -1, 0, 0
    for g in range(groups):
        end = tl.load(ends + g)
        own = tl.cdiv(end - start, BM)
        here = (tile >= tiles) & (tile < tiles + own)
        first = tl.where(here, start + (tile - tiles) * BM, first)
        last = tl.where(here, end, last)
        group = tl.where(here, g, group)
        tiles += own
        start = end
    if group >= 0:
        r = first + tl.arange(0, BM)
        c = pn * BN + tl.arange(0, BN)
        # A group's last rows are read again in place of the next one's.
        held = tl.minimum(r, last - 1)
        column = tl.cast(group, tl.int64) * n + c
        xs = x + held.to(tl.int64)[:, None] * x_stride
        ws = w + column[None, :] * w_stride
        sums = tl.zeros([BM, BN], tl.float32)
        for at in range(0, k, BK):
            i = at + tl.arange(0, BK)
            if EVEN:
                a = tl.load(xs + i[None, :])
                b = tl.load(ws + i[:, None])
            else:
                a = tl.load(xs + i[None, :], (i < k)[None, :], 0.0)
                b = tl.load(ws + i[:, None], (i < k)[:, None] & (c < n)[None, :], 0.0)
            sums = tl.dot(a, b, sums, input_precision="ieee")
        if of_rows is not None:
            sums *= tl.load(of_rows + held)[:, None]
        if of_columns is not None:
            sums *= tl.load(of_columns + column, c < n, 0.0)[None, :]
        if bias is not None:
            sums += tl.load(bias + column, c < n, 0.0).to(tl.float32)[None, :]
        at = y + r.to(tl.int64)[:, None] * n + c[None, :]
        tl.store(at, sums.to(y.dtype.element_ty), (r < last)[:, None] & (c < n)[None, :])


@triton.jit
def sum_groups(
    x, w, y, of_rows, of_columns, ends,
    m, n, x_stride, w_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """y[g] = x[:, slots of g] @ w[:, slots of g].T, times scales of the group's rows and columns.

    x: [m, slots]; w: [n, slots], both bf16 or both float32. of_rows: float32 [groups, m]; of_columns: float32
    [groups, n]; each may be None. ends: int32 [groups]. y: [groups, m, n], zeros for a group without slots. BM rows and
    BN columns of one group a program; EVEN: m is a multiple of BM, n of BN, and each group's slots of BK.
    Bounded: products exact, sums in float32, one rounding.
    """
    pm, pn, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(ends + tl.maximum(group - 1, 0))
    start = tl.where(group == 0, 0, start)
    end = tl.load(ends + group)
    r = pm * BM + tl.arange(0, BM)
    c = pn * BN + tl.arange(0, BN)
    xs = x + r.to(tl.int64)[:, None] * x_stride
    ws = w + c.to(tl.int64)[None, :] * w_stride
    sums = tl.zeros([BM, BN], tl.float32)
    if EVEN:
        # Groups begin where blocks do: loads of sixteen bytes.
        for block in range(start // BK, end // BK):
            i = block * BK + tl.arange(0, BK)
            sums = tl.dot(tl.load(xs + i[None, :]), tl.load(ws + i[:, None]), sums, input_precision="ieee")
    else:
        for at in range(start, end, BK):
            i = at + tl.arange(0, BK)
            a = tl.load(xs + i[None, :], (r < m)[:, None] & (i < end)[None, :], 0.0)
            b = tl.load(ws + i[:, None], (i < end)[:, None] & (c < n)[None, :], 0.0)
            sums = tl.dot(a, b, sums, input_precision="ieee")
    if of_rows is not None:
        sums *= tl.load(of_rows + group * m + r, r < m, 0.0)[:, None]
    if of_columns is not None:
        sums *= tl.load(of_columns + group * n + c, c < n, 0.0)[None, :]
    at = y + (group.to(tl.int64) * m + r[:, None]) * n + c[None, :]
    tl.store(at, sums.to(y.dtype.element_ty), (r < m)[:, None] & (c < n)[None, :])
