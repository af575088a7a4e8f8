"""The linen modules: their results, the place of their state, and both under Flax's transforms."""

from functools import cache, partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import quaver
import quaver.jax as qj
import quaver.jax.linen as ql
from quaver.jax import state as states
from quaver.reference.operations import record, roll
from tests.close import assert_bitwise, assert_close
from tests.jax import plain_layer
from tests.jax.functional_mlp import layer_norm_mlp

# Threefry takes seconds to compile.
KEY = jax.random.key(0, impl="unsafe_rbg")
DELAYED = quaver.recipes.delayed(history=3)
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 32)), jnp.float32)
MEMORY = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 24)), jnp.float32)


def assert_same(a: Any, b: Any, what: str = "") -> None:
    """Two pytrees are equal bit by bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, left), right in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert_bitwise(left, right, f"{what} {jax.tree_util.keystr(path)}")


def filled(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    """The model's variables with random parameters, scales and biases too; quicker than compiling its init."""
    shapes = jax.eval_shape(partial(model.init, **options), KEY, *inputs)
    random = np.random.default_rng(2)
    params = jax.tree.map(lambda p: 0.3 * random.standard_normal(p.shape).astype(np.float32), shapes["params"])
    return jax.tree.map(lambda p: np.zeros(p.shape, p.dtype), shapes) | {"params": params}


def initialized(model: nn.Module, *inputs: Any) -> Any:
    """What init gives, as one program: eagerly each operation of the layer would be compiled and run too."""
    return jax.jit(model.init)(KEY, *inputs)


def step(model: nn.Module, variables: Any, *inputs: Any) -> Any:
    """Gradients of the parameters, and the next state."""
    state, params = flax.core.pop(variables, "params")
    return gradients_of(model)(params, state, *inputs)


@cache
def gradients_of(model: nn.Module) -> Any:
    @jax.jit
    def run(params: Any, state: Any, *inputs: Any) -> Any:
        def loss(params: Any, state: Any) -> Any:
            return jnp.square(model.apply({"params": params, **state}, *inputs)).sum()

        return jax.grad(loss, argnums=(0, 1))(params, state)

    return run


@pytest.mark.parametrize("features, axis", [(6, -1), ((2, 3), (1, -1)), ((4,), (0,))])
def test_without_a_recipe_it_is_flaxs_dense_general(features: Any, axis: Any) -> None:
    ours, theirs = ql.DenseGeneral(features, axis=axis), nn.DenseGeneral(features, axis=axis)
    (y, variables), (expected, drawn) = (jax.jit(layer.init_with_output)(KEY, X) for layer in (ours, theirs))
    assert_same(variables, drawn, "init")
    assert_bitwise(y, expected)


def test_a_module_is_the_function_on_its_variables() -> None:
    recipe = "nvfp4"

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return ql.DenseGeneral((4, 8), recipe=recipe, name="first")(x)

    variables = initialized(Model(), X)
    gradients, following = step(Model(), variables, X)
    params = variables["params"]["first"]
    state = states.init(recipe)
    assert_same(variables.get(ql.COLLECTION, {}).get("first", {}), state)

    def loss_of_function(kernel: Any, bias: Any, state: Any) -> Any:
        y = qj.linear(X, kernel.reshape(32, 32), bias.reshape(32), recipe=recipe, state=state, name="first")
        return jnp.square(y).sum()

    kernel, bias, after = jax.jit(jax.grad(loss_of_function, argnums=(0, 1, 2)))(
        params["kernel"], params["bias"], state
    )
    assert_bitwise(gradients["first"]["kernel"], kernel)
    assert_close("bias", gradients["first"]["bias"], bias, 1e-6)
    assert_same(following.get(ql.COLLECTION, {}).get("first", {}), after)


def test_the_history_matches_numpy_over_steps() -> None:
    model = ql.DenseGeneral(8, use_bias=False, recipe=DELAYED)
    state, params = flax.core.pop(initialized(model, X), "params")
    history, factor = np.zeros((3, 3), np.float32), np.zeros(3, np.float32)
    run = jax.jit(jax.grad(lambda p, s, x: (model.apply({"params": p, **s}, x) * 3).sum(), argnums=(0, 1)))
    for size in (1.0, 5.0, 0.25, 0.5):
        _, state = run(params, state, X * size)
        amaxes = [np.abs(X).max() * size, np.abs(params["kernel"]).max(), 3.0]
        for i, amax in enumerate(amaxes):
            assert DELAYED.fprop.a is not None and DELAYED.dgrad.a is not None and DELAYED.delayed is not None
            fmt = DELAYED.dgrad.a.format if i == 2 else DELAYED.fprop.a.format
            history[:, i], factor[i] = roll(record(history[:, i], amax), factor[i], DELAYED.delayed, fmt)
    assert (state[ql.COLLECTION]["history"] == history).all()
    assert_bitwise(state[ql.COLLECTION]["factor"], factor)


def test_jit_distinguishes_the_module_recipe_from_the_ambient_one() -> None:
    plain, own = ql.DenseGeneral(16), ql.DenseGeneral(16, recipe="mxfp8")
    variables = initialized(plain, X)
    run, run_own = (jax.jit(lambda v, module=module: module.apply(v, X)) for module in (plain, own))
    high, low = run(variables), run_own(variables)
    assert (high != low).any()
    with qj.autocast("mxfp8"):
        assert_bitwise(run(variables), low)
    with qj.autocast("mxfp4"):
        assert (run(variables) != low).any()
        assert_bitwise(run_own(variables), low)
    with qj.autocast(enabled=False):
        assert_bitwise(run_own(variables), high)


def test_a_kernel_is_quantized_from_its_own_dtype_and_the_output_has_dtype() -> None:
    module = ql.DenseGeneral(16, dtype=jnp.bfloat16, recipe="tensorwise")
    y, variables = jax.jit(module.init_with_output)(KEY, X)
    assert y.dtype == jnp.bfloat16
    params = variables["params"]
    function = jax.jit(partial(qj.linear, recipe="tensorwise", dtype="bfloat16"))
    expected = function(X.astype(jnp.bfloat16), params["kernel"], params["bias"])
    assert_bitwise(y.astype(jnp.float32), expected.astype(jnp.float32))


def test_missing_and_foreign_state_gives_a_clear_error() -> None:
    model = nn.Sequential([ql.DenseGeneral(8)])
    with qj.autocast(DELAYED):
        variables = filled(model, X)
        with pytest.raises(ValueError, match=r"DenseGeneral layers_0 under recipe 'delayed' needs its state, history"):
            model.apply({"params": variables["params"]}, X)
        with pytest.raises(ValueError, match=r"with respect to the layer's state"):
            jax.eval_shape(jax.grad(lambda p: model.apply({**variables, "params": p}, X).sum()), variables["params"])
        assert jax.eval_shape(model.apply, variables, X).shape == (2, 4, 8)
    with (
        qj.autocast(quaver.recipes.delayed(history=5)),
        pytest.raises(
            ValueError, match=r"has a history of shape \(3, 3\) and needs \(5, 3\): it belongs to another recipe"
        ),
    ):
        model.apply(variables, X)


class Stack(nn.Module):
    """Two layers, one after the other or scanned, perhaps recomputed in backward."""

    scanned: bool = False
    recomputed: bool = False
    collections: tuple[str, ...] = ("params", ql.COLLECTION)

    @nn.compact
    def __call__(self, x: Any) -> Any:
        layer = nn.remat(ql.DenseGeneral) if self.recomputed else ql.DenseGeneral
        if not self.scanned:
            for i in range(2):
                x = layer(32, use_bias=False, recipe=DELAYED, name=f"layer_{i}")(x)
            return x

        def body(module: Any, x: Any, _: Any) -> Any:
            return module(x), None

        scan = nn.scan(body, variable_axes=dict.fromkeys(self.collections, 0), split_rngs={"params": True}, length=2)
        return scan(layer(32, use_bias=False, recipe=DELAYED, name="layer"), x, None)[0]


def stacked(tree: Any) -> Any:
    """Layers' variables as nn.scan keeps them: with a leading axis."""
    return {
        name: {"layer": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers.values())}
        for name, layers in tree.items()
    }


def test_state_under_remat_and_scan_matches_a_loop() -> None:
    variables = filled(Stack(), X)
    loop = step(Stack(), variables, X)
    expected = stacked({"params": loop[0], **loop[1]})
    model = Stack(scanned=True, recomputed=True)
    initialized = jax.eval_shape(model.init, KEY, X)
    assert jax.tree.map(jnp.shape, initialized) == jax.tree.map(jnp.shape, stacked(variables))
    gradients, following = step(model, stacked(variables), X)
    assert_same({"params": gradients, **following}, expected)


def test_a_scan_without_the_collection_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match="need the collection in variable_axes"):
        jax.eval_shape(Stack(scanned=True, collections=("params",)).init, KEY, X)


def test_a_layer_used_twice_gives_a_clear_error_and_a_scan_gives_each_use_its_state() -> None:
    class Twice(nn.Module):
        scanned: bool = False

        @nn.compact
        def __call__(self, x: Any) -> Any:
            layer = ql.DenseGeneral(32, use_bias=False, recipe=DELAYED, name="layer")
            if not self.scanned:
                return layer(layer(x))
            axes = {ql.COLLECTION: 0}
            scan = nn.scan(
                lambda m, x, _: (m(x), None), variable_broadcast="params", variable_axes=axes,
                split_rngs={"params": False}, length=2,
            )  # fmt: skip
            return scan(layer, x, None)[0]

    with pytest.raises(ValueError, match="2 calls read the same state in one step"):
        step(Twice(), filled(Twice(), X), X)
    variables = filled(Twice(scanned=True), X)
    kernel = variables["params"]["layer"]["kernel"]
    assert kernel.shape == (32, 32)
    _, following = step(Twice(scanned=True), variables, X)
    history = following[ql.COLLECTION]["layer"]["history"]
    between = jax.jit(partial(qj.linear, recipe=DELAYED))(X, kernel, state=states.init(DELAYED))
    assert history[:, 2, :2].tolist() == [[a.max(), jnp.abs(kernel).max()] for a in (jnp.abs(X), jnp.abs(between))]


def test_state_under_vmap_is_per_layer() -> None:
    axes = {"params": 0, ql.COLLECTION: 0}
    model = nn.vmap(ql.DenseGeneral, variable_axes=axes, split_rngs={"params": True})(8, use_bias=False, recipe=DELAYED)
    variables = initialized(model, X)
    gradients, following = step(model, variables, X)
    for i in range(2):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], variables)
        gradient, state = step(ql.DenseGeneral(8, use_bias=False, recipe=DELAYED), one, X[i])
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], (gradients, following)), (gradient, state), f"layer {i}")


@pytest.mark.parametrize(
    "order, options",
    [
        ("pre", {"mask_type": "none"}),
        ("pre", {"groups": 2, "activation": "swiglu", "rope": ql.Rope(), "use_bias": False}),
        ("pre", {"qk_norm": "RMSNorm", "fused": False, "groups": 1, "normalization": "RMSNorm", "head_dim": 4}),
        ("pre", {"cross_attention": True}),
        ("post", {"cross_attention": True, "fused": False}),
        ("post", {"mask_type": "none", "normalization": "RMSNorm"}),
        ("parallel", {"rope": ql.Rope(), "groups": 1}),
    ],
    ids=str,
)
def test_a_transformer_layer_matches_its_formula(order: str, options: dict[str, Any]) -> None:
    layer = ql.TransformerLayer(heads=4, hidden=48, post_norm=order == "post", parallel=order == "parallel", **options)
    inputs = (X, MEMORY) if options.get("cross_attention") else (X,)
    params = filled(layer, *inputs)["params"]
    bias = np.random.default_rng(3).standard_normal((1, 4, 4, 4)).astype(np.float32)
    y = jax.jit(layer.apply)({"params": params}, *inputs, bias=bias)
    expected = plain_layer.layer(
        np.asarray(X, np.float64),
        np.asarray(MEMORY, np.float64) if len(inputs) == 2 else None,
        jax.tree.map(lambda p: np.asarray(p, np.float64), params),
        options.get("normalization", "LayerNorm"),
        order,
        causal=options.get("mask_type", "causal") == "causal",
        rope="rope" in options,
        bias=bias,
    )
    assert_close(order, y, expected, 2e-6)


def test_layer_norm_mlp_is_the_function_on_its_variables() -> None:
    model = ql.LayerNormMLP(48, activation="swiglu", recipe="mxfp8")
    variables = filled(model, X)
    p = variables["params"]
    y, normalized = jax.jit(model.apply)(variables, X)
    wi, wo = p["mlp"]["wi"], p["mlp"]["wo"]
    expected = jax.jit(partial(layer_norm_mlp, activation="swiglu", recipe="mxfp8"))(
        X, p["norm"]["scale"], p["norm"]["bias"], wi["kernel"], wo["kernel"], wi["bias"], wo["bias"],
    )  # fmt: skip
    assert_bitwise(y, expected[0])
    assert_bitwise(normalized, expected[1])


def test_dropout_needs_deterministic_set_and_drop_path_drops_samples() -> None:
    layer = ql.TransformerLayer(heads=2, hidden=8, dropout=0.3, attention_dropout=0.3)
    x = jnp.tile(X[:1], (64, 1, 1))
    variables = filled(layer, x, deterministic=True)
    with pytest.raises(ValueError, match="say deterministic=False in training"):
        layer.apply(variables, x)

    @partial(jax.jit, static_argnums=0)
    def run(layer: nn.Module, seed: int) -> Any:
        return layer.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.fold_in(KEY, seed)})

    a, b, c = (run(layer, seed) for seed in (0, 0, 1))
    assert (a == b).all() and (a != c).any()
    y = run(ql.TransformerLayer(heads=2, hidden=8, drop_path=0.5), 0)
    kinds = {tuple(np.round(row, 3)) for row in np.asarray(y[:, 0])}
    assert len(kinds) == 4, "each of two parts is there or not"
    assert (y == x).all((1, 2)).sum() in range(4, 32)


def test_logical_axes_are_named_and_change_nothing_else() -> None:
    layer = ql.TransformerLayer(heads=4, hidden=48, activation="swiglu", partition=True)
    names = nn.get_partition_spec(jax.eval_shape(layer.init, KEY, X))["params"]
    assert names["attention"]["qkv"]["kernel"] == jax.sharding.PartitionSpec("embed", "heads", None, "head_dim")
    assert names["mlp"]["wi"]["kernel"] == jax.sharding.PartitionSpec("embed", "mlp", None)
    assert names["mlp"]["wo"]["bias"] == jax.sharding.PartitionSpec("embed")
    dense = ql.DenseGeneral((2, 4), kernel_axes=("embed", None, "mlp"), bias_axes=(None, "mlp"))
    boxed, plain = initialized(dense, X), initialized(ql.DenseGeneral((2, 4)), X)
    assert isinstance(boxed["params"]["kernel"], nn.LogicallyPartitioned)
    assert_same(nn.unbox(boxed), plain)
    apply = jax.jit(dense.apply)
    assert_bitwise(apply(boxed, X), apply(plain, X))


@pytest.mark.parametrize(
    "layer, inputs, sentence",
    [
        (ql.TransformerLayer(heads=3, hidden=8), (X,), "32 features do not divide among 3 heads"),
        (ql.TransformerLayer(heads=4, groups=3, hidden=8), (X,), "4 query heads cannot share 3 heads"),
        (ql.TransformerLayer(heads=4, hidden=8, cross_attention=True), (X,), "cross_attention=True needs a memory"),
        (ql.TransformerLayer(heads=4, hidden=8), (X, MEMORY), "has no cross attention"),
        (ql.TransformerLayer(heads=4, hidden=8, parallel=True, post_norm=True), (X,), "is pre-norm"),
        (ql.LayerNormMLP(8, normalization="layer"), (X,), "give one of 'LayerNorm', 'RMSNorm'"),
        (ql.MLP(8, activation="swigloo"), (X,), "did you mean 'swiglu'"),
        (ql.DenseGeneral(8, axis=3), (X,), "axis 3 does not name different axes of an array with 3"),
        (ql.DenseGeneral(8, recipe="mxpf8"), (X,), "did you mean 'mxfp8'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_arguments_give_a_clear_error(layer: nn.Module, inputs: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(layer.init, KEY, *inputs)


def test_states_of_scanned_layers_merge_and_update_layer_by_layer() -> None:
    def after(amaxes: Any) -> Any:
        return [states.record(states.init(DELAYED), a, DELAYED) for a in amaxes]

    def stack(layers: Any) -> Any:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

    @jax.jit
    def together_and_one_by_one(amaxes: Any) -> Any:
        a, b = map(after, amaxes)
        merged = states.merge(stack(a), stack(b)), stack([states.merge(*pair) for pair in zip(a, b, strict=True)])
        nothing = jax.tree.map(jnp.zeros_like, b[1])
        return merged, (states.update(stack(a), stack([b[0], nothing])), stack([states.update(a[0], b[0]), a[1]]))

    amaxes = np.array([[[1, 2, 3], [4, 0, 6]], [[2, 1, 3], [5, 7, 0]]], np.float32)
    for together, one_by_one in together_and_one_by_one(amaxes):
        assert_same(together, one_by_one)
