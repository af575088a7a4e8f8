"""`grouped_dot`: one quantized GEMM per expert, for rows of x that are grouped by expert.

    fprop   y[t]      = x[t] @ w[e]                      token t belongs to expert e
    dgrad   grad_x[t] = grad_y[t] @ w[e].T
    wgrad   grad_w[e] = sum of x[t] ⊗ grad_y[t] over its tokens

The tokens of all experts form one operand; each expert's weight is an operand of its own. Blocks or rotations along the
tokens start anew for each expert. GEMMs are emulated: dequantized operands are multiplied. On a CPU this happens tile
by tile with one expert per tile, because `jax.lax.ragged_dot` would multiply every token by every expert there. On CUDA
it uses `jax.lax.ragged_dot`.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import sequential_vmap

from quaver.jax.inspection.inspector import Measurements, recorder_of
from quaver.jax.linears.function import check_gradients, next_state, unwrapped, warn_unquantized
from quaver.jax.linears.gemms import LinearContext
from quaver.jax.numerics.quantized import (
    Quantized,
    array,
    as_bytes,
    as_codes,
    checked_float_dtype,
    checked_state,
    without_elements,
)
from quaver.jax.numerics.rounding import forbid_second_derivative
from quaver.jax.operations.native import decoded, scaled
from quaver.jax.operations.ops import DTYPES, check_static_int, quantize
from quaver.jax.operations.sharding import ordered, psum_like, varying
from quaver.jax.state import buffers
from quaver.jax.state.buffers import GRAD_OUTPUT, INPUT, WEIGHT, State, factor_of
from quaver.jax.state.context import recipe_in_force, state_reads_of
from quaver.recipes.spec import QuantSpec, Recipe
from quaver.recipes.text import check_instance

#: Rows per tile if experts have many tokens, and if they have few.
TILE, SMALL_TILE = 128, 32


def grouped_dot(
    x: Array,
    w: Array,
    group_sizes: Array,
    *,
    recipe: str | Recipe | None = None,
    state: State | None = None,
    dtype: Any = None,
    name: str = "grouped",
    seed: int = 0,
) -> Array:
    """Compute y[t] = x[t] @ w[expert of t] with operands quantized as the recipe says, like `jax.lax.ragged_dot`.

    Args:
        x: [T, K], the tokens of expert 0 first, then those of expert 1, and so on.
        w: [experts, K, N]; its gradient has its dtype.
        group_sizes: int32 [experts], number of tokens per expert; 0 is allowed. Tokens beyond their sum give zeros.
        recipe, state, dtype, name, seed: as for `quaver.jax.linear`; all experts share one state.
    Returns:
        [T, N]. Inside shard_map each shard's tokens are an operand of their own.
    Raises:
        ValueError: shapes that do not fit, or a state that `linear` rejects.
        TypeError: an argument is not an array.
    Exact: codes and scales. Bounded: outputs and gradients, relative RMS 1e-6 in float32 of the same products in
        float64.
    """
    in_force = recipe_in_force(recipe)
    check_instance("grouped_dot", "name", name, str, "'experts'")
    x, w, group_sizes = (array(name, k, a) for k, a in (("x", x), ("w", w), ("group_sizes", group_sizes)))
    if x.ndim != 2 or w.ndim != 3 or group_sizes.shape != w.shape[:1] or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"{name}: x is [T, K], w [experts, K, N] and group_sizes [experts]; these are {x.shape}, {w.shape} and "
            f"{group_sizes.shape}"
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"{name}: group_sizes count tokens and are {group_sizes.dtype}; convert them to int32")
    check_static_int("seed", seed, "the steps' noise differs by the count in the state")
    dtype = checked_float_dtype(name, jnp.result_type(x, w) if dtype is None else dtype)
    quantizes = in_force is not None and in_force.quantizes
    if quantizes and dtype not in DTYPES:
        warn_unquantized(dtype)
    # Empty operands have no codes.
    nothing = 0 in (*x.shape, *w.shape) and not state
    if in_force is None or not quantizes or dtype not in DTYPES or nothing:
        high = x.astype(dtype), w.astype(dtype)
        return lax.ragged_dot(*high, group_sizes, preferred_element_type=jnp.float32).astype(dtype)
    state = checked_state(name, state)
    buffers.check_state(state, in_force, name)
    call = LinearContext(in_force, dtype, name, seed, None, None, None, None, state_reads_of(state), recorder_of(name))
    return _grouped(call, x.astype(dtype), w, group_sizes, state)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(call: LinearContext, x: Array, w: Array, sizes: Array, state: State) -> Array:
    layout, state = _layout(call.recipe, x, sizes), buffers.rolled_and_checked(state, call.recipe)
    y, xq, wq = _fprop(call, x, w, layout, state)
    if call.recorder is not None:
        call.recorder.report(call.name, _measured_fprop(x, w, sizes, layout, xq, wq, y))
    return y


def _fprop(call: LinearContext, x: Array, w: Array, layout: "GroupedLayout", state: State) -> tuple[Array, Any, Any]:
    """Return the output [T, N], and the operands input [T, K] and weights [experts, N, K]."""
    gemm = call.recipe.fprop
    xq = x if gemm.a is None else quantize(x, gemm.a, factor=factor_of(state, INPUT))
    wq = _experts(jnp.swapaxes(w, 1, 2), gemm.b, factor_of(state, WEIGHT))
    with call.scope("fprop"):
        return _matmul_per_token(xq, wq, layout).astype(call.dtype), xq, wq


def _forward(call: LinearContext, x: Any, w: Any, sizes: Any, state: Any) -> tuple[Array, Any]:
    (x, w, sizes, state), (perturbs_x, perturbs_w, _, perturbs_state) = unwrapped(x, w, sizes, state)
    perturbed, argument_w = [perturbs_x, perturbs_w, False, perturbs_state], w
    x, w, _, state = check_gradients(call, x, w, None, state, perturbed)
    recipe, state = call.recipe, buffers.rolled_and_checked(state, call.recipe)
    layout = _layout(recipe, x, sizes)
    y, xq, wq = _fprop(call, x, w, layout, state)
    measured = None
    if call.recorder is not None:
        # Backward reports them too, because a forward that `jax.checkpoint` recomputes would count twice.
        measured = _measured_fprop(x, w, sizes, layout, xq, wq, y), x, argument_w, sizes
    if recipe.dequantized_backward:
        # Dequantize here: tokens are arranged in tiles before wgrad, and codes could not be.
        x = x if recipe.wgrad.b is not None else xq.dequantize().astype(x.dtype)
        values = jnp.swapaxes(jax.vmap(lambda q: q.dequantize())(wq), 1, 2).astype(w.dtype)
        argument_w = argument_w if recipe.dgrad.b is not None else values
    saved_x = xq if recipe.reuse.input else _along_tokens(x, recipe.wgrad.b, layout, factor=factor_of(state, INPUT))
    # JAX neither copies nor stacks a residual that is an argument.
    saved_w = wq if recipe.reuse.weight else argument_w
    amaxes = None if recipe.delayed is None else (xq.amax, wq.amax.max())
    like = without_elements(x), without_elements(w)
    return y, (as_bytes(saved_x), as_bytes(saved_w), layout, amaxes, state, like, measured)


def _backward(call: LinearContext, saved: Any, g: Array) -> tuple[Any, ...]:
    saved_x, saved_w, layout, amaxes, state, (like_x, like_w), measured = saved
    recipe, plan, factor = call.recipe, call.recipe.reuse, factor_of(state, GRAD_OUTPUT)
    g, saved_x, saved_w = forbid_second_derivative(call.label, (g, saved_x, saved_w))
    saved_x, saved_w = as_codes(saved_x), as_codes(saved_w)
    if "count" in state:
        g = buffers.unless_overrun(g, state["count"].max())
    gq: Any = g if recipe.dgrad.a is None else quantize(g, recipe.dgrad.a, **_noise(call, state, 0), factor=factor)
    weights = (
        jax.vmap(lambda q: q.T)(saved_w) if plan.weight else _experts(saved_w, recipe.dgrad.b, factor_of(state, WEIGHT))
    )
    with call.scope("dgrad"):
        grad_x = psum_like(_matmul_per_token(gq, weights, layout), like_x).astype(like_x.dtype)
    gt = gq if plan.grad_output else _along_tokens(g, recipe.wgrad.a, layout, factor=factor, **_noise(call, state, 1))
    tokens = _columns_in_tiles(saved_x.T, layout) if plan.input else _operand(saved_x)
    gradients = _columns_in_tiles(gt.T, layout) if plan.grad_output else _operand(gt)
    with call.scope("wgrad"):
        grad_w = psum_like(_sum_over_tokens(tokens, gradients, layout), like_w).astype(like_w.dtype)
    if call.recorder is not None:
        measurements = _measured_backward(call, measured, layout, g, gq, weights, gt, saved_x, grad_x, grad_w)
        call.recorder.report(call.name, measurements)
    return grad_x, grad_w, None, next_state(call, state, amaxes, gq, gt)


_grouped.defvjp(_forward, _backward, symbolic_zeros=True)


def _measured_fprop(
    x: Array, w: Array, sizes: Array, layout: "GroupedLayout", xq: Any, wq: Any, y: Array
) -> Measurements:
    """Measure fprop for `quaver.jax.inspect`."""
    measured, weights = Measurements(), jnp.swapaxes(w, 1, 2)
    if isinstance(xq, Quantized):
        measured.operand("fprop", "input", x, xq)
    if isinstance(wq, Quantized):
        measured.operand("fprop", "weight", weights, wq)
    with jax.default_matmul_precision("highest"):
        exact = _matmul_per_token(x.astype(jnp.float32), weights.astype(jnp.float32), layout)
    measured.results("fprop", exact, y, sizes)
    return measured


def _measured_backward(
    call: LinearContext,
    saved: Any,
    layout: "GroupedLayout",
    g: Array,
    gq: Any,
    weights: Any,
    gt: Any,
    tokens: Any,
    grad_x: Array,
    grad_w: Array,
) -> Measurements:
    """Measure dgrad and wgrad for `quaver.jax.inspect`, and return fprop's measurements too.

    Args:
        saved: fprop's measurements, x, w and the experts' numbers of tokens.
        gq, weights: operands of dgrad.
        gt, tokens: operands of wgrad, in tiles unless the other GEMMs read the same codes.
    """
    measured, x, w, sizes = saved
    reuse = call.recipe.reuse
    if isinstance(gq, Quantized):
        measured.operand("dgrad", "grad_output", g, gq)
    if reuse.weight:
        measured.share("weight", "fprop", "dgrad")
    elif isinstance(weights, Quantized):
        measured.operand("dgrad", "weight", w, weights, transposed=True)
    in_tiles = {
        "grad_output": (g, gt, reuse.grad_output and "dgrad"),
        "input": (x, tokens, reuse.input and "fprop"),
    }
    for name, (values, q, shared) in in_tiles.items():
        if shared:
            measured.share(name, shared, "wgrad")
        elif isinstance(q, Quantized):
            tiles = _take(values, layout.token).T
            measured.operand("wgrad", name, tiles, q, transposed=True, rows_and_columns=values.T)
    wide = [each.astype(jnp.float32) for each in (x, w, g)]
    with jax.default_matmul_precision("highest"):
        measured.results("dgrad", _matmul_per_token(wide[2], wide[1], layout), grad_x, sizes)
        a, b = (_operand(_along_tokens(each, None, layout)) for each in (wide[2], wide[0]))
        measured.results("wgrad", _sum_over_tokens(a, b, layout), jnp.swapaxes(grad_w, 1, 2), sizes)
    return measured


def _noise(call: LinearContext, state: State, which: int) -> dict[str, Any]:
    """Return the stochastic-rounding stream of grad_output (0) or of its transpose (1)."""
    if "count" not in state:
        return {}
    operand = ("grad_output", "grad_output.T")[which]
    return {"seed": call.seed, "tensor_id": call.tensor_id(operand), "count": state["count"][which]}


def _experts(w: Array, spec: QuantSpec | None, factor: Array | None) -> Any:
    """Quantize each expert's weight [experts, rows, k] on its own."""
    return w if spec is None else jax.vmap(lambda one: quantize(one, spec, factor=factor))(w)


def _along_tokens(x: Array, spec: QuantSpec | None, layout: "GroupedLayout", **options: Any) -> Any:
    """Arrange x [T, features] in tiles and quantize it as wgrad's operand [features, slots]."""
    transposed = _take(x, layout.token).T
    return transposed if spec is None else quantize(transposed, spec, **options)


class GroupedLayout(NamedTuple):
    """Assignment of tokens to slots in tiles of one expert each; some slots are empty."""

    #: int32 [slots]: token of each slot, T for an empty one.
    token: Array
    #: int32 [T]: slot of each token; the number of slots for a token without expert.
    slot: Array
    #: int32 [tiles]: expert of each tile.
    expert: Array
    #: int32 [experts]: number of slots per expert.
    sizes: Array


def _layout(recipe: Recipe, x: Array, sizes: Array) -> GroupedLayout:
    rows, experts = x.shape[0], sizes.shape[0]
    tile = TILE if rows >= TILE * experts else SMALL_TILE
    for spec in (recipe.wgrad.a, recipe.wgrad.b):
        if spec is not None:
            tile = math.lcm(tile, spec.block[1] or 1, 16 if spec.hadamard else 1)
    tiles = rows // tile + experts
    sizes = sizes.astype(jnp.int32)
    filled = -(-sizes // tile)
    last, first_token = jnp.cumsum(filled), jnp.cumsum(sizes) - sizes
    first_slot = (last - filled) * tile
    at = jnp.arange(tiles, dtype=jnp.int32)
    # jax 0.10's searchsorted fails inside jax.shard_map over some axes of a mesh.
    expert = jnp.minimum((last <= at[:, None]).sum(1, dtype=jnp.int32), experts - 1)
    slots = jnp.arange(tiles * tile, dtype=jnp.int32)
    owner = jnp.repeat(expert, tile, total_repeat_length=tiles * tile)
    within = slots - first_slot[owner]
    token = jnp.where(within < sizes[owner], first_token[owner] + within, rows)
    slot = jnp.full(rows, tiles * tile, jnp.int32).at[token].set(slots, mode="drop")
    return GroupedLayout(token, slot, expert, filled * tile)


def _take(x: Array, index: Array, axis: int = 0) -> Array:
    """Gather along an axis; zeros where the index is out of range."""
    if not x.shape[axis]:
        return jnp.zeros((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]), x.dtype)
    return jnp.take(x, index, axis=axis, mode="fill", fill_value=0)


def _operand(q: Any) -> tuple[Array, Array]:
    """Return the values [rows, k] of an operand and the factor of its products, [rows, 1] or [1, 1]."""
    return decoded(q.with_k_last()) if isinstance(q, Quantized) else (q, jnp.ones((1, 1), jnp.float32))


def _columns_in_tiles(q: Any, layout: GroupedLayout) -> tuple[Array, Array]:
    """Return an operand [features, T] with its columns arranged in tiles, and its factor."""
    values, scale = _operand(q)
    return _take(values, layout.token, 1), scale


def _matmul_per_token(a: Any, b: Any, layout: GroupedLayout) -> Array:
    """Multiply each row of a [T, k] by its expert's matrix [n, k] transposed: float32 [T, n]."""
    (x, s), (w, t) = _operand(a), jax.vmap(_operand)(b)
    wide = jnp.promote_types(x.dtype, w.dtype)
    tiles = layout.expert.shape[0]
    x = _take(x, layout.token).astype(wide)
    y = lax.platform_dependent(x, w.astype(wide), layout, cuda=_rows_ragged, default=_rows_tiled)
    s = (_take(s, layout.token) if s.shape[0] > 1 else s).reshape(tiles if s.shape[0] > 1 else 1, -1, 1)
    y = scaled(y.reshape(tiles, -1, y.shape[1]), s, jnp.swapaxes(t, 1, 2)[layout.expert])
    return _take(y.reshape(-1, y.shape[2]), layout.slot)


def _sum_over_tokens(a: tuple[Array, Array], b: tuple[Array, Array], layout: GroupedLayout) -> Array:
    """Sum a [m, slots] times b [n, slots] transposed over each expert's slots: float32 [experts, m, n]."""
    (x, s), (g, t) = a, b
    wide = jnp.promote_types(x.dtype, g.dtype)
    y = lax.platform_dependent(x.astype(wide), g.astype(wide), layout, cuda=_tokens_ragged, default=_tokens_tiled)
    return scaled(y, lax.expand_dims(s, (0,)), lax.expand_dims(t.T, (0,)))


def _rows_tiled(x: Array, w: Array, layout: GroupedLayout) -> Array:
    def one(tile: tuple[Array, Array]) -> Array:
        return lax.dot_general(tile[0], w[tile[1]], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    return lax.map(one, (x.reshape(layout.expert.shape[0], -1, x.shape[1]), layout.expert)).reshape(
        x.shape[0], w.shape[1]
    )


@sequential_vmap
def _rows_ragged(x: Array, w: Array, layout: GroupedLayout) -> Array:
    return lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), layout.sizes, preferred_element_type=jnp.float32)


def _tokens_tiled(x: Array, g: Array, layout: GroupedLayout) -> Array:
    tiles = layout.expert.shape[0]

    def add(sums: Array, tile: tuple[Array, ...]) -> tuple[Array, None]:
        expert, a, b = tile
        y = lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return sums.at[expert].add(y), None

    split = (jnp.swapaxes(z.reshape(z.shape[0], tiles, -1), 0, 1) for z in (x, g))
    start = jnp.zeros((layout.sizes.shape[0], x.shape[0], g.shape[0]), jnp.float32)
    axes = ordered(varying(x) | varying(g) | varying(layout.expert))
    start = lax.pcast(start, axes, to="varying") if axes else start
    return lax.scan(add, start, (layout.expert, *split))[0]


@sequential_vmap
def _tokens_ragged(x: Array, g: Array, layout: GroupedLayout) -> Array:
    contract = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [1], [])
    return lax.ragged_dot_general(x, g, layout.sizes, contract, preferred_element_type=jnp.float32)
