"""linen's and NNX's attention modules pass their options on: sinks, ALiBi, local chunks and segment ids."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import quaver.jax.linen as ql
import quaver.jax.nnx as qn
from quaver.jax.blocks.attention import attention
from quaver.reference.attention import alibi_numbers
from tests.close import assert_close

# Threefry takes seconds to compile.
KEY = jax.random.key(0, impl="unsafe_rbg")
B, S, H, D = 2, 10, 4, 8
Q, K, V = (jnp.asarray(np.random.default_rng(i).standard_normal((B, S, H, D)), jnp.float32) for i in range(3))
X = Q.reshape(B, S, H * D)
SINKS = jnp.float32([0.5, -1.0, 2.0, 0.0])
IDS = jnp.asarray([[0] * 4 + [1] * 6, [5] * 3 + [2] * 5 + [-1] * 2])


def of_linen(options: Any, **arguments: Any) -> Any:
    module = ql.DotProductAttention(**options)
    variables = module.init(KEY, Q, K, V)
    if variables:
        assert jax.tree.map(jnp.shape, variables) == {"params": {"sinks": (H,)}}
        variables = {"params": {"sinks": SINKS}}
    return module.apply(variables, Q, K, V, **arguments)


def of_nnx(options: Any, **arguments: Any) -> Any:
    module = qn.DotProductAttention(heads=H, **options)
    if options.get("sinks") == "learnable":
        assert (module.sinks[...] == 0).all() and nnx.state(module, nnx.Param)
        module.sinks[...] = SINKS
    return module(Q, K, V, **arguments)


@pytest.mark.parametrize("run", [of_linen, of_nnx])
def test_the_core_passes_its_options_on(run: Any) -> None:
    options = {"mask_type": "causal", "window": (6, 0), "soft_cap": 3.0}
    slopes = jnp.asarray(alibi_numbers(H))
    expected = attention(Q, K, V, sinks=SINKS, alibi_slopes=slopes, segment_ids=IDS, **options)
    got = run(options | {"sinks": "learnable", "alibi": True}, segment_ids=IDS)
    assert_close("sinks and ALiBi", got, expected, 1e-6)
    expected = attention(Q, K, V, sinks="off_by_one", chunk=3, mask_type="causal")
    assert_close("chunks", run({"mask_type": "causal", "chunk": 3, "sinks": "off_by_one"}), expected, 1e-6)


def test_sinks_are_trained_in_both_flavours() -> None:
    linen = ql.TransformerLayer(heads=H, hidden=16, sinks="learnable", alibi=True)
    variables = linen.init(KEY, X)
    gradients = jax.grad(lambda v: (linen.apply(v, X) ** 2).sum())(variables)
    assert jnp.abs(gradients["params"]["attention"]["attention"]["sinks"]).min() > 0
    own = qn.TransformerLayer(H * D, H, 16, sinks="learnable", alibi=True, rngs=nnx.Rngs(KEY))
    gradients = nnx.grad(lambda layer: (layer(X) ** 2).sum())(own)
    assert jnp.abs(gradients["attention"]["attention"]["sinks"][...]).min() > 0


@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_a_layer_sees_only_its_own_segment(flavour: str) -> None:
    if flavour == "linen":
        linen = ql.TransformerLayer(heads=H, hidden=16)
        variables = linen.init(KEY, X)

        def run(x: Any, **options: Any) -> Any:
            return linen.apply(variables, x, **options)

    else:
        run = qn.TransformerLayer(H * D, H, 16, rngs=nnx.Rngs(KEY))  # type: ignore[assignment]
    got = run(X, segment_ids=IDS)
    assert_close("first row", got[0], jnp.concatenate([run(X[:1, :4])[0], run(X[:1, 4:])[0]]), 1e-6)
    assert_close("second row", got[1, 3:8], run(X[1:, 3:8])[0], 1e-6)


@pytest.mark.parametrize("run", [of_linen, of_nnx])
def test_a_ring_takes_no_masks_of_tokens(run: Any) -> None:
    with pytest.raises(ValueError, match=r"attention with context_axis takes no (bias or )?chunk; leave"):
        run({"context_axis": "cp", "chunk": 3}, bias=jnp.zeros((S, S)))


def test_learnable_sinks_need_the_number_of_heads_in_nnx() -> None:
    with pytest.raises(ValueError, match="give heads, the number of query heads"):
        qn.DotProductAttention(sinks="learnable")
    for kind in (lambda: of_linen({"sinks": "learned"}), lambda: of_nnx({"sinks": "learned"})):
        with pytest.raises(ValueError, match="sinks is 'learned'; give None, 'off_by_one' or 'learnable'"):
            kind()
