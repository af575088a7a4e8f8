"""Test layer states: rolled like the reference, merged, shared, split and checked."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array, lax

import quaver.jax as qj
from quaver import recipes
from quaver.jax import state as states
from quaver.recipes.spec import Recipe
from quaver.reference import operations as reference
from tests.close import assert_bitwise, assert_close

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"history": 4},
    "margin": {"history": 4, "margin": 2},
    "most recent": {"history": 4, "algorithm": "most_recent"},
    "of one step": {"history": 1},
    "of two steps": {"history": 2},
    "e4m3": {"history": 4, "format": "e4m3"},
    "any scale": {"history": 4, "power_of_two": False},
    "any scale with a margin": {"history": 4, "power_of_two": False, "margin": -140},
}
EVERY = pytest.mark.parametrize("recipe", [recipes.delayed(**o) for o in OPTIONS.values()], ids=OPTIONS)

roll = jax.jit(states.roll, static_argnames="recipe")
record = jax.jit(states.record, static_argnames="recipe")


def windows(recipe: Recipe, seed: int, spread: float = 38.0) -> states.State:
    """A history with gaps, and plausible factors."""
    assert recipe.delayed is not None
    rng = np.random.default_rng(seed)
    window = (10.0 ** rng.uniform(-spread + 0.1, spread, (recipe.delayed.length, 3))).astype(np.float32)
    window[rng.random(window.shape) < 0.3] = 0
    return {"history": jax.device_put(window), "factor": jax.device_put(rng.choice([0, 1, 8], 3).astype(np.float32))}


def after(recipe: Recipe, amaxes: Any, before: states.State) -> states.State:
    """The next state of a step that recorded these amaxes, 0 for none."""
    return record(before, np.asarray(amaxes, np.float32), recipe=recipe)


@EVERY
def test_a_roll_is_the_references(recipe: Recipe) -> None:
    assert recipe.delayed is not None
    for seed in range(30):
        state = windows(recipe, seed)
        got = roll(state, recipe=recipe)
        for i, spec in enumerate(states.columns(recipe)):
            before = np.asarray(state["history"])[:, i], np.asarray(state["factor"])[i]
            history, factor = reference.roll(*before, recipe.delayed, spec.format, spec.power_of_two)  # type: ignore[arg-type]
            assert_bitwise(np.asarray(got["history"])[:, i], history, f"history, column {i}")
            assert_bitwise(np.asarray(got["factor"])[i], np.float32(factor), f"factor, column {i}")


def test_nonfinite_values_are_not_recorded() -> None:
    recipe = recipes.delayed(history=3)
    got = after(recipe, [jnp.inf, jnp.nan, 2.0], qj.state.init(recipe))
    assert_bitwise(np.asarray(got["history"]) + 0.0, np.float32([[0, 0, 0], [0, 0, 0], [0, 0, 2]]))
    assert_bitwise(got["factor"], np.float32([0, 0, 2.0**14]))


def test_a_state_that_torch_left_unrolled_is_rolled_first() -> None:
    """torch rolls at the start of a step: state saved after a step has its amaxes in row 0."""
    recipe = recipes.delayed(history=3)
    recorded = jnp.float32([[1, 2, 3], [0, 0, 0], [4, 0, 0]])
    ready = jax.jit(partial(states.rolled_and_checked, recipe=recipe))(
        {"history": recorded, "factor": np.zeros(3, np.float32)}
    )
    assert_bitwise(ready["history"], np.float32([[0, 0, 0], [4, 0, 0], [1, 2, 3]]))
    assert_bitwise(ready["factor"], np.float32([64, 128, 2.0**14]))


@EVERY
def test_merging_micro_batches_is_recording_their_maximum(recipe: Recipe) -> None:
    """Also where one of them recorded nothing, and where the window is constant so that a roll does not show."""
    merge = jax.jit(qj.state.merge)
    unrecorded = jax.jit(qj.state.unrecorded)
    ones = np.ones((recipe.delayed.length, 3), np.float32)  # type: ignore[union-attr]
    constant = {"history": ones, "factor": np.ones(3, np.float32)}
    for before in [windows(recipe, seed) for seed in range(5)] + [qj.state.init(recipe), constant]:
        before = {"history": np.array(before["history"]), "factor": np.asarray(before["factor"])}
        before["history"][0] = 0.0
        for one, other in ([(1, 2, 3), (3, 2, 1)], [(0, 2, 1), (1, 0, 0.5)], [(0, 0, 0), (0.5, 1, 0)], [(0, 0, 0)] * 2):
            parts = [after(recipe, amaxes, before) for amaxes in (one, other)]
            expected = after(recipe, np.maximum(one, other), before)
            for got in (merge(*parts), merge(*parts[::-1]), merge(unrecorded(before), *parts)):
                assert_bitwise(got["history"], np.asarray(expected["history"]))
                assert_bitwise(got["factor"], np.asarray(expected["factor"]))


def step(recipe: Any, x: Array, w: Array, state: Any) -> Any:
    """The loss, and the gradients of w and of the state."""

    def loss(w: Array, state: Any) -> Array:
        return (qj.linear(x, w, recipe=recipe, state=state["layer"]) ** 2).mean()

    return jax.value_and_grad(loss, argnums=(0, 1))(w, state)


def test_micro_batches_accumulate_in_a_scan() -> None:
    recipe, rng = recipes.delayed(history=4), np.random.default_rng(0)
    xs, w = jnp.asarray(rng.normal(size=(4, 8, 16)), jnp.float32), jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
    before = {"layer": after(recipe, [1, 1, 1], qj.state.init(recipe))}

    @jax.jit
    def accumulated(w: Array, before: Any) -> Any:
        def add(total: Any, x: Array) -> Any:
            _, (gradient, next_state) = step(recipe, x, w, before)
            return (total[0] + gradient, qj.state.merge(total[1], next_state)), next_state

        return lax.scan(add, (jnp.zeros_like(w), qj.state.unrecorded(before)), xs)

    (_, merged), each = accumulated(w, before)
    newest = np.asarray(each["layer"]["history"][:, -1]).max(0)
    assert_bitwise(merged["layer"]["history"][-1], newest)
    assert newest[0] == np.abs(np.asarray(xs)).max()
    assert_bitwise(merged["layer"]["factor"], after(recipe, newest, before["layer"])["factor"])


def test_micro_batches_draw_different_noise() -> None:
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(16, 16)), jnp.float32), jnp.asarray(rng.normal(size=(16, 16)), jnp.float32)
    before = {"layer": qj.state.init("nvfp4")}
    one = jax.jit(lambda i: step("nvfp4", x, w, qj.state.micro_batch(before, i))[1])
    (first, a), (second, b) = one(0), one(1)
    assert (first != second).any()
    assert_bitwise(qj.state.merge(a, b)["layer"]["count"], np.float32([1, 2]))


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_a_layer_used_twice_records_the_maximum_of_both_as_torchs_does(name: str) -> None:
    import torch

    import quaver.torch as qt

    recipe = recipes.get(name) if name == "nvfp4" else recipes.delayed(history=4)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(16, 16)).astype(np.float32), rng.normal(size=(16, 16)).astype(np.float32)
    g = rng.normal(size=(16, 16)).astype(np.float32)

    @jax.jit
    def twice(w: Array, state: Any) -> Any:
        def loss(w: Array, state: Any) -> Array:
            shared = qj.state.share(state, 2)
            first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], shared) for i in range(2))
            h = qj.linear(jnp.asarray(x), w, recipe=recipe, state=first, name="layer")
            return (qj.linear(h, w, recipe=recipe, state=second, name="layer") * g).sum()

        return jax.grad(loss, argnums=(0, 1))(w, state)

    layer = qt.Linear(16, 16, bias=False)
    layer.__dict__["qualified_name"] = "layer"
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(w.T.copy()))
    state = qj.state.init(recipe)
    for _ in range(3):
        layer.zero_grad()
        with qt.autocast(recipe):
            y = layer(layer(torch.from_numpy(x)))
        y.backward(torch.from_numpy(g))
        grad_w, state = twice(jnp.asarray(w), state)
        assert layer.weight.grad is not None
        assert_close("grad_w", grad_w, layer.weight.grad.T, 1e-6)
    if name == "nvfp4":
        # Neither framework needs dgrad of the first use.
        assert_bitwise(np.asarray(state["count"], np.int64)[1], np.asarray(layer.count)[1])
    else:
        with qt.autocast(recipe):
            pass
        assert_bitwise(np.asarray(state["history"]) + 0.0, layer.history.numpy())
        assert_bitwise(state["factor"], layer.factor.numpy())


def test_a_layer_that_took_no_part_keeps_its_state() -> None:
    recipe = recipes.delayed(history=3)
    before = {"used": after(recipe, [1, 1, 1], qj.state.init(recipe)), "noisy": {"count": jnp.float32([4, 4])}}
    before["skipped"] = before["used"]
    zeros = jax.tree.map(jnp.zeros_like, before["used"])
    new = {"used": after(recipe, [2, 2, 2], before["used"]), "skipped": zeros, "noisy": {"count": jnp.zeros(2)}}
    got = jax.jit(qj.state.update)(before, new)
    for key, expected in (("used", new["used"]), ("skipped", before["skipped"]), ("noisy", before["noisy"])):
        jax.tree.map(partial(assert_bitwise, what=key), got[key], expected)


def test_split_and_join_are_inverse_and_find_states_anywhere() -> None:
    state = qj.state.init(recipes.delayed(history=2))
    tree = {
        "a": {"w": jnp.ones(2), "state": state},
        "b": [jnp.zeros(3), qj.state.init("nvfp4"), {"count": jnp.ones(2), "w": 1}],
    }
    rest, states = qj.state.split(tree)
    assert rest["a"]["state"] is None and rest["b"][1] is None and rest["b"][2]["count"] is not None
    assert states["a"]["w"] is None and states["b"][0] is None and set(states["a"]["state"]) == {"history", "factor"}
    back = qj.state.join(rest, states)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(assert_bitwise, jax.tree.map(np.asarray, back), jax.tree.map(np.asarray, tree))


def model(parameters: Any, x: Array) -> Array:
    """Two layers with states among the parameters, as in an Equinox module."""
    for name in ("first", "second"):
        p = parameters[name]
        x = jnp.tanh(qj.linear(x, p["w"], p["b"], recipe=recipes.delayed(history=4), state=p["state"]))
    return x


def test_optax_and_clipping_see_no_state() -> None:
    rng = np.random.default_rng(0)

    def layer(k: int, n: int) -> Any:
        w = (rng.normal(size=(k, n)) / np.sqrt(k)).astype(np.float32)
        return {"w": w, "b": np.zeros(n, np.float32), "state": qj.state.init(recipes.delayed(history=4))}

    parameters = {"first": layer(16, 32), "second": layer(32, 8)}
    x, target = (rng.normal(size=s).astype(np.float32) for s in ((64, 16), (64, 8)))
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    optimizer = jax.jit(tx.init)(qj.state.split(parameters)[0])

    @jax.jit
    def train(parameters: Any, optimizer: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda p: ((model(p, x) - target) ** 2).mean())(parameters)
        gradient, after = qj.state.split(gradient)
        weights, before = qj.state.split(parameters)
        updates, optimizer = tx.update(gradient, optimizer, weights)
        weights = optax.apply_updates(weights, updates)
        return loss, optax.tree.norm(gradient), qj.state.join(weights, qj.state.update(before, after)), optimizer

    losses = []
    for _ in range(6):
        loss, norm, parameters, optimizer = train(parameters, optimizer)
        losses.append(float(loss))
        assert norm < 2
        qj.state.check(parameters, recipes.delayed(history=4))
    assert losses[-1] < losses[0]
    assert float(parameters["first"]["state"]["history"][-1, 0]) == np.abs(x).max()
    # This prevents that the state's gradient is clipped like any other.
    clipped = jax.tree.map(lambda leaf: np.asarray(leaf) * np.float32(0.3), qj.state.split(parameters)[1])
    with pytest.raises(ValueError, match="clipped, passed to an optimizer"):
        qj.state.check(clipped, recipes.delayed(history=4))


def test_a_recipe_that_remembers_nothing_has_no_state() -> None:
    for name, build in recipes.RECIPES.items():
        fields = set(qj.state.init(name))
        assert fields == ({"history", "factor"} if build().delayed else {"count"} if build().stochastic else set())
    assert qj.state.init(None) == {}


def test_summed_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="roundings"):
        qj.state.check([{"count": jnp.float32([2.0**25, 0])}], "nvfp4")


CURRENT = recipes.delayed(history=4)


@pytest.mark.parametrize(
    ("misuse", "sentence"),
    [
        (lambda state, n: jax.jit(lambda s: states.check(s, CURRENT))(state), "call it outside jit"),
        (lambda state, n: jax.jit(states.share)(state, n), "n must be a Python int that is known when jit traces"),
        (
            lambda state, n: jax.jit(lambda x, n: qj.quantize(x, CURRENT.fprop.a, seed=n))(jnp.ones((4, 4)), n),
            "seed must be",
        ),
        (
            lambda state, n: jax.jit(lambda x, n: qj.linear(x, x, seed=n))(jnp.ones((4, 4)), n),
            "seed must be a Python int",
        ),
    ],
)
def test_traced_values_that_must_be_static_are_refused(misuse: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        misuse(states.init(CURRENT), 3)
