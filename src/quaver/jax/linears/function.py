"""`linear`: x @ w + bias with the operands of its three GEMMs quantized as a recipe says, as a differentiable function.

One custom_vjp around `quaver.jax.linears.gemms` serves every recipe. It saves the operands that the GEMMs consumed, at
one byte or half a byte per element, and returns the layer's next state as the gradient of its state.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from quaver.jax.inspection.inspector import recorder_of
from quaver.jax.linears import gemms, measuring
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
from quaver.jax.operations.ops import DTYPES, check_static_int
from quaver.jax.operations.sharding import (
    GemmMeshAxes,
    ShardedOperand,
    ShardPlacement,
    axes_of,
    gathered_array,
    gathered_leading_shape,
    gathered_shape,
    input_placement,
    output_placement,
    partition_spec_of,
    psum_like,
    scattered_leading_shape,
    shard_of_gradient,
    varying,
    weight_placement,
    with_auto_sharding,
    without_overlap,
)
from quaver.jax.state import buffers
from quaver.jax.state.buffers import State
from quaver.jax.state.context import recipe_in_force, state_reads_of
from quaver.recipes.spec import Recipe
from quaver.recipes.text import check_instance

# ---- which derivatives are supported; others raise an error ----
#
# A forward rule knows which arguments are differentiated. A quantized layer has one hand-written derivative. Rounding
# has no derivative, so a second derivative would silently treat the rounded values as constants.


def unwrapped(*parts: Any) -> tuple[list[Any], list[bool]]:
    """Return a forward rule's arguments as plain arrays, and which of them are differentiated."""
    perturbed = [any(p.perturbed for p in jax.tree.leaves(part, is_leaf=_is_primal)) for part in parts]
    return [jax.tree.map(lambda p: p.value, part, is_leaf=_is_primal) for part in parts], perturbed


def _is_primal(node: Any) -> bool:
    return hasattr(node, "perturbed")


def check_gradients(call: LinearContext, x: Any, w: Any, bias: Any, state: State, perturbed: list[bool]) -> Any:
    """Validate the requested gradients in a forward rule; return x, w, bias and state.

    Args:
        call: the call's context.
        x, w, bias, state: arguments of the layer.
        perturbed: which of these four are differentiated.
    Raises:
        ValueError: the gradient of a `Quantized` operand is requested, or the state is not differentiated, or several
            calls read the same state.
        NotImplementedError: raised later, if the returned arrays are differentiated again.
    """
    for what, operand, differentiated in (("x", x, perturbed[0]), ("w", w, perturbed[1])):
        if differentiated and isinstance(operand, Quantized):
            raise ValueError(
                f"{call.label}: the gradient of {what} is requested, but {what} is a Quantized, whose codes have "
                f"no gradient; give {what} as an array, or differentiate with respect to the other arguments only"
            )
    if call.recipe.stochastic:
        _check_noise_state(call, state, perturbed)
    if call.recipe.delayed is not None or call.recipe.stochastic:
        _check_state_gradient(call, perturbed)
    return forbid_second_derivative(call.label, (x, w, bias, state))


#: Advice on differentiating Flax modules with state, for error messages.
FLAX = (
    "In Flax NNX call quaver.jax.nnx.value_and_grad(loss)(model, ...) instead of nnx.value_and_grad; in Flax Linen "
    "differentiate with respect to all variables, as TrainState.create(params=variables, ...).apply_gradients takes "
    "them."
)


def _check_noise_state(call: LinearContext, state: State, perturbed: list[bool]) -> None:
    if "count" not in state:
        raise ValueError(
            f"{call.label}: recipe {call.recipe.name!r} rounds gradients stochastically and got no state, so every "
            "step would use the same noise; pass state=quaver.jax.state.init(recipe) and differentiate with "
            f"respect to it, or take the recipe with stochastic_rounding=False. {FLAX}"
        )
    if not any(perturbed[1:]):
        raise ValueError(
            f"{call.label}: only the gradient of x is computed under recipe {call.recipe.name!r}, which rounds "
            "stochastically and counts its noise in the state, so every step would use the same noise; "
            "differentiate with respect to x and the state, jax.grad(loss, argnums=(0, 1))(x, state), where the "
            "state's gradient is its next value, or use the recipe with stochastic_rounding=False"
        )


def _check_state_gradient(call: LinearContext, perturbed: list[bool]) -> None:
    trains = perturbed[1] or perturbed[2]
    if trains and not perturbed[3]:
        raise ValueError(
            f"{call.label}: gradients are taken under recipe {call.recipe.name!r}, but not with respect to the layer's "
            "state, so the next step would know nothing of this one; differentiate with respect to both, "
            "jax.value_and_grad(loss, argnums=(0, 1))(parameters, state): the state's gradient is its next value. "
            f"{FLAX} If the layer is to stay as it is, put jax.lax.stop_gradient around its weights, its bias and its "
            "state: the gradient of x alone reads a history and leaves it alone"
        )
    if perturbed[3] and call.state_reads.count > 1:
        raise ValueError(
            f"{call.label}: {call.state_reads.count} calls read the same state in one step, and autodiff would sum the "
            "states that they return; give each call a slice of "
            f"quaver.jax.state.share(state, {call.state_reads.count}). If only one of them runs, as with branches of "
            "jax.lax.cond, pass the state to the branches as an operand. A call that only reads the state takes "
            "jax.lax.stop_gradient of its weights, its bias and its state"
        )


# ---- linear ----

#: Checkpoint name of saved operands, for `jax.checkpoint_policies.save_only_these_names`.
SAVED_NAME = "quaver.quantized"


def linear(
    x: Array | Quantized,
    w: Array | Quantized,
    bias: Array | None = None,
    *,
    recipe: str | Recipe | None = None,
    state: State | None = None,
    dtype: Any = None,
    name: str = "linear",
    seed: int = 0,
    axes: GemmMeshAxes | None = None,
    gather_input: ShardedOperand | None = None,
    gather_weight: ShardedOperand | None = None,
    scatter_output: ShardedOperand | None = None,
) -> Array:
    """Compute x @ w + bias under a recipe: the argument, else the innermost `autocast`'s, else none.

    Args:
        x: [..., K] in float32, bfloat16 or float16, or a `Quantized` [T, K] with the spec of fprop's input.
        w: [K, N]; its gradient has its dtype. Or a `Quantized` [N, K] with the spec of fprop's weight.
        bias: [N], added in float32.
        recipe: a name or Recipe.
        state: state of this layer, from `quaver.jax.state.init`; its gradient is its next value. None for recipes
            without state, and for stochastic rounding if no gradients are taken.
        dtype: x is cast to it, and the output has it; None promotes x's and w's.
        name: name of the layer. Stochastic rounding uses the streams crc32("name.grad_output") and
            crc32("name.grad_output.T"), so names should be unique.
        seed: seed of stochastic rounding.
        axes: the mesh axes that shard the GEMMs, inside shard_map; None derives them from the array types
            (`quaver.jax.operations.sharding`).
        gather_input, gather_weight: all-gather x or w in quantized form (`quaver.jax.ShardedOperand`).
        scatter_output: reduce-scatter the output over a mesh axis that shards K, inside shard_map; backward gathers
            grad_output in quantized form. Not together with the gathers. `quaver.jax.inspect` does not measure it.
    Returns:
        [..., N]; with `scatter_output` of one shard. Without a recipe it is computed in dtype's own precision; float64
        is never quantized, with a warning.
    Raises:
        ValueError: shapes or dtypes that do not fit, a missing state, or gradients that do not include the state.
        TypeError: an argument is not an array.
    Exact: all codes, scales and states. Bounded: outputs and gradients, relative RMS 1e-6 in float32 of the same
        products in float64.
    """
    in_force = recipe_in_force(recipe)
    _check_types(axes, gather_input, gather_weight, name)
    label = name or "this layer"
    x, w = (a if isinstance(a, Quantized) else array(label, what, a) for what, a in (("x", x), ("w", w)))
    bias = None if bias is None else array(label, "bias", bias)
    check_static_int("seed", seed, "the steps' noise differs by the count in the state")
    placements = input_placement(gather_input, x), weight_placement(gather_weight, w)
    shape = _checked_shape(x, w, bias, label, placements[1])
    scattered = output_placement(scatter_output, shape[:-1], w.shape[0 if isinstance(w, Quantized) else 1])
    if scattered is not None and placements != (None, None):
        raise ValueError(f"{label}: scatter_output goes with no gather_input and no gather_weight; leave them out")
    dtype = _dtype(label, x, w, dtype)
    unquantized = in_force is None or not in_force.quantizes
    if unquantized or dtype not in DTYPES:
        if not unquantized:
            warn_unquantized(dtype)
        return high_precision(x, w, bias, dtype, placements, scattered)
    assert in_force is not None
    state = checked_state(label, state)
    buffers.check_state(state, in_force, label)
    recorder = None if scattered is not None else recorder_of(name)
    if recorder is not None:
        # Whole results are measured.
        placements = without_overlap(placements[0]), placements[1]
    call = LinearContext(in_force, dtype, name, seed, axes, *placements, scattered, state_reads_of(state), recorder)
    _check_bias(call, x, w, bias, state)

    def run_on_matrix(x: Any, w: Any, bias: Array | None, state: State) -> Array:
        rows = x if isinstance(x, Quantized) else x.astype(dtype).reshape(math.prod(shape[:-1]), shape[-1])
        y = _linear(call, rows, w, bias, state)
        leading = scattered_leading_shape(gathered_leading_shape(shape[:-1], placements[0]), scattered)
        return y if len(shape) == 2 else y.reshape(*leading, y.shape[-1])

    return with_auto_sharding(
        run_on_matrix, x, (*partition_spec_of(x)[:-1], partition_spec_of(w)[0 if isinstance(w, Quantized) else 1])
    )(x, w, bias, state)


def high_precision(
    x: Any,
    w: Any,
    bias: Array | None,
    dtype: Any,
    gathered: tuple[ShardPlacement | None, ShardPlacement | None] = (None, None),
    scattered: ShardPlacement | None = None,
) -> Array:
    """Compute x [..., K] @ w [K, N] + bias unquantized, as Flax's Dense does.

    Args:
        x, w, bias, dtype: as for `linear`.
        gathered: placements of the shards of x and w, which are gathered.
        scattered: placement of the shards of the output, which is reduce-scattered.
    """
    x = x.dequantize() if isinstance(x, Quantized) else x
    w = w.dequantize().T if isinstance(w, Quantized) else w
    x, w = (gathered_array(a, placement) for a, placement in zip((x, w), gathered, strict=True))
    y = lax.dot_general(x.astype(dtype), w.astype(dtype), (((x.ndim - 1,), (0,)), ((), ())))
    if scattered is not None:
        y = lax.psum_scatter(y, scattered.gather.axis, scatter_dimension=scattered.position, tiled=True)
    return y if bias is None else y + bias.astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(call: LinearContext, x: Any, w: Any, bias: Array | None, state: State) -> Array:
    """Differentiable core of `linear`: x [T, K] and w [K, N] to [T, N]."""
    state = buffers.rolled_and_checked(state, call.recipe)
    y, xq, wq = gemms.fprop(call, x, w, bias, state, _axes(call, x, w, state))
    if call.recorder is not None:
        call.recorder.report(call.name, measuring.measure_fprop(call, x, w, bias, xq, wq, y))
    return y


@jax.tree_util.register_static
@dataclass(frozen=True)
class _GemmSharding:
    """Mesh axes of the GEMMs as static data for backward."""

    axes: GemmMeshAxes


class _NeedsGrad(NamedTuple):
    """Which arrays need gradients."""

    input: bool
    weight: bool
    bias: bool


def _forward(call: LinearContext, x: Any, w: Any, bias: Any, state: Any) -> tuple[Array, Any]:
    (x, w, bias, state), perturbed = unwrapped(x, w, bias, state)
    argument_x, argument_w = x, w
    x, w, bias, state = check_gradients(call, x, w, bias, state, perturbed)
    if perturbed[3] and (call.recipe.delayed is not None or call.recipe.stochastic):
        state = _require_mapped_state(call, state, x, w)
    axes = _axes(call, x, w, state)
    needs = _NeedsGrad(*perturbed[:3])
    step_state = buffers.rolled_and_checked(state, call.recipe)
    y, xq, wq = gemms.fprop(call, x, w, bias, step_state, axes)
    # JAX may trace one forward for several sets of needed gradients and caches a single pytree structure. So the
    # residuals have the same structure for every set, and their shapes encode what was needed.
    input_serves_wgrad, weight_serves_dgrad = gemms.serves_wgrad(call.recipe), gemms.serves_dgrad(call.recipe)
    saved_x = _operand_to_save(
        needs.weight, x, argument_x, input_serves_wgrad, lambda: gemms.saved_input(call, x, xq, step_state, axes)
    )
    saved_w = _operand_to_save(needs.input, w, argument_w, weight_serves_dgrad, lambda: gemms.saved_weight(call, w, wq))
    amaxes = None
    if call.recipe.delayed is not None:
        assert xq is not None and wq is not None
        amaxes = xq.amax, wq.amax
    # Gradients have the parameters' dtypes; an empty array carries the dtype, and its type under shard_map.
    grad_types = [None if isinstance(p, Quantized) or p is None else without_elements(p) for p in (x, w, bias)]
    measured = None
    if call.recorder is not None:
        # Backward reports them too, because a forward that `jax.checkpoint` recomputes would count twice.
        measured = measuring.measure_fprop(call, x, w, bias, xq, wq, y), argument_x, argument_w
    needs_as_shape = jnp.zeros((*needs, 0), jnp.bool_)
    residuals = needs_as_shape, _GemmSharding(axes), saved_x, saved_w, grad_types, amaxes, step_state, measured
    return y, residuals


def _operand_to_save(needed: bool, operand: Any, argument: Any, serves: bool, make: Callable[[], Any]) -> Any:
    """Return an operand to save for backward, or a slice without elements if backward does not need it.

    The empty slice is batched under vmap like the operand. The result is None for an operand that was passed quantized
    and whose codes only fprop can use.

    Args:
        needed: True if backward needs the operand.
        operand: the operand as fprop used it.
        argument: the same as the forward rule received it. JAX neither copies nor stacks a residual that is an
            argument.
        serves: True if backward can use fprop's codes.
        make: function that returns what backward needs of the operand.
    """
    if not needed:
        unsupported = isinstance(operand, Quantized) and not serves
        return None if unsupported else jax.tree.map(without_elements, as_bytes(make()))
    saved = make()
    if isinstance(saved, Quantized):
        return checkpoint_name(as_bytes(saved), SAVED_NAME)
    return argument if saved is operand else saved


def _backward(call: LinearContext, saved: Any, g: Any) -> tuple[Any, Any, Any, Any]:
    needs_as_shape, sharding, saved_x, saved_w, (like_x, like_w, like_bias), amaxes, state, measured = saved
    axes, needs = sharding.axes, _NeedsGrad(*map(bool, needs_as_shape.shape[:3]))
    g, saved_x, saved_w = forbid_second_derivative(call.label, (g, saved_x, saved_w))
    saved_x, saved_w = as_codes(saved_x), as_codes(saved_w)
    gq, gt = gemms.quantized_gradient(call, g, state, axes, needs.input, needs.weight)
    grad_x = grad_w = grad_bias = own_x = own_w = None
    if needs.input:
        summed = axes.outputs or call.input_placement is not None or call.output_placement is not None
        own_x = gemms.dgrad(call, g, gq, saved_w, state, axes, jnp.float32 if summed else like_x.dtype)
        shard = own_x if call.rings_dgrad else shard_of_gradient(own_x, call.input_placement)
        grad_x = psum_like(shard, like_x).astype(like_x.dtype)
    if needs.weight:
        summed = axes.tokens or call.weight_placement is not None
        own_w = gemms.wgrad(call, g, gt, saved_x, jnp.float32 if summed else like_w.dtype)
        grad_w = psum_like(shard_of_gradient(own_w, call.weight_placement), like_w).astype(like_w.dtype)
    if needs.bias:
        grad_bias = psum_like(g.sum(0, dtype=jnp.float32), like_bias).astype(like_bias.dtype)
    if call.recorder is not None:
        measurements, x, w = measured
        if own_x is not None:
            measuring.measure_dgrad(call, measurements, w, g, gq, own_x, state, axes)
        if own_w is not None:
            measuring.measure_wgrad(call, measurements, x, saved_x, g, gq, gt, own_w)
        call.recorder.report(call.name, measurements)
    return grad_x, grad_w, grad_bias, next_state(call, state, amaxes, gq, gt)


def next_state(call: LinearContext, state: State, amaxes: Any, gq: Any, gt: Any) -> State:
    """Return the gradient of the state, which is the layer's next state."""
    after = dict(state)
    if call.recipe.delayed is not None:
        seen = buffers.amaxes_of(state, *amaxes, None if gq is None else gq.amax)
        after = buffers.record(after, seen, call.recipe)
    if call.recipe.stochastic:
        own = gq, None if call.recipe.reuse.grad_output else gt
        drawn = [q is not None and q.spec.rounding == "stochastic" for q in own]
        after["count"] = after["count"] + jnp.asarray(drawn, jnp.float32)
    return after


_linear.defvjp(_forward, _backward, symbolic_zeros=True)


def _axes(call: LinearContext, x: Any, w: Any, state: State) -> GemmMeshAxes:
    if call.axes is not None:
        return call.axes
    gathered = [
        None if placements is None else placements.gather.axis
        for placements in (call.input_placement, call.weight_placement)
    ]
    return axes_of(x, w, state, gathered[0], gathered[1])


def _check_bias(call: LinearContext, x: Any, w: Any, bias: Array | None, state: State) -> None:
    scattered = None if call.output_placement is None else call.output_placement.gather.axis
    inputs = () if bias is None else _axes(call, x, w, state).inputs
    cut = tuple(axis for axis in inputs if axis not in varying(bias) and axis != scattered)
    if cut:
        raise ValueError(
            f"{call.label}: mesh axes {cut} shard K, so each shard computes a part of the sum, and the bias would "
            "be added on every shard; add it after jax.lax.psum, or give axes= if they do not shard K"
        )


def _require_mapped_state(call: LinearContext, state: State, *operands: Any) -> State:
    """Return the state; raise under a vmap that maps the operands but not the state, whose gradients would be
    summed.
    """

    @custom_vmap
    def same(state: State, operands: Any) -> State:
        return state

    @same.def_vmap
    def rule(axis_size: int, mapped: Any, state: State, operands: Any) -> tuple[State, Any]:
        if any(jax.tree.leaves(mapped[1])) and not all(jax.tree.leaves(mapped[0])):
            raise ValueError(
                f"{call.label}: a vmap over {axis_size} slices shares one state, and autodiff would sum the states "
                f"that they return; also map quaver.jax.state.share(state, {axis_size})"
            )
        return state, mapped[0]

    return same(state, operands)


def _checked_shape(x: Any, w: Any, bias: Any, name: str, weight: ShardPlacement | None) -> tuple[int, ...]:
    """Return the shape of x after checking that all shapes fit."""
    shape = tuple(x.shape)
    if len(w.shape) != 2:
        raise ValueError(f"{name}: w has shape {tuple(w.shape)}; give a matrix [K, N], or use quaver.jax.dot_general")
    k, n = gathered_shape(w.shape[::-1] if isinstance(w, Quantized) else w.shape, weight)
    if not shape or shape[-1] != k:
        raise ValueError(f"{name}: x has shape {shape} and w is [K, N] = [{k}, {n}]; the last axis of x must be {k}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)} and w has {n} outputs; give a bias [{n}]")
    return shape


def _check_types(axes: Any, gather_input: Any, gather_weight: Any, name: Any) -> None:
    check_instance("linear", "name", name, str, "'layers.0.mlp'")
    if axes is not None:
        check_instance(name, "axes", axes, GemmMeshAxes, "quaver.jax.operations.sharding.GemmMeshAxes(tokens=('dp',))")
    for what, gather in (("gather_input", gather_input), ("gather_weight", gather_weight)):
        if gather is not None:
            check_instance(
                name, what, gather, ShardedOperand, "quaver.jax.ShardedOperand('fsdp', PartitionSpec('fsdp', None))"
            )


def _dtype(label: str, x: Any, w: Any, dtype: Any) -> Any:
    if dtype is None:
        own = [a.dtype for a in (x, w) if not isinstance(a, Quantized)]
        dtype = jnp.result_type(*own) if own else jnp.float32
    return checked_float_dtype(label, dtype)


def warn_unquantized(dtype: Any) -> None:
    warnings.warn(
        f"{dtype} is computed in high precision: recipes quantize float32, bfloat16 and float16", stacklevel=3
    )
