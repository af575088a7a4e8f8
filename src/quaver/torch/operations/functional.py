"""`quantize`, `dequantize` and `matmul` as users call them: checked, then done by the operation of that name."""

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.core.text.given import instance
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops


def quantize(
    x: Tensor | Quantized,
    spec: QuantSpec,
    amax: Tensor | float | None = None,
    *,
    factor: Tensor | float | None = None,
    seed: int = 0,
    tensor_id: int = 0,
    count: Tensor | int = 0,
) -> Quantized:
    """Quantize one GEMM operand: data = round_to(x × e), scale = 1 / e, a factor e for each block.

    Args:
        x: [rows, k] in float32, bfloat16 or float16, the axis that the GEMM sums over last. A `Quantized` of this
            spec is returned as it is.
        spec: how.
        amax: [blocks of rows, blocks of k], or the tensor's [1, 1] for two-level scales; None measures it.
        factor: the encode factor of delayed scaling, in place of the one that amax implies; 0 is unset.
        seed, tensor_id, count: of stochastic rounding's Philox stream.
    Returns:
        A block whose amax (measured or given) is infinite or NaN has scale NaN. Not differentiable: see `Linear`.
    Raises:
        ValueError: x is no matrix, has another dtype, or is quantized by another spec.
        TypeError: x is neither a tensor nor quantized, or spec is no QuantSpec.
    Exact: the bits of `quaver.core.reference.quantize`, eager and compiled.
    """
    instance("quantize", "spec", spec, QuantSpec, "quaver.recipes.get('mxfp8').fprop.a")
    if isinstance(x, Quantized):
        if x.spec != spec:
            raise ValueError(f"the operand is quantized as {x.spec} and {spec} was asked for; dequantize() it first")
        return x
    instance("quantize", "x", x, Tensor, "torch.as_tensor(x)")
    if x.dim() != 2:
        raise ValueError(f"an operand is a matrix [rows, k]; this one has shape {tuple(x.shape)}: reshape it first")
    if x.dtype not in ops.DTYPES:
        raise ValueError(f"an operand is float32, bfloat16 or float16, not {x.dtype}; convert it first")
    return ops.QUANTIZE(x.detach(), spec, amax, factor, (seed, tensor_id, count))


def dequantize(q: Quantized) -> Tensor:
    """float32 [rows, k]: data × scale; after a Hadamard the rotated values, as the GEMM sees them. Exact."""
    instance("dequantize", "q", q, Quantized, "quaver.torch.quantize(x, spec)")
    return q.dequantize()


def matmul(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype = torch.float32,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """a [m, k] @ b [n, k].T + bias [n], accumulated in float32, scaled, rounded once to dtype.

    Args:
        fast_accum: let the hardware accumulate faster and coarser where it offers that; see `GemmSpec.fast_accum`.
    Raises:
        ValueError: the operands do not share k, or dtype is none of float32, bfloat16, float16.
        TypeError: an operand is not quantized.
    Bounded: relative RMS below 1e-6 of float64 on the same operands for float32 output.
    """
    for what, operand in (("a", a), ("b", b)):
        instance("matmul", what, operand, Quantized, "quaver.torch.quantize(x, spec)")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a is {a.shape} and b is {b.shape}: both are [rows, k] and k must agree")
    if dtype not in ops.DTYPES:
        raise ValueError(f"the output is float32, bfloat16 or float16, not {dtype}")
    with ops.without_autocast(a.device.type):
        return ops.MATMUL(a, b, dtype, bias, fast_accum)
