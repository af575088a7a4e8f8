"""The gradients of activations' inputs, written as the eight-bit codes that the next GEMMs read.

They are quantized as rounded to their dtype, so that the codes are those of what `activate_backward` writes.
"""

import triton
import triton.language as tl

from quaver.kernels.activation import factor_of, load_tile, store_tile, value_gradient
from quaver.kernels.cast import load4, store_turned
from quaver.kernels.numbers import (
    decode_scale,
    encode,
    encode_factor,
    flushed,
    magnitude_bits,
    meet,
    packed_codes,
)


@triton.jit
def gradients_of(
    g, x, b, limit, alpha,
    dtype: tl.constexpr, F: tl.constexpr, B: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """The gradients of gate x and value b (GATED; else of x, twice), float32 of them in dtype."""
    if GATED:
        second = value_gradient(g, x, b, limit, alpha, F, CLAMPED)
        first = B(g * factor_of(b, limit, CLAMPED), x, limit, alpha)
    else:
        first = B(g, x, limit, alpha)
        second = first
    return first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)


@triton.jit
def largest4(v0, v1, v2, v3):
    """The bits of the largest magnitude at each place of four tiles."""
    m = tl.maximum(magnitude_bits(v0), magnitude_bits(v1))
    return tl.maximum(m, tl.maximum(magnitude_bits(v2), magnitude_bits(v3)))


@triton.jit
def note(work, m, top, scale, factor, programs, POWER_OF_TWO: tl.constexpr):
    """The last of the programs writes the amax, and the scale of what the factor encoded."""
    last, largest = meet(work, flushed(tl.max(m, None)), programs)
    if last:
        tl.store(top, largest.to(tl.float32, bitcast=True))
        tl.store(scale, decode_scale(largest, tl.load(factor), POWER_OF_TWO))


@triton.jit
def write4(
    v0, v1, v2, v3, e, q, qt, r, r4, c, rows, columns, end, stride, qt_lines,
    CODES: tl.constexpr, INTEGERS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Four rows from each of r, times e, to codes: q up to column `end`, and qt the transpose; either may be None."""
    v0, v1, v2, v3 = v0 * e, v1 * e, v2 * e, v3 * e
    c0, c1 = encode(v0, CODES, INTEGERS), encode(v1, CODES, INTEGERS)
    c2, c3 = encode(v2, CODES, INTEGERS), encode(v3, CODES, INTEGERS)
    if q is not None:
        dtype: tl.constexpr = q.dtype.element_ty
        store_tile(q, c0.to(dtype, bitcast=True), r, c, rows, end, stride, EVEN)
        store_tile(q + stride, c1.to(dtype, bitcast=True), r, c, rows - 1, end, stride, EVEN)
        store_tile(q + 2 * stride, c2.to(dtype, bitcast=True), r, c, rows - 2, end, stride, EVEN)
        store_tile(q + 3 * stride, c3.to(dtype, bitcast=True), r, c, rows - 3, end, stride, EVEN)
    if qt is not None:
        packed = packed_codes(v0, v1, v2, v3, c0, c1, c2, c3, CODES, INTEGERS)
        store_turned(qt, r4, c, columns, 4 * qt_lines, packed, EVEN)


@triton.jit
def activate_backward_codes(
    grad, gate, value, q, qt, value_q, value_qt, scale, value_scale, top, value_top, factor, value_factor, work,
    rows, columns, grad_stride, gate_stride, value_stride, q_stride, qt_lines, gate_end, value_end, programs,
    limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    F: tl.constexpr, B: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, INTEGERS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """grad [rows, columns] to the gradients of gate and value (GATED), each by its factor, in one pass.

    q, value_q: their codes, in rows of q_stride bytes, of which columns up to gate_end and value_end are written: zeros
        beyond the gradient. qt, value_qt: their transposes as int32, rows of qt_lines times 16 bytes. Either pair may
        be None.
    scale, top: float32 [1]; of both gradients, with the one factor, where value_factor is None.
    work: int32 [4] of zeros, left as zeros. Exact: codes, scales and amaxes, given the gradients.
    """
    r = tl.program_id(0) * BM + 4 * tl.arange(0, BM // 4)
    r4 = tl.program_id(0) * (BM // 4) + tl.arange(0, BM // 4)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    dtype: tl.constexpr = gate.dtype.element_ty
    g0, g1, g2, g3 = load4(grad, r, c, rows, columns, grad_stride, EVEN)  # [BM / 4, BN] each
    x0, x1, x2, x3 = load4(gate, r, c, rows, columns, gate_stride, EVEN)
    b0, b1, b2, b3 = x0, x1, x2, x3
    if GATED:
        b0, b1, b2, b3 = load4(value, r, c, rows, columns, value_stride, EVEN)
    x0, b0 = gradients_of(g0, x0, b0, limit, alpha, dtype, F, B, GATED, CLAMPED)
    x1, b1 = gradients_of(g1, x1, b1, limit, alpha, dtype, F, B, GATED, CLAMPED)
    x2, b2 = gradients_of(g2, x2, b2, limit, alpha, dtype, F, B, GATED, CLAMPED)
    x3, b3 = gradients_of(g3, x3, b3, limit, alpha, dtype, F, B, GATED, CLAMPED)
    e = tl.load(factor)
    write4(x0, x1, x2, x3, e, q, qt, r, r4, c, rows, columns, gate_end, q_stride, qt_lines, CODES, INTEGERS, EVEN)
    m = largest4(x0, x1, x2, x3)
    if GATED:
        if value_factor is not None:
            e = tl.load(value_factor)
        write4(
            b0, b1, b2, b3, e, value_q, value_qt, r, r4, c, rows, columns, value_end, q_stride, qt_lines,
            CODES, INTEGERS, EVEN,
        )  # fmt: skip
        other = largest4(b0, b1, b2, b3)
        if value_factor is None:
            m = tl.maximum(m, other)
        else:
            note(work + 2, other, value_top, value_scale, value_factor, programs, POWER_OF_TWO)
    note(work, m, top, scale, factor, programs, POWER_OF_TWO)


@triton.jit
def row_factor(
    bits, scale, r, rows, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP: tl.constexpr, MAX: tl.constexpr
):
    """Encode factors of rows with these amaxes, whose scales are written."""
    e = encode_factor(bits, POWER_OF_TWO, EMAX, TOP, MAX)
    tl.store(scale + r, decode_scale(bits, e, POWER_OF_TWO), mask=r < rows)
    return e


@triton.jit
def activate_backward_rows(
    grad, gate, value, q, value_q, scale, value_scale,
    rows, columns, grad_stride, gate_stride, value_stride, q_stride, gate_end, value_end, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    F: tl.constexpr, B: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """As `activate_backward_codes`, quantized by rows, which BN covers, without transposes.

    scale, value_scale: float32 [rows]; one for the row of both gradients where value_scale is None.
    """
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BN)
    dtype: tl.constexpr = gate.dtype.element_ty
    out: tl.constexpr = q.dtype.element_ty
    g = load_tile(grad, r, c, rows, columns, grad_stride, EVEN)  # [BM, BN]
    x = load_tile(gate, r, c, rows, columns, gate_stride, EVEN)
    b = x
    if GATED:
        b = load_tile(value, r, c, rows, columns, value_stride, EVEN)
    x, b = gradients_of(g, x, b, limit, alpha, dtype, F, B, GATED, CLAMPED)
    bits = flushed(tl.max(magnitude_bits(x), 1))  # [BM]
    if GATED:
        other = flushed(tl.max(magnitude_bits(b), 1))
        if value_scale is None:
            bits = tl.maximum(bits, other)
    e = row_factor(bits, scale, r, rows, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
    codes = encode(x * e[:, None], CODES, INTEGERS).to(out, bitcast=True)
    store_tile(q, codes, r, c, rows, gate_end, q_stride, EVEN)
    if GATED:
        if value_scale is not None:
            e = row_factor(other, value_scale, r, rows, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
        codes = encode(b * e[:, None], CODES, INTEGERS).to(out, bitcast=True)
        store_tile(value_q, codes, r, c, rows, value_end, q_stride, EVEN)
