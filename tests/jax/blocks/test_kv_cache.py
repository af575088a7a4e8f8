"""Decoding with a cache gives the outputs of one forward over all tokens, and one program serves all steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import quaver.jax.linen as ql
import quaver.jax.nnx as qn
from quaver.jax.blocks.kv_cache import append, init_cache
from tests.close import assert_close

# Threefry takes seconds to compile.
KEY = jax.random.key(0, impl="unsafe_rbg")
B, S, H, G, D, PROMPT, CAPACITY = 2, 9, 4, 2, 8, 5, 12
X = jnp.asarray(np.random.default_rng(0).standard_normal((B, S, H * D)), jnp.float32)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"groups": G, "rope": qn.Rope(), "window": (3, 0), "sinks": "off_by_one"},
    {"groups": G, "alibi": True, "qk_norm": "RMSNorm", "fused": False, "recipe": "mxfp8"},
    {"groups": G, "rope": qn.Rope(interleaved=True), "chunk": 4, "recipe": "rowwise"},
)


def decode(step: Any, cache: Any) -> Any:
    """Return the outputs of the prompt and of each token after it."""
    out = []
    for x in (X[:, :PROMPT], *(X[:, i : i + 1] for i in range(PROMPT, S))):
        y, cache = step(cache, x)
        out.append(y)
    return jnp.concatenate(out, 1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_a_prompt_and_steps_equal_one_forward(flavour: str, options: dict[str, Any]) -> None:
    traced: list[int] = []
    if flavour == "nnx":
        layer = qn.TransformerLayer(H * D, H, 16, rngs=nnx.Rngs(KEY), **options)
        cache: Any = qn.KVCache(B, CAPACITY, G, D)

        @nnx.jit
        def compiled(layer: Any, cache: Any, x: Any) -> Any:
            traced.append(x.shape[1])
            return layer(x, cache=cache)

        got, expected = decode(lambda cache, x: (compiled(layer, cache, x), cache), cache), layer(X)
        assert cache.length[...] == S
    else:
        linen = ql.TransformerLayer(heads=H, hidden=16, **options)
        variables = linen.init(KEY, jnp.zeros((B, CAPACITY, H * D)), decode=True)
        params = {"params": variables["params"]}

        @jax.jit
        def step(cache: Any, x: Any) -> Any:
            traced.append(x.shape[1])
            y, new = linen.apply(params | cache, x, decode=True, mutable=["cache"])
            return y, new

        got, expected = decode(step, {"cache": variables["cache"]}), linen.apply(params, X)
    assert traced == [PROMPT, 1]
    assert_close(flavour, got, expected, 1e-5)


def test_a_full_cache_raises_and_gives_nan_inside_jit() -> None:
    k = jnp.ones((1, 2, G, D))
    cache = append(init_cache(1, 3, G, D), k, k)[0]
    with pytest.raises(ValueError, match="3 slots, which 2 cached and 2 new tokens exceed; make it longer"):
        append(cache, k, k)
    with pytest.raises(ValueError, match="3 slots, which 0 cached and 4 new tokens exceed"):
        jax.jit(append)(cache, *[jnp.ones((1, 4, G, D))] * 2)
    with pytest.raises(ValueError, match="the keys have shape"):
        append(cache, k[..., :1], k)
    full = qn.KVCache(B, 6, H, D)
    layer = qn.MultiHeadAttention(H * D, H, mask_type="causal", rngs=nnx.Rngs(KEY))
    compiled = nnx.jit(lambda layer, cache, x: layer(x, cache=cache))
    assert jnp.isfinite(compiled(layer, full, X[:, :4])).all()
    for _ in range(2):
        assert jnp.isnan(compiled(layer, full, X[:, :4])).all()


def test_a_cache_takes_only_plain_causal_self_attention() -> None:
    layer = qn.MultiHeadAttention(H * D, H, rngs=nnx.Rngs(KEY))
    with pytest.raises(ValueError, match="a cache needs causal attention, and the layer has mask_type 'none'"):
        layer(X, cache=qn.KVCache(B, CAPACITY, H, D))
    causal = ql.MultiHeadAttention(H, mask_type="causal")
    with pytest.raises(ValueError, match="attention with a cache takes no segment_ids; leave it out"):
        causal.init(KEY, X, segment_ids=jnp.zeros((B, S), int), decode=True)
    params = {"params": causal.init(KEY, X)["params"]}
    with pytest.raises(ValueError, match="decode=True needs the collection 'cache'; make it by init"):
        causal.apply(params, X, decode=True, mutable=["cache"])
