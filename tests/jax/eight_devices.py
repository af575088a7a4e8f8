"""Recipes on eight virtual devices against one: `python -m tests.jax.eight_devices mxfp8`, or `mxfp8:some explicit`.

A separate process, since the number of devices is fixed when JAX starts. Its last line lists the failures by case.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Container
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from tests.xla_options import FLAGS

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FLAGS}"

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import quaver.jax as qj
from quaver import recipes
from quaver.jax.operations.sharding import quantize_shard
from quaver.recipes.spec import Recipe
from tests.close import assert_bitwise, assert_close
from tests.jax.sharded_attention import check_attention

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
#: Every shard has whole blocks of every recipe: K / 4 is a multiple of 128.
B, S, K, N = 4, 256, 512, 256
BOTH = ("data", "model")


@dataclass
class Layout:
    """Layouts of x [B, S, K], w [K, N], bias [N] and y [B, S, N], and the mesh axes that shard tokens, K and N."""

    x: P
    w: P
    bias: P
    y: P
    tokens: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    gathers: dict[str, qj.ShardedOperand] = field(default_factory=dict)


LAYOUTS = {
    "data": Layout(P("data", "model"), P(), P(), P("data", "model"), tokens=BOTH),
    "column": Layout(P("data"), P(None, "model"), P("model"), P("data", None, "model"), ("data",), (), ("model",)),
    "row": Layout(P("data", None, "model"), P("model"), P(), P("data"), ("data",), ("model",), ()),
    "fsdp": Layout(
        P("data"), P("data"), P(), P("data"), ("data",), gathers={"weight": qj.ShardedOperand("data", P("data", None))}
    ),
    "sequence": Layout(
        P("data", "model"),
        P(None, "model"),
        P("model"),
        P("data", None, "model"),
        ("data",),
        (),
        ("model",),
        {"input": qj.ShardedOperand("model", P("data", "model", None))},
    ),
}


#: The quick cases have each layout once and each way of sharding operands once, with one of two recipes. With each
#: recipe both ways, and layers that gather, one of them packed codes.
SOME = {
    "delayed": {("data", "jit"), ("row", "shard_map"), ("fsdp", "jit")},
    "mxfp8": {("column", "jit"), ("sequence", "shard_map")},
    "nvfp4": {("fsdp", "jit")},
}
SOME_OPERANDS = {
    "delayed": {("data", "jit"), ("column", "shard_map"), ("row", "jit")},
    "mxfp8": {("data", "shard_map"), ("column", "jit"), ("row", "shard_map")},
    "nvfp4": set(),
}
#: Each.
ALL = frozenset((name, how) for name in LAYOUTS for how in ("shard_map", "jit"))


def arrays() -> tuple[Array, ...]:
    """x, w, bias and grad_output, with rows and columns of many magnitudes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, S, K)) * np.exp2(rng.integers(-6, 7, (B, S, 1)))
    w = rng.normal(size=(K, N)) * np.exp2(rng.integers(-6, 7, (1, N)))
    g = rng.normal(size=(B, S, N)) * np.exp2(rng.integers(-6, 7, (B, S, 1)))
    return tuple(jax.device_put(a.astype(np.float32)) for a in (x, w, rng.normal(size=N), g))


def step(recipe: Recipe, x: Any, w: Any, bias: Any, g: Any, state: Any, summed: str = "", **gathers: Any) -> Any:
    """Output, gradients and next state; a row-parallel output is summed over the axis `summed`."""

    def layer(x: Array, w: Array, bias: Array, state: Any) -> Array:
        if not summed:
            return qj.linear(x, w, bias, recipe=recipe, state=state, **gathers)
        return lax.psum(qj.linear(x, w, recipe=recipe, state=state, **gathers), summed) + bias

    y, back = jax.vjp(layer, x, w, bias, state)
    return (y, *back(g))


def named(tree: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(MESH, spec), tree, is_leaf=lambda node: isinstance(node, P))


def pieces(layout: Layout, recipe: Recipe, state: Any, how: str) -> Any:
    """A jitted step on eight devices, by shard_map or by shardings."""
    ins = (layout.x, layout.w, layout.bias, layout.y, jax.tree.map(lambda _: P(), state))
    outs = (layout.y, layout.x, layout.w, layout.bias, ins[4])
    gathers = {f"gather_{operand}": gather for operand, gather in layout.gathers.items()}
    if how == "shard_map":
        summed = layout.inputs[0] if layout.inputs else ""
        run = partial(step, recipe, summed=summed, **gathers)
        return jax.jit(jax.shard_map(run, mesh=MESH, in_specs=ins, out_specs=outs))
    whole = {key: qj.ShardedOperand(gather.axis, named(gather.sharding)) for key, gather in gathers.items()}
    return jax.jit(partial(step, recipe, **whole), in_shardings=named(ins), out_shardings=named(outs))


def gathered(program: str) -> list[str]:
    """The dtypes that a compiled program gathers, except those of scales."""
    gathers = re.findall(r"= \(?(\w+)\[([\d,]*)\][^=]*? all-gather(?:-start)?\(", program)
    return [kind for kind, shape in gathers if np.prod([int(n) for n in shape.split(",") if n]) > 8 * S * B]


@cache
def on_one(recipe: Recipe) -> Any:
    return jax.jit(partial(step, recipe))


def check_layer(recipe: Recipe, some: Container[tuple[str, str]]) -> None:
    args = arrays()
    state = first = qj.state.init(recipe)
    alone = on_one(recipe)
    expected = []
    for _ in range(2):
        expected.append(alone(*args, state))
        state = expected[-1][4]
    for name, layout in LAYOUTS.items():
        for how in ("shard_map", "jit"):
            if (how == "jit" and "input" in layout.gathers) or (name, how) not in some:
                continue
            run = pieces(layout, recipe, first, how).lower(*args, first).compile()
            state, case = first, f"{name} by {how}"
            for right in expected:
                got = run(*args, state)
                state = got[4]
                for part, a, b in zip(("y", "grad_x", "grad_w", "grad_bias"), got, right, strict=False):
                    assert_close(f"{case}, {part}", a, b, 1e-6)
                for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(right[4]), strict=True):
                    assert_bitwise(a, b, f"{case}, state")
            if layout.gathers and recipe.wgrad.b is not None:
                kinds = gathered(run.as_text())
                assert kinds and set(kinds) == {"u8"}, f"{case} gathers {kinds}"


def check_operands(recipe: Recipe, some: Container[tuple[str, str]]) -> None:
    """Codes and scales of all six operands, sharded in every way, against those of the whole."""
    x, w, _, g = arrays()
    x, g = x.reshape(B * S, K), g.reshape(B * S, N)
    tables = {key: (x, w.T, g, w, g.T, x.T)[i] for i, key in enumerate(recipe.operands())}
    specs = {key: spec for key, spec in recipe.operands().items() if spec is not None}
    given = {key: tables[key] for key in specs}

    def quantized(arrays: Any, cuts: Any) -> Any:
        operands = {}
        for key, spec in specs.items():
            q = quantize_shard(arrays[key], spec, *cuts[key], tensor_id=7, count=3)
            operands[key] = q.codes(), q.scales()
        return operands

    nothing: Any = dict.fromkeys(specs, ((), ()))
    whole = jax.jit(partial(quantized, cuts=nothing))(given)
    for name in ("data", "column", "row"):
        t, k, n = (getattr(LAYOUTS[name], axis) for axis in ("tokens", "inputs", "outputs"))
        cuts = dict(zip(recipe.operands(), ((t, k), (n, k), (t, n), (k, n), (n, t), (k, t)), strict=True))
        layouts = {key: P(cuts[key][0] or None, cuts[key][1] or None) for key in specs}
        outs = {key: (spec, spec) for key, spec in layouts.items()}
        run = jax.shard_map(partial(quantized, cuts=cuts), mesh=MESH, in_specs=(layouts,), out_specs=outs)
        jitted = jax.jit(partial(quantized, cuts=nothing), in_shardings=(named(layouts),))
        for how, cut in (("shard_map", jax.jit(run)), ("jit", jitted)):
            if (name, how) not in some:
                continue
            for key, (codes, scales) in cut(given).items():
                what = f"{name} by {how}, {key}"
                assert_bitwise(codes, whole[key][0], f"{what}, codes")
                # A scale for several shards is on each of them.
                repeats = [a // b for a, b in zip(scales.shape, whole[key][1].shape, strict=True)]
                assert_bitwise(scales, np.tile(whole[key][1], repeats), f"{what}, scales")


def fails(sentence: str, function: Any, specs: tuple[P, ...], out: P, *args: Array, **options: Any) -> None:
    try:
        jax.jit(jax.shard_map(function, mesh=MESH, in_specs=specs, out_specs=out, **options))(*args)
    except ValueError as error:
        assert sentence in str(error), str(error)
    else:
        raise AssertionError(f"no error with {sentence!r}")


def check_sentences(_: Recipe) -> None:
    x, w = jnp.ones((64, 96)), jnp.ones((96, 32))

    def layer(x: Array, w: Array, **options: Any) -> Array:
        return qj.linear(x, w, recipe="mxfp8", **options)

    row = (P(None, BOTH), P(BOTH, None))
    fails("divide the operand into shards of 12", lambda x, w: lax.psum(layer(x, w), BOTH), row, P(), x, w)
    biased = partial(qj.linear, bias=jnp.ones(32), recipe="mxfp8")
    fails("add it after jax.lax.psum", lambda x, w: lax.psum(biased(x, w), BOTH), row, P(), x, w)
    fails("with check_vma=True", layer, (P(BOTH), P()), P(BOTH), x, w, check_vma=False)
    for gather, sentence in (
        (qj.ShardedOperand("model", P("data", None)), "the spec does not name that axis"),
        (qj.ShardedOperand("model", P("model", None)), "does not vary over that mesh axis"),
    ):
        fails(sentence, partial(layer, gather_weight=gather), (P("data"), P()), P("data"), x, w)
    fails(
        "which the GEMM sums over",
        partial(layer, gather_input=qj.ShardedOperand("data", P(None, "data"))),
        (P(None, "data"), P()),
        P(),
        x,
        w,
    )


def check_explicit(recipe: Recipe) -> None:
    """Types that carry shardings keep them, and the bits are those of one device."""
    x, w, bias, g = arrays()
    state = qj.state.init(recipe)
    expected = on_one(recipe)(x, w, bias, g, state)
    mesh = jax.make_mesh((4, 2), BOTH, axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        layout = LAYOUTS["column"]
        args = [jax.device_put(a, getattr(layout, name)) for a, name in ((x, "x"), (w, "w"), (bias, "bias"), (g, "y"))]
        got = jax.jit(partial(step, recipe))(*args, state)
        for a, spec in zip(got, (layout.y, layout.x, layout.w), strict=False):
            assert jax.typeof(a).sharding.spec == P(*spec, *[None] * (a.ndim - len(spec))), jax.typeof(a)
    for a, b in zip(jax.tree.leaves(got[4]), jax.tree.leaves(expected[4]), strict=True):
        assert_bitwise(a, b, "state")
    for part, a, b in zip(("y", "grad_x", "grad_w"), got, expected, strict=False):
        assert_close(part, a, b, 1e-6)


def check(case: str) -> None:
    name, _, some = case.partition(":")
    if name == "sentences":
        check_sentences(recipes.get("mxfp8"))
    elif name == "attention":
        check_attention(MESH)
    elif name == "explicit":
        check_explicit(recipes.get("delayed"))
    else:
        if cuts := SOME_OPERANDS[name] if some else ALL:
            check_operands(recipes.get(name), cuts)
        check_layer(recipes.get(name), SOME[name] if some else ALL)


def failure(case: str) -> str:
    """Why a case fails; "" if it does not."""
    try:
        check(case)
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    print(json.dumps({case: failure(case) for case in sys.argv[1:]}))
