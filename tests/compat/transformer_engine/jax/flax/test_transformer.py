"""A linen layer of Transformer Engine's fields computes what its documentation says, and trains under recipes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import Array

import quaver.compat.transformer_engine.jax as te
from quaver.compat.transformer_engine.common.recipe import DelayedScaling
from tests.compat.transformer_engine.jax.flax import plain

DECODER = te.flax.TransformerLayerType.DECODER
KINDS: dict[str, dict[str, Any]] = {
    "T5's encoder": {"self_attn_mask_type": "no_mask"},
    "T5's decoder": {"layer_type": DECODER, "mlp_activations": ("gelu", "linear")},
    "GPT": {"enable_relative_embedding": False, "use_bias": True, "scale_attn_logits": True},
    "Llama": {
        "num_gqa_groups": 2,
        "layernorm_type": "rmsnorm",
        "mlp_activations": ("silu", "linear"),
        "enable_relative_embedding": False,
        "enable_rotary_pos_emb": True,
    },
    "not fused": {"fuse_qkv_params": False, "zero_centered_gamma": True, "use_bias": True},
    "BERT": {"output_layernorm": True, "apply_residual_connection_post_layernorm": True},
    "residual from the norm": {"apply_residual_connection_post_layernorm": True, "layer_type": DECODER},
}
EACH = pytest.mark.parametrize("kind", KINDS)
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "intermediate_dropout": 0.0}


def layer_of(kind: str, **more: Any) -> tuple[Any, Any, Array, Array | None]:
    layer = te.flax.TransformerLayer(64, 96, 4, **QUIET, **KINDS[kind], **more)
    x = jax.random.normal(jax.random.key(1), (2, 5, 64))
    memory = jax.random.normal(jax.random.key(2), (2, 7, 64)) if "layer_type" in KINDS[kind] else None
    # One program: eagerly, JAX compiles each operation.
    variables = nn.unbox(jax.jit(layer.init)(jax.random.key(0), x, memory))
    rng = np.random.default_rng(3)
    # Norms and biases that do something.
    params = jax.tree.map(
        lambda p: p + 0.1 * rng.normal(size=p.shape).astype(p.dtype) if p.ndim < 3 else p, variables["params"]
    )
    return layer, {**variables, "params": params}, x, memory


@EACH
def test_the_formula_matches_the_documentation(kind: str) -> None:
    layer, variables, x, memory = layer_of(kind)
    expected = plain.layer(variables["params"], x, memory, heads=4, **KINDS[kind])
    np.testing.assert_allclose(jax.jit(layer.apply)(variables, x, memory), expected, rtol=0, atol=3e-5)


def test_sequence_first_input_gives_the_transposed_result() -> None:
    layer, variables, x, _ = layer_of("Llama")
    transposed, *_ = layer_of("Llama", transpose_batch_sequence=True)
    y = transposed.apply(variables, x.swapaxes(0, 1)).swapaxes(0, 1)
    np.testing.assert_allclose(y, layer.apply(variables, x), rtol=0, atol=1e-6)


def test_it_trains_quantized_and_each_gemm_records_its_own_history() -> None:
    with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=4)):
        layer, variables, x, _ = layer_of("GPT")

        def loss(params: Any, metas: Any) -> tuple[Array, Array]:
            y = layer.apply({"params": params, te.NVTE_FP8_COLLECTION_NAME: metas}, x)
            return (y**2).mean(), y

        metas = variables[te.NVTE_FP8_COLLECTION_NAME]
        assert set(metas) == {"attention", "mlp"} and set(metas["mlp"]) == {"wi", "wo"}
        assert set(metas["attention"]) == {"qkv", "out"}
        (gradients, after), y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(variables["params"], metas)
    plainly = jax.jit(layer.apply)(variables, x)
    assert 1e-3 < float(jnp.linalg.norm(y - plainly) / jnp.linalg.norm(plainly)) < 0.2
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradients))
    recorded = [np.asarray(h).max(0) for h in jax.tree.leaves(after) if h.ndim == 2]
    assert len(recorded) == 4 and all((h > 0).all() for h in recorded)
    assert len({tuple(h) for h in recorded}) == 4


def test_dropout_and_drop_path_draw_from_the_named_rng() -> None:
    x = jax.random.normal(jax.random.key(4), (4, 5, 64))
    layer = te.flax.TransformerLayer(64, 96, 4, drop_path=0.5, dropout_rng_name="mine", hidden_dropout_dims=(1,))
    variables = jax.jit(layer.init)({"params": jax.random.key(0), "mine": jax.random.key(1)}, x)
    run = jax.jit(lambda i: layer.apply(variables, x, rngs={"mine": jax.random.key(i)}))
    assert not jnp.array_equal(run(1), run(2))
    assert jnp.array_equal(run(1), run(1))
    still = jax.jit(partial(layer.apply, deterministic=True))
    assert jnp.array_equal(still(variables, x), still(variables, x))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"softmax_type": "learnable"}, "softmax_type='learnable' is not supported"),
        ({"low_rank_adaptation_scope": "qkv"}, "no low_rank_adaptation_scope 'qkv'"),
        ({"num_attention_heads": 5}, "has 5 heads, 64 features, and inputs of shape"),
        ({"layer_type": DECODER}, "attends to `encoded`; pass it"),
        ({"layer_type": "decodr"}, "did you mean 'decoder'"),
        ({"self_attn_mask_type": "casual"}, "no attn_mask_type 'casual'; did you mean 'causal'"),
        ({"mlp_activations": ("geglu",)}, "no activation 'geglu'; did you mean 'gelu'"),
        ({"layernorm_type": "rms_norm"}, "no layernorm_type 'rms_norm'; did you mean 'rmsnorm'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_options_give_a_clear_error(given: dict[str, Any], sentence: str) -> None:
    layer = te.flax.TransformerLayer(**{"hidden_size": 64, "mlp_hidden_size": 96, "num_attention_heads": 4, **given})
    with pytest.raises(ValueError, match=sentence):
        layer.init(jax.random.key(0), jnp.ones((2, 5, 64)), deterministic=True)


@pytest.mark.parametrize(
    ("scope", "adapted"),
    [
        ("none", set()), ("all", {"qkv", "out", "mlp"}), ("mlp", {"mlp"}), ("exclude_qkv_proj", {"out", "mlp"}),
        ("exclude_mlp", {"qkv", "out"}),
    ],
)  # fmt: skip
def test_the_scope_selects_the_layers_with_adapters(scope: str, adapted: set[str]) -> None:
    layer = te.flax.TransformerLayer(64, 96, 4, low_rank_adaptation_scope=scope, hidden_dropout=0.0)
    shapes = jax.eval_shape(partial(layer.init, deterministic=True), jax.random.key(0), jnp.ones((2, 5, 64)))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes["params"])]
    assert {name for name in ("qkv", "out", "mlp") if any("lora" in p and f"'{name}'" in p for p in paths)} == adapted


def test_a_wrong_field_suggests_the_nearest() -> None:
    with pytest.raises(TypeError, match="no option 'num_attention_head'; did you mean 'num_attention_heads'"):
        te.flax.TransformerLayer(num_attention_head=4)
    layer = te.flax.TransformerLayer(64, 96, 4)
    with pytest.raises(ValueError, match="decode=True is not supported"):
        layer.init(jax.random.key(0), jnp.ones((2, 5, 64)), deterministic=True, decode=True)
