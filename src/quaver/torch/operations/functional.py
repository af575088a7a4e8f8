"""`quantize`, `dequantize` and `matmul` as users call them: checked, then done by the operation of that name."""

import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.recipes.text import instance
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops

# ---- functional ------------------------------------------------------------------------------------------


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
    Exact: the bits of `quaver.reference.quantize`, eager and compiled.
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


# ---- siblings --------------------------------------------------------------------------------------------
# One quantization for layers of the very same tensor, such as q, k and v of a model, or gate and up.
#
# Each thread knows which tensor it quantized last and what became of it. A layer that is given that very tensor next,
# unwritten and by an equal spec, takes what there is, and backward keeps it once. The tensor is held weakly, and where
# it dies what became of it is freed. Only what autograd has computed is taken so: a tensor that a program holds and
# fills, such as a buffer of inputs, may be written in ways that leave no trace (`.numpy()`, a CUDA graph replayed). A
# tensor of autograd's may be another one's memory too: `torch.compile(mode="reduce-overhead")` returns the same object
# in each step, with the same version, whose graph node alone is new. So the node is marked, and only a marked one
# counts.


class Quantization(weakref.ref[Tensor]):
    """What a tensor, to which this refers weakly, was quantized to, and by what that is recognized."""

    __slots__ = ("by", "facts", "mark", "operands")

    #: The version and address of the tensor, the factor, the stream and whatever else must be the same.
    facts: tuple[Any, ...]
    #: What quantized it: a recipe, or a decided step.
    by: Any
    #: What fprop reads, and what wgrad reads where that is another quantization, None before it is needed. None once
    #: the tensor has died.
    operands: Any
    #: What the tensor's graph node has under `MARK`.
    mark: object


#: A key of a graph node's metadata.
MARK = "quaver.torch.operations.functional"


class _SharedInputCache(threading.local):
    #: The last one.
    last: Quantization | None = None


thread = _SharedInputCache()


def lookup(x: Tensor, facts: tuple[Any, ...], by: Any, like: Callable[[Any, Any], bool]) -> Quantization | None:
    """The quantization of this very tensor, if it was this thread's last, by the same or by what is like it, and
    nothing has changed since."""
    last = thread.last
    if last is None or last() is not x or last.facts != facts:
        return None
    node: Any = x.grad_fn
    if node is None or node.metadata.get(MARK) is not last.mark:
        return None
    return last if last.by is by or like(last.by, by) else None


def remember(x: Tensor, facts: tuple[Any, ...], by: Any, operands: Any) -> Quantization:
    """Note what this thread has quantized last: a tensor that has a graph node."""
    last = thread.last = Quantization(x, free)
    last.facts, last.by, last.operands, last.mark = facts, by, operands, object()
    node: Any = x.grad_fn
    if node is not None:
        node.metadata[MARK] = last.mark
    return last


#: Of a `Quantization` whose tensor has died, in whichever thread.
free = operator.methodcaller("__setattr__", "operands", None)


def alike(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes quantize an input alike, for fprop and for wgrad, and lay out what they write alike."""
    return (
        one.fprop.a == other.fprop.a
        and one.wgrad.b == other.wgrad.b
        and one.dequantized_backward is other.dequantized_backward
        and one.delayed is other.delayed is None
        and _per_tensor(one) == _per_tensor(other)
    )


def _per_tensor(recipe: Recipe) -> bool:
    return all(spec is not None and spec.per_tensor for spec in recipe.operands().values())
