"""State that recipes keep between steps, as plain pytrees: amax histories, and counts of stochastic roundings.

The state of one linear layer is a dict of float32 arrays:

    delayed scaling       {"history": [length, 3], "factor": [3]}    columns: input, weight, grad_output
    stochastic rounding   {"count": [2]}                             quantizations of grad_output and of its transpose
    every other recipe    {}

The gradient of a loss with respect to a state *is* the next state ("overwrite with gradient"), because only backward
knows the amax of grad_output. So a step is one `jax.value_and_grad` over parameters and state. The returned state
replaces the old one; it must not be added, clipped or averaged. Autodiff sums the gradients of an array that is used
twice. So use `share` for a state that several calls read in one step, and `merge` for the states of micro-batches.

Row 0 of a returned history is 0, or -0 in a column that recorded nothing, which `merge` relies on.
Source: overwrite-with-gradient collections of flax and Transformer Engine; the history window is
`quaver.reference.operations`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver import recipes
from quaver.jax.numerics.quantized import array, where
from quaver.jax.numerics.rounding import forbid_second_derivative, two_to_the
from quaver.jax.numerics.scaling import encode_factor, exponent
from quaver.jax.operations.ops import check_static_int
from quaver.jax.operations.sharding import pmax_like
from quaver.jax.state.context import StateReads, state_reads_of
from quaver.recipes.spec import QuantSpec, Recipe
from quaver.reference.numerics import FACTOR_EXPONENTS, FLT_MAX

State = dict[str, Array]

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2

#: float32 represents every integer up to here.
MOST_COUNTED = 2**24


def init(recipe: str | Recipe | None, uses: int = 1) -> State:
    """Return the state of one layer before its first step; {} for a recipe without state.

    Args:
        recipe: name, Recipe, or None for high precision.
        uses: number of calls of the layer in one step, for `use`; above 1, every array has a leading axis of this
            length.
    """
    if recipe is None:
        return {}
    check_static_int("uses", uses, "count the calls where the program is written")
    if uses < 1:
        raise ValueError(f"uses is {uses}; give the number of calls in one step, 1 or more")
    recipe = recipes.get(recipe)
    state: State = {}
    if recipe.delayed is not None:
        state["history"] = jnp.zeros((recipe.delayed.length, 3), jnp.float32)
        state["factor"] = jnp.zeros(3, jnp.float32)
    if recipe.stochastic:
        state["count"] = jnp.zeros(2, jnp.float32)
    return state if uses == 1 else {name: jnp.stack([leaf] * uses) for name, leaf in state.items()}


def columns(recipe: Recipe) -> tuple[QuantSpec, QuantSpec, QuantSpec]:
    """Return the specs of the three columns of a delayed recipe's history."""
    return recipe.history_specs


def factor_of(state: State, column: int) -> Array | None:
    """Return the encode factor of a column; None if the state has no history."""
    return lax.index_in_dim(state["factor"], column, keepdims=False) if "factor" in state else None


def roll(state: State, recipe: Recipe) -> State:
    """End a step: move row 0 into each window and update the factors; a column with 0 in row 0 is unchanged.

    Exact: `quaver.reference.operations.roll` column by column.
    """
    if recipe.delayed is None:
        return state
    history, factor = state["history"], state["factor"]
    newest = lax.slice_in_dim(history, 0, 1)
    top = history.max(0) if recipe.delayed.algorithm == "max" else newest.reshape(3)
    e = _factors(top, recipe)
    rolled = lax.concatenate(
        [lax.full_like(newest, 0), lax.slice_in_dim(history, min(2, len(history)), None), newest], 0
    )
    recorded = lax.gt(newest, np.float32(0))
    rolled = where(recorded, lax.slice_in_dim(rolled, 0, len(history)), history)
    return state | {"history": rolled, "factor": where(recorded.reshape(3), e, factor)}


def rolled_and_checked(state: State, recipe: Recipe) -> State:
    """Return the state as a step uses it.

    A state left unrolled by another program is rolled. A factor that cannot follow from its window becomes NaN, so that
    states that were summed, averaged or clipped show up in the loss.
    """
    if recipe.delayed is None:
        return state
    state = roll(state, recipe)
    history, factor = state["history"], state["factor"]
    top = history.max(0) if recipe.delayed.algorithm == "max" else lax.index_in_dim(history, -1, keepdims=False)
    # Values that have left the window can only have made the factor smaller. A factor that is not a power of two may be
    # off by an ulp.
    larger = lax.gt(factor, lax.mul(_factors(top, recipe), np.float32(1.5)))
    wrong = lax.bitwise_and(lax.gt(top, np.float32(0)), larger)
    if all(spec.power_of_two for spec in columns(recipe)):
        mantissa = lax.bitwise_and(lax.bitcast_convert_type(factor, jnp.int32), np.int32(0x7FFFFF))
        wrong = lax.bitwise_or(wrong, lax.ne(mantissa, np.int32(0)))
    return state | {"factor": where(wrong, jnp.nan, factor)}


def amaxes_of(state: State, *amaxes: Array | None) -> Array:
    """Return the amaxes of input, weight and grad_output as float32 [3], 0 for operands that were not quantized.

    If the state is the same on all shards, so is the result.
    """
    provided = [np.zeros(1, np.float32) if a is None else a.reshape(1) for a in amaxes]
    return pmax_like(lax.concatenate(provided, 0), state["factor"])


def record(state: State, amaxes: Array, recipe: Recipe) -> State:
    """Return the next state: the finite ones of a step's amaxes [3] rolled into the windows."""
    before = lax.index_in_dim(state["history"], 0, keepdims=False)
    newest = where(lax.is_finite(amaxes), lax.max(before, amaxes), before)
    rolled = roll(state | {"history": _with_row_0(state["history"], newest)}, recipe)
    # A negative zero in row 0 marks a column that recorded nothing.
    row = where(lax.gt(newest, np.float32(0)), 0, lax.full_like(newest, -0.0))
    return rolled | {"history": _with_row_0(rolled["history"], row)}


def _with_row_0(history: Array, row: Array) -> Array:
    return lax.concatenate([row.reshape(1, 3), lax.slice_in_dim(history, 1, None)], 0)


def _factors(amax: Array, recipe: Recipe) -> Array:
    """Return the encode factors for the windows' amaxes [3]."""
    assert recipe.delayed is not None
    specs = columns(recipe)
    e = _factor(amax, specs[0], recipe.delayed.margin)
    for i, spec in enumerate(specs):
        if spec != specs[0]:
            e = lax.select(np.arange(3) == i, _factor(amax, spec, recipe.delayed.margin), e)
    return e


def _factor(amax: Array, spec: QuantSpec, margin: int) -> Array:
    """Return one encode factor, as `quaver.reference.operations.factor_from`."""
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    if spec.power_of_two:
        p = lax.sub(exponent(bits, spec.format.max), np.int32(margin))
        return two_to_the(lax.clamp(np.int32(FACTOR_EXPONENTS[0]), p, np.int32(FACTOR_EXPONENTS[1])))
    # Apply the margin in two halves, each of which float32 can represent.
    half = margin // 2
    e = lax.optimization_barrier(lax.mul(encode_factor(bits, spec.format, False), np.float32(2.0**-half)))
    e = lax.mul(e, np.float32(2.0 ** -(margin - half)))
    return lax.clamp(np.finfo(np.float32).tiny, e, np.float32(FLT_MAX))


def unless_overrun(x: Array, count: Array) -> Array:
    """Return x, or NaN if a count has reached float32's limit, where every step would repeat the same noise."""
    return where(lax.le(count, np.float32(MOST_COUNTED)), x, jnp.nan)


def is_state(node: Any) -> bool:
    """Return True if a node of a pytree is the state of one layer: a dict with exactly the keys above."""
    return isinstance(node, dict) and set(node) in ({"history", "factor"}, {"count"}, {"history", "factor", "count"})


def split(tree: Any) -> tuple[Any, Any]:
    """Separate the states from a pytree of parameters or gradients, for an optimizer or for clipping.

    Returns:
        Two trees of the same structure: the rest with None for every state, and the states with None for every other
        leaf. `join` recombines them.
    """
    rest = jax.tree.map(lambda node: None if is_state(node) else node, tree, is_leaf=is_state)
    states = jax.tree.map(lambda node: node if is_state(node) else None, tree, is_leaf=is_state)
    return rest, states


def join(rest: Any, states: Any) -> Any:
    """Recombine the trees of `split`: each leaf comes from the tree in which it is not None."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, rest, states, is_leaf=lambda node: node is None or is_state(node)
    )


def per_layer(function: Callable[..., State], *trees: Any) -> Any:
    """Apply a function of layer states to trees of them.

    Raises:
        ValueError: a tree contains something else, or the structures differ.
    """
    layers = [_layers(tree) for tree in trees]
    if any(other != layers[0] for other in layers):
        raise ValueError(
            "trees of layer states differ in their layers, or in the keys of their states; give trees of the same "
            "layers"
        )
    return jax.tree.map(function, *trees, is_leaf=is_state)


def _layers(tree: Any) -> list[tuple[Any, set[str]]]:
    """Return the path and the keys of each layer's state."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_state)
    for path, leaf in leaves:
        if not is_state(leaf):
            raise ValueError(
                f"a tree of layer states contains a {type(leaf).__name__} at "
                f"{jax.tree_util.keystr(path) or 'its root'}; quaver.jax.state.split separates the states from a "
                "tree of parameters or of gradients"
            )
    return [(path, set(state)) for path, state in leaves]


def merge(*states: Any) -> Any:
    """Merge the next states of several micro-batches, or of several uses, that started from the same state.

    Args:
        states: one or more trees of states, as returned as gradients of steps.
    Exact: the state of one step that recorded the maximum of their amaxes, as in PyTorch layers; counts become the
        largest.
    """
    if not states:
        raise ValueError("quaver.jax.state.merge takes the states of one or more micro-batches, but got none")
    merged = per_layer(dict, states[0])
    for other in states[1:]:
        merged = per_layer(_merge, merged, other)
    return merged


def _merge(a: State, b: State) -> State:
    merged: State = {}
    if "count" in a:
        merged["count"] = jnp.maximum(a["count"], b["count"])
    if "history" in a:
        ra, rb = _recorded(a), _recorded(b)
        # Broadcast over every row, and over layers if they are stacked.
        both, alone = (c[..., None, :] for c in (ra & rb, rb))
        # Rolled windows differ only in the newest value, and the factor falls as it rises.
        history = jnp.where(both, jnp.maximum(a["history"], b["history"]), jnp.where(alone, b["history"], a["history"]))
        factor = jnp.where(ra & rb, jnp.minimum(a["factor"], b["factor"]), jnp.where(rb, b["factor"], a["factor"]))
        merged |= {"history": history, "factor": factor}
    return merged


def _recorded(state: State) -> Array:
    """Return bool [3]: True for each column that recorded an amax, that is with a factor and +0 in row 0."""
    return ~jnp.signbit(state["history"][..., 0, :]) & (state["factor"] > 0)


def unrecorded(states: Any) -> Any:
    """Return the states as a step that recorded nothing would return them; the start value of `merge`."""

    def mark(state: State) -> State:
        if "history" not in state:
            return state
        return state | {"history": state["history"].at[..., 0, :].set(-0.0)}

    return per_layer(mark, states)


def micro_batch(states: Any, index: Array | int) -> Any:
    """Return the states for micro-batch number `index` of a step: the same factors, but other noise."""

    if not isinstance(index, (int, np.integer)):
        array("micro_batch", "index", index)

    def later(state: State) -> State:
        return state | {"count": state["count"] + index} if "count" in state else state

    return per_layer(later, states)


def update(before: Any, after: Any) -> Any:
    """Return the next states, where unused layers keep their state: autodiff gives zeros for those."""

    def keep(old: State, new: State) -> State:
        updated: State = {}
        if "count" in old:
            updated["count"] = jnp.maximum(old["count"], new["count"])
        if "history" in old:
            took_part = new["factor"] > 0
            updated["history"] = jnp.where(took_part[..., None, :], new["history"], old["history"])
            updated["factor"] = jnp.where(took_part, new["factor"], old["factor"])
        return updated

    return per_layer(keep, before, after)


def share(states: Any, n: int) -> Any:
    """Return states for n uses of the same layers in one step: every leaf gets a leading axis of length n.

    Use slice i for the i-th use, or pass the whole as `xs` of a scan or as a mapped argument of a vmap. The gradient is
    their maximum instead of autodiff's sum; each use has its own noise.
    """

    check_static_int("n", n, "count the uses where the program is written")
    if n < 1:
        raise ValueError(f"n is {n}; give the number of uses, 1 or more")
    return _share(states, n)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _share(states: Any, n: int) -> Any:
    return _broadcast_states(states, n)


def _broadcast_states(states: Any, n: int) -> Any:
    def broadcast(state: State) -> State:
        shared_state = {name: jnp.broadcast_to(leaf, (n, *leaf.shape)) for name, leaf in state.items()}
        if "count" in shared_state:
            # Backward reaches the last use first.
            shared_state["count"] = shared_state["count"] + jnp.arange(n - 1, -1, -1, dtype=jnp.float32)[:, None]
        return shared_state

    return per_layer(broadcast, states)


def _share_forward(states: Any, n: int) -> tuple[Any, Any]:
    return _broadcast_states(forbid_second_derivative("quaver.jax.state.share", states), n), states


def _share_backward(n: int, before: Any, gradient: Any) -> tuple[Any]:
    before, gradient = forbid_second_derivative("quaver.jax.state.share", (before, gradient))
    uses = [jax.tree.map(lambda leaf, i=i: leaf[i], gradient) for i in range(n)]
    return (update(before, merge(unrecorded(before), *uses)),)


_share.defvjp(_share_forward, _share_backward)


def use(state: State, uses: int, label: str) -> State:
    """Return the state for the next of the `uses` calls that a module makes in one step.

    The module's state has a slice for each call. A call reads the slices merged by maximum, and its next state is the
    gradient of its own slice, so that autodiff adds nothing.

    Args:
        state: of `init(recipe, uses)`.
        uses: number of calls in one step.
        label: name of the layer for error messages.
    Raises:
        ValueError: raised in backward if the layer was not called `uses` times.
    Exact: as `share`.
    """
    if uses == 1 or not state:
        return state
    reads = state_reads_of(state)
    # Values that are not traced are not counted; their slices differ only in the noise of gradients.
    return _use(state, max(reads.count - 1, 0), uses, reads, label)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _use(state: State, index: int, uses: int, reads: StateReads, label: str) -> State:
    merged = merge(*(jax.tree.map(lambda leaf, i=i: leaf[i], state) for i in range(uses)))
    if "count" in merged:
        # Backward reaches the last call first.
        merged["count"] = merged["count"] + np.float32(max(uses - 1 - index, 0))
    return merged


def _use_forward(state: State, index: int, uses: int, reads: StateReads, label: str) -> tuple[State, None]:
    return _use(forbid_second_derivative(label, state), index, uses, reads, label), None


def _use_backward(index: int, uses: int, reads: StateReads, label: str, _: None, gradient: State) -> tuple[State]:
    if reads.count != uses:
        raise ValueError(
            f"{label}: made for uses={uses} and called {reads.count} times in this step; make it with "
            f"uses={reads.count}. Inside a function that JAX traces by itself (jax.jit, jax.checkpoint or a scan's "
            "body) only the calls of that function are counted. A call that only reads the state takes "
            "jax.lax.stop_gradient of the variables"
        )
    gradient = forbid_second_derivative(label, gradient)
    return ({name: jnp.stack([jnp.zeros_like(g)] * uses).at[index].set(g) for name, g in gradient.items()},)


_use.defvjp(_use_forward, _use_backward)


def check(states: Any, recipe: str | Recipe) -> None:
    """Raise if the states cannot have been returned by a step under this recipe; call it on values, outside jit.

    Raises:
        ValueError: names the first invalid state: wrong dtype or length, not finite, or a factor that does not follow
            from its window, as if states were summed, averaged, clipped or passed to an optimizer.
    """
    recipe = recipes.get(recipe)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(states)):
        raise ValueError("quaver.jax.state.check needs values; call it outside jit, on the result of a step")
    for path, state in jax.tree_util.tree_leaves_with_path(states, is_leaf=is_state):
        if not is_state(state):
            continue
        where = jax.tree_util.keystr(path) or "the state"
        if "count" in state and not (np.asarray(state["count"]) <= MOST_COUNTED).all():
            raise ValueError(
                f"{where} counts {state['count'].max()} roundings, but float32 can only count to {MOST_COUNTED}. "
                "Was it summed? A layer used twice needs quaver.jax.state.share, micro-batches "
                "quaver.jax.state.merge"
            )
        if recipe.delayed is None:
            continue
        check_state(state, recipe, where)
        # A leading axis comes from a scan or from `share`.
        history = np.asarray(state["history"]).reshape(-1, recipe.delayed.length, 3)
        factor = np.asarray(_used(history, np.asarray(state["factor"]).reshape(-1, 3), recipe))
        if not np.isfinite(factor).all() or not np.isfinite(history).all():
            raise ValueError(
                f"{where} cannot be the result of a step under recipe {recipe.name!r}: its factors do not follow "
                "from its history. Was it summed (a layer used twice needs quaver.jax.state.share, micro-batches "
                "quaver.jax.state.merge), clipped, passed to an optimizer, or written under other options? "
                "quaver.jax.state.init(recipe) creates a new one"
            )


@partial(jax.jit, static_argnames="recipe")
def _used(history: Any, factor: Any, recipe: Recipe) -> Array:
    """Return the factors [slices, 3] that a step would use, in one jitted program."""
    return jax.vmap(lambda h, f: rolled_and_checked({"history": h, "factor": f}, recipe)["factor"])(history, factor)


def check_state(state: State, recipe: Recipe, where: str) -> None:
    """Raise ValueError if a state lacks what the recipe needs, or has it in another dtype or shape."""
    if recipe.stochastic and "count" in state:
        _fits(state, {"count": (2,)}, recipe, where)
    if recipe.delayed is None:
        return
    if "history" not in state or "factor" not in state:
        raise ValueError(
            f"{where}: recipe {recipe.name!r} uses an amax history but got none; pass "
            "state=quaver.jax.state.init(recipe), use a module, which stores it, or use the recipe 'tensorwise'"
        )
    _fits(state, {"history": (recipe.delayed.length, 3), "factor": (3,)}, recipe, where)


def _fits(state: State, wanted: dict[str, tuple[int, ...]], recipe: Recipe, where: str) -> None:
    for key, shape in wanted.items():
        if state[key].shape[-len(shape) :] != shape or state[key].dtype != jnp.float32:
            raise ValueError(
                f"{where}: {key} is {state[key].dtype}{list(state[key].shape)} and recipe {recipe.name!r} needs "
                f"float32{list(shape)}; create it with quaver.jax.state.init(recipe), and do not cast it"
            )
