"""Cross entropy of rows of logits: one pass over a row for the loss, another that overwrites it with the gradient.

Also sums over rows. The online softmax over blocks is that of Milakov and Gimelshein (2018, arXiv:1805.02867);
overwriting the logits by the gradient is Liger Kernel's idea (arXiv:2410.10989).
"""

import triton
import triton.language as tl

# ---- cross entropy ----

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp(x):
    """Return e to x in two instructions, where `tl.exp` takes five; subnormal results become zero."""
    return tl.exp2(x * _LOG2E)


@triton.jit
def _load(at, c, columns, buffer, cap, CAP: tl.constexpr, MASKED: tl.constexpr):
    """Load columns c; return float32 logits after the soft cap, and (1 - tanh) / 2 of its tanh; -infinity outside the
    row.
    """
    v = tl.load(at + c, mask=c < buffer, other=0.0).to(tl.float32) if MASKED else tl.load(at + c).to(tl.float32)
    r = v
    if CAP:
        # tanh by one exponential, which overflows to the right limit; the reciprocal is the square of an inverse root.
        r = tl.rsqrt(tl.exp2(v * (2.0 * _LOG2E / cap)) + 1.0)
        r = r * r
        v = tl.fma(r, -2.0 * cap, cap)
    if MASKED:
        v = tl.where(c < columns, v, float("-inf"))
    return v, r


@triton.jit
def _first(at, c, m, s, total, columns, buffer, cap, CAP: tl.constexpr, SMOOTHING: tl.constexpr, MASKED: tl.constexpr):
    """Update the running maximum, the sum of exponentials relative to it, and the logits' mean by one block."""
    v, _ = _load(at, c, columns, buffer, cap, CAP, MASKED)
    top = tl.maximum(m, tl.max(v, 0))
    # Only -infinity so far: any finite number will do.
    base = tl.where(top == float("-inf"), 0.0, top)
    s = s * _exp(m - base) + tl.sum(_exp(v - base), 0)
    if SMOOTHING:
        total = tl.fma(tl.where(c < columns, v, 0.0) if MASKED else v, 1.0 / columns, total)
    return top, s, total


@triton.jit
def _second(at, c, m, log_s, rise, even, columns, buffer, cap, CAP: tl.constexpr, MASKED: tl.constexpr):
    """Overwrite the logits of one block by their gradient, as if it did not contain the target."""
    v, r = _load(at, c, columns, buffer, cap, CAP, MASKED)
    d = _gradient(v, r, m, log_s, rise, even, CAP).to(at.dtype.element_ty)
    if MASKED:
        tl.store(at + c, d, mask=c < buffer)
    else:
        tl.store(at + c, d)


@triton.jit
def _gradient(v, r, m, log_s, rise, less, CAP: tl.constexpr):
    """Return rise times the softmax of v, minus less, times the derivative of the soft cap."""
    d = tl.fma(tl.exp2(tl.fma(v - m, _LOG2E, log_s * -_LOG2E)), rise, -less)
    if CAP:
        # 1 - tanh squared.
        d = d * tl.fma(r * -4.0, r, r * 4.0)
    return d


@triton.jit
def cross_entropy(
    logits, targets, losses, weights,
    columns, buffer, stride, ignore, smoothing, z_loss, cap,
    BLOCK: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, CAP: tl.constexpr,
    GRADIENT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Compute losses float32 [rows] of logits [rows, columns] with row stride `stride` and targets int64 [rows]; one
    row each.

    buffer: columns, or more if the memory after a row may be overwritten, a multiple of 16 bytes for wide accesses.
    GRADIENT: overwrite the logits by the loss's gradient, times weights float32 [rows] if given. A target equal to
    `ignore` has loss and gradient 0, one out of range NaN. RAGGED: BLOCK does not divide columns. The relative error of
    the loss is at most 1e-6 against float64.
    """
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    target = tl.load(targets + row)
    c = tl.arange(0, BLOCK)
    if target == ignore:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, columns, BLOCK):
                tl.store(at + start + c, tl.zeros((BLOCK,), at.dtype.element_ty), mask=start + c < buffer)
    else:
        known = (target >= 0) & (target < columns)
        # Read before anything is overwritten: the reductions below synchronize the threads.
        right, r = _load(at, tl.where(known, target, 0), columns, buffer, cap, CAP, False)
        own = right
        right = tl.where(known, right, float("nan"))
        m = float("-inf")
        s = 0.0
        total = 0.0
        if SMOOTHING:
            total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            m, s, total = _first(at, start + c, m, s, total, columns, buffer, cap, CAP, SMOOTHING, RAGGED)
        # m + log_s is the logarithm of the sum; separate terms are accurate for large logits.
        log_s = tl.log(s)
        loss = (m - right) + log_s
        if SMOOTHING:
            loss = (1.0 - smoothing) * loss + smoothing * ((m - tl.sum(total, 0)) + log_s)
        rise = 1.0
        if Z_LOSS:
            lse = m + log_s
            loss += z_loss * lse * lse
            rise = 1.0 + 2.0 * z_loss * lse
        tl.store(losses + row, loss)
        if GRADIENT:
            scale = tl.where(known, 1.0, float("nan"))
            if weights is not None:
                scale *= tl.load(weights + row)
            even = scale * (smoothing / columns)
            rise *= scale
            for start in range(0, columns, BLOCK):
                _second(at, start + c, m, log_s, rise, even, columns, buffer, cap, CAP, RAGGED)
            # The target's gradient is written last, which saves comparing every column with the target.
            d = _gradient(own, r, m, log_s, rise, even + scale * (1.0 - smoothing), CAP)
            tl.debug_barrier()
            tl.store(at + target, d.to(at.dtype.element_ty), mask=known)


# ---- column sums: deterministic sums over rows, such as partial sums of another kernel ----


@triton.jit
def column_sums(
    x, out, second, rows, columns, stride, rows_each, split,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Sum x [rows, columns] to out [programs along axis 1, columns]: program j sums rows_each rows from j · rows_each
    on.

    rows_each: a multiple of BM. out is float32 if a second pass follows, else of any dtype, rounded once. second: None,
    or of any dtype: receives the columns from `split` on; no second pass follows. Float32 sums in a fixed order.
    """
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    begin = tl.program_id(1) * rows_each
    total = tl.zeros([BM, BN], tl.float32)
    for offset in range(0, rows_each, BM):
        r = begin + offset + tl.arange(0, BM)
        at = x + r[:, None].to(tl.int64) * stride + c[None, :]  # [BM, BN]
        if EVEN:
            total += tl.load(at).to(tl.float32)
        else:
            total += tl.load(at, mask=(r[:, None] < rows) & (c[None, :] < columns), other=0.0).to(tl.float32)
    summed = tl.sum(total, 0)
    at = out + tl.program_id(1).to(tl.int64) * columns + c
    if second is None:
        tl.store(at, summed.to(out.dtype.element_ty), mask=c < columns)
    else:
        tl.store(at, summed.to(out.dtype.element_ty), mask=c < split)
        tl.store(second + c - split, summed.to(second.dtype.element_ty), mask=(c >= split) & (c < columns))
