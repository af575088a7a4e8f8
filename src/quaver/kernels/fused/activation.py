"""Activations, plain and gated, forward with the eight bits that the next GEMM reads, and backward.

A kernel is told which by two functions of `quaver.kernels.fused.formulas`. Four rows at a time, as
`quaver.kernels.quantizing.cast`.
"""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import (
    INFINITY_BITS,
    decode_scale,
    encode,
    encode4,
    encode_factor,
    exponent,
    flushed,
    largest_bits4,
    magnitude_bits,
    meet,
    packed_codes,
    power_of_two,
)
from quaver.kernels.bits.tiles import load_tile, store_tile
from quaver.kernels.fused.norm import swizzled
from quaver.kernels.quantizing.cast import load4, store4, store_turned


@triton.jit
def factor_of(value, limit, CLAMPED: tl.constexpr):
    """What the gate's function is multiplied by: the value, or (CLAMPED) the value held within ±limit, plus 1."""
    if CLAMPED:
        return tl.where(value > limit, limit, tl.where(value < -limit, -limit, value)) + 1.0
    return value


@triton.jit
def gated(x, value, limit, alpha, dtype: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr):
    """The result of one activation, rounded to dtype."""
    y = F(x, limit, alpha)
    if GATED:
        y = y * factor_of(value, limit, CLAMPED)
    return y.to(dtype)


@triton.jit
def activate(
    gate, value, y, q, qt, scale, top, factor, work,
    rows, columns, gate_stride, value_stride, q_stride, qt_lines, programs, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    F: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, MODE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, INTEGERS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """gate [rows, columns], and value of the same shape (GATED), to y in gate's dtype unless None.

    MODE, of what is quantized, which is y as rounded to its dtype: "none"; "amax": top float32 [1], its amax;
        "tensor": by `factor`, as it lies to q and transposed to qt as int32, either of them None, with scale and top.
    q_stride, qt_lines: bytes of a row of q, 16 of them in a row of qt; the ends of rows beyond y are zeros.
    limit, alpha: the formula's, if it takes any. CODES: the format of q and qt.
    work: int32 [2] of zeros, left as zeros.
    Bounded: relative RMS 1e-6 of float64, for normally distributed x, before y's rounding.
    Exact: q, qt, scale and top, given y.
    """
    r = tl.program_id(0) * BM + 4 * tl.arange(0, BM // 4)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    dtype: tl.constexpr = gate.dtype.element_ty
    x0, x1, x2, x3 = load4(gate, r, c, rows, columns, gate_stride, EVEN)  # [BM / 4, BN] each
    b0, b1, b2, b3 = x0, x1, x2, x3
    if GATED:
        b0, b1, b2, b3 = load4(value, r, c, rows, columns, value_stride, EVEN)
    y0 = gated(x0, b0, limit, alpha, dtype, F, GATED, CLAMPED)
    y1 = gated(x1, b1, limit, alpha, dtype, F, GATED, CLAMPED)
    y2 = gated(x2, b2, limit, alpha, dtype, F, GATED, CLAMPED)
    y3 = gated(x3, b3, limit, alpha, dtype, F, GATED, CLAMPED)
    if y is not None:
        store4(y, r, c, rows, columns, y0, y1, y2, y3, EVEN)
    if MODE != "none":
        x0, x1, x2, x3 = y0.to(tl.float32), y1.to(tl.float32), y2.to(tl.float32), y3.to(tl.float32)
        m = largest_bits4(x0, x1, x2, x3)
        last, largest = meet(work, flushed(tl.max(m, None)), programs)
        if last:
            tl.store(top, largest.to(tl.float32, bitcast=True))
            if MODE == "tensor":
                tl.store(scale, decode_scale(largest, tl.load(factor), POWER_OF_TWO))
    if MODE == "tensor":
        e = tl.load(factor)
        x0, x1, x2, x3 = x0 * e, x1 * e, x2 * e, x3 * e
        c0, c1, c2, c3 = encode4(x0, x1, x2, x3, CODES, INTEGERS)
        if q is not None:
            store4(q, r, c, rows, q_stride, c0, c1, c2, c3, EVEN)
        if qt is not None:
            r4 = tl.program_id(0) * (BM // 4) + tl.arange(0, BM // 4)
            packed = packed_codes(x0, x1, x2, x3, c0, c1, c2, c3, CODES, INTEGERS)
            store_turned(qt, r4, c, columns, 4 * qt_lines, packed, EVEN)


@triton.jit
def activate_blocks(
    gate, value, y, q, scale,
    rows, columns, gate_stride, value_stride, q_stride, scale_stride, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    F: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """As `activate`, quantized in blocks of BLOCK columns, which divides BN; or, MODE "row" and BN >= columns, by rows.

    scale: MODE "row": float32 [rows]; "blocks": that of block j of row i at j · scale_stride + i; "e8m0": exponents in
        the order of `quaver.kernels.fused.norm.swizzled`.
    """
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    dtype: tl.constexpr = gate.dtype.element_ty
    x = load_tile(gate, r, c, rows, columns, gate_stride, EVEN)  # [BM, BN]
    b = x
    if GATED:
        b = load_tile(value, r, c, rows, columns, value_stride, EVEN)
    rounded = gated(x, b, limit, alpha, dtype, F, GATED, CLAMPED)
    if y is not None:
        store_tile(y, rounded, r, c, rows, columns, columns, EVEN)
    v = rounded.to(tl.float32)
    if MODE == "row":
        bits = flushed(tl.max(magnitude_bits(v), 1))  # [BM]
        e = encode_factor(bits, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
        tl.store(scale + r, decode_scale(bits, e, POWER_OF_TWO), mask=r < rows)
        v = v * e[:, None]
    else:
        grid = tl.reshape(v, (BM, BN // BLOCK, BLOCK))
        bits = flushed(tl.max(magnitude_bits(grid), 2))  # [BM, BN / BLOCK]
        block = tl.program_id(1) * (BN // BLOCK) + tl.arange(0, BN // BLOCK)
        there = (r[:, None] < rows) & (block[None, :] * BLOCK < columns)
        if MODE == "blocks":
            e = encode_factor(bits, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
            at = scale + block[None, :].to(tl.int64) * scale_stride + r[:, None]
            tl.store(at, decode_scale(bits, e, POWER_OF_TWO), mask=there)
        else:
            p = exponent(bits, EMAX, TOP_MANTISSA)
            e = tl.where(bits == 0, 0.0, power_of_two(p))
            code = tl.where(bits < INFINITY_BITS, tl.where(bits == 0, 0, 127 - p), 255)
            tl.store(scale + swizzled(r[:, None], block[None, :], scale_stride), code.to(tl.uint8), mask=there)
        v = tl.reshape(grid * e[:, :, None], (BM, BN))
    codes = encode(v, CODES, INTEGERS).to(q.dtype.element_ty, bitcast=True)
    store_tile(q, codes, r, c, rows, q_stride, q_stride, EVEN)


@triton.jit
def value_gradient(g, x, b, limit, alpha, F: tl.constexpr, CLAMPED: tl.constexpr):
    """The gradient of value b, beside gate x."""
    y = F(x, limit, alpha) * g
    if CLAMPED:
        y = y * tl.where(tl.abs(b) > limit, 0.0, 1.0)
    return y


@triton.jit
def activate_backward(
    grad, gate, value, of_gate, of_value,
    rows, columns, grad_stride, gate_stride, value_stride, of_gate_stride, of_value_stride, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    F: tl.constexpr, B: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """grad [rows, columns] to the gradients of gate and value (GATED) in gate's dtype; B is F's backward.

    Bounded, as `activate`.
    """
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    dtype: tl.constexpr = gate.dtype.element_ty
    g = load_tile(grad, r, c, rows, columns, grad_stride, EVEN)  # [BM, BN]
    x = load_tile(gate, r, c, rows, columns, gate_stride, EVEN)
    if GATED:
        b = load_tile(value, r, c, rows, columns, value_stride, EVEN)
        second = value_gradient(g, x, b, limit, alpha, F, CLAMPED).to(dtype)
        store_tile(of_value, second, r, c, rows, columns, of_value_stride, EVEN)
        g = g * factor_of(b, limit, CLAMPED)
    first = B(g, x, limit, alpha).to(dtype)
    store_tile(of_gate, first, r, c, rows, columns, of_gate_stride, EVEN)
