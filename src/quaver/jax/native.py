"""How a GEMM of two quantized operands is lowered, platform by platform.

CPU: every E4M3, E5M2 and E2M1 value is a bfloat16 value, also after multiplying by a power of two or by an E4M3 scale,
and the product of two of them is exact in float32: so a bfloat16 GEMM with float32 sums adds up exactly the products
that the recipe defines.

CUDA: FP8 operands go straight into `dot_general`, which XLA turns into an FP8 GEMM; a pair of casts before it would be
deleted, and the FP8 GEMM with it. Blocks of MXFP8 and NVFP4 go into XLA's block-scaled dot.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from quaver.core.spec import QuantSpec
from quaver.jax.quantized import Quantized, e2m1_values, over_blocks, unpack
from quaver.jax.rounding import two_to_the

NT = (((1,), (1,)), ((), ()))

#: The largest block scale of a row is folded in as 2**TOP: products stay below float32's largest, and what underflows
#: is smaller by 2**-166.
TOP = 40


@partial(jax.jit, static_argnames=("dtype", "fast_accum"))
def matmul(a: Quantized, b: Quantized, bias: Array | None, *, dtype: Any, fast_accum: bool) -> Array:
    """a [m, k] @ b [n, k].T + bias."""
    if a.shape[0] * a.shape[1] * b.shape[0] == 0:
        y = jnp.zeros((a.shape[0], b.shape[0]), jnp.float32)
    else:
        y = emulated(a, b)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(dtype)


def emulated(a: Quantized, b: Quantized) -> Array:
    """float32 [m, n] from operands decoded to bfloat16, or to float32 where block scales are no powers of two."""
    (x, s), (y, t) = decoded(a), decoded(b)
    return scaled(lax.dot_general(x, y, NT, preferred_element_type=jnp.float32), s, t.T)


def decoded(q: Quantized) -> tuple[Array, Array]:
    """The operand [rows, k] with the scales of its blocks in it, and the scale of each row or of all of them."""
    spec = q.spec
    dtype = jnp.float32 if spec.scale == "fp32" and spec.block[1] is not None else jnp.bfloat16
    if spec.format.bits == 4:
        values = e2m1_values(unpack(q.data, q.shape[1]), dtype)
    else:
        values = lax.optimization_barrier(q.data).astype(dtype)
    if spec.two_level:
        assert q.tensor_factor is not None
        blocks = lax.bitcast_convert_type(q.scale, jnp.float8_e4m3fn).astype(dtype)
        return over_blocks(values, blocks, spec.block), 1 / lax.optimization_barrier(q.tensor_factor)
    if spec.block[1] is None:
        return values, _rows(q.scale, spec, q.shape[0])
    scale = q.scales()
    top = jnp.where(jnp.isfinite(scale), scale, 0).max(1, keepdims=True, initial=0)
    # Of a row's largest scale the power of two, held so that what it leaves fits.
    lift = two_to_the(jnp.clip(127 + TOP - (lax.bitcast_convert_type(top, jnp.int32) >> 23), -126, 126))
    folded = (scale * lift).astype(dtype)
    return over_blocks(values, folded, spec.block), _rows(1 / lift, spec, q.shape[0])


def _rows(scale: Array, spec: QuantSpec, rows: int) -> Array:
    """A scale for each block of rows to one for each row; a single one stays."""
    if spec.block[0] is None or spec.block[0] == 1:
        return scale
    return jnp.repeat(scale, spec.block[0], axis=0)[:rows]


def scaled(y: Array, s: Array, t: Array) -> Array:
    """y × s × t in an order that leaves float32's range only if the result does.

    Args:
        y: float32 [m, n].
        s: [m, 1] or [1, 1].
        t: [1, n] or [1, 1].
    """
    (sm, se), (tm, te) = _split(s), _split(t)
    p = se + te
    half = p >> 1
    return y * (sm * tm) * two_to_the(half) * two_to_the(p - half)


def _split(s: Array) -> tuple[Array, Array]:
    """Mantissa in [1, 2), or NaN, and exponent."""
    bits = lax.bitcast_convert_type(s, jnp.int32)
    mantissa = lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F800000, jnp.float32)
    return jnp.where(jnp.isnan(s), s, mantissa), (bits >> 23) - 127
