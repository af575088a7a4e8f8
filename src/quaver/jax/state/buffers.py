"""The state that recipes keep between steps, as plain pytrees: histories of amaxes, and counts of random roundings.

The state of one linear layer is a dict of float32 arrays:

    delayed scaling       {"history": [length, 3], "factor": [3]}    columns: input, weight, grad_output
    stochastic rounding   {"count": [2]}                             quantizations of grad_output and of its transpose
    every other recipe    {}

The gradient of a loss with respect to a state *is* the next state ("overwrite with gradient"): backward alone knows the
amax of grad_output. So a step is one `jax.value_and_grad` over parameters and state, and the state it returns takes the
old one's place; nothing may add, clip or average it. Autodiff adds up the gradients of what is used twice: a state that
several calls read in one step goes through `share`, and states of micro-batches through `merge`.

Row 0 of a history that a step returns is 0, and -0 in a column that recorded nothing, by which `merge` tells them.
Source: flax's and Transformer Engine's overwrite-with-gradient collections; the window is
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
from quaver.jax.numerics.rounding import two_to_the, without_derivative
from quaver.jax.numerics.scaling import encode_factor, exponent
from quaver.jax.operations.ops import static
from quaver.jax.operations.sharding import max_like
from quaver.recipes.spec import QuantSpec, Recipe
from quaver.reference.numerics import FACTOR_EXPONENTS, FLT_MAX

State = dict[str, Array]

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2

#: float32 has every whole number up to here.
MOST_COUNTED = 2**24


def init(recipe: str | Recipe | None) -> State:
    """The state of one layer before its first step; {} for a recipe that remembers nothing."""
    if recipe is None:
        return {}
    recipe = recipes.get(recipe)
    state: State = {}
    if recipe.delayed is not None:
        state["history"] = jnp.zeros((recipe.delayed.length, 3), jnp.float32)
        state["factor"] = jnp.zeros(3, jnp.float32)
    if recipe.stochastic:
        state["count"] = jnp.zeros(2, jnp.float32)
    return state


def columns(recipe: Recipe) -> tuple[QuantSpec, QuantSpec, QuantSpec]:
    """The specs behind the three columns of a delayed recipe's history."""
    return recipe.history_specs


def factor_of(state: State, column: int) -> Array | None:
    """The encode factor of a column; None where the state has no history."""
    return lax.index_in_dim(state["factor"], column, keepdims=False) if "factor" in state else None


def roll(state: State, recipe: Recipe) -> State:
    """End a step: what row 0 recorded joins each window, and the factors follow; a column with 0 there stays.

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


def ready(state: State, recipe: Recipe) -> State:
    """The state as a step uses it: what another program left unrolled is rolled, and a factor that cannot follow from
    its window becomes NaN, so that states which were added up, averaged or clipped are seen in the loss."""
    if recipe.delayed is None:
        return state
    state = roll(state, recipe)
    history, factor = state["history"], state["factor"]
    top = history.max(0) if recipe.delayed.algorithm == "max" else lax.index_in_dim(history, -1, keepdims=False)
    # Values that have left the window since can only have made it smaller. A factor that is no power of two may be an
    # ulp off.
    larger = lax.gt(factor, lax.mul(_factors(top, recipe), np.float32(1.5)))
    wrong = lax.bitwise_and(lax.gt(top, np.float32(0)), larger)
    if all(spec.power_of_two for spec in columns(recipe)):
        mantissa = lax.bitwise_and(lax.bitcast_convert_type(factor, jnp.int32), np.int32(0x7FFFFF))
        wrong = lax.bitwise_or(wrong, lax.ne(mantissa, np.int32(0)))
    return state | {"factor": where(wrong, jnp.nan, factor)}


def amaxes_of(state: State, *amaxes: Array | None) -> Array:
    """The amaxes of input, weight and grad_output as float32 [3], 0 for what was not quantized, and all shards' if
    the state is all shards'."""
    given = [np.zeros(1, np.float32) if a is None else a.reshape(1) for a in amaxes]
    return max_like(lax.concatenate(given, 0), state["factor"])


def record(state: State, amaxes: Array, recipe: Recipe) -> State:
    """The next state: the amaxes [3] of a step, those that are not finite excepted, rolled into the windows."""
    before = lax.index_in_dim(state["history"], 0, keepdims=False)
    newest = where(lax.is_finite(amaxes), lax.max(before, amaxes), before)
    rolled = roll(state | {"history": _with_row_0(state["history"], newest)}, recipe)
    # The sign of row 0 says that a column recorded nothing.
    row = where(lax.gt(newest, np.float32(0)), 0, lax.full_like(newest, -0.0))
    return rolled | {"history": _with_row_0(rolled["history"], row)}


def _with_row_0(history: Array, row: Array) -> Array:
    return lax.concatenate([row.reshape(1, 3), lax.slice_in_dim(history, 1, None)], 0)


def _factors(amax: Array, recipe: Recipe) -> Array:
    """The encode factors that the windows' amaxes [3] imply."""
    assert recipe.delayed is not None
    specs = columns(recipe)
    e = _factor(amax, specs[0], recipe.delayed.margin)
    for i, spec in enumerate(specs):
        if spec != specs[0]:
            e = lax.select(np.arange(3) == i, _factor(amax, spec, recipe.delayed.margin), e)
    return e


def _factor(amax: Array, spec: QuantSpec, margin: int) -> Array:
    """`quaver.reference.operations.factor_from`."""
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    if spec.power_of_two:
        p = lax.sub(exponent(bits, spec.format.max), np.int32(margin))
        return two_to_the(lax.clamp(np.int32(FACTOR_EXPONENTS[0]), p, np.int32(FACTOR_EXPONENTS[1])))
    # In two halves, each of which float32 can hold.
    half = margin // 2
    e = lax.optimization_barrier(lax.mul(encode_factor(bits, spec.format, False), np.float32(2.0**-half)))
    e = lax.mul(e, np.float32(2.0 ** -(margin - half)))
    return lax.clamp(np.finfo(np.float32).tiny, e, np.float32(FLT_MAX))


def unless_overrun(x: Array, count: Array) -> Array:
    """x, or NaN where a count is so large that float32 would count no further, and every step draw the same noise."""
    return where(lax.le(count, np.float32(MOST_COUNTED)), x, jnp.nan)


def is_state(node: Any) -> bool:
    """True if a node of a pytree is the state of one layer: a dict with exactly the names above."""
    return isinstance(node, dict) and set(node) in ({"history", "factor"}, {"count"}, {"history", "factor", "count"})


def split(tree: Any) -> tuple[Any, Any]:
    """Take the states out of a pytree of parameters or of gradients, for an optimizer and for clipping.

    Returns:
        Two trees like the one given: the rest with None in place of every state, and the states with None in place of
        every other leaf. `join` puts them together again.
    """
    rest = jax.tree.map(lambda node: None if is_state(node) else node, tree, is_leaf=is_state)
    states = jax.tree.map(lambda node: node if is_state(node) else None, tree, is_leaf=is_state)
    return rest, states


def join(rest: Any, states: Any) -> Any:
    """The tree that `split` took apart, each leaf from where it is not None."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, rest, states, is_leaf=lambda node: node is None or is_state(node)
    )


def per_layer(function: Callable[..., State], *trees: Any) -> Any:
    """A function of layers' states, over trees of them.

    Raises:
        ValueError: a tree holds something else, or they differ in structure.
    """
    layers = [_layers(tree) for tree in trees]
    if any(other != layers[0] for other in layers):
        raise ValueError(
            "trees of layers' states differ in their layers, or in what these remember; give the same ones"
        )
    return jax.tree.map(function, *trees, is_leaf=is_state)


def _layers(tree: Any) -> list[tuple[Any, set[str]]]:
    """Where each layer's state is, and what it is made of."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_state)
    for path, leaf in leaves:
        if not is_state(leaf):
            raise ValueError(
                f"a tree of layers' states holds a {type(leaf).__name__} at {jax.tree_util.keystr(path) or 'its root'}"
                "; quaver.jax.state.split takes the states out of a tree of parameters or of gradients"
            )
    return [(path, set(state)) for path, state in leaves]


def merge(*states: Any) -> Any:
    """One next state from those of several micro-batches, or of several uses, that all began from the same state.

    Args:
        states: two or more trees of states, as gradients of steps returned them.
    Exact: what one step would have returned that recorded the maximum of theirs, as torch's layers do; counts move to
        the furthest.
    """
    if not states:
        raise ValueError("quaver.jax.state.merge takes the states of one micro-batch or more, and got none")
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
        # Of every row, and of every layer where they are stacked.
        both, alone = (c[..., None, :] for c in (ra & rb, rb))
        # Windows that rolled differ in the newest value alone, and the factor falls as that rises.
        history = jnp.where(both, jnp.maximum(a["history"], b["history"]), jnp.where(alone, b["history"], a["history"]))
        factor = jnp.where(ra & rb, jnp.minimum(a["factor"], b["factor"]), jnp.where(rb, b["factor"], a["factor"]))
        merged |= {"history": history, "factor": factor}
    return merged


def _recorded(state: State) -> Array:
    """bool [3]: True for each column of a next state that recorded an amax; it has a factor, and its row 0 is +0."""
    return ~jnp.signbit(state["history"][..., 0, :]) & (state["factor"] > 0)


def unrecorded(states: Any) -> Any:
    """These states as a step that recorded nothing would return them: `merge` begins from them."""

    def mark(state: State) -> State:
        if "history" not in state:
            return state
        return state | {"history": state["history"].at[..., 0, :].set(-0.0)}

    return per_layer(mark, states)


def micro_batch(states: Any, index: Array | int) -> Any:
    """The states for micro-batch number `index` of a step: the same factors, other noise."""

    if not isinstance(index, (int, np.integer)):
        array("micro_batch", "index", index)

    def later(state: State) -> State:
        return state | {"count": state["count"] + index} if "count" in state else state

    return per_layer(later, states)


def update(before: Any, after: Any) -> Any:
    """The next states, those of layers that took no part in the step as they were: autodiff gives them zeros."""

    def keep(old: State, new: State) -> State:
        kept: State = {}
        if "count" in old:
            kept["count"] = jnp.maximum(old["count"], new["count"])
        if "history" in old:
            took_part = new["factor"] > 0
            kept["history"] = jnp.where(took_part[..., None, :], new["history"], old["history"])
            kept["factor"] = jnp.where(took_part, new["factor"], old["factor"])
        return kept

    return per_layer(keep, before, after)


def share(states: Any, n: int) -> Any:
    """States for n uses of the same layers in one step: every leaf gets a leading axis of n.

    Take slice i for the i-th use, or give the whole to the `xs` of a scan or the mapped axis of a vmap. The gradient is
    their maximum, where autodiff's sum would be wrong; each use draws noise of its own.
    """

    static("n", n, "count the uses where the program is written")
    if n < 1:
        raise ValueError(f"n is {n}; a layer that is not used needs no share")
    return _share(states, n)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _share(states: Any, n: int) -> Any:
    return _fanned(states, n)


def _fanned(states: Any, n: int) -> Any:
    def fan(state: State) -> State:
        fanned = {name: jnp.broadcast_to(leaf, (n, *leaf.shape)) for name, leaf in state.items()}
        if "count" in fanned:
            # Backward comes to the last use first.
            fanned["count"] = fanned["count"] + jnp.arange(n - 1, -1, -1, dtype=jnp.float32)[:, None]
        return fanned

    return per_layer(fan, states)


def _share_forward(states: Any, n: int) -> tuple[Any, Any]:
    return _fanned(without_derivative("quaver.jax.state.share", states), n), states


def _share_backward(n: int, before: Any, gradient: Any) -> tuple[Any]:
    before, gradient = without_derivative("quaver.jax.state.share", (before, gradient))
    uses = [jax.tree.map(lambda leaf, i=i: leaf[i], gradient) for i in range(n)]
    return (update(before, merge(unrecorded(before), *uses)),)


_share.defvjp(_share_forward, _share_backward)


def check(states: Any, recipe: str | Recipe) -> None:
    """Refuse states that no step under this recipe can have returned; call it on values, outside jit.

    Raises:
        ValueError: naming the first: of another dtype or length, not finite, or with a factor that does not follow from
            its window, as where states were added up, averaged, clipped or handed to an optimizer.
    """
    recipe = recipes.get(recipe)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(states)):
        raise ValueError("quaver.jax.state.check looks at values; call it outside jit, on what a step returned")
    for path, state in jax.tree_util.tree_leaves_with_path(states, is_leaf=is_state):
        if not is_state(state):
            continue
        where = jax.tree_util.keystr(path) or "the state"
        if "count" in state and not (np.asarray(state["count"]) <= MOST_COUNTED).all():
            raise ValueError(
                f"{where} counts {state['count'].max()} roundings, and float32 counts to {MOST_COUNTED}. Was it added "
                "up? A layer used twice needs quaver.jax.state.share, micro-batches quaver.jax.state.merge"
            )
        if recipe.delayed is None:
            continue
        fitting(state, recipe, where)
        # A leading axis is that of a scan or of `share`.
        history = np.asarray(state["history"]).reshape(-1, recipe.delayed.length, 3)
        factor = np.asarray(_used(history, np.asarray(state["factor"]).reshape(-1, 3), recipe))
        if not np.isfinite(factor).all() or not np.isfinite(history).all():
            raise ValueError(
                f"{where} is not what a step under recipe {recipe.name!r} returns: its factors do not follow from "
                "its history. Was it added up (a layer used twice needs quaver.jax.state.share, micro-batches "
                "quaver.jax.state.merge), clipped, given to an optimizer, or written under other options? "
                "quaver.jax.state.init(recipe) begins afresh"
            )


@partial(jax.jit, static_argnames="recipe")
def _used(history: Any, factor: Any, recipe: Recipe) -> Array:
    """The factors [slices, 3] that a step would use: one program, where each operation would be one."""
    return jax.vmap(lambda h, f: ready({"history": h, "factor": f}, recipe)["factor"])(history, factor)


def fitting(state: State, recipe: Recipe, where: str) -> None:
    """Refuse a state that lacks what a delayed recipe needs, or has it in another dtype or length.

    Raises:
        ValueError: it lacks that, or has it otherwise.
    """
    if recipe.stochastic and "count" in state:
        _fits(state, {"count": (2,)}, recipe, where)
    if recipe.delayed is None:
        return
    if "history" not in state or "factor" not in state:
        raise ValueError(
            f"{where}: recipe {recipe.name!r} scales by a history and got none; pass "
            "state=quaver.jax.state.init(recipe), use a module, which keeps it, or the recipe 'tensorwise'"
        )
    _fits(state, {"history": (recipe.delayed.length, 3), "factor": (3,)}, recipe, where)


def _fits(state: State, wanted: dict[str, tuple[int, ...]], recipe: Recipe, where: str) -> None:
    for key, shape in wanted.items():
        if state[key].shape[-len(shape) :] != shape or state[key].dtype != jnp.float32:
            raise ValueError(
                f"{where}: {key} is {state[key].dtype}{list(state[key].shape)} and recipe {recipe.name!r} needs "
                f"float32{list(shape)}; begin with quaver.jax.state.init(recipe), and keep casts away from it"
            )
