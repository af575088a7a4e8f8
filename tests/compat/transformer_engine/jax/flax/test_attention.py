"""Attention of Transformer Engine's arguments: masks, layouts, biases and rotary positions by their formulas."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import quaver.compat.transformer_engine.jax as te
from tests.compat.transformer_engine.jax.flax import plain

SHAPE = 2, 6, 4, 8
ROOT = 8**-0.5


def operands(groups: int = 4) -> tuple[Array, Array, Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = SHAPE, (2, 6, groups, 8), (2, 6, groups, 8)
    q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return q, k, v


def attend(q: Array, *others: Any, mask: Any = None, bias: Any = None, **fields: Any) -> Array:
    module = te.flax.DotProductAttention(8, 4, **fields)
    y: Array = module.apply({}, q, *others, mask, bias)
    return y


PADDED = jnp.zeros((2, 1, 6, 6), bool).at[1, :, :, 4:].set(True)


@pytest.mark.parametrize(
    ("name", "mask", "hidden"),
    [
        ("no_mask", PADDED, None),
        ("causal", PADDED, plain.later(6, 6)),
        ("padding", PADDED, PADDED),
        ("padding", PADDED.astype(jnp.uint8), PADDED),
        ("padding", None, None),
        ("padding_causal", PADDED, PADDED | plain.later(6, 6)),
        ("causal_padding", PADDED, PADDED | plain.later(6, 6)),
        ("causal_padding", None, plain.later(6, 6)),
    ],
    ids=["no_mask", "causal", "padding", "padding of bytes", "no padding", "both", "both transposed", "causal alone"],
)
def test_masks(name: str, mask: Any, hidden: Any) -> None:
    groups = 4 if name == "causal" else 2
    q, k, v = operands(groups)
    y = attend(q, k, v, mask=mask, attn_mask_type=name, num_gqa_groups=groups)
    np.testing.assert_allclose(y, plain.attend(q, k, v, hidden, 0, ROOT), atol=1e-5)


def test_layouts_are_the_same_values() -> None:
    q, k, v = operands()
    plainly = attend(q, k, v)
    together = attend(jnp.stack([q, k, v], 2), qkv_layout="bs3hd")
    packed = attend(q, jnp.stack([k, v], 2), None, qkv_layout="BSHD_BS2HD")
    first = attend(*(x.swapaxes(0, 1) for x in (q, k, v)), transpose_batch_sequence=True)
    for y in (together, packed, first.swapaxes(0, 1)):
        np.testing.assert_array_equal(y, plainly)


@pytest.mark.parametrize(("kind", "added"), [("post_scale_bias", 1.0), ("pre_scale_bias", 0.25), (None, 1.0)])
def test_biases(kind: str | None, added: float) -> None:
    q, k, v = operands()
    bias = jax.random.normal(jax.random.key(7), (1, 4, 6, 6))
    y = attend(q, k, v, bias=bias, attn_bias_type=kind, scale_factor=0.25, attn_mask_type="no_mask")
    np.testing.assert_allclose(y, plain.attend(q, k, v, None, bias * added, 0.25), atol=1e-5)


@pytest.mark.parametrize("consecutive", [True, False])
def test_rotary_positions_have_periods_between_the_windows(consecutive: bool) -> None:
    how = "consecutive" if consecutive else "alternate"
    module = te.flax.MultiHeadAttention(8, 4, rotary_pos_emb_windows=(3, 500), rotary_pos_emb_group_method=how)
    q, *_ = operands()
    np.testing.assert_allclose(module._apply_rope(q), plain.transposed(q, 3, 500, consecutive), atol=1e-5)


def test_weights_have_the_original_initial_values() -> None:
    x = jnp.ones((2, 6, 512))
    keys = {"params": jax.random.key(0)}
    module = te.flax.MultiHeadAttention(64, 8)
    kernel = nn.unbox(module.init(keys, x, x))["params"]["qkv"]["kernel"]
    spread = kernel.std((0, 2)) * 512**0.5
    np.testing.assert_allclose(spread, [1 / 8, 1, 1], rtol=0.02)
    once = nn.unbox(te.flax.MultiHeadAttention(64, 8, scaled_query_init=False).init(keys, x, x))
    once = once["params"]["qkv"]["kernel"]
    np.testing.assert_array_equal(once[:, 1:], kernel[:, 1:])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"attn_mask_type": "padding_causal_bottom_right"}, "no attn_mask_type 'padding_causal_bottom_right'"),
        ({"attn_bias_type": "no_bias"}, "attn_bias_type is 'no_bias', and a bias was given"),
        ({"qkv_layout": "thd_thd_thd"}, "no qkv_layout 'thd_thd_thd'"),
        ({"softmax_type": "off_by_one"}, "softmax_type='off_by_one' is not supported"),
        ({"context_parallel_axis": "cp"}, "context_parallel_axis='cp' is not supported"),
        ({"context_parallel_strategy": "RING"}, "context_parallel_strategy='RING' is not supported"),
        ({"score_mod": abs}, "score_mod=<built-in function abs> is not supported"),
        ({"max_segments_per_seq": 4}, "max_segments_per_seq=4 is not supported"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_options_give_a_clear_error(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        attend(*operands(), bias=jnp.zeros((1, 1, 6, 6)), **fields)


def test_missing_keys_and_invalid_masks_give_clear_errors() -> None:
    q, k, v = operands()
    with pytest.raises(ValueError, match="keys or values are missing"):
        attend(q)
    with pytest.raises(ValueError, match="a tuple is no mask; give an array"):
        attend(q, k, v, mask=(1, 2), attn_mask_type="padding")
