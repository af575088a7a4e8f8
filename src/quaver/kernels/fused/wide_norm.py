"""`quaver.kernels.fused.norm` for rows that do not fit registers: a few passes over a row, block by block, in the
cache."""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import encode, flushed, magnitude_bits, note_amax
from quaver.kernels.fused.norm import load_parameter, load_row, store_row


@triton.jit
def wide_norm(
    x, gamma, beta, y, q, mean, inverse, scale, top, factor, work,
    rows, columns, stride, q_stride, programs, eps, share,
    BN: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, CENTRED: tl.constexpr,
    MODE: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTEGERS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """`quaver.kernels.fused.norm.norm` over any number of columns; MODE "none", "amax" or "tensor".

    STEPS: blocks of BN that a row has, known where statistics are taken, so that all of them are loaded at once.
    """
    first = tl.program_id(0)
    m = tl.zeros([BN], tl.float32)
    e = 1.0
    if MODE == "tensor":
        e = tl.load(factor)
    for row in range(first, rows, programs):
        middle = 0.0
        if CENTRED:
            total = tl.zeros([BN], tl.float32)
            for step in range(STEPS):
                c = tl.max_contiguous(step * BN + tl.arange(0, BN), VECTOR)
                total += load_row(x, row, c, columns, stride, EVEN)
            middle = tl.sum(total, 0) * share
            tl.store(mean + row, middle)
        squares = tl.zeros([BN], tl.float32)
        for step in range(STEPS):
            c = tl.max_contiguous(step * BN + tl.arange(0, BN), VECTOR)
            v = load_row(x, row, c, columns, stride, EVEN) - middle
            if not EVEN:
                v = tl.where(c < columns, v, 0.0)
            squares = tl.fma(v, v, squares)
        f = tl.rsqrt(tl.sum(squares, 0) * share + eps)
        tl.store(inverse + row, f)
        for begin in range(0, q_stride, BN):
            c = tl.max_contiguous(begin + tl.arange(0, BN), VECTOR)
            v = (load_row(x, row, c, columns, stride, EVEN) - middle) * f
            if gamma is not None and beta is not None:
                v = tl.fma(v, load_parameter(gamma, c, columns, EVEN), load_parameter(beta, c, columns, EVEN))
            elif gamma is not None:
                v = v * load_parameter(gamma, c, columns, EVEN)
            elif beta is not None:
                v = v + load_parameter(beta, c, columns, EVEN)
            rounded = v.to(x.dtype.element_ty)
            if y is not None:
                store_row(y, rounded, row, c, columns, columns, EVEN)
            if MODE != "none":
                v = rounded.to(tl.float32)
                if not EVEN:
                    v = tl.where(c < columns, v, 0.0)
                # Keeps NaN; no bytes change threads here (triton-lang/triton#11111).
                m = tl.maximum(m, tl.abs(v), propagate_nan=tl.PropagateNan.ALL)
            if q is not None:
                codes = encode(v * e, CODES, INTEGERS).to(q.dtype.element_ty, bitcast=True)
                store_row(q, codes, row, c, q_stride, q_stride, EVEN)
    if MODE != "none":
        note_amax(work, flushed(tl.max(magnitude_bits(m), 0)), programs, top, scale, e, MODE == "tensor", POWER_OF_TWO)


@triton.jit
def wide_norm_backward(
    grad, x, gamma, mean, inverse, dx, partial, rows, columns, grad_stride, stride, width, programs, share,
    BN: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, CENTRED: tl.constexpr, BETA: tl.constexpr,
):  # fmt: skip
    """`quaver.kernels.fused.norm.norm_backward` over any number of columns.

    A program adds to its own row of `partial`, which holds zeros; no other program touches that row.
    """
    first = tl.program_id(0)
    own = partial
    if partial is not None:
        own = partial + first.to(tl.int64) * width
    for row in range(first, rows, programs):
        f = tl.load(inverse + row)
        middle = 0.0
        if CENTRED:
            middle = tl.load(mean + row)
        products = tl.zeros([BN], tl.float32)
        total = tl.zeros([BN], tl.float32)
        for begin in range(0, columns, BN):
            c = tl.max_contiguous(begin + tl.arange(0, BN), VECTOR)
            v = (load_row(x, row, c, columns, stride, EVEN) - middle) * f
            along = load_row(grad, row, c, columns, grad_stride, EVEN)
            if not EVEN:
                v = tl.where(c < columns, v, 0.0)
            if gamma is not None:
                tl.store(own + c, tl.load(own + c, mask=c < columns) + along * v, mask=c < columns)
                if BETA:
                    at = own + width // 2 + c
                    tl.store(at, tl.load(at, mask=c < columns) + along, mask=c < columns)
                along = along * load_parameter(gamma, c, columns, EVEN)
            products += along * v
            total += along
        inner = tl.sum(products, 0) * share
        shift = 0.0
        if CENTRED:
            shift = tl.sum(total, 0) * share
        for begin in range(0, columns, BN):
            c = tl.max_contiguous(begin + tl.arange(0, BN), VECTOR)
            v = (load_row(x, row, c, columns, stride, EVEN) - middle) * f
            along = load_row(grad, row, c, columns, grad_stride, EVEN)
            if gamma is not None:
                along = along * load_parameter(gamma, c, columns, EVEN)
            store_row(dx, ((along - shift - v * inner) * f).to(x.dtype.element_ty), row, c, columns, columns, EVEN)
