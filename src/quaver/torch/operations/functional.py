"""Public functions `quantize`, `dequantize` and `matmul`: argument checks around the operations of those names.

Also shares the quantized input between layers that read the same tensor.
"""

import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.recipes.text import check_instance
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops

# ---- public functions ----


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
    """Quantize one GEMM operand: data = round_to(x × e), scale = 1 / e, with a factor e per block.

    The result equals `quaver.reference.quantize` bit for bit, eager and compiled. Not differentiable: see `Linear`.

    Args:
        x: [rows, k] in float32, bfloat16 or float16; k is the contraction axis of the GEMM. A `Quantized` of this spec
            is returned unchanged.
        spec: format, block, kind of scale and rounding of the operand.
        amax: [blocks of rows, blocks of k], or [1, 1] of the tensor for two-level scales; None measures it.
        factor: encode factor of delayed scaling, used instead of the one computed from amax; 0 is unset. Only for specs
            with one fp32 or power-of-two scale per tensor.
        seed, tensor_id, count: Philox stream of stochastic rounding.

    Returns:
        The quantized operand. A block whose amax (measured or given) is infinite or NaN has scale NaN.

    Raises:
        ValueError: x is not a matrix, has another dtype, or is quantized by another spec, or factor is passed for other
            scales.
        TypeError: x is neither a tensor nor quantized, or spec is not a QuantSpec.
    """
    check_instance("quantize", "spec", spec, QuantSpec, "quaver.recipes.get('mxfp8').fprop.a")
    spec.check_factor(factor)
    if isinstance(x, Quantized):
        if x.spec != spec:
            raise ValueError(f"the operand is quantized as {x.spec} and {spec} was asked for; dequantize() it first")
        return x
    check_instance("quantize", "x", x, Tensor, "torch.as_tensor(x)")
    if x.dim() != 2:
        raise ValueError(f"an operand is a matrix [rows, k]; this one has shape {tuple(x.shape)}: reshape it first")
    if x.dtype not in ops.DTYPES:
        raise ValueError(f"an operand is float32, bfloat16 or float16, not {x.dtype}; convert it first")
    return ops.QUANTIZE(x.detach(), spec, amax, factor, (seed, tensor_id, count))


def dequantize(q: Quantized) -> Tensor:
    """Return data × scale, float32 [rows, k]; after a Hadamard rotation these are the rotated values that the GEMM
    uses. A product beyond float32 is infinite on a CPU, and the largest float32 on a GPU.
    """
    check_instance("dequantize", "q", q, Quantized, "quaver.torch.quantize(x, spec)")
    return ops.DEQUANTIZE(q, torch.float32)


def matmul(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype = torch.float32,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """Compute a [m, k] @ b [n, k].T + bias [n], accumulated in float32, scaled, rounded once to dtype.

    The relative RMS error is below 1e-6 against float64 on the same operands for float32 output.

    Args:
        fast_accum: allow faster, less precise accumulation where the hardware offers it; see `GemmSpec.fast_accum`.

    Raises:
        ValueError: the operands have different k, or dtype is not float32, bfloat16 or float16.
        TypeError: an operand is not quantized.
    """
    for what, operand in (("a", a), ("b", b)):
        check_instance("matmul", what, operand, Quantized, "quaver.torch.quantize(x, spec)")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a is {a.shape} and b is {b.shape}: both are [rows, k] and k must agree")
    if dtype not in ops.DTYPES:
        raise ValueError(f"the output is float32, bfloat16 or float16, not {dtype}")
    with ops.without_autocast(a.device.type):
        return ops.MATMUL(a, b, dtype, bias, fast_accum)


# ---- shared inputs: quantize a tensor once for several layers, such as q, k and v, or gate and up ----
# Each thread remembers the last tensor that it quantized, and the operands. A layer that gets the same unmodified
# tensor and an equal spec reuses the operands, and backward saves them once. The tensor is referenced weakly; the
# operands are freed with it. Only outputs of autograd functions are shared: a tensor that the program owns, such as an
# input buffer, may be written without a trace (`.numpy()`, a replayed CUDA graph).
# `torch.compile(mode="reduce-overhead")` returns the same object with the same version in each step, with only the
# graph node being new. So the node is marked, and the mark must match.


class Quantization(weakref.ref[Tensor]):
    """Weak reference to a tensor, with its operands and the key by which they are found."""

    __slots__ = ("by", "conditions", "mark", "operands")

    #: Version and address of the tensor, factor, stream, and whatever else must be unchanged.
    conditions: tuple[Any, ...]
    #: `LinearPlan` that quantized it.
    by: Any
    #: Operand of fprop, and that of wgrad if it is another quantization (None until needed); None once the tensor has
    #: died.
    operands: Any
    #: Object stored in the graph node's metadata under `MARK`.
    mark: object


#: Key in the metadata of a graph node.
MARK = "quaver.torch.operations.functional"


class _SharedInputCache(threading.local):
    #: Last quantization of this thread.
    last: Quantization | None = None


thread = _SharedInputCache()


def lookup(x: Tensor, conditions: tuple[Any, ...], by: Any, like: Callable[[Any, Any], bool]) -> Quantization | None:
    """Return the quantization of x if it was this thread's last, made by `by` or an equivalent, and x is unchanged;
    else None.
    """
    last = thread.last
    if last is None or last() is not x or last.conditions != conditions:
        return None
    node: Any = x.grad_fn
    if node is None or node.metadata.get(MARK) is not last.mark:
        return None
    return last if last.by is by or like(last.by, by) else None


def remember(x: Tensor, conditions: tuple[Any, ...], by: Any, operands: Any) -> Quantization:
    """Record the last quantization of this thread; x must have a graph node."""
    last = thread.last = Quantization(x, free)
    last.conditions, last.by, last.operands, last.mark = conditions, by, operands, object()
    node: Any = x.grad_fn
    if node is not None:
        node.metadata[MARK] = last.mark
    return last


#: Drops the operands of a `Quantization` whose tensor has died, in any thread.
free = operator.methodcaller("__setattr__", "operands", None)


def same_input_quantization(one: Recipe, other: Recipe) -> bool:
    """Return True if two recipes without delayed scaling quantize inputs equally for fprop and wgrad, in one layout."""
    return (
        one.fprop.a == other.fprop.a
        and one.wgrad.b == other.wgrad.b
        and one.dequantized_backward is other.dequantized_backward
        and one.delayed is other.delayed is None
        and _per_tensor(one) == _per_tensor(other)
    )


def _per_tensor(recipe: Recipe) -> bool:
    return all(spec is not None and spec.per_tensor for spec in recipe.operands().values())
