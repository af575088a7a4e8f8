"""The NNX modules: the bits of the linen ones, states that are written back, transforms, and converting models."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import quaver
import quaver.jax as qj
import quaver.jax.linen as ql
import quaver.jax.nnx as qn
from quaver.jax import state as states
from tests.close import assert_bitwise, assert_close

KEY = jax.random.key(0, impl="unsafe_rbg")
DELAYED = quaver.recipes.delayed(history=3)
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 32)), jnp.float32)
#: X's amax.
TOP = np.abs(X).max()
MEMORY = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 24)), jnp.float32)


def rngs() -> nnx.Rngs:
    return nnx.Rngs(KEY)


def pure(model: Any, kind: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(model, kind))


def without_state_key(tree: Any) -> Any:
    """NNX's states by linen's paths: {"wi": {"state": {...}}} as {"wi": {...}}."""
    if not isinstance(tree, dict):
        return tree
    return {k: without_state_key(v) for k, v in (tree["state"] if set(tree) == {"state"} else tree).items()}


def assert_same(a: Any, b: Any, what: str = "") -> None:
    """Two pytrees are equal bit by bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, left), right in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert_bitwise(left, right, f"{what} {jax.tree_util.keystr(path)}")


def squared(model: Any, *inputs: Any) -> Any:
    return jnp.square(model(*inputs)).sum()


@nnx.jit
def train_step(model: Any, *inputs: Any) -> Any:
    return qn.value_and_grad(squared)(model, *inputs)


PAIRS: list[tuple[Any, Any, tuple[Any, ...]]] = [
    (ql.DenseGeneral((4, 6), axis=(1, 2)), partial(qn.DenseGeneral, (4, 32), (4, 6), axis=(1, 2)), (X,)),
    (
        ql.TransformerLayer(heads=4, hidden=48, groups=2, activation="swiglu", rope=ql.Rope(), qk_norm="RMSNorm"),
        partial(qn.TransformerLayer, 32, 4, 48, groups=2, activation="swiglu", rope=qn.Rope(), qk_norm="RMSNorm"),
        (X,),
    ),
    (
        ql.TransformerLayer(heads=4, hidden=48, cross_attention=True, post_norm=True, normalization="RMSNorm"),
        partial(qn.TransformerLayer, 32, 4, 48, memory_features=24, post_norm=True, normalization="RMSNorm"),
        (X, MEMORY),
    ),
    (
        ql.TransformerLayer(heads=4, hidden=48, parallel=True, fused=False, groups=1, mask_type="none", head_dim=4),
        partial(qn.TransformerLayer, 32, 4, 48, parallel=True, fused=False, groups=1, mask_type="none", head_dim=4),
        (X,),
    ),
]


def filled(shapes: Any) -> Any:
    random = np.random.default_rng(2)
    # numpy converts and device_put copies: a conversion and jnp.asarray are a program for each shape.
    return jax.tree.map(lambda p: jax.device_put((0.3 * random.standard_normal(p.shape)).astype(np.float32)), shapes)


def module_of(make: Any) -> Any:
    """The module that `make` makes, with numpy's weights and fresh states: JAX would compile each operation of each
    shape that draws a weight."""
    model = nnx.eval_shape(make)
    _, weights, others = nnx.split(model, nnx.Param, ...)

    def fresh(leaf: Any) -> Any:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return KEY if is_key else jax.device_put(np.zeros(leaf.shape, leaf.dtype))

    nnx.update(model, filled(weights), jax.tree.map(fresh, others))
    return model


@pytest.mark.parametrize("linen, make, inputs", PAIRS, ids=["dense", "gqa", "cross", "parallel"])
def test_an_nnx_module_is_the_linen_one(linen: Any, make: Any, inputs: Any) -> None:
    """Names, shapes and outputs; without a recipe, which is quick to compile."""
    shapes = jax.eval_shape(linen.init, KEY, *inputs)["params"]
    abstract = nnx.eval_shape(lambda: make(rngs=rngs()))
    assert jax.tree.map(jnp.shape, pure(abstract, nnx.Param)) == jax.tree.map(jnp.shape, shapes)
    params = filled(shapes)
    graph, _, rest = nnx.split(abstract, nnx.Param, ...)
    assert not jax.tree.leaves(nnx.to_pure_dict(nnx.filter_state(rest, qn.OverwriteWithGradient)))
    run = jax.jit(lambda params, *inputs: _merged(graph, abstract, params)(*inputs))
    assert_bitwise(run(params, *inputs), jax.jit(linen.apply)({"params": params}, *inputs))


def _merged(graph: Any, abstract: Any, params: Any) -> Any:
    """The module with these parameters."""
    state = nnx.state(abstract, nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    layer = nnx.merge(graph, state, nnx.State({}))
    return layer


def test_with_a_recipe_gradients_and_states_are_linens_too() -> None:
    linen = ql.MLP(48, activation="swiglu", use_bias=False, recipe=DELAYED)
    # Its own weights, drawn by one program.
    model = nnx.jit(lambda: qn.MLP(32, 48, activation="swiglu", use_bias=False, recipe=DELAYED, rngs=rngs()))()
    params = pure(model, nnx.Param)
    state = {ql.COLLECTION: without_state_key(pure(model, qn.OverwriteWithGradient))}
    assert jax.tree.map(jnp.shape, {"params": params, **state}) == jax.tree.map(
        jnp.shape, jax.eval_shape(linen.init, KEY, X)
    )

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        return jax.grad(lambda p, s: jnp.square(linen.apply({"params": p, **s}, X)).sum(), argnums=(0, 1))(
            params, state
        )

    for _ in range(2):
        expected, state = step(params, state)
        _, gradients = train_step(model, X)
        assert_same(nnx.to_pure_dict(gradients), expected, "gradient of")
        assert_same(without_state_key(pure(model, qn.OverwriteWithGradient)), state[ql.COLLECTION], "state")


def test_a_step_is_value_and_grad_and_an_optimizer_of_parameters() -> None:
    model = module_of(lambda: qn.DenseGeneral(32, 8, recipe=DELAYED, rngs=rngs()))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        (loss, _), gradients = qn.value_and_grad(lambda m: (squared(m, X), "aux"), has_aux=True)(model)
        optimizer.update(model, gradients)
        return loss

    losses = [step(model, optimizer) for _ in range(4)]
    assert losses[-1] < losses[0]
    history = np.asarray(model.state.history[...])
    assert (history[1:, 0] == TOP).all() and history[1, 1] != history[2, 1]
    assert "history" not in str(nnx.state(optimizer))


def test_a_layer_that_took_no_part_keeps_its_state() -> None:
    dense = partial(qn.DenseGeneral, 32, 4, recipe=DELAYED)
    model = module_of(lambda: nnx.Dict(a=dense(rngs=rngs()), b=dense(rngs=rngs())))
    nnx.jit(qn.value_and_grad(lambda m: squared(m["a"], X) + squared(m["b"], X)))(model)
    before = pure(model["b"], qn.OverwriteWithGradient)
    nnx.jit(qn.value_and_grad(lambda m: squared(m["a"], X)))(model)
    assert_same(pure(model["b"], qn.OverwriteWithGradient), before)
    assert (np.asarray(model["a"].state.history[...])[1:, 0] == TOP).all()


def test_a_forgotten_or_foreign_state_gives_a_clear_error() -> None:
    model = module_of(lambda: qn.DenseGeneral(32, 8, name="head", rngs=rngs()))
    with (
        qj.autocast(DELAYED),
        pytest.raises(ValueError, match=r"DenseGeneral head runs under recipe 'delayed' and has no"),
    ):
        model(X)
    with qj.autocast(DELAYED):
        model = module_of(lambda: qn.DenseGeneral(32, 8, name="head", rngs=rngs()))
        with pytest.raises(
            ValueError, match="head: gradients are taken under recipe 'delayed', but not with respect to"
        ):
            nnx.eval_shape(nnx.grad(squared), model, X)
    with (
        qj.autocast(quaver.recipes.delayed(history=7)),
        pytest.raises(ValueError, match="has the state of recipe 'delayed'"),
    ):
        model(X)


class Stack(nnx.Module):
    """Two layers, scanned over or not, perhaps recomputed in backward."""

    def __init__(self, layers: Any, scanned: bool, recomputed: bool) -> None:
        self.layers = nnx.data(layers)
        self.scanned = scanned
        self.recomputed = recomputed

    def __call__(self, x: Any) -> Any:
        def run(x: Any, layer: Any) -> Any:
            return layer(x)

        step = nnx.remat(run) if self.recomputed else run
        if self.scanned:
            return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        for layer in self.layers:
            x = step(x, layer)
        return x


def test_state_under_scan_and_remat_matches_a_loop() -> None:
    def make(rngs: nnx.Rngs) -> Any:
        return qn.DenseGeneral(32, 32, use_bias=False, recipe=DELAYED, rngs=rngs)

    loop = module_of(lambda: Stack([make(rngs()) for _ in range(2)], False, False))
    # State that is not fresh.
    train_step(loop, X)
    graph = nnx.graphdef(loop.layers[0])
    expected_layers = [nnx.state(layer) for layer in loop.layers]
    stacked = nnx.merge(graph, jax.tree.map(lambda *leaves: jnp.stack(leaves), *expected_layers))
    model = Stack(stacked, True, True)
    _, expected = train_step(loop, X)
    expected = jax.tree.map(lambda *g: jnp.stack(g), *(nnx.to_pure_dict(expected)["layers"][i] for i in range(2)))
    following = jax.tree.map(lambda *s: jnp.stack(s), *(pure(m, qn.OverwriteWithGradient) for m in loop.layers))
    _, gradients = train_step(model, X)
    assert_same(nnx.to_pure_dict(gradients)["layers"], expected)
    assert_same(pure(model.layers, qn.OverwriteWithGradient), following)


def test_layers_made_and_run_under_vmap_have_separate_states() -> None:
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key: Any) -> Any:
        return qn.DenseGeneral(32, 8, use_bias=False, recipe=DELAYED, rngs=nnx.Rngs(key))

    model = nnx.jit(lambda: make(jax.random.split(KEY, 2)))()
    assert model.state.history.shape == (2, 3, 3)
    each = nnx.vmap(lambda layer, x: layer(x))
    nnx.jit(qn.value_and_grad(lambda m: jnp.square(each(m, X)).sum()))(model)
    newest = np.asarray(model.state.history[...])[:, 2]
    assert_bitwise(newest[:, 0], np.abs(X).max((1, 2)))
    assert_bitwise(newest[:, 1], np.abs(model.kernel[...]).max((1, 2)))


def test_train_and_eval_switch_every_dropout() -> None:
    dropping = {"dropout": 0.3, "attention_dropout": 0.3, "drop_path": 0.3}
    model = module_of(lambda: qn.TransformerLayer(32, 2, 8, **dropping, rngs=rngs()))
    plain = module_of(lambda: qn.TransformerLayer(32, 2, 8, rngs=rngs()))
    run = nnx.jit(lambda model, x: model(x))
    first, second = run(model, X), run(model, X)
    assert (np.asarray(first) != np.asarray(second)).any()
    model.eval()
    nnx.update(plain, nnx.state(model, nnx.Param))
    assert_bitwise(run(model, X), run(plain, X))
    with pytest.raises(ValueError, match="there is dropout; give rngs"):
        qn.DotProductAttention(dropout=0.1)


@pytest.mark.parametrize(
    "make, sentence",
    [
        (partial(qn.TransformerLayer, 32, 3, 8), "32 features do not divide among 3 heads"),
        (partial(qn.TransformerLayer, 32, 4, 8, parallel=True, post_norm=True), "is pre-norm"),
        (partial(qn.LayerNormMLP, 32, 8, normalization="layer"), "give one of 'LayerNorm', 'RMSNorm'"),
        (partial(qn.DenseGeneral, (4, 8), 3, axis=-1), "name different numbers of axes"),
        (partial(qn.DenseGeneral, 4, 3, recipe="mxpf8"), "did you mean 'mxfp8'"),
    ],
    ids=["heads", "parallel", "norm", "axes", "recipe"],
)
def test_invalid_arguments_give_a_clear_error(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(rngs=rngs())
    with pytest.raises(ValueError, match="needs a memory"):
        nnx.eval_shape(lambda: qn.TransformerLayer(32, 4, 8, memory_features=24, rngs=rngs())(X))


# Converting.


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(2, 32, rngs=rngs, decode=False)
        self.up = nnx.Linear(32, 48, rngs=rngs)
        self.down = nnx.Linear(48, 32, use_bias=False, rngs=rngs)
        self.mix = nnx.Einsum("bsd,df->bsf", (32, 16), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(x)
        return self.mix(x + self.down(jax.nn.relu(self.up(x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(7, 32, rngs=rngs)
        self.blocks = nnx.List([Block(rngs)])
        self.head = qn.DenseGeneral(16, 7, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.head(self.blocks[0](self.embed(ids)))


IDS = jnp.arange(8).reshape(2, 4) % 7
NAMES = [
    *(f"blocks.0.attention.{part}" for part in ("key", "out", "query", "value")),
    "blocks.0.down",
    "blocks.0.mix",
    "blocks.0.up",
    "head",
]


def test_convert_gives_every_layer_its_recipe_and_revert_takes_it_back() -> None:
    model = module_of(lambda: Model(rngs()))
    run = nnx.jit(lambda model, ids: model(ids))
    before = run(model, IDS)
    report = qn.convert(model, "tensorwise", head=True)
    assert list(report.converted) == NAMES and not report.skipped and not report.unused
    assert report.others == {"Embed": 1}
    assert str(report) == "converted 8 to tensorwise\n  not linear: 1 Embed"
    jaxpr = str(jax.make_jaxpr(lambda ids: model(ids))(IDS))
    assert jaxpr.count("custom_vjp_call[") == 8
    with qj.autocast("mxfp8"):
        assert str(jax.make_jaxpr(lambda ids: model(ids))(IDS)) == jaxpr, "a layer's own recipe holds"
    assert model.blocks[0].up.dot_general.name == "blocks.0.up" and model.head.name == "head"
    assert qn.revert(model) == NAMES
    assert_bitwise(run(model, IDS), before)
    assert qn.revert(model) == []


@pytest.mark.parametrize("recipe", [DELAYED, "nvfp4"], ids=str)
def test_an_unconverted_model_restores_the_plain_state_of_a_converted_one(recipe: Any) -> None:
    def made(seed: int) -> Any:
        keys = nnx.Rngs(seed)
        layers = nnx.Linear(32, 32, rngs=keys), nnx.Dropout(0.0, rngs=keys), qn.DenseGeneral(32, 8, rngs=keys)
        return nnx.Sequential(*layers)

    model, plain = made(0), made(1)
    qn.convert(model, recipe)
    train_step(model, X)
    saved = qn.plain_state(model)
    assert jax.tree.structure(saved) == jax.tree.structure(nnx.state(plain))
    nnx.update(plain, saved)
    before = pure(model, qn.OverwriteWithGradient)
    nnx.update(model, saved)
    assert_same(pure(model, qn.OverwriteWithGradient), before)
    qn.revert(model)
    assert_bitwise(plain(X), model(X))


def test_gradients_of_a_layer_without_its_state_name_the_call_to_make() -> None:
    model = nnx.Sequential(nnx.Linear(32, 8, rngs=rngs()))
    for recipe in (DELAYED, "nvfp4"):
        qn.convert(model, recipe)
        with pytest.raises(ValueError, match=r"quaver\.jax\.nnx\.value_and_grad.*TrainState"):
            nnx.grad(squared)(model, X)


def test_a_converted_layer_is_the_function_with_its_name() -> None:
    layer = module_of(lambda: nnx.Dict(up=nnx.Linear(32, 48, use_bias=False, rngs=rngs())))
    qn.convert(layer, "nvfp4", seed=5)
    kernel, direction = layer["up"].kernel[...], np.ones((2, 4, 48), np.float32)
    _, gradients = nnx.jit(qn.value_and_grad(lambda m: (m["up"](X) * direction).sum()))(layer)

    def expected(kernel: Any, state: Any) -> Any:
        return (qj.linear(X, kernel, recipe="nvfp4", state=state, name="up", seed=5) * direction).sum()

    gradient, state = jax.jit(jax.grad(expected, argnums=(0, 1)))(kernel, states.init("nvfp4"))
    assert_bitwise(gradients["up"]["kernel"][...], gradient)
    assert_bitwise(layer["up"].dot_general.state.count[...], state["count"])


def test_rules_skips_and_unmatched_patterns() -> None:
    model = module_of(lambda: Model(rngs()))
    rules = quaver.Rules({"*.attention.*": None, "up": "mxfp8", "blocks.[0-9].*": DELAYED, "hed": "nvfp4"})
    report = qn.convert(model, rules, skip=["mix", "lm_head"])
    assert {name: str(recipe) for name, recipe in report.converted.items()} == {
        "blocks.0.down": "delayed",
        "blocks.0.up": "mxfp8",
    }
    assert report.skipped["blocks.0.attention.query"] == "rule '*.attention.*' leaves it untouched"
    assert report.skipped["blocks.0.mix"] == "skip pattern 'mix'"
    assert report.skipped["head"] == "no rule matches it"
    assert report.unused == ["lm_head", "hed"]
    assert "matched nothing: hed; did you mean 'head'?" in str(report)
    assert model.blocks[0].down.dot_general.state.history.shape == (3, 3)
    assert model.blocks[0].mix.einsum_op is jnp.einsum
    with pytest.raises(ValueError, match=r"give a list of patterns: skip=\['head'\]"):
        qn.convert(model, "mxfp8", skip="head")


def test_unconvertible_modules_say_why() -> None:
    class Custom(nnx.Linear):
        def __call__(self, x: Any, out_sharding: Any = None) -> Any:
            return x @ self.kernel[...]

    model = module_of(
        lambda: nnx.Dict(
            custom=Custom(32, 8, rngs=rngs()),
            injected=nnx.Linear(32, 8, dot_general=lambda *a, **k: None, rngs=rngs()),
            general=nnx.LinearGeneral(32, 8, dot_general_cls=lambda: jax.lax.dot_general, rngs=rngs()),
            conv=nnx.Conv(3, 3, (1,), rngs=rngs()),
        )
    )
    with pytest.warns(UserWarning, match="convert changed nothing"):
        report = qn.convert(model, "mxfp8")
    assert report.skipped == {
        "custom": "Custom overrides __call__",
        "general": "it sets a custom dot_general_cls",
        "injected": "it has a custom dot_general",
    }
    assert report.others == {"Conv": 1}
    with pytest.raises(ValueError, match="did you mean 'mxfp8'"):
        qn.convert(model, "mxpf8")


def test_converting_again_keeps_the_state_of_the_same_recipe() -> None:
    model = module_of(lambda: nnx.Dict(up=nnx.Linear(32, 8, rngs=rngs()), own=qn.DenseGeneral(32, 8, rngs=rngs())))
    loss = nnx.jit(qn.value_and_grad(lambda m: squared(m["up"], X) + squared(m["own"], X)))
    qn.convert(model, DELAYED)
    loss(model)
    before = pure(model, qn.OverwriteWithGradient)
    assert (np.asarray(before["up"]["dot_general"]["state"]["factor"]) > 0).all()
    qn.convert(model, DELAYED)
    assert_same(pure(model, qn.OverwriteWithGradient), before)
    qn.convert(model, quaver.recipes.delayed(history=5))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(pure(model, qn.OverwriteWithGradient)))


def test_lora_and_stacked_layers_convert() -> None:
    lora = module_of(lambda: nnx.Dict(a=nnx.LoRALinear(32, 8, lora_rank=2, rngs=rngs())))
    assert list(qn.convert(lora, "tensorwise").converted) == ["a"]
    assert str(jax.make_jaxpr(lambda x: lora["a"](x))(X)).count("custom_vjp_call[") == 1

    make = nnx.vmap(lambda key: nnx.Linear(32, 32, use_bias=False, rngs=nnx.Rngs(key)))
    stacked = nnx.jit(lambda: make(jax.random.split(KEY, 2)))()
    qn.convert(stacked, DELAYED)
    assert stacked.dot_general.state.history.shape == (2, 3, 3)

    def loss(model: Any) -> Any:
        scan = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(X, model).sum()

    nnx.jit(qn.value_and_grad(loss))(stacked)
    history = np.asarray(stacked.dot_general.state.history[...])
    assert_bitwise(history[:, 2, 1], np.abs(stacked.kernel[...]).max((1, 2)))


def test_a_linen_model_crosses_the_bridge_with_its_state() -> None:
    @nnx.jit
    def begin() -> Any:
        model = nnx.bridge.ToNNX(ql.DenseGeneral(8, recipe=DELAYED), rngs=rngs())
        nnx.bridge.lazy_init(model, X)
        return model

    model = begin()
    train_step(model, X)
    history = jax.tree.leaves(nnx.state(model, qn.OverwriteWithGradient))
    assert any((np.asarray(leaf)[..., 0] == TOP).any() for leaf in history)


def test_logical_axes_place_the_parameters_and_are_linens() -> None:
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rules = (("embed", "data"), ("heads", "model"), ("mlp", "model"), ("head_dim", None))
    options = {"groups": 2, "activation": "swiglu", "partition": True}
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        model = nnx.eval_shape(lambda: qn.TransformerLayer(32, 4, 48, **options, rngs=rngs()))
        layer = qn.MLP(32, 48, partition=True, rngs=rngs())
    assert layer.wi.kernel[...].sharding.spec == jax.sharding.PartitionSpec("data", "model")
    ours = nnx.to_pure_dict(
        jax.tree.map(
            lambda v: v.get_metadata().get("out_sharding"),
            nnx.state(model, nnx.Param),
            is_leaf=lambda v: isinstance(v, nnx.Variable),
        )
    )
    boxed = jax.eval_shape(ql.TransformerLayer(heads=4, hidden=48, **options).init, KEY, X)["params"]
    for part, names in (("attention", ("qkv", "out")), ("mlp", ("wi", "wo"))):
        for name in names:
            assert {k: tuple(v.names) for k, v in boxed[part][name].items()} == ours[part][name]


def test_norms_and_relative_position_bias_are_linens() -> None:
    for name, ours in (("LayerNorm", qn.LayerNorm), ("RMSNorm", qn.RMSNorm)):
        module = ours(32, zero_centered=True)
        linen = getattr(ql, name)(zero_centered=True)
        y, variables = jax.jit(linen.init_with_output)(KEY, X)
        assert_same(pure(module, nnx.Param), variables["params"])
        assert_close(name, nnx.jit(lambda module: module(X))(module), y, 1e-6)
    bias = module_of(lambda: qn.RelativePositionBias(3, buckets=8, rngs=rngs()))
    linen = ql.RelativePositionBias(3, buckets=8)
    expected = jax.jit(lambda params: linen.apply({"params": params}, 4, 5))(pure(bias, nnx.Param))
    assert_bitwise(nnx.jit(lambda bias: bias(4, 5))(bias), expected)
