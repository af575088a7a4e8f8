"""quantize, dequantize and matmul: the operations on arrays and `Quantized` that every JAX layer uses."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from quaver.jax.numerics.quantized import (
    Quantized,
    along,
    array,
    checked_float_dtype,
    computed_once,
    pack,
    scale_blocks,
)
from quaver.jax.numerics.rounding import Place, encode, flush, forbid_derivative, rotate, uniform, widen
from quaver.jax.numerics.scaling import factors
from quaver.jax.operations import native
from quaver.recipes.spec import QuantSpec
from quaver.recipes.text import check_instance

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

NO_DERIVATIVE = (
    "quaver.jax.quantize: rounding has no derivative. quaver.jax.linear, dot_general and grouped_dot have "
    "gradients of their own; to treat a value as a constant, quantize jax.lax.stop_gradient(x)"
)


def quantize(
    x: Array | Quantized,
    spec: QuantSpec,
    amax: Array | float | None = None,
    *,
    factor: Array | float | None = None,
    seed: int = 0,
    tensor_id: Array | int = 0,
    count: Array | int = 0,
    place: Place | None = None,
    axis: int = 1,
) -> Quantized:
    """Quantize one GEMM operand: data = round_to(x × e), scale = 1 / e, with an encode factor e per block.

    Args:
        x: [rows, k] in float32, bfloat16 or float16, with the contraction axis last, or [k, rows] with axis=0. A
            `Quantized` with this spec is returned unchanged.
        spec: how to quantize.
        amax: [row blocks, k blocks], or the tensor's [1, 1] for two-level scales, or one number; None measures it.
        factor: encode factor of delayed scaling, which replaces the one that amax implies; 0 means unset. Only for
            specs with one fp32 or power-of-two scale per tensor.
        seed: 64-bit Python int, the key of stochastic rounding's Philox stream.
        tensor_id, count: further inputs of that stream.
        place: (first row, first column, columns of the whole) if x is a shard of an operand, as under shard_map; it
            then uses the random numbers of its part of the whole.
        axis: contraction axis of x; 0 gives the operand that quantizing x.T gives, without the transpose.
    Returns:
        The quantized operand. A block whose amax (measured or passed) is infinite or NaN has scale NaN.
    Raises:
        ValueError: x is not a matrix, has another dtype, or is quantized with another spec, or factor is passed for
            other scales, or axis is not 0 or 1.
        NotImplementedError: its derivative is requested; see `linear`.
    Exact: the bits of `quaver.reference.quantize`, eager and under jit. Bounded if scales are not powers of two: scales
        within an ulp, codes within a step, and subnormals (also scales) count as 0 on a CPU. Rotated operands have an
        exception (`quaver.jax.numerics.rounding.rotate`).
    """
    check_instance("quantize", "spec", spec, QuantSpec, "quaver.recipes.get('mxfp8').fprop.a")
    spec.check_factor(factor)
    if isinstance(x, Quantized):
        if x.spec != spec:
            raise ValueError(f"the operand is quantized as {x.spec}, but {spec} is required; dequantize() it first")
        return x
    own, x = getattr(x, "dtype", None), array("quantize", "x", x)
    if x.ndim != 2:
        raise ValueError(f"an operand is a matrix [rows, k]; this one has shape {x.shape}: reshape it first")
    # A float64 numpy array would have become float32 implicitly.
    if own not in DTYPES:
        raise ValueError(f"an operand is float32, bfloat16 or float16, not {own}; convert it first")
    check_static_int("seed", seed, "let tensor_id or count differ instead")
    if axis not in (0, 1):
        raise ValueError(f"quantize: axis is {axis!r}; give the contraction axis of x, 0 or 1")
    _numbers(spec, along(axis, x.shape), amax, factor, tensor_id, count)
    if axis == 0 and amax is not None and jnp.size(amax) != 1:
        amax = jnp.swapaxes(amax, 0, 1)
    whole = None if place is None else place[2]
    at = (0, 0) if place is None else place[:2]
    if isinstance(count, int):
        count &= 0xFFFFFFFF
    return _quantize(x, amax, factor, _word(tensor_id), _word(count), at, spec=spec, seed=seed, whole=whole, axis=axis)


def check_static_int(what: str, number: object, instead: str) -> None:
    """Raise ValueError if an array is passed where a static Python int is required."""
    if not isinstance(number, int):
        raise ValueError(
            f"{what} must be a Python int that is known when jit traces, and this is {number!r}; {instead}"
        )


def _numbers(spec: QuantSpec, shape: tuple[int, int], amax: Any, factor: Any, tensor_id: Any, count: Any) -> None:
    for what, number in (("amax", amax), ("factor", factor), ("tensor_id", tensor_id), ("count", count)):
        optional = number is None and what in ("amax", "factor")
        if not optional and (isinstance(number, bool) or not isinstance(number, (int, float))):
            array("quantize", what, number)
    wanted = (1, 1) if spec.two_level else spec.blocks(*shape)
    if amax is not None and jnp.size(amax) != 1 and jnp.shape(amax) != wanted:
        raise ValueError(f"quantize: amax has shape {jnp.shape(amax)}; give one number, or {wanted}")
    if factor is not None and jnp.size(factor) != 1:
        raise ValueError(f"quantize: factor has shape {jnp.shape(factor)}; give one number for the whole tensor")


def _word(x: Array | int) -> Array:
    return jnp.uint32(x) if isinstance(x, int) else x


@partial(jax.jit, static_argnames=("spec", "seed", "whole", "axis"))
def _quantize(
    x: Array,
    amax: Array | float | None,
    factor: Array | float | None,
    tensor_id: Array,
    count: Array,
    at: tuple[Array, Array],
    *,
    spec: QuantSpec,
    seed: int,
    whole: int | None,
    axis: int,
) -> Quantized:
    x, amax, factor = forbid_derivative(NO_DERIVATIVE, (x, amax, factor))
    if spec.hadamard or spec.rounding == "stochastic":
        # Barrier: keep XLA from recomputing x's producer, such as a transpose, for both amax and data; likewise the
        # noise.
        x = lax.optimization_barrier(x)
    x = rotate(x, axis) if spec.hadamard else widen(x)
    rows, k = along(axis, x.shape)
    u = None
    if spec.rounding == "stochastic":
        x = flush(x)
    e, scale, tensor_factor, tensor_amax = factors(x, spec, amax, factor, axis)
    if spec.rounding == "stochastic":
        # Noise waits for x's factors: XLA on a CPU would draw that of all layers first.
        e, scale, count = computed_once((e, scale, count))
        drawn = uniform(rows, k, seed, tensor_id, count, None if whole is None else (*at, whole), axis)
        u = lax.optimization_barrier(drawn)
    elif not spec.per_tensor:
        e, scale = computed_once((e, scale))
    data = encode(scale_blocks(x, lax.optimization_barrier(e), along(axis, spec.block)), spec.format, u)
    if spec.format.packed:
        data = computed_once(pack(data, axis))
    return Quantized(data, scale, tensor_factor, tensor_amax, spec, (rows, k), axis)


def dequantize(q: Quantized) -> Array:
    """Return float32 [rows, k]: data × scale; after a Hadamard the rotated values, as the GEMM sees them. Exact."""
    check_instance("dequantize", "q", q, Quantized, "quaver.jax.quantize(x, spec)")
    return q.dequantize()


def matmul(
    a: Quantized, b: Quantized, dtype: Any = jnp.float32, bias: Array | None = None, *, fast_accum: bool = False
) -> Array:
    """Compute a [m, k] @ b [n, k].T + bias [n], accumulated in float32, scaled, and rounded once to dtype.

    Args:
        a, b: quantized operands with the same k, each in any layout.
        dtype: of the output: float32, bfloat16 or float16.
        bias: added in float32.
        fast_accum: let a GPU accumulate faster and less precisely if it can.
    Raises:
        ValueError: k differs, or dtype is none of the three.
    Bounded: on a CPU, relative RMS below 1e-6 of float64 on the same operands for float32 output.
    """
    for what, operand in (("a", a), ("b", b)):
        check_instance("matmul", what, operand, Quantized, "quaver.jax.quantize(x, spec)")
    bias = None if bias is None else array("matmul", "bias", bias)
    dtype = checked_float_dtype("matmul", dtype)
    if bias is not None and bias.shape != (b.shape[0],):
        raise ValueError(f"matmul: bias has shape {bias.shape} and b is {b.shape}; give a bias [{b.shape[0]}]")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a is {a.shape} and b is {b.shape}: both are [rows, k] and k must agree")
    if dtype not in DTYPES:
        raise ValueError(f"the output is float32, bfloat16 or float16, not {jnp.dtype(dtype).name}")
    return native.matmul(a, b, bias, dtype=jnp.dtype(dtype), fast_accum=fast_accum)
