"""The functions behind the activations, float32 in and out, each with what it does to a gradient.

Every one takes (x, limit, alpha), of which most need x alone; a backward takes the gradient before. sigmoid(2 u) stands
for (1 + tanh(u)) / 2, which keeps its digits where tanh is near -1. NaN gives NaN.
"""

import triton
import triton.language as tl

#: sqrt(2 / pi), and the cubic term of gelu's tanh form.
_ROOT, _CUBIC = tl.constexpr(0.7978845608028654), tl.constexpr(0.044715)
_HALF_ROOT, _DENSITY = tl.constexpr(0.7071067811865476), tl.constexpr(0.3989422804014327)
_QUICK = tl.constexpr(1.702)


@triton.jit
def linear(x, limit, alpha):
    return x


@triton.jit
def linear_backward(g, x, limit, alpha):
    return g


@triton.jit
def sigmoid(x, limit, alpha):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid_backward(g, x, limit, alpha):
    s = 1.0 / (1.0 + tl.exp(-x))
    return g * (s * (1.0 - s))


@triton.jit
def silu(x, limit, alpha):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_backward(g, x, limit, alpha):
    s = 1.0 / (1.0 + tl.exp(-x))
    return g * (s * (1.0 + x * (1.0 - s)))


@triton.jit
def gelu(x, limit, alpha):
    u = 2.0 * _ROOT * (x + _CUBIC * x * x * x)
    return x / (1.0 + tl.exp(-u))


@triton.jit
def gelu_backward(g, x, limit, alpha):
    u = 2.0 * _ROOT * (x + _CUBIC * x * x * x)
    s = 1.0 / (1.0 + tl.exp(-u))
    slope = 2.0 * _ROOT * (1.0 + 3.0 * _CUBIC * x * x)
    return g * (s + x * (s * (1.0 - s)) * slope)


@triton.jit
def gelu_exact(x, limit, alpha):
    return 0.5 * x * (1.0 + tl.erf(x * _HALF_ROOT))


@triton.jit
def gelu_exact_backward(g, x, limit, alpha):
    return g * (0.5 * (1.0 + tl.erf(x * _HALF_ROOT)) + x * (_DENSITY * tl.exp(-0.5 * x * x)))


@triton.jit
def quick_gelu(x, limit, alpha):
    return x / (1.0 + tl.exp(-_QUICK * x))


@triton.jit
def quick_gelu_backward(g, x, limit, alpha):
    u = _QUICK * x
    s = 1.0 / (1.0 + tl.exp(-u))
    return g * (s * (1.0 + u * (1.0 - s)))


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
    return held / (1.0 + tl.exp(-alpha * held))


@triton.jit
def clamped_silu_backward(g, x, limit, alpha):
    held = tl.where(x > limit, limit, x)
    u = alpha * held
    s = 1.0 / (1.0 + tl.exp(-u))
    return tl.where(x > limit, 0.0, 1.0) * (g * (s * (1.0 + u * (1.0 - s))))
