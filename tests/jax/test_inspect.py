"""`quaver.jax.inspect`: the rows of `qt.inspect`, planted faults, transformations, and no changed bit."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax import Array

import quaver.jax as qj
import quaver.torch as qt
from quaver.jax import linen as qlinen
from quaver.jax import nnx as qnnx
from quaver.jax import state as states
from tests.close import assert_bitwise

SIZES = (48, 64, 32)
RNG = np.random.default_rng(0)
INPUT = RNG.normal(size=(64, SIZES[0])).astype(np.float32)
WEIGHTS = [RNG.normal(size=(k, n)).astype(np.float32) / 8 for k, n in pairwise(SIZES)]
#: Numbers per expert: one has few tokens and one has none.
GROUPS = np.array([40, 3, 0, 21], np.int32)


def loss_of(recipe: str) -> Callable[..., Array]:
    """Return the loss of a two-layer MLP; its `row_scale` scales the rows of the gradient."""

    def loss(x: Any, weights: Any, state: Any, row_scale: Any = 1.0) -> Array:
        y = qj.linear(x, weights[0], recipe=recipe, state=state[0], name="0")
        y = qj.linear(jnp.tanh(y), weights[1], recipe=recipe, state=state[1], name="2")
        return jnp.square(y * row_scale).mean()

    return loss


def inspected(step: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[qj.Inspector, Any]:
    """Run one inspected step; return its inspector and result."""
    with qj.inspect(every=1, **options) as inspector:
        result = step(*arguments)
        inspector.step()
    return inspector, result


def by_tensor(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {(row["layer"], row["gemm"], row["tensor"], row["expert"]): row for row in rows}


def assert_equal_rows(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert row.keys() == expected.keys()
    for key, value in row.items():
        assert value == (pytest.approx(expected[key], rel=1e-4) if isinstance(value, float) else expected[key]), row


def torch_rows(recipe: str) -> list[dict[str, Any]]:
    layers = [torch.nn.Linear(k, n, bias=False) for k, n in pairwise(SIZES)]
    with torch.no_grad():
        for layer, w in zip(layers, WEIGHTS, strict=True):
            layer.weight.copy_(torch.tensor(w.T))
    model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])
    qt.convert(model, recipe)
    with qt.inspect(model, every=1) as inspector:
        model(torch.tensor(INPUT, requires_grad=True)).square().mean().backward()
        inspector.step()
    return inspector.rows


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8", "nvfp4"])
def test_rows_are_those_of_torch_and_no_bit_changes(recipe: str) -> None:
    step = jax.jit(jax.value_and_grad(loss_of(recipe), argnums=(0, 1, 2)))
    arguments = INPUT, WEIGHTS, [states.init(recipe)] * 2
    inspector, result = inspected(step, *arguments)
    for ours, plain in zip(jax.tree.leaves(result), jax.tree.leaves(step(*arguments)), strict=True):
        assert_bitwise(ours, plain)
    rows, expected = by_tensor(inspector.rows), by_tensor(torch_rows(recipe))
    assert rows.keys() == expected.keys()
    for tensor, row in rows.items():
        assert_equal_rows(row, expected[tensor])


def test_experts_have_rows_of_their_own() -> None:
    w = RNG.normal(size=(4, SIZES[0], 32)).astype(np.float32) / 8

    def loss(x: Any, w: Any) -> Array:
        return jnp.square(qj.grouped_dot(x, w, GROUPS, recipe="mxfp8", name="experts")).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    inspector, gradients = inspected(step, INPUT, w)
    for ours, plain in zip(gradients, step(INPUT, w), strict=True):
        assert_bitwise(ours, plain)
    model = torch.nn.ModuleDict({"experts": qt.GroupedLinear(4, SIZES[0], 32, bias=False, recipe="mxfp8")})
    with torch.no_grad():
        model["experts"].weight.copy_(torch.tensor(w.swapaxes(1, 2).copy()))
    with qt.inspect(model, every=1) as expected:
        x = torch.tensor(INPUT, requires_grad=True)
        model["experts"](x, torch.tensor(GROUPS.cumsum(dtype=np.int32))).square().sum().backward()
        expected.step()
    rows, of_torch = by_tensor(inspector.rows), by_tensor(expected.rows)
    assert rows.keys() == of_torch.keys()
    for tensor, row in rows.items():
        assert row["snr"] == pytest.approx(of_torch[tensor]["snr"], abs=0.1), tensor
        assert tensor[2] == "weight" or row["elements"] == of_torch[tensor]["elements"], tensor
        assert not row["flags"]


def test_planted_faults_are_named_and_nothing_else_is_flagged() -> None:
    recipe = "tensorwise(format='e4m3')"
    grad = jax.jit(jax.grad(loss_of(recipe), argnums=(1, 2)))
    channel, unknown, row_scale = INPUT.copy(), INPUT.copy(), np.ones_like(INPUT[:, :1])
    even = row_scale.copy()
    channel[:, 7] *= 1e7
    unknown[3, 4] = np.nan
    row_scale[5] = 1e4
    with qj.inspect(every=1) as inspector:

        def step(x: Any = INPUT, row_scale: Any = even) -> tuple[dict[str, Any], list[Any]]:
            grad(x, WEIGHTS, [states.init(recipe)] * 2, row_scale)
            inspector.step()
            return inspector.worst(1)[0], inspector.flagged()

        assert not step()[1]
        worst, _ = step(channel)
        assert (worst["layer"], worst["gemm"], worst["tensor"]) == ("0", "fprop", "input")
        assert worst["outlier_column"] == 7 and worst["flushed"] > 0.9 and "column 7" in str(inspector)
        _, flagged = step(row_scale=row_scale)
        rows = {(row["gemm"], row["tensor"]): row["outlier_row"] for row in flagged if "outlier_row" in row}
        assert rows["dgrad", "grad_output"] == rows["wgrad", "grad_output"] == 5
        worst, _ = step(unknown)
        assert (worst["layer"], worst["tensor"], worst["nonfinite"]) == ("0", "input", 1)
        assert not step()[1]


def test_recomputed_and_scanned_forwards_count_once() -> None:
    stack = jnp.asarray(RNG.normal(size=(2, SIZES[0], SIZES[0])).astype(np.float32) / 8)

    def layer(x: Array, w: Array) -> Array:
        return jnp.tanh(qj.linear(x, w, recipe="tensorwise", name="layer"))

    def unrolled(x: Array, stack: Array) -> Array:
        return layer(layer(x, stack[0]), stack[1]).sum()

    def scanned(x: Array, stack: Array) -> Array:
        body = jax.checkpoint(layer)
        return jax.lax.scan(lambda x, w: (body(x, w), None), x, stack)[0].sum()

    rows = [
        inspected(jax.jit(jax.grad(f, argnums=(0, 1))), jnp.asarray(INPUT), stack)[0].rows for f in (unrolled, scanned)
    ]
    assert rows[0][0]["elements"] == 2 * INPUT.size
    for row, expected in zip(*rows, strict=True):
        assert_equal_rows(row, expected)
    # A forward without gradient, here of two slices, has rows of fprop.
    batch = jax.jit(jax.vmap(layer, in_axes=(None, 0)))
    of_forward = inspected(batch, jnp.asarray(INPUT), stack)[0].rows
    assert [row["tensor"] for row in of_forward] == ["input", "weight", "output"]
    assert of_forward[0]["elements"] == 2 * INPUT.size


def test_layers_have_the_names_of_modules(tmp_path: Path) -> None:
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Array) -> Array:
            return qlinen.DenseGeneral(32, recipe="tensorwise", name="up")(x)

    block = Block()
    variables = block.init(jax.random.key(0), INPUT)
    inspector, _ = inspected(jax.jit(block.apply), variables, INPUT, out=tmp_path)
    assert {row["layer"] for row in inspector.rows} == {"up"}
    assert [json.loads(line) for line in (tmp_path / "inspect.jsonl").read_text().splitlines()] == inspector.rows
    model = nnx.List([nnx.Linear(SIZES[0], 32, rngs=nnx.Rngs(0))])
    qnnx.convert(model, "tensorwise")
    run = nnx.jit(lambda model, x: model[0](x))
    assert {row["layer"] for row in inspected(run, model, INPUT)[0].rows} == {"0"}


def test_only_sampled_steps_are_measured() -> None:
    traces = []

    @jax.jit
    def step(x: Array, w: Array) -> Array:
        traces.append(1)
        return qj.linear(x, w, recipe="tensorwise", name="layer")

    with qj.inspect(every=3, start=1, stop=6) as inspector:
        for number in range(8):
            step(INPUT, WEIGHTS[0])
            if number == 4:
                with inspector.pause():
                    step(INPUT, WEIGHTS[0])
            inspector.step()
    assert sorted({row["step"] for row in inspector.rows}) == [1, 4]
    assert {row["elements"] for row in inspector.rows if row["tensor"] == "input"} == {INPUT.size}
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0; give a whole number, 1 or more"),
        ({"every": 1, "layers": "layr"}, "no quantized layer matches 'layr'"),
        ({"every": 1, "recipe": None}, "no quantized layer ran in step 0; call the jitted step function"),
    ],
)
def test_bad_input_is_one_error(options: dict[str, Any], message: str) -> None:
    recipe = options.pop("recipe", "tensorwise")
    with pytest.raises(ValueError, match=re.escape(message)), qj.inspect(**options) as inspector:
        jax.jit(lambda x, w: qj.linear(x, w, recipe=recipe, name="layer"))(INPUT, WEIGHTS[0])
        inspector.step()


def test_one_inspector_is_open_at_a_time_and_a_step_is_not_paused() -> None:
    step = jax.jit(jax.grad(loss_of("tensorwise")))
    arguments = INPUT, WEIGHTS, [states.init("tensorwise")] * 2
    with qj.inspect(every=1) as inspector:
        with pytest.raises(RuntimeError, match="another inspector is open"):
            qj.inspect(every=1).start()
        with inspector.pause(), inspector.pause(), pytest.raises(RuntimeError, match="within pause"):
            inspector.step()
        step(*arguments)
        inspector.step()
    assert inspector.rows
    with pytest.raises(ZeroDivisionError), qj.inspect(every=1):
        raise ZeroDivisionError
    with qj.inspect(every=1) as other:
        step(*arguments)
        other.step()
    assert other.rows


def test_count_reports_saturated_flushed_and_nonfinite_operands() -> None:
    w, x = jnp.ones((64, 32)), jnp.ones((4, 64)).at[0, 0].set(1e-30)

    @jax.jit
    def step(x: Any, state: Any) -> Any:
        layer = lambda w, state: qj.linear(x, w, recipe="delayed", state=state, name="up").sum()  # noqa: E731
        return jax.grad(layer, argnums=(0, 1))(w, state)

    # A factor far too large for ones.
    state = qj.state.init("delayed") | {"factor": jnp.asarray([1024.0, 1.0, 1.0])}
    before = step(x, state)
    with qj.count() as counters:
        after = step(x, state)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, after))
    own = counters.table["up"]["fprop.input"]
    assert (own.elements, own.saturated, own.flushed, own.nonfinite) == (256, 255, 1, 0)
    assert "up" in str(counters) and "wgrad.grad_output" in str(counters)
    with qj.count() as counters:
        step(x.at[1, 1].set(jnp.nan), state)
    assert counters.table["up"]["fprop.input"].nonfinite == 1
    with qj.count() as counters:
        pass
    assert str(counters) == "nothing was quantized while counting"
