"""Test linear layers and the MLP with Transformer Engine's fields: formulas, dtypes, axis names and errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

import quaver.compat.transformer_engine.jax as te
import quaver.jax
from quaver import recipes
from quaver.compat.transformer_engine.common.recipe import Float8CurrentScaling
from quaver.compat.transformer_engine.jax.flax import module
from tests.compat.transformer_engine.jax.flax import plain

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 5, 64))


def test_a_dense_layer_contracts_any_axes() -> None:
    x = X.reshape(2, 5, 8, 8)
    layer = te.flax.DenseGeneral((4, 16), axis=(-2, -1), bias_init=nn.initializers.normal())
    variables = layer.init(KEY, x)
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    assert kernel.shape == (8, 8, 4, 16) and bias.shape == (4, 16)
    np.testing.assert_allclose(layer.apply(variables, x), jnp.tensordot(x, kernel, 2) + bias, atol=1e-5)


def test_under_a_recipe_it_is_our_linear_bit_for_bit() -> None:
    layer = te.flax.DenseGeneral(32, use_bias=False)
    variables = layer.init(KEY, X)

    def loss(v: Any, x: Any) -> Any:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            return (layer.apply(v, x) ** 2).sum()

    def ours(v: Any, x: Any) -> Any:
        recipe = recipes.tensorwise(power_of_two=False)
        return (quaver.jax.linear(x, v["params"]["kernel"], recipe=recipe) ** 2).sum()

    results, expected = (jax.value_and_grad(f, (0, 1))(variables, X) for f in (loss, ours))
    jax.tree.map(np.testing.assert_array_equal, results, expected)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_norm_and_a_dense_layer_behind_it(kind: str, centered: bool) -> None:
    shared: dict[str, Any] = {"layernorm_type": kind, "zero_centered_gamma": centered}
    shared |= {"scale_init": nn.initializers.normal()}
    norm = te.flax.LayerNorm(bias_init=nn.initializers.normal(), **shared)
    both = te.flax.LayerNormDenseGeneral(
        (3, 32),
        use_bias=True,
        return_layernorm_output=True,
        ln_bias_init=nn.initializers.normal(),
        depth_scaling=2.0,
        **shared,
    )
    norm_variables, both_variables = nn.unbox(norm.init(KEY, X)), nn.unbox(both.init(KEY, X))
    expected = plain.norm(norm_variables["params"], X, kind, centered)
    np.testing.assert_allclose(norm.apply(norm_variables, X), expected, atol=1e-5)
    y, normed = both.apply(both_variables, X)
    expected = plain.norm(both_variables["params"], X, kind, centered)
    np.testing.assert_allclose(normed, expected, atol=1e-5)
    np.testing.assert_allclose(y, plain.dense(both_variables["params"], expected) / 2, atol=1e-5)
    bare = te.flax.LayerNormDenseGeneral(8, enable_layernorm=False)
    y, normed = bare.apply(bare.init(KEY, X), X)
    assert normed is None and set(bare.init(KEY, X)["params"]) == {"kernel"}


@pytest.mark.parametrize(
    "names",
    [
        ("relu",),
        ("gelu", "linear"),
        ("linear", "silu"),
        ("sigmoid", "linear"),
        ("quick_gelu", "linear"),
        ("squared_relu",),
        ("relu", "gelu", "linear"),
    ],
    ids="-".join,
)
def test_an_mlp_multiplies_its_parts(names: tuple[str, ...]) -> None:
    mlp = te.flax.LayerNormMLP(
        48, activations=names, use_bias=True, return_layernorm_output=True, bias_init=nn.initializers.normal(0.1)
    )
    variables = nn.unbox(mlp.init(KEY, X, deterministic=True))
    y, normed = mlp.apply(variables, X, deterministic=True)
    np.testing.assert_allclose(y, plain.mlp(variables["params"], normed, names), atol=2e-5)
    assert variables["params"]["wi_kernel"].shape == (64, len(names), 48)


def test_parts_may_be_functions_and_the_clamped_one_takes_parameters() -> None:
    x = X[..., None, :].repeat(2, -2)
    np.testing.assert_allclose(module.activated(x, (jnp.tanh, "linear"), None), jnp.tanh(X) * X, atol=1e-6)
    y = module.activated(x, module.CLAMPED, {"limit": 0.5, "alpha": 2.0})
    gate, value = jnp.minimum(X, 0.5), jnp.clip(X, -0.5, 0.5)
    np.testing.assert_allclose(y, gate * jax.nn.sigmoid(2 * gate) * (value + 1), atol=1e-6)
    for params, names, sentence in (
        ({"limit": 1.0}, ("relu",), "activation_params are only for activations="),
        (None, (), "activations is empty"),
        (None, ("rleu",), "no activation 'rleu'; did you mean 'relu'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            module.activated(x, names, params)


def test_results_have_their_inputs_dtype_and_parameters_the_fields() -> None:
    x = X.astype(jnp.bfloat16)
    mlp = te.flax.LayerNormMLP(48, use_bias=True, return_layernorm_output=True)
    variables = mlp.init(KEY, x, deterministic=True)
    assert {p.dtype for p in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    assert all(y.dtype == jnp.bfloat16 for y in mlp.apply(variables, x, deterministic=True))
    low = te.flax.DenseGeneral(8, dtype=jnp.bfloat16)
    assert {p.dtype for p in jax.tree.leaves(low.init(KEY, X))} == {jnp.dtype(jnp.bfloat16)}
    assert low.apply(low.init(KEY, X), X).dtype == jnp.float32


def test_axes_have_the_names_that_fields_give() -> None:
    specs = nn.get_partition_spec(te.flax.LayerNormMLP(48).init(KEY, X, deterministic=True))["params"]
    assert specs["wi_kernel"] == PartitionSpec("embed", "act", "mlp") and specs["scale"] == PartitionSpec("embed")
    layer = te.flax.DenseGeneral(
        8, kernel_axes=("embed", "out"), bias_axes=("out",), input_axes=("batch", None, "embed")
    )
    assert nn.get_partition_spec(layer.init(KEY, X))["params"]["kernel"] == PartitionSpec("embed", "out")
    with pytest.raises(ValueError, match=r"kernel has shape \(64, 8\), and .* names 1 axes; name all"):
        te.flax.DenseGeneral(8, kernel_axes=("embed",)).init(KEY, X)


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (lambda: te.flax.DenseGeneral(8, quantization_checkpoint_name="q"), "quantization_checkpoint_name='q'"),
        (lambda: te.flax.LayerNormDenseGeneral(8, axis=0), "axis=0 is not supported: leave it -1"),
        (lambda: te.flax.LayerNormMLP(8, axis=0), "axis=0 is not supported: leave it -1"),
    ],
    ids=["names of codes", "axis", "axis of an MLP"],
)
def test_unsupported_options_give_a_clear_error(layer: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        layer().init(KEY, X)


def test_low_rank_adapters_are_added_to_dense_layers() -> None:
    fields: Any = {"enable_low_rank_adaptation": True, "low_rank_adaptation_dim": 4, "low_rank_adaptation_alpha": 8.0}
    layer = te.flax.DenseGeneral((3, 8), use_bias=False, **fields)
    params = nn.unbox(layer.init(KEY, X))["params"]
    shapes = {"kernel": (64, 3, 8), "lora_a_kernel": (64, 3, 4), "lora_b_kernel": (3, 4, 8)}
    assert jax.tree.map(jnp.shape, params) == shapes and not params["lora_b_kernel"].any()
    params["lora_b_kernel"] = jax.random.normal(KEY, (3, 4, 8))
    low = jnp.einsum("...i,ior,orz->...oz", X, params["lora_a_kernel"], params["lora_b_kernel"])
    plain = jnp.einsum("...i,ioz->...oz", X, params["kernel"])
    np.testing.assert_allclose(layer.apply({"params": params}, X), plain + 2 * low, atol=1e-4)
    mlp = nn.unbox(te.flax.LayerNormMLP(48, activations=("silu", "linear"), **fields).init(KEY, X, deterministic=True))
    own = {name: value.shape for name, value in mlp["params"].items() if "lora" in name}
    assert own == {
        "wi_lora_a_kernel": (64, 2, 4), "wi_lora_b_kernel": (2, 4, 48),
        "wo_lora_a_kernel": (48, 4), "wo_lora_b_kernel": (4, 64),
    }  # fmt: skip


def test_flaxs_own_layers_take_a_recipe_of_theirs() -> None:
    cls = te.flax.make_dot_general_cls(Float8CurrentScaling())
    layer = nn.Dense(16, dot_general_cls=cls)
    variables = layer.init(KEY, X)
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    expected = quaver.jax.linear(X, kernel, recipe=recipes.tensorwise(power_of_two=False)) + bias
    np.testing.assert_allclose(layer.apply(variables, X), expected, atol=1e-6)
    assert not jnp.array_equal(layer.apply(variables, X), X @ kernel + bias)
