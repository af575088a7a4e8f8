"""Measurements of a linear layer's GEMMs in the sampled steps of `quaver.jax.inspect`.

An operand is compared with its values before quantization, and a result with the product of both. One that the caller
passed as a `Quantized` has no other values, so neither it nor its GEMMs are measured. A GEMM whose operand is gathered
from other devices is not measured. Inside shard_map each shard measures its own GEMM, before sums over shards.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from quaver.jax.inspection.inspector import Measurements
from quaver.jax.linears import gemms
from quaver.jax.linears.gemms import LinearContext
from quaver.jax.numerics.quantized import Quantized
from quaver.jax.operations.sharding import GemmMeshAxes
from quaver.jax.state.buffers import State


def measure_fprop(
    call: LinearContext, x: Any, w: Any, bias: Array | None, xq: Quantized | None, wq: Quantized | None, y: Array
) -> Measurements:
    """Measure fprop's operands x [T, K] and w [K, N] and its result y [T, N]."""
    measured = Measurements()
    if xq is not None and not isinstance(x, Quantized):
        measured.operand("fprop", "input", x, xq)
    if wq is not None and not isinstance(w, Quantized):
        measured.operand("fprop", "weight", w.T, wq)
    if _has_both(call, x, w):
        exact = _exact(x, w)
        measured.result("fprop", exact if bias is None else exact + bias.astype(jnp.float32), y)
    return measured


def measure_dgrad(
    call: LinearContext,
    measured: Measurements,
    w: Any,
    g: Array,
    gq: Quantized | None,
    grad_x: Array,
    state: State,
    axes: GemmMeshAxes,
) -> None:
    """Measure dgrad's operands g [T, N] and w [K, N] and its result grad_x [T, K]."""
    spec = call.recipe.dgrad.b
    if gq is not None:
        measured.operand("dgrad", "grad_output", g, gq)
    if isinstance(w, Quantized):
        return
    if call.recipe.reuse.weight:
        measured.share("weight", "fprop", "dgrad")
    elif spec is not None:
        # The compiler merges this with the same quantization in dgrad.
        q = gemms.transposed_weight(call, w, spec, state, axes)
        measured.operand("dgrad", "weight", w, q, transposed=True)
    if call.weight_placement is None:
        measured.result("dgrad", _exact(g, w.T), grad_x)


def measure_wgrad(
    call: LinearContext,
    measured: Measurements,
    x: Any,
    saved_x: Any,
    g: Array,
    gq: Quantized | None,
    gt: Quantized | None,
    grad_w: Array,
) -> None:
    """Measure wgrad's operands g.T [N, T] and x.T [K, T] and its result grad_w [K, N]."""
    recipe = call.recipe
    if recipe.reuse.grad_output and gq is not None:
        if not measured.share("grad_output", "dgrad", "wgrad"):
            measured.operand("wgrad", "grad_output", g, gq)
    elif gt is not None:
        measured.operand("wgrad", "grad_output", g.T, gt, transposed=True)
    if isinstance(x, Quantized):
        return
    if recipe.reuse.input:
        measured.share("input", "fprop", "wgrad")
    elif recipe.wgrad.b is not None:
        measured.operand("wgrad", "input", x.T, saved_x, transposed=True)
    if call.input_placement is None:
        measured.result("wgrad", _exact(g.T, x), grad_w.T)


def _has_both(call: LinearContext, x: Any, w: Any) -> bool:
    gathered = call.input_placement is not None or call.weight_placement is not None
    return not (gathered or isinstance(x, Quantized) or isinstance(w, Quantized))


def _exact(a: Array, b: Array) -> Array:
    """Return a [m, k] @ b [k, n] in float32."""
    return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=lax.Precision.HIGHEST)
