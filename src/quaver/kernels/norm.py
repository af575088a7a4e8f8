"""LayerNorm, RMSNorm and L2 normalization of rows; one pass writes the output and the codes for a quantized GEMM.

One program processes many rows, so that gamma is read once and few programs combine their amaxes. A row is kept in
registers; wider rows use `wide_norm`. Threads hold VECTOR adjacent elements in every mode, so that rows are summed in
the same order, and an output has the same bits with and without codes.
"""

import triton
import triton.language as tl

from quaver.kernels.numerics import (
    decode_scale,
    encode,
    encode_factor,
    flushed,
    largest_of_runs,
    magnitude_bits,
    shared_exponent,
    store_amax,
    widened,
)

# ---- rows in registers ----

#: Widest row for which beta is kept in registers like gamma; with wider ones a multiprocessor would run only two
#: programs, which wait for memory at the same time.
BETA_IN_REGISTERS = tl.constexpr(2048)


@triton.jit
def load_row(x, row, c, columns, stride, EVEN: tl.constexpr):
    """Load a row as float32 [BN], zeros beyond its end."""
    at = x + row * stride.to(tl.int64) + c
    if EVEN:
        return widened(tl.load(at))
    return widened(tl.load(at, mask=c < columns, other=0.0))


@triton.jit
def load_parameter(p, c, columns, EVEN: tl.constexpr):
    """Load a parameter as float32 [BN], zeros beyond its end."""
    if EVEN:
        return widened(tl.load(p + c))
    return widened(tl.load(p + c, mask=c < columns, other=0.0))


@triton.jit
def store_row(y, value, row, c, columns, stride, EVEN: tl.constexpr):
    at = y + row * stride.to(tl.int64) + c
    if EVEN:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=c < columns)


@triton.jit
def swizzled(row, block, row_blocks):
    """Return the offset of the scale of a row's block in the order of GEMMs; row_blocks: blocks of a row, rounded up to
    4.

    Source: NVIDIA, cuBLAS, "1D Block Scaling Factors Layout".
    """
    tile = (row // 128) * (row_blocks // 4) + block // 4
    return tile.to(tl.int64) * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4


@triton.jit
def norm(
    x, gamma, beta, y, q, mean, inverse, scale, top, factor, work,
    rows, columns, stride, q_stride, scale_stride, programs, eps, share,
    BN: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, IN_REGISTERS: tl.constexpr, CENTRED: tl.constexpr,
    MODE: tl.constexpr, BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr,
    MAX: tl.constexpr, INTEGERS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Normalize x [rows, columns <= BN]; write y in x's dtype unless None, and the statistics mean, inverse float32
    [rows].

    gamma, beta: [columns] or None; IN_REGISTERS (beta up to `BETA_IN_REGISTERS` columns) or read for each row.
    share: 1 / columns, or 1 for a sum of squares.
    MODE, the quantization of y after rounding to its dtype:
        "none"; "amax": top float32 [1], its amax; "tensor": q by `factor`, with its scale and top;
        "row": q and scale [rows]; "blocks": q and scales of blocks of BLOCK columns, with that of block j of row i at j
        · scale_stride + i; "e8m0": q and exponents in the order of `swizzled`.
    q's rows are q_stride bytes, padded with zeros. CODES: format of q. work: int32 [2] of zeros, left as zeros.
    The relative RMS error is at most 1e-6 against float64 before rounding to y's dtype. Given y, the values q, scale
    and top are exact.
    """
    # log2 of the adjacent elements per thread.
    HALVINGS: tl.constexpr = (VECTOR > 1) + (VECTOR > 2) + (VECTOR > 4)
    first = tl.program_id(0)
    c = tl.max_contiguous(tl.arange(0, BN), VECTOR)
    if IN_REGISTERS and gamma is not None:
        g = load_parameter(gamma, c, columns, EVEN)
    if IN_REGISTERS and BN <= BETA_IN_REGISTERS and beta is not None:
        b = load_parameter(beta, c, columns, EVEN)
    m = tl.zeros([BN], tl.int32)
    e = 1.0
    if MODE == "tensor":
        e = tl.load(factor)
    for row in range(first, rows, programs):
        v = load_row(x, row, c, columns, stride, EVEN)  # [BN]
        if CENTRED:
            middle = tl.sum(v, 0) * share
            tl.store(mean + row, middle)
            v = v - middle if EVEN else tl.where(c < columns, v - middle, 0.0)
        f = tl.rsqrt(tl.sum(v * v, 0) * share + eps)
        tl.store(inverse + row, f)
        v = v * f
        if gamma is not None:
            scaling = g if IN_REGISTERS else load_parameter(gamma, c, columns, EVEN)
            if beta is not None:
                shift = b if IN_REGISTERS and BN <= BETA_IN_REGISTERS else load_parameter(beta, c, columns, EVEN)
                v = tl.fma(v, scaling, shift)
            else:
                v = v * scaling
        elif beta is not None:
            v = v + (b if IN_REGISTERS and BN <= BETA_IN_REGISTERS else load_parameter(beta, c, columns, EVEN))
        rounded = v.to(x.dtype.element_ty)
        if y is not None:
            store_row(y, rounded, row, c, columns, columns, EVEN)
        if MODE != "none":
            v = rounded.to(tl.float32)
            if not EVEN:
                # 0 · NaN is NaN, also beyond the last column.
                v = tl.where(c < columns, v, 0.0)
        if MODE == "amax" or MODE == "tensor":
            m = tl.maximum(m, magnitude_bits(v))
        if MODE == "row":
            bits = tl.max(largest_of_runs(v, HALVINGS), 0)
            e = encode_factor(bits, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
            tl.store(scale + row, decode_scale(bits, e, POWER_OF_TWO))
        if MODE == "blocks" or MODE == "e8m0":
            grid = tl.reshape(v, (BN // BLOCK, BLOCK))
            if MODE == "blocks":
                bits = tl.max(tl.reshape(largest_of_runs(v, HALVINGS), (BN // BLOCK, BLOCK >> HALVINGS)), 1)
            else:
                # Bytes of scales change threads, so `largest_of_runs` must not be used.
                bits = tl.max(magnitude_bits(grid), 1)
            block = tl.arange(0, BN // BLOCK)
            there = block * BLOCK < columns
            if MODE == "blocks":
                wide = encode_factor(bits, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
                at = scale + block.to(tl.int64) * scale_stride + row
                tl.store(at, decode_scale(bits, wide, POWER_OF_TWO), mask=there)
            else:
                code, wide = shared_exponent(bits, EMAX, TOP_MANTISSA)
                tl.store(scale + swizzled(row, block, scale_stride), code.to(tl.uint8), mask=there)
            v = tl.reshape(grid * wide[:, None], (BN,))
        elif q is not None:
            v = v * e
        if q is not None:
            codes = encode(v, CODES, INTEGERS).to(q.dtype.element_ty, bitcast=True)
            store_row(q, codes, row, c, q_stride, q_stride, EVEN)
    if MODE == "amax" or MODE == "tensor":
        store_amax(work, flushed(tl.max(m, 0)), programs, top, scale, e, MODE == "tensor", POWER_OF_TWO)


@triton.jit
def norm_backward(
    grad, x, gamma, mean, inverse, dx, partial, rows, columns, grad_stride, stride, width, programs, share,
    BN: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, CENTRED: tl.constexpr, BETA: tl.constexpr,
):  # fmt: skip
    """Compute dx in x's dtype from grad and x [rows, columns <= BN], and each program's share of the parameters'
    gradients.

    dx = inverse · (grad gamma - mean(grad gamma) - x̂ mean(grad gamma x̂)), x̂ = (x - mean) inverse.
    partial: float32 [programs, width] or None: of gamma, and from column width / 2 on of beta (if BETA). Precision as
    in `norm`.
    """
    first = tl.program_id(0)
    c = tl.max_contiguous(tl.arange(0, BN), VECTOR)
    if gamma is not None:
        g = load_parameter(gamma, c, columns, EVEN)
    of_gamma = tl.zeros([BN], tl.float32)
    of_beta = tl.zeros([BN], tl.float32)
    for row in range(first, rows, programs):
        v = load_row(x, row, c, columns, stride, EVEN)  # [BN]
        along = load_row(grad, row, c, columns, grad_stride, EVEN)  # [BN]
        f = tl.load(inverse + row)
        if CENTRED:
            v = v - tl.load(mean + row)
        v = v * f
        if not EVEN:
            v = tl.where(c < columns, v, 0.0)
        if gamma is not None:
            of_gamma += along * v
            if BETA:
                of_beta += along
            along = along * g
        inner = tl.sum(along * v, 0) * share
        if CENTRED:
            along = along - tl.sum(along, 0) * share
        store_row(dx, ((along - v * inner) * f).to(x.dtype.element_ty), row, c, columns, columns, EVEN)
    if partial is not None:
        at = partial + first.to(tl.int64) * width + c
        tl.store(at, of_gamma, mask=c < columns)
        if BETA:
            tl.store(at + width // 2, of_beta, mask=c < columns)


# ---- wide rows that do not fit registers: several passes block by block, in the cache ----


@triton.jit
def wide_norm(
    x, gamma, beta, y, q, mean, inverse, scale, top, factor, work,
    rows, columns, stride, q_stride, programs, eps, share,
    BN: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, CENTRED: tl.constexpr,
    MODE: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTEGERS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Run `norm` for any number of columns; MODE "none", "amax" or "tensor".

    STEPS: number of BN blocks of a row, a constant where statistics are computed, so that all blocks are loaded at
    once.
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
                # Preserves NaN; safe here, because no bytes change threads (triton-lang/triton#11111).
                m = tl.maximum(m, tl.abs(v), propagate_nan=tl.PropagateNan.ALL)
            if q is not None:
                codes = encode(v * e, CODES, INTEGERS).to(q.dtype.element_ty, bitcast=True)
                store_row(q, codes, row, c, q_stride, q_stride, EVEN)
    if MODE != "none":
        store_amax(work, flushed(tl.max(magnitude_bits(m), 0)), programs, top, scale, e, MODE == "tensor", POWER_OF_TWO)


@triton.jit
def wide_norm_backward(
    grad, x, gamma, mean, inverse, dx, partial, rows, columns, grad_stride, stride, width, programs, share,
    BN: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, CENTRED: tl.constexpr, BETA: tl.constexpr,
):  # fmt: skip
    """Run `norm_backward` for any number of columns.

    A program accumulates in its own row of `partial`, which is zero at first; no other program touches that row.
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
