"""`quaver.jax.convert`, `plain_state` and `explain` on models of linen, NNX and Equinox."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import quaver.jax as qj
import quaver.jax.linen as ql
from quaver import recipes

# Threefry takes seconds to compile.
KEY = jax.random.key(0, impl="unsafe_rbg")
TOKENS = jnp.arange(32).reshape(2, 16) % 50
W = jnp.asarray(np.random.default_rng(1).standard_normal((32, 8)), jnp.float32)
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 32)), jnp.float32)


class Language(nn.Module):
    """Flax's own layers: an embedding, attention, a slot that is taken, and an output head."""

    custom: Any = None

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(50, 32, name="embed")(tokens)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(x)
        x = x + nn.Dense(32, name="mlp", dot_general=self.custom)(x)
        return nn.Dense(50, name="lm_head")(x)

    def hidden(self, tokens: Any) -> Any:
        return self(tokens)[..., :3]


def test_a_linen_model_runs_as_if_its_slots_were_set() -> None:
    model, report = qj.convert(nn.Dense(8, name="d"), "mxfp8")
    variables = jax.jit(model.init)(KEY, X)
    slots = nn.Dense(8, dot_general_cls=ql.dot_general_cls("mxfp8"))
    np.testing.assert_array_equal(jax.jit(model.apply)(variables, X), jax.jit(slots.apply)(variables, X))
    assert list(report.converted.values()) == [recipes.get("mxfp8")]


def test_a_linen_language_model_trains_and_its_head_stays_in_high_precision() -> None:
    plain = Language()
    model, report = qj.convert(plain, "delayed")
    variables = jax.jit(model.init)(KEY, TOKENS)
    assert set(report.converted) == {"attention.query", "attention.key", "attention.value", "attention.out", "mlp"}
    assert "output head" in report.skipped["lm_head"]
    params = jax.eval_shape(plain.init, KEY, TOKENS)["params"]
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(jnp.shape, params)
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1))

    @jax.jit
    def step(state: Any) -> Any:
        loss = lambda v: jnp.square(state.apply_fn(v, TOKENS, method="hidden")).mean()  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    losses = []
    for _ in range(3):
        state, value = step(state)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    history = state.params[ql.COLLECTION]["mlp"]["DotGeneral_0"]["history"]
    assert ((history[-3:] > 0).all(), history.shape[1]) == (True, 3)
    saved = qj.plain_state(state.params)
    assert set(saved) == {"params"} and plain.apply(saved, TOKENS).shape == (2, 16, 50)


def test_rules_and_skips_decide_layers_of_linen() -> None:
    model, report = qj.convert(
        Language(jax.lax.dot_general), {"*.query": "mxfp8", "lm_head": "rowwise"}, skip=["*.out", "nothing"]
    )
    jax.eval_shape(model.init, KEY, TOKENS)
    names = {name: recipe.name for name, recipe in report.converted.items()}
    assert names == {"attention.query": "mxfp8", "lm_head": "rowwise"}
    assert report.skipped["attention.out"] == "skip pattern '*.out'" and report.unused == ["nothing"]
    assert report.skipped["attention.key"] == report.skipped["mlp"] == "no rule matches it"
    taken, report = qj.convert(Language(jax.lax.dot_general), "mxfp8", head=True)
    jax.eval_shape(taken.init, KEY, TOKENS)
    assert report.skipped == {"mlp": "it sets a custom dot_general"} and "lm_head" in report.converted


def test_the_heads_of_nnx_models_stay_in_high_precision() -> None:
    class Head(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(50, 32, rngs=nnx.Rngs(0))
            self.mlp = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
            self.lm_head = nnx.Linear(32, 50, rngs=nnx.Rngs(0))

    own = Head()
    model, report = qj.convert(own, "tensorwise")
    assert model is own and set(report.converted) == {"mlp"} and "output head" in report.skipped["lm_head"]
    assert set(qj.convert(Head(), "tensorwise", head=True)[1].converted) == {"mlp", "lm_head"}
    assert set(nnx.to_pure_dict(qj.plain_state(model))) == {"embed", "mlp", "lm_head"}


def test_linen_layers_in_jit_and_called_by_keyword_run_under_their_own_recipe() -> None:
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(8, name="second")(inputs=nn.jit(nn.Dense)(32, name="first")(x))

    variables = jax.jit(Inner().init)(KEY, X)
    results = {}
    for recipe in ("mxfp8", "mxfp4"):
        model, report = qj.convert(Inner(), recipe)
        results[recipe] = model.apply(variables, X)
        assert set(report.converted) == {"first", "second"}
        assert "second" in model.tabulate(KEY, X)
    first, second = variables["params"]["first"], variables["params"]["second"]
    for recipe, y in results.items():
        h = qj.linear(X, first["kernel"], first["bias"], recipe=recipe)
        expected = qj.linear(h, second["kernel"], second["bias"], recipe=recipe)
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6 * float(jnp.abs(expected).max()))
    with pytest.raises(NotImplementedError, match="no bind"):
        model.bind(variables)


def test_a_head_before_its_embedding_keeps_the_first_decision() -> None:
    class Reversed(nn.Module):
        @nn.compact
        def __call__(self, x: Any, tokens: Any) -> Any:
            return nn.Dense(50, name="head")(x), nn.Embed(50, 32)(tokens)

    model, report = qj.convert(Reversed(), "delayed")
    variables = model.init(KEY, X, TOKENS)
    model.apply(variables, X, TOKENS)
    assert list(report.converted) == ["head"] and not report.skipped


@pytest.mark.parametrize("function", [qj.convert, qj.plain_state])
def test_other_models_are_named(function: Any) -> None:
    with pytest.raises(TypeError, match="not a list"):
        function([], "mxfp8") if function is qj.convert else function([])
    with pytest.raises(ValueError, match="no recipe 'mxfp9'"):
        qj.convert(nn.Dense(3), "mxfp9")
    with pytest.raises(ValueError, match="convert sets the recipes of linear layers only"):
        qj.convert(nn.Dense(3), recipes.mxfp8(attention=True))


# ---- Equinox ----


def equinox_model() -> Any:
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):  # type: ignore[misc,name-defined]
        embed: Any
        attention: Any
        mlp: Any
        lm_head: Any

        def __init__(self) -> None:
            keys = jax.random.split(KEY, 4)
            self.embed = eqx.nn.Embedding(50, 32, key=keys[0])
            self.attention = eqx.nn.MultiheadAttention(2, 32, key=keys[1])
            self.mlp = eqx.nn.Linear(32, 32, key=keys[2])
            self.lm_head = eqx.nn.Linear(32, 50, key=keys[3])

        def __call__(self, tokens: Any) -> Any:
            x = jax.vmap(self.embed)(tokens)
            x = x + self.attention(x, x, x)
            return jax.vmap(self.lm_head)(x + jax.vmap(self.mlp)(x))

    return Model()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "nvfp4"])
def test_an_equinox_model_trains(recipe: str) -> None:
    eqx = pytest.importorskip("equinox")
    plain = equinox_model()
    model, report = qj.convert(plain, recipe)
    projections = ("query_proj", "key_proj", "value_proj", "output_proj")
    assert set(report.converted) == {"mlp", *(f"attention.{name}" for name in projections)}
    assert "output head" in report.skipped["lm_head"]
    tx = optax.sgd(0.1)

    @eqx.filter_jit
    def step(model: Any) -> Any:
        value, gradient = eqx.filter_value_and_grad(lambda m: jnp.square(jax.vmap(m)(TOKENS)).mean())(model)
        gradient, after = qj.state.split(gradient)
        weights, before = qj.state.split(model)
        updates, _ = tx.update(gradient, tx.init(eqx.filter(weights, eqx.is_array)))
        return qj.state.join(eqx.apply_updates(weights, updates), qj.state.update(before, after)), value

    first, loss = step(model)
    second, lower = step(first)
    assert float(lower) < float(loss)
    if recipe == "delayed":
        assert (second.mlp.state["history"][-2:] > 0).all()
    restored = qj.plain_state(second)
    assert jax.tree.structure(restored) == jax.tree.structure(plain)


def test_an_equinox_layer_under_vmap_is_one_gemm_of_all_tokens() -> None:
    eqx = pytest.importorskip("equinox")
    layer, _ = qj.convert(eqx.nn.Linear(32, 8, key=KEY), "tensorwise")
    both = jax.jit(lambda m, x: jax.vmap(jax.vmap(m))(x))
    plain = lambda w, b, x: qj.linear(x, w.T, b, recipe="tensorwise", name="")  # noqa: E731

    @jax.jit
    def of_layer(x: Any) -> Any:
        y, back = jax.vjp(lambda w, b, x: both(eqx.tree_at(lambda m: (m.weight, m.bias), layer, (w, b)), x), *p, x)
        return y, back(jnp.cos(y))

    @jax.jit
    def of_function(x: Any) -> Any:
        y, back = jax.vjp(plain, *p, x)
        return y, back(jnp.cos(y))

    p = layer.weight, layer.bias
    for own, expected in zip(jax.tree.leaves(of_layer(X)), jax.tree.leaves(of_function(X)), strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=2e-6 * float(jnp.abs(expected).max()))
    # An outlier token makes the scale of all tokens too small for the others, but not that of one token alone.
    outlier = X.at[0, 0].multiply(1e6)
    assert not np.array_equal(layer(outlier[1, 1]), both(layer, outlier)[1, 1])
    per_example = jax.vmap(jax.grad(lambda w, x: eqx.tree_at(lambda m: m.weight, layer, w)(x).sum()), in_axes=(None, 0))
    assert per_example(layer.weight, X[0]).shape == (16, 8, 32)


def test_an_equinox_layer_called_twice_needs_its_number_of_uses() -> None:
    eqx = pytest.importorskip("equinox")
    loss = lambda m: jax.vmap(lambda x: m(m(x)))(X[0]).sum()  # noqa: E731
    once, _ = qj.convert(eqx.nn.Linear(32, 32, key=KEY), "delayed")
    with pytest.raises(ValueError, match="2 calls read the same state"):
        jax.eval_shape(eqx.filter_grad(loss), once)
    # The gradient of the input alone reads the state and leaves it alone.
    of_input = eqx.filter_jit(lambda m, x: jax.grad(lambda x: jax.vmap(lambda x: m(m(x)))(x).sum())(x))
    assert of_input(once, X[0]).shape == (16, 32)
    twice, _ = qj.convert(eqx.nn.Linear(32, 32, key=KEY), "delayed", uses=2)
    history = eqx.filter_jit(eqx.filter_grad(loss))(twice).state["history"]
    assert (history[:, -1] > 0).all() and history[0, -1, 0] == jnp.abs(X[0]).max() != history[1, -1, 0]


# ---- explain ----


def test_explain_names_the_gemms_of_layers() -> None:
    w = jnp.ones((32, 32))

    def loss(w: Any, x: Any) -> Any:
        return qj.linear(jnp.tanh(x @ w), w, recipe="mxfp8", name="layers.0.up").sum()

    found = qj.explain(jax.grad(loss, argnums=(0, 1)), w, jax.ShapeDtypeStruct((16, 32), jnp.float32))
    own = {(row.gemm, row.runs) for row in found if row.layer == "layers.0.up"}
    # The sum's gradient does not need the output.
    assert own == {("dgrad", "emulated"), ("wgrad", "emulated")}
    assert [row.runs for row in found if not row.layer] == ["high precision"] * 3
    assert "e4m3[1x32]:e8m0 x e4m3[1x32]:e8m0" in repr(found) and "bf16 x bf16 -> f32" in repr(found)


def test_explain_takes_static_arguments_and_equinoxs_jit() -> None:
    def run(w: Any, x: Any, mode: str, *, train: bool = False) -> Any:
        return qj.linear(x, w, recipe="mxfp8", name=mode) * (2 if train else 1)

    assert [row.layer for row in qj.explain(run, W, X[0], "up", train=True)] == ["up"]
    assert not qj.explain(jnp.tanh, X) and repr(qj.explain(jnp.tanh, X)).startswith("layer")
    eqx = pytest.importorskip("equinox")
    layer, _ = qj.convert(eqx.nn.Linear(32, 8, key=KEY), "mxfp8")
    found = qj.explain(eqx.filter_jit(lambda m, x: jax.vmap(m)(x)), layer, X[0])
    assert [row.runs for row in found] == ["emulated"]


#: Lines of programs that XLA compiles for H200 and B200.
PROGRAM = """
  %a = f8e4m3fn[64,96]{1,0} parameter(0)
  %b = f8e5m2[48,96]{1,0} parameter(1)
  %gemm.1 = (f32[64,48]{1,0}, s8[33554432]{0}) custom-call(%a, %b, %s), custom_call_target="__cublas$lt$matmul$f8", \
metadata={op_name="jit(f)/jvp(quaver[a|fprop|e4m3[*x*]:fp32 x e5m2[*x*]:fp32])/dot_general"}
  %scaled = bf16[1,64,48]{2,1,0} custom-call(%a, %a, %s, %s), custom_call_target="__cudnn$blockScaledDot", \
metadata={op_name="jit(f)/quaver[b|wgrad|e4m3[1x32]:e8m0 x e4m3[1x32]:e8m0]/dot"}
  %w = bf16[48,96]{1,0} parameter(2)
  ROOT %dot.1 = f32[48,48]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %other = f32[8] custom-call(%a), custom_call_target="somebody"
"""


def test_explain_reads_the_calls_of_gpu_libraries() -> None:
    from quaver.jax.inspection.explain import gemms_in

    assert [(g.layer, g.gemm, g.types, g.runs) for g in gemms_in(PROGRAM)] == [
        ("a", "fprop", "f8e4m3fn x f8e5m2 -> f32", "fp8"),
        ("b", "wgrad", "f8e4m3fn x f8e4m3fn -> bf16", "block-scaled"),
        ("", "", "bf16 x bf16 -> f32", "high precision"),
    ]
