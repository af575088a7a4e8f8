"""Lowering of a GEMM of two quantized operands for each platform.

CPU: every E4M3, E5M2 and E2M1 value is exact in bfloat16, also when multiplied by a power of two or an E4M3 scale. The
product of two such values is exact in float32. So a bfloat16 GEMM with float32 accumulation sums exactly the products
that the recipe defines.

CUDA: FP8 operands are passed to `dot_general` directly, which XLA lowers to an FP8 GEMM; XLA would remove a pair of
casts before it, and with it the FP8 GEMM. Blocks of MXFP8 and NVFP4 use XLA's block-scaled dot, which is native from
Blackwell on. Other blocks are emulated as on a CPU.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap

from quaver.jax.numerics.quantized import (
    FLOAT8,
    Quantized,
    along,
    computed_once,
    cut,
    isnan,
    padded,
    scale_blocks,
    where,
)
from quaver.jax.numerics.rounding import SMALLEST_NORMAL_BITS, forbid_derivative, two_to_the
from quaver.recipes.spec import QuantSpec

NT = (((1,), (1,)), ((), ()))

NO_DERIVATIVE = (
    "quaver.jax.matmul: quantized operands have no derivative. quaver.jax.linear, dot_general and grouped_dot "
    "have gradients of their own; to treat a value as a constant, multiply jax.lax.stop_gradient(operand)"
)

#: The largest block scale of a row is normalized to 2**MAX_SCALE_EXPONENT before it is applied: products stay finite in
#: float32, and values that underflow are smaller by 2**-166.
MAX_SCALE_EXPONENT = 40


@partial(jax.jit, static_argnames=("dtype", "fast_accum"))
def matmul(a: Quantized, b: Quantized, bias: Array | None, *, dtype: Any, fast_accum: bool) -> Array:
    """Return a [m, k] @ b [n, k].T + bias."""
    a, b = forbid_derivative(NO_DERIVATIVE, (a, b))
    (m, k), n = a.shape, b.shape[0]
    if m * k * n == 0:
        return _finish(jnp.zeros((m, n), jnp.float32), bias, dtype)
    if jax.default_backend() == "gpu":
        warn_if_emulated(on_cuda(a.spec, b.spec), a.spec, b.spec, getattr(jax.devices()[0], "compute_capability", None))
    if on_cuda(a.spec, b.spec) == "emulated":
        return _emulated(a, b, bias, dtype=dtype)
    cuda = partial(_on_cuda, dtype=dtype, fast_accum=fast_accum)
    return lax.platform_dependent(a, b, bias, cuda=cuda, default=partial(_emulated, dtype=dtype))


def on_cuda(a: QuantSpec, b: QuantSpec) -> str:
    """Return how CUDA runs a GEMM of operands with these specs: "fp8", "block-scaled" or "emulated"."""
    if a.format.name in FLOAT8 and b.format.name in FLOAT8 and a.block[1] is b.block[1] is None:
        return "fp8"
    return "block-scaled" if _hardware_block(a) == _hardware_block(b) != "" else "emulated"


@cache
def warn_if_emulated(kind: str, a: QuantSpec, b: QuantSpec, capability: str | None) -> None:
    """Warn, once per pair of specs, if a GPU multiplies them in high precision, and say why.

    Args:
        kind: from `on_cuda`.
        a, b: specs of the operands.
        capability: compute capability such as "9.0"; None for a GPU that is not NVIDIA's.
    """
    if capability is None:
        why = "FP8 GEMMs are lowered for CUDA only"
    elif kind == "emulated":
        why = "XLA has no GEMM for their blocks"
    elif float(capability) < (least := {"fp8": 8.9, "block-scaled": 10.0}[kind]):
        why = f"the tensor cores of compute capability {capability} do not take them, {least} and newer do"
    else:
        return
    warnings.warn(
        f"GEMMs of {a} and {b} run in high precision on this GPU, on the exact values of their codes: {why}",
        stacklevel=3,
    )


def _hardware_block(spec: QuantSpec) -> str:
    """Return NVIDIA's block-scaled type of an operand, "mxfp8" or "nvfp4", or ""."""
    if spec.scale == "e8m0" and spec.format.name in FLOAT8 and spec.block[1] == 32:
        return "mxfp8"
    return "nvfp4" if spec.two_level and spec.block[1] == 16 else ""


def _on_cuda(a: Quantized, b: Quantized, bias: Array | None, *, dtype: Any, fast_accum: bool) -> Array:
    # Power-of-two scales can be applied after the GEMM's own rounding, which is then the only one.
    exact = bias is None and all(q.spec.scale not in ("fp32", "two_level_fp32") for q in (a, b))
    out = dtype if exact and dtype == jnp.bfloat16 else jnp.float32
    y, s, t = _fp8(a, b, out, fast_accum) if on_cuda(a.spec, b.spec) == "fp8" else _block_scaled(a, b, out)
    return _finish(scaled(y, s, t), bias, dtype)


def _emulated(a: Quantized, b: Quantized, bias: Array | None, *, dtype: Any) -> Array:
    # No operand is decoded before both are quantized: weights and saved inputs would be, for all layers at once.
    first, second = computed_once((a.data, b.data))
    a, b = replace(a, data=first), replace(b, data=second)
    (x, s), (y, t) = decoded(a), decoded(b)
    s, t = (s if a.axis == 1 else s.T), (t.T if b.axis == 1 else t)
    if x.dtype != y.dtype:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    # On a GPU float32 operands would lose bits to TF32.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    x = x if a.axis == 1 else transposed(x)
    contract = (((1,), (b.axis,)), ((), ()))
    product = lax.dot_general(x, y, contract, precision=precision, preferred_element_type=jnp.float32)
    if a.spec.scale == b.spec.scale == "unit":
        product = fixed_gemm(product)
    return _finish(scaled(product, s, t), bias, dtype)


def transposed(x: Array) -> Array:
    """Return x.T as the left operand of a GEMM; bfloat16 is moved in blocks of columns on a CPU.

    XLA would fold a plain transpose into the GEMM, and multiplies bfloat16 on a CPU only if the left operand's
    contraction axis is its last; otherwise it multiplies float32 copies, which takes several times as long.
    """
    k, rows = x.shape
    block = math.gcd(k, 32) if isinstance(k, int) else 1
    # One block would be a plain transpose, which XLA folds when it no longer converts operands, and cannot run.
    block = block if block < k else k // 2
    if block < 2 or x.dtype != jnp.bfloat16:
        return x.T

    def in_blocks(x: Array) -> Array:
        return lax.transpose(x.reshape(k // block, block, rows), (2, 0, 1)).reshape(rows, k)

    return lax.platform_dependent(x, cpu=in_blocks, default=jnp.transpose)


def fixed_gemm(y: Array) -> Array:
    """Return a GEMM's float32 result so that XLA on a CPU does not merge a following transpose into the GEMM.

    It would exchange the operands after it has decided how to multiply bfloat16, and then has no kernel for them. It
    does not look through a product with a number that it cannot know.
    """

    def multiplied(y: Array) -> Array:
        return lax.mul(y, computed_once(np.float32(1)))

    return lax.platform_dependent(y, cpu=multiplied, default=lambda y: y)


def _finish(y: Array, bias: Array | None, dtype: Any) -> Array:
    return (y if bias is None else lax.add(y, lax.expand_dims(bias.astype(jnp.float32), (0,)))).astype(dtype)


def _fp8(a: Quantized, b: Quantized, out: Any, fast_accum: bool) -> tuple[Array, Array, Array]:
    """Return the GEMM of the data, and the scales of each row of a and of b."""
    precision = lax.Precision.DEFAULT if fast_accum else lax.Precision.HIGHEST
    a, b = a.with_k_last(), b.with_k_last()
    y = lax.dot_general(a.data, b.data, NT, precision=precision, preferred_element_type=out)
    return y, per_row_scales(a, a.scales()), per_row_scales(b, b.scales()).T


def _block_scaled(a: Quantized, b: Quantized, out: Any) -> tuple[Array, Array, Array]:
    """Return the GEMM with block scales applied, and the remaining factors: 1 / tensor factor of each operand."""
    operands = [x[None] for x in (*_blocks(a), *_blocks(b))]
    product = _scaled_matmul(out)(*operands)[0]
    # Under shard_map the result loses the mesh axes over which it varies.
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    lost = tuple(sorted(axes - jax.typeof(product).manual_axis_type.varying))
    return lax.pcast(product, lost, to="varying") if lost else product, _tensor_scale(a), _tensor_scale(b)


@cache
def _scaled_matmul(out: Any) -> Callable[..., Array]:
    """Return a batchable `jax.nn.scaled_matmul` of [batch, m, k], [batch, n, k] and their scales.

    Its own vmap rule requires all operands to be batched.
    """

    @custom_vmap
    def multiply(a: Array, s: Array, b: Array, t: Array) -> Array:
        return jax.nn.scaled_matmul(a, b, s, t, preferred_element_type=out)

    @multiply.def_vmap
    def of_batch(size: int, batched: list[bool], *operands: Array) -> tuple[Array, bool]:
        each = [
            x if is_so else jnp.broadcast_to(x, (size, *x.shape)) for x, is_so in zip(operands, batched, strict=True)
        ]
        y = multiply(*(x.reshape(-1, *x.shape[2:]) for x in each))
        return y.reshape(size, -1, *y.shape[1:]), True

    return multiply


def _blocks(q: Quantized) -> tuple[Array, Array]:
    """Return data [rows, k] and scales [rows, k / block] in the dtypes of XLA's block-scaled dot."""
    q = q.with_k_last()
    (rows, k), block = q.shape, q.spec.block[1]
    assert block is not None
    padding = -k % block
    if q.spec.format.packed:
        data = padded(q.data, 0, (k + padding) // 2 - q.data.shape[1])
        data = lax.bitcast_convert_type(data, jnp.float4_e2m1fn).reshape(rows, k + padding)
    else:
        data = padded(q.data, 0, padding)
    kind = jnp.float8_e4m3fn if q.spec.two_level else jnp.float8_e8m0fnu
    return data, lax.bitcast_convert_type(per_row_scales(q, q.scale), kind)


def _tensor_scale(q: Quantized) -> Array:
    if q.tensor_factor is None:
        return jnp.ones((1, 1), jnp.float32)
    return lax.div(np.float32(1), lax.optimization_barrier(q.tensor_factor))


def decoded(q: Quantized) -> tuple[Array, Array]:
    """Return the operand [rows, k] with block scales applied, and the scale of each row [rows, 1] or of the tensor,
    both in the stored layout.

    The operand is bfloat16, or float32 if block scales are not powers of two.
    """
    spec = q.spec
    dtype = jnp.float32 if spec.scale == "fp32" and spec.block[1] is not None else jnp.bfloat16
    values = q.stored_values(dtype)
    if spec.two_level:
        blocks = lax.bitcast_convert_type(q.scale, jnp.float8_e4m3fn).astype(dtype)
        return scale_blocks(values, blocks, q.stored_block), _tensor_scale(q)
    scale = per_row_scales(q, q.stored_scales())
    if spec.block[1] is None:
        return values, scale
    row_max_scale = lax.expand_dims(lax.reduce_max(where(lax.is_finite(scale), scale, 0), (q.axis,)), (q.axis,))
    binade = lax.shift_right_arithmetic(lax.bitcast_convert_type(row_max_scale, jnp.int32), np.int32(23))
    row_rescale = two_to_the(
        lax.clamp(np.int32(-126), lax.sub(np.int32(127 + MAX_SCALE_EXPONENT), binade), np.int32(126))
    )
    blocks = scale_blocks(values, lax.mul(scale, row_rescale).astype(dtype), along(q.axis, (1, spec.block[1])))
    return blocks, lax.div(np.float32(1), row_rescale)


def per_row_scales(q: Quantized, scale: Array) -> Array:
    """Expand an operand's stored scales of row blocks to one per row; a single scale per tensor stays."""
    (block, _), (rows, _) = q.spec.block, q.shape
    if block is None or block == 1:
        return scale
    (blocks, k), each = along(q.axis, scale.shape), min(block, max(rows, 1))
    shape, dims = ((blocks, each, k), (0, 2)) if q.axis == 1 else ((k, blocks, each), (0, 1))
    wide = lax.broadcast_in_dim(scale, shape, dims).reshape(along(q.axis, (blocks * each, k)))
    return cut(wide, *along(q.axis, (rows, k)))


def scaled(y: Array, s: Array, t: Array) -> Array:
    """Return y [m, n] × s × t, in an order in which no intermediate overflows unless the result does.

    Args:
        y: float32, or bfloat16 if both scales are powers of two; may have a batch axis [batch, m, n].
        s: float32 [m, 1] or [1, 1], with as many axes as y.
        t: float32 [1, n] or [1, 1], likewise.
    """
    (sm, se), (tm, te) = _split(s), _split(t)
    p = lax.add(se, te)
    half = lax.shift_right_arithmetic(p, np.int32(1))
    first, second = lax.mul(lax.mul(sm, tm), two_to_the(half)), two_to_the(lax.sub(p, half))
    return lax.mul(lax.mul(y, first.astype(y.dtype)), second.astype(y.dtype))


def _split(s: Array) -> tuple[Array, Array]:
    """Return mantissa in [1, 2) and exponent. NaN stays; a zero or subnormal scale, which XLA's CPU flushes, has
    mantissa 0.
    """
    bits = lax.bitcast_convert_type(s, jnp.int32)
    fraction = lax.bitwise_and(bits, np.int32(0x7FFFFF))
    mantissa = lax.bitcast_convert_type(lax.bitwise_or(fraction, np.int32(0x3F800000)), jnp.float32)
    mantissa = where(lax.lt(bits, SMALLEST_NORMAL_BITS), 0, mantissa)
    return where(isnan(s), s, mantissa), lax.sub(lax.shift_right_arithmetic(bits, np.int32(23)), np.int32(127))
