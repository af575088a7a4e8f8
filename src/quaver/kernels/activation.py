"""Activations, plain and gated: forward with the codes that the next GEMM reads, and backward.

Each activation is passed to the kernels as a pair of functions of this module. Rows are processed four at a time, as in
`quaver.kernels.tensorwise`.
"""

import triton
import triton.language as tl

from quaver.kernels.norm import swizzled
from quaver.kernels.numerics import (
    INFINITY_BITS,
    combine_amaxes,
    decode_scale,
    encode,
    encode4,
    encode_factor,
    exponent,
    flushed,
    largest_bits4,
    load_tile,
    magnitude_bits,
    packed_codes,
    power_of_two,
    store_tile,
)
from quaver.kernels.tensorwise import load4, store4, store_transposed

# ---- kernels ----


@triton.jit
def factor_of(value, limit, CLAMPED: tl.constexpr):
    """Return the factor of the gate's function: the value, or (CLAMPED) the value clamped to ±limit, plus 1."""
    if CLAMPED:
        return tl.where(value > limit, limit, tl.where(value < -limit, -limit, value)) + 1.0
    return value


@triton.jit
def gated(x, value, limit, alpha, dtype: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr):
    """Compute one activation, rounded to dtype."""
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
    """Apply an activation to gate [rows, columns], and value of the same shape (GATED); write y in gate's dtype unless
    None.

    MODE, the quantization of y after rounding to its dtype: "none"; "amax": top float32 [1], its amax;
        "tensor": by `factor`, row-major to q and transposed to qt as int32, either of them None, with scale and top.
    q_stride, qt_lines: bytes of a row of q, and 16-byte lines of a row of qt; padding is zero.
    limit, alpha: parameters of the formula, if it has any. CODES: format of q and qt.
    work: int32 [2] of zeros, left as zeros.
    For normally distributed x the relative RMS error is at most 1e-6 against float64, before y's rounding. Given y, the
    values q, qt, scale and top are exact.
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
        last, largest = combine_amaxes(work, flushed(tl.max(m, None)), programs)
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
            store_transposed(qt, r4, c, columns, 4 * qt_lines, packed, EVEN)


@triton.jit
def activate_blocks(
    gate, value, y, q, scale,
    rows, columns, gate_stride, value_stride, q_stride, scale_stride, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    F: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
    INTEGERS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Run `activate` with quantization in blocks of BLOCK columns, which divides BN; or by rows (MODE "row", BN >=
    columns).

    scale: MODE "row": float32 [rows]; "blocks": that of block j of row i at j · scale_stride + i; "e8m0": exponents in
    the order of `quaver.kernels.norm.swizzled`.
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
    """Return the gradient of value b with gate x."""
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
    """Compute the gradients of gate and value (GATED) in gate's dtype from grad [rows, columns]; B is the backward of
    F.

    Precision as in `activate`.
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


# ---- formulas of the activations in float32, each with its backward ----
# All take (x, limit, alpha), of which most use x only; a backward also takes the gradient, first. sigmoid(2 u) replaces
# (1 + tanh(u)) / 2, which loses digits where tanh is near -1. NaN gives NaN.
#
# They are written for few instructions, because these kernels are limited by arithmetic before memory. The exponential
# is base 2, which needs no product and flushes subnormal results to zero. A reciprocal is the square of an inverse
# root, two instructions instead of eight for a division. Products and sums use `tl.fma`. The rounding is bounded, not
# exact; `tests/kernels/test_formulas.py` measures it over all bf16 values.

#: Converts an exponent of e to one of 2.
_LOG2E = tl.constexpr(1.4426950408889634)
#: Constants of gelu's tanh form: -2 sqrt(2 / pi) log2(e), and that times its cubic coefficient 0.044715; the same for
#: its derivative, to base e.
_LINEAR, _CUBIC = tl.constexpr(-2.302208198144325), tl.constexpr(-0.10294323958002349)
_SLOPE, _SLOPE_CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.21406444881780076)
#: The normal density: its maximum, and the coefficient of x² in the exponent of 2.
_DENSITY, _FALL = tl.constexpr(0.3989422804014327), tl.constexpr(-0.7213475204444817)
_QUICK = tl.constexpr(1.702)
#: From this x on, gelu(x) = x.
_FAR = tl.constexpr(1024.0)


@triton.jit
def linear(x, limit, alpha):
    return x


@triton.jit
def linear_backward(g, x, limit, alpha):
    return g


@triton.jit
def inverse_root(z):
    """Return 1 / sqrt(1 + 2**z), whose square is sigmoid(-z ln 2); 0 if 2**z overflows, never infinite."""
    return tl.rsqrt(1.0 + tl.exp2(z))


@triton.jit
def sigmoid(x, limit, alpha):
    r = inverse_root(x * -_LOG2E)
    return r * r


@triton.jit
def sigmoid_backward(g, x, limit, alpha):
    r = inverse_root(x * -_LOG2E)
    s = r * r
    return g * (s * (1.0 - s))


@triton.jit
def silu(x, limit, alpha):
    r = inverse_root(x * -_LOG2E)
    return x * r * r


@triton.jit
def silu_backward(g, x, limit, alpha):
    r = inverse_root(x * -_LOG2E)
    s = r * r
    return g * (s * tl.fma(x, 1.0 - s, 1.0))


@triton.jit
def gelu(x, limit, alpha):
    r = inverse_root(x * tl.fma(x * x, _CUBIC, _LINEAR))
    return x * r * r


@triton.jit
def gelu_backward(g, x, limit, alpha):
    squared = x * x
    r = inverse_root(x * tl.fma(squared, _CUBIC, _LINEAR))
    s = r * r
    slope = tl.fma(squared, _SLOPE_CUBIC, _SLOPE)
    return g * tl.fma(x * (s * (1.0 - s)), slope, s)


@triton.jit
def beyond(a):
    """Return the normal distribution's probability beyond a >= 0, as 2 to a polynomial.

    Within 7e-6 of it up to 5.6, where it is 1e-8; from there on a small decreasing number. The polynomial is a minimax
    fit of log2, by linear programming over 600 points, with double weight below 2.
    """
    p = tl.fma(a, -1.7114185766331502e-06, 5.934539876761846e-05)
    p = tl.fma(p, a, -0.0009145903750322759)
    p = tl.fma(p, a, 0.008453127928078175)
    p = tl.fma(p, a, -0.05386635288596153)
    p = tl.fma(p, a, -0.4585373103618622)
    p = tl.fma(p, a, -1.151231050491333)
    return tl.exp2(tl.fma(p, a, -0.9999961256980896))


@triton.jit
def gelu_exact(x, limit, alpha):
    # max(x, 0) - a P(X > a) with a = |x|. x is clamped at `_FAR`, because infinity times a probability of 0 would be
    # NaN.
    a = tl.abs(tl.minimum(x, _FAR, propagate_nan=tl.PropagateNan.ALL))
    return tl.fma(-a, beyond(a), tl.maximum(x, 0.0))


@triton.jit
def gelu_exact_backward(g, x, limit, alpha):
    outside = beyond(tl.abs(x))
    below = tl.where(x < 0.0, outside, 1.0 - outside)
    return g * tl.fma(x * _DENSITY, tl.exp2(x * _FALL * x), below)


@triton.jit
def quick_gelu(x, limit, alpha):
    r = inverse_root(x * (-_QUICK * _LOG2E))
    return x * r * r


@triton.jit
def quick_gelu_backward(g, x, limit, alpha):
    r = inverse_root(x * (-_QUICK * _LOG2E))
    s = r * r
    return g * (s * tl.fma(_QUICK * x, 1.0 - s, 1.0))


@triton.jit
def relu(x, limit, alpha):
    return tl.where(x <= 0.0, 0.0, x)


@triton.jit
def relu_backward(g, x, limit, alpha):
    return tl.where(x <= 0.0, 0.0, g)


@triton.jit
def squared_relu(x, limit, alpha):
    r = tl.where(x <= 0.0, 0.0, x)
    return r * r


@triton.jit
def squared_relu_backward(g, x, limit, alpha):
    return 2.0 * tl.where(x <= 0.0, 0.0, x) * g


@triton.jit
def clamped_silu(x, limit, alpha):
    """Return min(x, limit) sigmoid(alpha min(x, limit))."""
    clamped = tl.where(x > limit, limit, x)
    r = inverse_root(clamped * (alpha * -_LOG2E))
    return clamped * r * r


@triton.jit
def clamped_silu_backward(g, x, limit, alpha):
    clamped = tl.where(x > limit, limit, x)
    r = inverse_root(clamped * (alpha * -_LOG2E))
    s = r * r
    return tl.where(x > limit, 0.0, 1.0) * (g * (s * tl.fma(alpha * clamped, 1.0 - s, 1.0)))
