"""The three GEMMs of a linear layer as plain functions of arrays, without derivatives.

    fprop   output      [T, N] = input         [T, K] @ weight   [N, K].T
    dgrad   grad_input  [T, K] = grad_output   [T, N] @ weight.T [K, N].T
    wgrad   grad_weight [N, K] = grad_output.T [N, T] @ input.T  [K, T].T

w is [K, N] as usual in JAX, which is weight.T; wgrad is computed with its operands swapped.
"""

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import jax.numpy as jnp
from jax import Array, lax

from quaver.jax.inspection.explain import gemm_scope
from quaver.jax.inspection.inspector import Recorder
from quaver.jax.numerics.quantized import Quantized
from quaver.jax.operations.native import fixed_gemm, transposed
from quaver.jax.operations.overlap import contracted_matmul, gathered_matmul, overlaps, scattered_matmul
from quaver.jax.operations.sharding import (
    GemmMeshAxes,
    ShardPlacement,
    all_gather_operand,
    axes_before_gather,
    quantize_shard,
    shard_of_gradient,
)
from quaver.jax.state.buffers import GRAD_OUTPUT, INPUT, WEIGHT, State, factor_of, unless_overrun
from quaver.jax.state.context import StateReads
from quaver.recipes.spec import QuantSpec, Recipe


@dataclass(frozen=True)
class LinearContext:
    """Static context of one call of a layer."""

    recipe: Recipe
    #: Dtype of the activations.
    dtype: Any
    name: str
    seed: int
    #: Mesh axes that shard its GEMMs; None derives them from the array types.
    axes: GemmMeshAxes | None
    #: Placement of the shards of x [T, K] and of w [K, N] for a gather; None for no gather.
    input_placement: ShardPlacement | None
    weight_placement: ShardPlacement | None
    #: Placement of the shards of the output [T, N] after a reduce-scatter; None for no scatter.
    output_placement: ShardPlacement | None
    #: Counter of the calls that read this state.
    state_reads: StateReads
    #: Recorder of the step that `quaver.jax.inspect` samples; None if the call is not measured.
    recorder: Recorder | None

    def __post_init__(self) -> None:
        for operand in ("fprop.a", "wgrad.b"):
            spec = self.recipe.operands()[operand]
            if spec is not None and spec.rounding != "nearest":
                raise ValueError(
                    f"{self.label}: recipe {self.recipe.name!r} rounds the input stochastically ({operand} is "
                    f"{spec}), and quaver.jax supports that only for gradients; round the input to nearest, or use "
                    "quaver.torch"
                )

    @property
    def rings_dgrad(self) -> bool:
        """Return True if dgrad's GEMM and the reduce-scatter of its result are one ring."""
        return overlaps(self.input_placement) and self.recipe.dgrad.b is not None

    @property
    def label(self) -> str:
        """Name of the layer for error messages; the root of a model has no name."""
        return self.name or "this layer"

    def scope(self, gemm: str) -> AbstractContextManager[None]:
        """Return a context that names a GEMM's operations in the compiled program."""
        spec = self.recipe.gemms[gemm]
        return gemm_scope(self.label, gemm, spec.a, spec.b)

    def tensor_id(self, operand: str) -> int:
        return zlib.crc32(f"{self.name}.{operand}".encode())


F = TypeVar("F", bound=Callable[..., Any])


def _named(function: F) -> F:
    """Decorate "fprop", "dgrad" or "wgrad" so that `quaver.jax.explain` finds its GEMM."""

    @wraps(function)
    def run(call: LinearContext, *args: Any, **options: Any) -> Any:
        with call.scope(function.__name__):
            return function(call, *args, **options)

    return cast(F, run)


@_named
def fprop(
    call: LinearContext,
    x: Array | Quantized,
    w: Array | Quantized,
    bias: Array | None,
    state: State,
    axes: GemmMeshAxes,
) -> tuple[Array, Quantized | None, Quantized | None]:
    """Return the output [T, N] and, if they were quantized, the operands input [T, K] and weight [N, K] before any
    gather.
    """
    gemm = call.recipe.fprop
    weight_t_placement = None if call.weight_placement is None else call.weight_placement.T
    if gemm.a is None or gemm.b is None:
        high = (
            all_gather_operand(_require_unquantized(call, x), call.input_placement),
            all_gather_operand(_require_unquantized(call, w), call.weight_placement),
        )
        if call.output_placement is None:
            return gemm_high_precision(*high, call.dtype, bias, axis=0), None, None
        y = gemm_high_precision(*high, jnp.float32, axis=0)
        return _with_bias(shard_of_gradient(y, call.output_placement), bias, call.dtype), None, None
    token_axes, (row_axes, k_axes) = (
        axes_before_gather(call.input_placement, axes.tokens, axes.inputs)[0],
        axes_before_gather(weight_t_placement, axes.outputs, axes.inputs),
    )
    xq = quantize_shard(x, gemm.a, token_axes, axes.inputs, factor=factor_of(state, INPUT))
    wq = quantize_shard(w, gemm.b, row_axes, k_axes, factor=factor_of(state, WEIGHT), axis=0)
    weight = all_gather_operand(wq, weight_t_placement)
    if call.output_placement is not None:
        y = scattered_matmul(xq, weight, call.output_placement, jnp.float32, fast_accum=gemm.fast_accum)
        return _with_bias(y, bias, call.dtype), xq, wq
    y = gathered_matmul(xq, call.input_placement, weight, call.dtype, bias, fast_accum=gemm.fast_accum)
    return y, xq, wq


def _with_bias(y: Array, bias: Array | None, dtype: Any) -> Array:
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(dtype)


def saved_input(
    call: LinearContext, x: Array | Quantized, xq: Quantized | None, state: State, axes: GemmMeshAxes
) -> Array | Quantized:
    """Return what wgrad needs of the input, not gathered.

    It is fprop's operand if wgrad can use it, else input.T [K, T] quantized for wgrad, else the input.
    """
    spec = call.recipe.wgrad.b
    if call.recipe.reuse.input:
        assert xq is not None
        return xq
    if spec is None and call.recipe.dequantized_backward:
        assert xq is not None
        return xq
    x = _require_unquantized(call, x)
    if spec is None:
        return x
    tokens, inputs = axes_before_gather(call.input_placement, axes.tokens, axes.inputs)
    return quantize_shard(x, spec, inputs, tokens, factor=factor_of(state, INPUT), axis=0)


def saved_weight(call: LinearContext, w: Array | Quantized, wq: Quantized | None) -> Array | Quantized:
    """Return what dgrad needs of the weight: fprop's operand if dgrad can use it, else the parameter itself."""
    if serves_dgrad(call.recipe):
        assert wq is not None
        return wq
    return _require_unquantized(call, w)


def serves_wgrad(recipe: Recipe) -> bool:
    """Return True if wgrad can use fprop's quantized input, as codes or dequantized."""
    return recipe.reuse.input or (recipe.dequantized_backward and recipe.wgrad.b is None)


def serves_dgrad(recipe: Recipe) -> bool:
    """Return True if dgrad can use fprop's quantized weight, as codes or dequantized."""
    return recipe.reuse.weight or (recipe.dequantized_backward and recipe.dgrad.b is None)


def quantized_gradient(
    call: LinearContext, g: Array, state: State, axes: GemmMeshAxes, need_input: bool, need_weight: bool
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize grad_output [T, N] for dgrad and grad_output.T [N, T] for wgrad, each if needed and quantized, else
    None.
    """
    recipe = call.recipe
    shared = recipe.reuse.grad_output
    tokens = axes_before_gather(call.output_placement, axes.tokens, axes.outputs)[0]
    forward = transposed = None
    if recipe.dgrad.a is not None and (need_input or (need_weight and shared)):
        forward = _gradient(call, g, "grad_output", recipe.dgrad.a, tokens, axes.outputs, state)
    if recipe.wgrad.a is not None and need_weight:
        if shared:
            assert forward is not None
            transposed = forward.T
        else:
            transposed = _gradient(call, g, "grad_output.T", recipe.wgrad.a, axes.outputs, tokens, state, axis=0)
    return forward, transposed


def _gradient(
    call: LinearContext,
    g: Array,
    operand: str,
    spec: QuantSpec,
    row_axes: tuple[str, ...],
    k_axes: tuple[str, ...],
    state: State,
    axis: int = 1,
) -> Quantized:
    if spec.rounding == "nearest":
        return quantize_shard(g, spec, row_axes, k_axes, factor=factor_of(state, GRAD_OUTPUT), axis=axis)
    stream = {"seed": call.seed, "tensor_id": call.tensor_id(operand)}
    count = state["count"][int(operand.endswith(".T"))]
    g = unless_overrun(g, count)
    factor = factor_of(state, GRAD_OUTPUT)
    return quantize_shard(g, spec, row_axes, k_axes, factor=factor, count=count, axis=axis, **stream)


@_named
def dgrad(
    call: LinearContext,
    g: Array,
    gq: Quantized | None,
    weight: Array | Quantized,
    state: State,
    axes: GemmMeshAxes,
    dtype: Any,
) -> Array:
    """Return grad_input [T, K] from the result of `saved_weight`, before its reduce-scatter unless that is a ring."""
    gemm = call.recipe.dgrad
    if gemm.b is None:
        g = all_gather_operand(g, call.output_placement)
    if gemm.b is None and isinstance(weight, Quantized):
        gathered = all_gather_operand(weight, None if call.weight_placement is None else call.weight_placement.T)
        return gemm_high_precision(g, gathered.dequantize().astype(g.dtype), dtype, axis=0)
    if gemm.b is None:
        return gemm_high_precision(g, all_gather_operand(weight, call.weight_placement), dtype)
    assert gq is not None
    if isinstance(weight, Quantized):
        operand = all_gather_operand(weight, None if call.weight_placement is None else call.weight_placement.T).T
    else:
        operand = all_gather_operand(transposed_weight(call, weight, gemm.b, state, axes), call.weight_placement)
    if call.rings_dgrad:
        return scattered_matmul(gq, operand, call.input_placement, dtype, fast_accum=gemm.fast_accum)
    return gathered_matmul(gq, call.output_placement, operand, dtype, fast_accum=gemm.fast_accum)


def transposed_weight(call: LinearContext, w: Array, spec: QuantSpec, state: State, axes: GemmMeshAxes) -> Quantized:
    """Quantize the parameter w [K, N] for dgrad, before any gather."""
    inputs, outputs = axes_before_gather(call.weight_placement, axes.inputs, axes.outputs)
    return quantize_shard(w, spec, inputs, outputs, factor=factor_of(state, WEIGHT))


@_named
def wgrad(call: LinearContext, g: Array, gq: Quantized | None, saved: Array | Quantized, dtype: Any) -> Array:
    """Return the gradient of w, grad_weight.T [K, N], from the result of `saved_input`."""
    gemm = call.recipe.wgrad
    if gemm.b is None:
        g = all_gather_operand(g, call.output_placement)
        values = all_gather_operand(saved, call.input_placement)
        values = values.dequantize().astype(g.dtype) if isinstance(values, Quantized) else values
        return gemm_high_precision(transposed(values), g, dtype, axis=0)
    assert gq is not None
    assert isinstance(saved, Quantized)
    operand = saved.T if call.recipe.reuse.input else saved
    gathered, placement = "a", call.input_placement
    if call.output_placement is not None:
        gathered, placement = "b", call.output_placement
    along_k = None if placement is None else placement.T
    return contracted_matmul(operand, gq, along_k, gathered, dtype, fast_accum=gemm.fast_accum)


def gemm_high_precision(a: Array, b: Array, dtype: Any, bias: Array | None = None, axis: int = 1) -> Array:
    """Compute a [m, k] @ b [n, k].T + bias [n] for unquantized operands, accumulated in float32.

    With axis=0, b is [k, n]; XLA on a CPU would multiply float32 copies of a bfloat16 b.T.
    """
    wide = jnp.promote_types(a.dtype, b.dtype)
    contract = (((1,), (axis,)), ((), ()))
    y = lax.dot_general(a.astype(wide), b.astype(wide), contract, preferred_element_type=jnp.float32)
    y = fixed_gemm(y) if wide == jnp.bfloat16 else y
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(dtype)


def _require_unquantized(call: LinearContext, x: Array | Quantized) -> Array:
    if isinstance(x, Quantized):
        raise ValueError(
            f"{call.label}: recipe {call.recipe.name!r} needs this operand also in blocks other than those of "
            f"{x.spec}: pass it unquantized"
        )
    return x
