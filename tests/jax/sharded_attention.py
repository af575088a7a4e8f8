"""Attention on eight devices against one: sharded batch and heads, and tokens in a ring; run by `eight_devices`."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import quaver
import quaver.jax as qj
import quaver.jax.linen as ql
import quaver.jax.nnx as qn
from quaver.jax.blocks.attention import attention
from quaver.jax.blocks.options import Rope
from quaver.jax.blocks.ring_attention import balanced_order, ring_attention
from tests.close import assert_close

#: Shards of 22 tokens on four devices.
B, S, H, G, D = 2, 88, 4, 2, 8
IDS = np.repeat([[0, 1, 2, -1], [3, 0, 1, 1]], [20, 40, 18, 10], axis=1)
TOKENS = P("model", "data")
NAMES = ("output", "q", "k", "v", "sinks", "slopes", "bias")

#: Options of a ring, and whether tokens are in balanced order.
RINGS: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"mask_type": "causal", "segment_ids": IDS}, False),
    ({"mask_type": "causal"}, True),
    ({"mask_type": "causal", "window": (30, 0), "soft_cap": 2.0, "segment_ids": IDS}, True),
]


def arrays() -> list[Any]:
    random = np.random.default_rng(0)
    shapes = (B, S, H, D), (B, S, H, D), (B, S, G, D), (B, S, G, D), (H,), (H,), (1, H, S, S)
    grad, *qkv, sinks, slopes, bias = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return [grad, *qkv, sinks, np.abs(slopes), bias]


def with_gradients(function: Any, grad: Any, *x: Any) -> Any:
    y, pull = jax.vjp(function, *x)
    return (y, *pull(grad))


def check_heads_and_batch(mesh: Any) -> None:
    """Replicated sinks, slopes and bias, and keys and values that heads or rows of the batch share."""
    grad, *operands = arrays()

    def one(q: Any, k: Any, v: Any, sinks: Any, slopes: Any, bias: Any) -> Any:
        return attention(q, k, v, mask_type="causal", sinks=sinks, alibi_slopes=slopes, bias=bias)

    expected = jax.jit(lambda *x: with_gradients(one, *x))(grad, *operands)
    rows, heads = P("model"), P("model", None, ("data",))
    layouts = {
        "batch": ((rows, rows, rows, P(), P(), P()), rows),
        "shared keys": ((heads, P("model"), P("model"), P("data"), P("data"), P(None, "data")), heads),
    }
    for name, (ins, out) in layouts.items():
        some, right = list(operands), expected
        if name == "shared keys":
            some[1:3] = [x[:, :, :1] for x in some[1:3]]
            right = jax.jit(lambda *x: with_gradients(one, *x))(grad, *some)
        many = jax.shard_map(one, mesh=mesh, in_specs=ins, out_specs=out)
        got = jax.jit(lambda *x, many=many: with_gradients(many, *x))(grad, *some)
        for what, a, b in zip(NAMES, got, right, strict=True):
            assert_close(f"{name}, {what}", a, b, 2e-6)


def check_eight_bits(mesh: Any) -> None:
    grad, *operands = arrays()
    recipe = quaver.recipes.tensorwise(attention=True)

    def one(q: Any, k: Any, v: Any, sinks: Any, slopes: Any, bias: Any) -> Any:
        return attention(q, k, v, mask_type="causal", sinks=sinks, alibi_slopes=slopes, bias=bias, recipe=recipe)

    rows = P("model")
    many = jax.shard_map(one, mesh=mesh, in_specs=(rows, rows, rows, P(), P(), P()), out_specs=rows)
    expected, got = (jax.jit(lambda *x, f=f: with_gradients(f, *x))(grad, *operands) for f in (one, many))
    for what, a, b in zip(NAMES, got, expected, strict=True):
        assert_close(f"eight bits, {what}", a, b, 1e-3)


def check_explicit() -> None:
    """Types that carry shardings keep them, over several chunks."""
    x = np.random.default_rng(0).standard_normal((2, 300, 4, 4)).astype(np.float32)

    def loss(x: Any) -> Any:
        return (attention(x, x, x, mask_type="causal", sinks="off_by_one") ** 2).sum()

    expected = jax.jit(jax.grad(loss))(x)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    layout = P("data", None, "model", None)
    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(loss))(jax.device_put(x, layout))
        assert jax.typeof(got).sharding.spec == layout
    assert_close("explicit", got, expected, 2e-6)


def check_ring(mesh: Any) -> None:
    grad, *operands, _ = arrays()
    for options, is_balanced in RINGS:
        order = balanced_order(S, 4) if is_balanced else np.arange(S, dtype=np.int32)
        given = {name: x for name, x in options.items() if name != "segment_ids"}
        ids = options.get("segment_ids")

        def one(q: Any, k: Any, v: Any, sinks: Any, slopes: Any, options: Any = options) -> Any:
            return attention(q, k, v, sinks=sinks, alibi_slopes=slopes, **options)

        def shard(*x: Any, given: Any = given, has_ids: bool = ids is not None, own: bool = is_balanced) -> Any:
            q, k, v, sinks, slopes, positions, ids = x
            return ring_attention(
                q,
                k,
                v,
                axis_name="data",
                positions=positions if own else None,
                segment_ids=ids if has_ids else None,
                sinks=sinks,
                alibi_slopes=slopes,
                **given,
            )

        specs = (TOKENS, TOKENS, TOKENS, P(), P(), P("data"), TOKENS)
        ring = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=TOKENS)
        expected = jax.jit(lambda *x, one=one: with_gradients(one, *x))(grad, *operands)
        sharded = [x[:, order] if x.ndim == 4 else x for x in (grad, *operands)]
        numbers = order, (IDS if ids is None else ids)[:, order]
        step = jax.jit(
            lambda *x, ring=ring, numbers=numbers: with_gradients(lambda *y: ring(*y, *numbers), *x),
        )
        compiled = step.lower(*sharded).compile()
        got = [x[:, np.argsort(order)] if x.ndim == 4 else x for x in compiled(*sharded)]
        for what, a, b in zip(NAMES, got, expected, strict=False):
            assert_close(f"{options}, {what}", a, b, 2e-6)
        program = compiled.as_text()
        assert "collective-permute" in program and not re.search(r"f32\S* all-gather", program)


def check_layers(mesh: Any) -> None:
    """Layers whose tokens a mesh axis shards, in both orders, with the parameters of one on one device."""
    x = np.random.default_rng(1).standard_normal((B, S, H * D)).astype(np.float32)
    options: dict[str, Any] = {"heads": H, "hidden": 8, "groups": G, "rope": Rope(), "sinks": "learnable"}
    plain = ql.TransformerLayer(**options)
    variables = plain.init(jax.random.key(0, impl="unsafe_rbg"), x)
    ring = ql.TransformerLayer(**options, context_axis="data")
    own = qn.TransformerLayer(H * D, **options, context_axis="data", rngs=nnx.Rngs(0))
    flat = traverse_util.flatten_dict(variables["params"])
    graph, state = nnx.split(own)
    state = nnx.map_state(lambda path, _: flat[path], state)

    def of_linen(variables: Any, x: Any, positions: Any = None) -> Any:
        return ring.apply(variables, x, positions=positions)

    def of_nnx(state: Any, x: Any) -> Any:
        return nnx.merge(graph, state)(x)

    grad = np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)
    expected = jax.jit(lambda *x: with_gradients(plain.apply, *x))(grad, variables, x)
    order = balanced_order(S, 4)
    back = np.argsort(order)
    balanced = jax.shard_map(of_linen, mesh=mesh, in_specs=(P(), TOKENS, P("data")), out_specs=TOKENS)
    got = jax.jit(lambda g, v, x: with_gradients(lambda *y: balanced(*y, order), g, v, x))(
        grad[:, order], variables, x[:, order]
    )
    assert_close("linen", got[0][:, back], expected[0], 2e-6)
    assert_close("linen, x", got[2][:, back], expected[2], 2e-6)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(expected[1]), strict=True):
        assert_close("linen, parameters", a, b, 1e-5)
    consecutive = jax.shard_map(of_nnx, mesh=mesh, in_specs=(P(), TOKENS), out_specs=TOKENS)
    got = jax.jit(lambda *x: with_gradients(consecutive, *x))(grad, state, x)
    assert_close("nnx", got[0], expected[0], 2e-6)
    assert_close("nnx, x", got[2], expected[2], 2e-6)


def check_errors(mesh: Any) -> None:
    _, q, k, v, *_ = arrays()

    def fails(sentence: str, **options: Any) -> None:
        def shard(*x: Any) -> Any:
            return ring_attention(*x, axis_name="data", **options)

        try:
            jax.eval_shape(jax.shard_map(shard, mesh=mesh, in_specs=(TOKENS,) * 3, out_specs=TOKENS), q, k, v)
        except ValueError as error:
            assert sentence in str(error), str(error)
        else:
            raise AssertionError(f"no error with {sentence!r}")

    fails("ring_attention takes 'none' or 'causal'", mask_type="padding")
    fails("give one of each token, (22,)", positions=jnp.arange(S))
    fails("sinks is 'learned'", sinks="learned")
    with qj.autocast(quaver.recipes.tensorwise(attention=True)):
        fails("ring_attention does not quantize")
    fails("ring_attention does not quantize", recipe=quaver.recipes.mxfp8(attention=True))
    try:
        balanced_order(90, 4)
    except ValueError as error:
        assert "90 tokens do not divide into 8 chunks" in str(error)
    else:
        raise AssertionError("90 tokens divide into 8 chunks")


def check_attention(mesh: Any) -> None:
    check_heads_and_batch(mesh)
    check_eight_bits(mesh)
    check_ring(mesh)
    check_layers(mesh)
    check_explicit()
    check_errors(mesh)
