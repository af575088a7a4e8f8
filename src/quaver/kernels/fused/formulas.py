"""The functions behind the activations, float32 in and out, each with what it does to a gradient.

Every one takes (x, limit, alpha), of which most need x alone; a backward takes the gradient before. sigmoid(2 u) stands
for (1 + tanh(u)) / 2, which keeps its digits where tanh is near -1. NaN gives NaN.

They are written for few instructions, since an activation waits for these before it waits for memory: the exponential
of 2, whose argument needs no product and whose subnormal results are zeros; a reciprocal as the square of an inverse
root, two instructions where a division takes eight; products and sums in one rounding (`tl.fma`). What each rounds to
is bounded, not exact; `tests/kernels/fused/test_formulas.py` measures it over all bf16 values.
"""

import triton
import triton.language as tl

#: What turns an exponential of e into one of 2.
_LOG2E = tl.constexpr(1.4426950408889634)
#: Of gelu's tanh form: -2 sqrt(2 / pi) log2(e), and that times its cubic term 0.044715; of its slope, in powers of e.
_LINEAR, _CUBIC = tl.constexpr(-2.302208198144325), tl.constexpr(-0.10294323958002349)
_SLOPE, _SLOPE_CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.21406444881780076)
#: The normal density: its height, and log2 of what it falls by.
_DENSITY, _FALL = tl.constexpr(0.3989422804014327), tl.constexpr(-0.7213475204444817)
_QUICK = tl.constexpr(1.702)
#: From here on x is its own gelu.
_FAR = tl.constexpr(1024.0)


@triton.jit
def linear(x, limit, alpha):
    return x


@triton.jit
def linear_backward(g, x, limit, alpha):
    return g


@triton.jit
def inverse_root(z):
    """1 / sqrt(1 + 2**z), whose square is the sigmoid of -z ln 2: 0 where 2**z is infinite, never an infinity."""
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
    """The normal distribution's probability beyond a, from 0 up, as 2 to a polynomial.

    Within 7e-6 of it up to 5.6, where it is 1e-8; from there on a small number that falls. The polynomial is a minimax
    fit of log2, by linear programming over 600 points, of which those below 2 weigh twice.
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
    # x less what lies beyond it, or 0 less that: an infinity is held, which times that 0 would be NaN.
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
    """min(x, limit) sigmoid(alpha min(x, limit))."""
    held = tl.where(x > limit, limit, x)
    r = inverse_root(held * (alpha * -_LOG2E))
    return held * r * r


@triton.jit
def clamped_silu_backward(g, x, limit, alpha):
    held = tl.where(x > limit, limit, x)
    r = inverse_root(held * (alpha * -_LOG2E))
    s = r * r
    return tl.where(x > limit, 0.0, 1.0) * (g * (s * tl.fma(alpha * held, 1.0 - s, 1.0)))
