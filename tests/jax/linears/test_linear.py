"""The quantized linear function against a plain composition in numpy, and under JAX's transformations."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import quaver.jax as qj
from quaver import recipes
from quaver.costs.ledger import saved_bytes
from quaver.jax import state as states
from quaver.recipes.formats import E4M3, E5M2
from quaver.recipes.spec import GemmSpec, QuantSpec, Recipe
from tests.close import assert_bitwise, assert_close
from tests.jax.composition import compose
from tests.operands import variants
from tests.pairs import alternating

#: Options without effect: fast accumulation on a CPU, and attention in a linear layer.
DIFFERENT = {name: r for name, r in variants().items() if "fast_accum" not in name and r.attention is None}
#: Slow, since these options only change scales and a rotation: test_frameworks_agree.py tests their bits, and
#: test_matmul.py their products.
BELOW = ("power_of_two", "hadamard")
#: Slow too, since other recipes have the same parts: a plain MXFP4, and NVFP4 without one option.
REPEATED = ("mxfp4", "nvfp4(stochastic_rounding=False)", "nvfp4(weight_2d=False)")


def _below(name: str) -> bool:
    return any(f"({switch}=" in name for switch in BELOW)


EVERY = pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=name, marks=[pytest.mark.slow] if name in REPEATED or _below(name) else [])
        for name, recipe in DIFFERENT.items()
    ],
)
QUANTIZED = pytest.mark.parametrize("name", [n for n, r in recipes.RECIPES.items() if r().quantizes])
#: Recipes with a state, one of each kind.
REMEMBERING = pytest.mark.parametrize("name", ["delayed", "nvfp4"])
GRADIENTS = ("output", "grad_x", "grad_w", "grad_bias")


def operands(lead: tuple[int, ...], k: int, n: int, dtype: Any = jnp.float32) -> tuple[Array, Array, Array, Array]:
    """x, w, bias and grad_output."""
    rng = np.random.default_rng(k)
    shapes = (*lead, k), (k, n), (n,), (*lead, n)
    sizes = 1.0, 0.3, 1.0, 1e-3
    # numpy converts and device_put copies: a conversion and jnp.asarray are a program for each shape.
    drawn = ((rng.normal(size=s) * size).astype(dtype) for s, size in zip(shapes, sizes, strict=True))
    x, w, bias, g = map(jax.device_put, drawn)
    return x, w, bias, g


@partial(jax.jit, static_argnames=("recipe", "dtype"))
def run(recipe: Any, x: Any, w: Any, bias: Any, state: Any, g: Any, dtype: Any = None) -> tuple[Any, ...]:
    """Output, the gradients of x, w and bias, and the next state."""
    call = partial(qj.linear, recipe=recipe, dtype=dtype)
    y, back = jax.vjp(lambda x, w, bias, state: call(x, w, bias, state=state), x, w, bias, state)
    return (y, *back(g))


def agree(recipe: Recipe, got: tuple[Any, ...], expected: Any, rms: float = 1e-6) -> None:
    for what, value in zip(GRADIENTS, got, strict=False):
        assert_close(what, np.asarray(value, np.float32), getattr(expected, what), rms)


@EVERY
def test_forward_and_backward_equal_a_plain_composition(recipe: Recipe) -> None:
    x, w, bias, g = operands((3, 11), 70, 37)
    state = qj.state.init(recipe)
    if recipe.stochastic:
        state["count"] = jnp.array([3.0, 5.0])
    agree(recipe, run(recipe, x, w, bias, state, g), compose(recipe, x, w, bias, g, counts=(3, 5)))


@pytest.mark.parametrize("name", ["delayed"])
def test_eager_and_jitted_give_the_same_bits(name: str) -> None:
    recipe = recipes.get(name)
    x, w, bias, g = operands((8,), 48, 32)
    state = qj.state.init(recipe)
    eager = run.__wrapped__(recipe, x, w, bias, state, g)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(run(recipe, x, w, bias, state, g)), strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize(
    ("name", "shape"),
    alternating(["delayed", "rowwise_bf16_wgrad", "nvfp4"], [((2, 0), 16, 8), ((5,), 16, 0)], ["nvfp4"]),
)
def test_empty_operands_give_zeros(name: str, shape: Any) -> None:
    x, w, bias, g = operands(*shape)
    y, grad_x, grad_w, grad_bias, _ = run(recipes.get(name), x, w, bias, qj.state.init(name), g)
    assert (y.shape, grad_x.shape, grad_w.shape, grad_bias.shape) == (g.shape, x.shape, w.shape, bias.shape)
    assert not grad_w.any() and not grad_x.any()


@pytest.mark.parametrize("name", ["rowwise_bf16_wgrad", "unit"])
def test_a_parameter_of_another_layout_has_the_transposed_gradient(name: str) -> None:
    """XLA on a CPU merges a transpose of a GEMM's bare result into the GEMM, and cannot run that in bfloat16."""
    value, gradient = (QuantSpec(fmt, scale="unit") for fmt in (E4M3, E5M2))
    unit = Recipe("unit", GemmSpec(value, value), GemmSpec(gradient, value), GemmSpec(gradient, value))
    recipe = unit if name == "unit" else recipes.get(name)
    x, w, _, g = operands((64,), 96, 32)

    @jax.jit
    def gradients(x: Array, w: Array, w_t: Array, g: Array) -> tuple[Array, Array]:
        def of(w: Array, x: Array) -> Array:
            return qj.linear(x, w, recipe=recipe, dtype=jnp.bfloat16)

        (own,), (transposed,) = (
            jax.vjp(partial(f, x=x), p)[1](g) for f, p in ((of, w), (lambda w, x: of(w.T, x), w_t))
        )
        return own, transposed

    own, transposed = gradients(x, w, w.T, g.astype(jnp.bfloat16))
    assert_close("gradient", transposed.T, own, 1e-6)


def test_gradients_export_with_a_symbolic_batch() -> None:
    name = "nvfp4"
    state = qj.state.init(name)
    w = operands((1,), 48, 32)[1]

    def loss(w: Array, state: Any, x: Array) -> Array:
        return jnp.square(qj.linear(x, w, recipe=name, state=state)).sum()

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    (batch,) = jax.export.symbolic_shape("batch")
    types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (w, state))
    exported = jax.export.export(step)(*types, jax.ShapeDtypeStruct((batch, 48), jnp.float32))
    x = operands((33,), 48, 32)[0]
    (value, got), (expected_value, expected) = exported.call(w, state, x), step(w, state, x)
    assert_close("loss", value, expected_value, 1e-6)
    assert_close("gradient", got[0], expected[0], 1e-6)
    jax.tree.map(assert_bitwise, got[1], expected[1])


def _narrow() -> Iterator[Any]:
    """Every recipe in bf16; the quick run has one of blocks, and one with a GEMM in bf16."""
    for name in recipes.RECIPES:
        quick = name in ("bf16", "rowwise_bf16_wgrad", "blockwise")
        yield pytest.param(name, jnp.bfloat16, marks=[] if quick else [pytest.mark.slow])
    yield "mxfp8", jnp.float16
    yield pytest.param("delayed", jnp.float16, marks=pytest.mark.slow)


@pytest.mark.parametrize("name, dtype", list(_narrow()))
def test_narrow_activations_and_wide_parameters_round_once(name: str, dtype: Any) -> None:
    recipe = recipes.get(name)
    x, w, bias, g = operands((48,), 96, 64)
    x, g = x.astype(dtype), g.astype(dtype)
    got = run(recipe, x, w, bias, qj.state.init(recipe), g, dtype=dtype)
    assert [a.dtype for a in got[:4]] == [dtype, dtype, jnp.float32, jnp.float32]
    expected = compose(recipe, x, w, bias, g)
    step = float(jnp.finfo(dtype).eps) / 2
    if not recipe.quantizes:
        # As flax does: parameters are cast, and so is their gradient.
        expected = compose(recipe, x, w.astype(dtype), bias, g)
        agree(recipe, got, expected, 3 * step)
        return
    for what, value, rms in zip(GRADIENTS, got, (step, step, 1e-6, 1e-6), strict=False):
        assert_close(what, np.asarray(value, np.float32), getattr(expected, what), rms)


def test_without_a_dtype_operands_are_promoted() -> None:
    x, w, bias, _ = operands((4,), 32, 16)
    narrow = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    layer = partial(jax.eval_shape, partial(qj.linear, recipe="mxfp8"))
    assert layer(x, w).dtype == jnp.float32
    assert layer(narrow[0], w).dtype == jnp.float32
    assert layer(*narrow, bias).dtype == jnp.bfloat16


def test_without_a_recipe_it_is_flaxs_dense() -> None:
    import flax.linen as nn

    x, w, bias, _ = operands((4,), 33, 17, jnp.bfloat16)
    theirs = jax.jit(nn.Dense(17, dtype=jnp.bfloat16).apply)({"params": {"kernel": w, "bias": bias}}, x)
    for recipe in (None, "bf16"):
        ours = jax.jit(partial(qj.linear, recipe=recipe))(x, w, bias)
        assert_bitwise(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))

    # High precision supports all of JAX's transformations.
    def cubed(x: Array) -> Array:
        return (qj.linear(x, w) ** 3).sum().astype(jnp.float32)

    second = jax.jit(jax.grad(lambda x: jax.grad(cubed)(x).sum()))(x)
    assert second.shape == x.shape and np.asarray(second).any()


def test_float64_is_computed_in_high_precision_with_a_warning() -> None:
    with jax.enable_x64(True):
        x, w, bias, _ = operands((4,), 32, 16, jnp.float64)
        with pytest.warns(UserWarning, match="float64 is computed in high precision"):
            y = qj.linear(x, w, bias, recipe="mxfp8")
        assert_close("output", y, np.asarray(x) @ np.asarray(w) + np.asarray(bias), 1e-15)


@pytest.mark.parametrize("name", ["delayed", "rowwise_bf16_wgrad", "blockwise", "mxfp4", "nvfp4"])
def test_a_step_is_traced_where_64_bits_are_enabled(name: str) -> None:
    """A Python number has 64 bits there, and primitives need operands of one dtype."""
    state, (x, w, bias, g) = qj.state.init(name), operands((4,), 33, 17, jnp.bfloat16)
    step = partial(run.__wrapped__, name)
    expected = jax.eval_shape(step, x, w, bias, state, g)
    with jax.enable_x64(True):
        assert jax.eval_shape(step, x, w, bias, state, g) == expected


def test_a_step_has_the_same_bits_where_64_bits_are_enabled() -> None:
    state, (x, w, bias, g) = qj.state.init("nvfp4"), operands((4,), 33, 17, jnp.bfloat16)
    expected = run("nvfp4", x, w, bias, state, g)
    with jax.enable_x64(True):
        jax.tree.map(assert_bitwise, run("nvfp4", x, w, bias, state, g), expected)


def kept_bytes(function: Any, *args: Any) -> int:
    """Bytes saved between forward and backward, without computing anything."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@QUANTIZED
def test_backward_keeps_eight_bits_an_element(name: str) -> None:
    recipe, tokens, k, n = recipes.get(name), 256, 128, 64
    x, w, _, _ = operands((tokens,), k, n, jnp.bfloat16)
    state = qj.state.init(recipe)
    saved = kept_bytes(lambda x, w, state: qj.linear(x, w, recipe=recipe, state=state), x, w, state)
    weight = k * n if recipe.reuse.weight else w.nbytes
    few = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + 2048
    assert saved <= saved_bytes(recipe, tokens, k) + weight + few
    assert saved < x.nbytes + w.nbytes or recipe.wgrad.b is None


def test_the_weight_is_not_saved_when_x_needs_no_gradient() -> None:
    x, w, _, _ = operands((64,), 128, 256, jnp.bfloat16)
    assert kept_bytes(lambda w: qj.linear(x, w, recipe="tensorwise"), w) < x.size + 1024


@pytest.mark.parametrize(
    "name", ["blockwise", "mxfp8", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tensorwise", "nvfp4"))]
)
def test_operands_that_are_quantized_already_are_used_as_they_are(name: str) -> None:
    recipe = recipes.get(name)
    x, w, bias, g = operands((32,), 128, 64)
    wq, xq = qj.quantize(w.T, recipe.fprop.b), qj.quantize(x, recipe.fprop.a)
    layer = jax.jit(partial(qj.linear, recipe=recipe))
    expected = layer(x, w, bias)
    assert_bitwise(layer(x, wq, bias), expected)
    assert_bitwise(layer(xq, wq, bias), expected)
    state = qj.state.init(recipe)

    @jax.jit
    def grad_x(weight: Any) -> Array:
        return jax.grad(lambda x, s: (qj.linear(x, weight, recipe=recipe, state=s) * g).sum(), argnums=(0, 1))(
            x, state
        )[0]

    if recipe.reuse.weight:
        assert_bitwise(grad_x(wq), grad_x(w))
    else:
        with pytest.raises(ValueError, match="needs this operand also in blocks other than"):
            grad_x(wq)
    with pytest.raises(ValueError, match=re.escape("dequantize() it first")):
        qj.linear(x, qj.quantize(w.T, recipes.get("rowwise").fprop.b), recipe=recipe)


# --- the state -------------------------------------------------------------------------------------------------------


@REMEMBERING
@pytest.mark.parametrize("how", ["eager", "jit", "grad of jit", "checkpoint", "scan"])
def test_a_step_without_the_state_fails_at_trace(name: str, how: str) -> None:
    x, w, _, _ = operands((4,), 16, 16)
    state = qj.state.init(name)

    def loss(w: Array, state: Any) -> Array:
        return qj.linear(x, w, recipe=name, state=state).sum()

    def scanned(w: Array, state: Any) -> Array:
        layers = jnp.stack([w, w]), qj.state.share(state, 2)
        step = lambda h, layer: (qj.linear(h, layer[0], recipe=name, state=layer[1]), None)  # noqa: E731
        return lax.scan(step, x, layers)[0].sum()

    ways = {
        "eager": jax.grad(loss),
        "jit": jax.jit(jax.grad(loss)),
        "grad of jit": jax.grad(jax.jit(loss)),
        "checkpoint": jax.grad(jax.checkpoint(loss)),
        "scan": jax.grad(scanned),
    }
    with pytest.raises(ValueError, match="differentiate with respect to both"):
        jax.eval_shape(ways[how], w, state)


@REMEMBERING
@pytest.mark.parametrize("how", ["eager", "jit", "grad of jit", "checkpoint"])
def test_a_state_read_by_two_calls_fails_at_trace(name: str, how: str) -> None:
    x, w, _, _ = operands((4,), 16, 16)

    def loss(w: Array, state: Any) -> Array:
        h = qj.linear(x, w, recipe=name, state=state)
        return qj.linear(h, w, recipe=name, state=state).sum()

    both = partial(jax.grad, argnums=(0, 1))
    ways = {
        "eager": both(loss),
        "jit": jax.jit(both(loss)),
        "grad of jit": both(jax.jit(loss)),
        "checkpoint": both(jax.checkpoint(loss)),
    }
    with pytest.raises(ValueError, match=r"share\(state, 2\)"):
        jax.eval_shape(ways[how], w, qj.state.init(name))
    # Without gradients there is nothing to add up.
    jax.eval_shape(loss, w, qj.state.init(name))


@REMEMBERING
def test_a_vmap_that_shares_a_state_fails_at_trace(name: str) -> None:
    x, w, _, _ = operands((3, 4), 16, 16)
    state = qj.state.init(name)

    def loss(w: Array, state: Any, axis: int | None) -> Array:
        return jax.vmap(lambda x, s: qj.linear(x, w, recipe=name, state=s), in_axes=(0, axis))(x, state).sum()

    with pytest.raises(ValueError, match=r"share\(state, 3\)"):
        jax.eval_shape(jax.grad(partial(loss, axis=None), argnums=(0, 1)), w, state)
    after = jax.jit(jax.grad(lambda w, s: loss(w, qj.state.share(s, 3), 0), argnums=(0, 1)))(w, state)[1]
    if "history" in after:
        assert float(after["history"][-1, 0]) == float(jnp.abs(x).max())
    jax.eval_shape(partial(loss, axis=None), w, state)


def test_a_state_summed_by_a_scan_is_seen_in_the_next_loss() -> None:
    """A scan that reads one state in every iteration adds up the states, which no trace can detect."""
    x, w, _, _ = operands((4,), 16, 16)

    def loss(w: Array, state: Any) -> Array:
        return lax.scan(lambda h, _: (qj.linear(h, w, recipe="delayed", state=state), None), x, length=3)[0].sum()

    summed = jax.jit(jax.grad(loss, argnums=(0, 1)))(w, qj.state.init("delayed"))[1]
    assert jnp.isnan(jax.jit(loss)(w, summed))
    with pytest.raises(ValueError, match=r"\['layer'\] cannot be the result of a step"):
        qj.state.check({"layer": summed}, "delayed")


@pytest.mark.parametrize("given", [None, {}])
def test_missing_state_entries_are_named(given: Any) -> None:
    x, w, _, _ = operands((4,), 16, 16)
    with pytest.raises(ValueError, match="uses an amax history but got none"):
        qj.linear(x, w, recipe="delayed", state=given)
    with pytest.raises(ValueError, match="would use the same noise"):
        jax.eval_shape(jax.grad(lambda w: qj.linear(x, w, recipe="nvfp4", state=given).sum()), w)
    # No gradients, no noise.
    assert jax.eval_shape(lambda w: qj.linear(x, w, recipe="nvfp4", state=given), w).shape == (4, 16)


def test_a_mismatched_state_is_refused() -> None:
    x, w, _, _ = operands((4,), 16, 16)
    with pytest.raises(ValueError, match=r"history is float32\[4, 3\]"):
        qj.linear(x, w, recipe="delayed", state=qj.state.init(recipes.delayed(history=4)))
    narrow = jax.tree.map(lambda s: s.astype(jnp.bfloat16), qj.state.init("delayed"))
    with pytest.raises(ValueError, match="and do not cast it"):
        qj.linear(x, w, recipe="delayed", state=narrow)


@pytest.mark.parametrize(
    "w, bias, sentence",
    [((16, 8, 2), None, "give a matrix"), ((8, 16), None, "must be 8"), ((16, 8), (16,), "give a bias")],
)
def test_mismatched_shapes_are_refused(w: Any, bias: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        qj.linear(jnp.ones((4, 16)), jnp.ones(w), None if bias is None else jnp.ones(bias), recipe="mxfp8")
    with pytest.raises(ValueError, match="floating"):
        qj.linear(jnp.ones((4, 16), int), jnp.ones((16, 8), int), recipe="mxfp8")


# --- transformations -------------------------------------------------------------------------------------------------


def test_vmap_scales_every_slice_by_itself() -> None:
    name, n = "delayed", 3
    x, w, _, g = operands((n, 16), 64, 32)
    x = x * jnp.array([1.0, 1e3, 1e-3])[:, None, None]
    ws = jnp.stack([w, w * 3, w - 1])
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * n), qj.state.init(name))

    def step(x: Array, w: Array, state: Any, g: Array) -> Any:
        y, back = jax.vjp(lambda x, w, s: qj.linear(x, w, recipe=name, state=s), x, w, state)
        return (y, *back(g))

    got = jax.jit(jax.vmap(step))(x, ws, state, g)
    one = jax.jit(step)
    for i in range(n):
        expected = one(x[i], ws[i], jax.tree.map(lambda leaf, i=i: leaf[i], state), g[i])
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert_close(f"slice {i}", a[i], b, 1e-6)


def test_unneeded_gradients_are_not_computed() -> None:
    x, w, bias, g = operands((8,), 32, 16)

    def gemms(argnums: tuple[int, ...]) -> int:
        step = jax.grad(lambda x, w, b: (qj.linear(x, w, b, recipe="tensorwise") * g).sum(), argnums=argnums)
        return len(re.findall("dot_general", str(jax.make_jaxpr(step)(x, w, bias))))

    assert gemms((2,)) < gemms((0,)) == gemms((1,)) < gemms((0, 1))


# --- delayed scaling, step by step -----------------------------------------------------------------------------------


OPTIONS: dict[str, dict[str, Any]] = {
    "margin, e4m3": {"history": 3, "margin": 2, "format": "e4m3"},
    "most recent": {"history": 4, "algorithm": "most_recent"},
    "of one step, any scale": {"history": 1, "power_of_two": False, "margin": -3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_states_match_torch_and_the_reference_step_by_step(options: dict[str, Any]) -> None:
    import torch

    import quaver.torch as qt
    from quaver.reference import operations

    recipe = recipes.delayed(**options)
    assert recipe.delayed is not None
    x, w, bias, g = operands((3, 8), 32, 16)
    layer = qt.Linear(32, 16)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.asarray(w).T.copy()))
        layer.bias.copy_(torch.from_numpy(np.asarray(bias).copy()))
    state = qj.state.init(recipe)
    mirror = [np.zeros(recipe.delayed.length, np.float32)] * 3, [np.float32(0)] * 3
    with np.errstate(over="ignore", invalid="ignore"):
        sizes = np.float32([1.0, 40.0, 1e-3, np.inf, 0.0, 7.0, 3e30, 1e-42])
    for i, size in enumerate(sizes):
        tx = torch.from_numpy(np.array(x) * size).requires_grad_()
        tx.data[~torch.isfinite(tx)] = torch.inf
        tg = torch.from_numpy(np.array(g) * sizes[-i])
        tg[~torch.isfinite(tg)] = torch.nan
        for other in (tx.data, tg):
            other[other.abs() < 2.0**-126] = 0.0
        with qt.autocast(recipe):
            assert_bitwise(
                np.asarray(state["history"]) + 0.0,
                layer.history.numpy() if i else 0 * np.asarray(state["history"]),
                f"step {i}",
            )
            if i:
                assert_bitwise(state["factor"], layer.factor.numpy(), f"step {i}")
            y = layer(tx)
        y.backward(tg)
        before = state["factor"]
        got = run(recipe, jnp.asarray(tx.detach().numpy()), w, bias, state, jnp.asarray(tg.numpy()))
        state = got[4]
        expected = compose(recipe, tx.detach().numpy(), w, bias, tg.numpy(), factors=before)
        if recipe.fprop.a.power_of_two:  # type: ignore[union-attr]
            agree(recipe, got, expected)
        for column, t in enumerate((tx.detach().numpy(), np.asarray(w), tg.numpy())):
            with np.errstate(invalid="ignore"):
                recorded = operations.record(mirror[0][column], float(np.abs(t).max()))
            spec = states.columns(recipe)[column]
            mirror[0][column], mirror[1][column] = operations.roll(
                recorded, mirror[1][column], recipe.delayed, spec.format, spec.power_of_two
            )
            assert_bitwise(
                np.asarray(state["history"][:, column]) + 0.0, mirror[0][column], f"step {i}, column {column}"
            )
            assert_bitwise(state["factor"][column], mirror[1][column], f"step {i}, column {column}")
