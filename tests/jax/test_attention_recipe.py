"""A recipe with attention=True quantizes attention in JAX: the function and every module, as the numpy reference."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import quaver
import quaver.jax as qj
import quaver.jax.linen as ql
import quaver.jax.nnx as qn
from quaver.jax.blocks.attention import attention
from quaver.reference.attention import attention as attention_reference
from quaver.reference.attention import attention_backward
from tests.close import assert_close
from tests.jax.test_second_derivative import WAYS

QUANTIZED = quaver.recipes.tensorwise(attention=True)
# Threefry takes seconds to compile.
KEY = jax.random.key(0, impl="unsafe_rbg")

#: Two chunks of queries, the last one not full, and blocks that are not full either.
B, SQ, SK, H, G, D, DV = 2, 301, 330, 4, 2, 40, 24


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def heads_first(x: Any) -> np.ndarray:
    return np.asarray(x).swapaxes(1, 2)


BIAS, SINKS = normal(4, 1, H, SQ, SK), np.float32([0.1, -1.0, 2.0, 0.0])
PADDING = np.arange(SQ) >= np.array([[280], [301]]), np.arange(SK) >= np.array([[330], [130]])
HIDDEN = {
    "none": None,
    "causal": np.arange(SK) > np.arange(SQ)[:, None],
    "padding": (PADDING[0][:, :, None] | PADDING[1][:, None, :])[:, None],
}


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("tensorwise", {"mask_type": "causal", "sinks": SINKS, "soft_cap": 3.0}),
        ("rowwise", {"mask_type": "padding", "mask": PADDING, "sinks": SINKS}),
        ("mxfp8", {"mask_type": "causal", "bias": BIAS, "soft_cap": 3.0}),
        ("blockwise", {"bias": BIAS[:, :1], "scale": 0.3}),
    ],
)
def test_output_and_gradients_equal_the_reference(recipe: str, options: dict[str, Any]) -> None:
    quantized = quaver.recipes.RECIPES[recipe](attention=True)
    q, k, v, grad = (
        normal(i, *s) for i, s in enumerate([(B, SQ, H, D), (B, SK, G, D), (B, SK, G, DV), (B, SQ, H, DV)])
    )
    spec = quantized.attention
    assert spec is not None
    of_reference = {name: x for name, x in options.items() if name not in ("mask", "mask_type")}
    of_reference["hidden"] = HIDDEN[options.get("mask_type", "none")]
    qkv = heads_first(q), heads_first(k), heads_first(v)
    trained = [name for name in ("bias", "sinks") if name in options]

    @jax.jit
    def run(q: Any, k: Any, v: Any, grad: Any, *learned: Any) -> Any:
        def call(q: Any, k: Any, v: Any, *learned: Any) -> Any:
            return attention(q, k, v, recipe=quantized, **(options | dict(zip(trained, learned, strict=True))))

        y, pull = jax.vjp(call, q, k, v, *learned)
        return y, *pull(grad)

    y, dq, dk, dv, *learned = run(q, k, v, grad, *(options[name] for name in trained))
    assert_close("output", heads_first(y), attention_reference(*qkv, spec, **of_reference), 1e-3)
    *expected, dbias, dsinks = attention_backward(heads_first(grad), *qkv, spec, **of_reference)
    for name, got, right in zip("qkv", (dq, dk, dv), expected, strict=True):
        assert_close(name, heads_first(got), right, 1e-3)
    for name, got in zip(trained, learned, strict=True):
        right = dsinks if name == "sinks" else dbias.sum((0, 1) if got.shape[1] == 1 else 0, keepdims=True)
        assert_close(name, got, right.reshape(got.shape), 1e-3)


X, HEADS = jnp.asarray(normal(0, 1, 33, 8)), jnp.asarray(normal(1, 1, 33, 2, 4))


def in_linen(recipe: Any) -> Any:
    layer = ql.MultiHeadAttention(2, recipe=recipe)
    return layer.apply(ql.MultiHeadAttention(2).init(KEY, X), X)


CALLS: dict[str, Callable[[Any], Any]] = {
    "the function": lambda recipe: attention(HEADS, HEADS, HEADS, recipe=recipe),
    "linen's core": lambda recipe: ql.DotProductAttention(recipe=recipe).apply({}, HEADS, HEADS, HEADS),
    "linen": in_linen,
    "nnx's core": lambda recipe: qn.DotProductAttention(recipe=recipe)(HEADS, HEADS, HEADS),
    "nnx": lambda recipe: qn.MultiHeadAttention(8, 2, recipe=recipe, rngs=nnx.Rngs(KEY))(X),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_own_and_ambient_recipes_quantize_attention(call: Callable[[Any], Any]) -> None:
    quantized, plain = call(QUANTIZED), call("tensorwise")
    assert not (quantized == plain).all() and jnp.abs(quantized - plain).max() < 0.4
    with qj.autocast(QUANTIZED):
        assert (call(None) == quantized).all()
        # A layer's own recipe has priority over the ambient one.
        assert (call("tensorwise") == plain).all()
        with qj.autocast(enabled=False):
            assert not (call(QUANTIZED) == quantized).all()


def test_an_infinity_makes_the_block_nan_as_in_the_reference() -> None:
    q, k, v = (normal(i, 1, 40, 2, 32) for i in range(3))
    k[0, 3, 1, 5], v[0, 7, 0, 1] = np.inf, np.nan
    quantized = quaver.recipes.mxfp8(attention=True)
    spec = quantized.attention
    assert spec is not None
    y = attention(q, k, v, mask_type="causal", recipe=quantized)
    hidden = np.arange(40) > np.arange(40)[:, None]
    expected = attention_reference(heads_first(q), heads_first(k), heads_first(v), spec, hidden=hidden)
    assert_close("output", heads_first(y), expected, 1e-3)


def test_dropout_drops_the_same_probabilities_in_backward() -> None:
    queries, keys = 40, 32
    q, k, v, grad = (normal(i, 1, n, 2, 32) for i, n in enumerate((queries, keys, keys, queries)))
    spec = QUANTIZED.attention
    assert spec is not None

    @jax.jit
    def run(v: Any) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, dropout=0.5, dropout_key=KEY, recipe=QUANTIZED)

        y, pull = jax.vjp(call, q, k, v)
        return y, *pull(grad)

    # Outputs of one-hot values are the probabilities.
    one_hot = np.broadcast_to(np.eye(keys, dtype=np.float32)[None, :, None], v.shape)
    keep = heads_first(run(one_hot)[0]) > 0
    assert abs(keep.mean() - 0.5) < 0.05
    qkv = heads_first(q), heads_first(k), heads_first(v)
    y, *gradients = run(v)
    assert_close("output", heads_first(y), attention_reference(*qkv, spec, keep=keep, dropout=0.5), 1e-3)
    expected = attention_backward(heads_first(grad), *qkv, spec, keep=keep, dropout=0.5)
    for name, got, right in zip("qkv", gradients, expected, strict=False):
        assert_close(name, heads_first(got), right, 1e-3)


def test_a_dtype_that_cannot_be_quantized_gives_a_clear_error() -> None:
    x = jnp.ones((1, 3, 2, 4), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="quantized attention takes float32, bfloat16 or float16"):
        attention(x, x, x, recipe=QUANTIZED)


@pytest.mark.parametrize("way", ["grad of grad", "hessian", "jvp of grad", "grad of a scan of grads"])
def test_a_second_derivative_is_refused(way: str) -> None:
    def loss(x: Any) -> Any:
        return (attention(x, x, x, recipe=QUANTIZED) ** 2).sum()

    with pytest.raises(NotImplementedError, match=r"no second derivative.*autocast\(enabled=False\)"):
        jax.eval_shape(lambda x: WAYS[way](loss, x), HEADS)
