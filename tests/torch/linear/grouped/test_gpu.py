"""What a GPU does with groups, on a CPU that passes for one: the numbers of one group after the other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.formats import E5M2
from quaver.recipes.spec import GemmSpec, QuantSpec, Recipe
from quaver.torch.linear.grouped.emulated import EmulatedGroups
from quaver.torch.linear.grouped.products import DeviceGroups
from quaver.torch.numerics.grouped import GroupOffsets
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.state.noise import name_streams
from tests.close import assert_bitwise, assert_close
from tests.torch.linear.grouped.test_function import STEPS, K, Permuted, ends, layer_of, rows, steps_of
from tests.torch.linear.grouped.test_matmul import RECIPES

EVERY = RECIPES | {"delayed": recipes.get("delayed")}


def without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the host is asked how many rows a group has."""
    monkeypatch.setattr(GroupOffsets, "bounds", lambda _: pytest.fail("the host has waited for the offsets"))


@pytest.mark.parametrize("name", EVERY)
def test_it_trains_as_one_group_after_the_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = "kn" if len(name) % 2 else "nk"
    layers = [layer_of(EVERY[name], layout=layout, bias=True) for _ in range(2)]
    with qt.only("reference"):
        expected = steps_of(layers[0], layers[0])
    calls: list[Any] = []
    multiply = DeviceGroups.multiply
    monkeypatch.setattr(DeviceGroups, "multiply", lambda *args: calls.append(args) or multiply(*args))
    with qt.only("decoded"):
        ours = steps_of(layers[1], layers[1])
    assert len(calls) == 2 * len(STEPS)
    state = len(list(layers[0].buffers()))
    for i, (tensor, wanted) in enumerate(zip(ours, expected, strict=True)):
        if i % (4 + state) < 4:
            assert_close(f"{i}", tensor, wanted, 1e-6)
        else:
            assert_bitwise(tensor.contiguous(), wanted.contiguous(), f"state {i}")


@pytest.mark.parametrize("name", EVERY)
def test_it_counts_what_one_group_after_the_other_counts(name: str) -> None:
    tables = []
    for implementation in ("reference", "decoded", "triton"):
        layer, (x, g) = layer_of(EVERY[name]), rows(0)
        with torch.no_grad():
            x[3, 2], x[40, 5] = float("inf"), 1e-30
        with qt.only(implementation), qt.count(layer) as counters:
            layer(x, ends((5, 3, 40, 19))).backward(g)
        tables.append({operand: counts for operands in counters.table.values() for operand, counts in operands.items()})
    assert tables[0] == tables[1] == tables[2]
    assert bool(tables[0]) is EVERY[name].quantizes


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "bf16"])
def test_bf16_layers_do_not_synchronize_with_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer_of(name, dtype=torch.bfloat16) for _ in range(2)]
    expected = steps_of(layers[0], layers[0])
    without_bounds(monkeypatch)
    with qt.only("decoded"):
        ours = steps_of(layers[1], layers[1])
    for tensor, wanted in zip(ours, expected, strict=True):
        if tensor.is_floating_point():
            assert (tensor.float() - wanted.float()).norm() <= 4e-3 * wanted.float().norm()


@pytest.mark.parametrize(
    "name",
    [
        "tensorwise",
        RECIPES["tensorwise, dequantized"],
        "delayed",
        "rowwise",
        "mxfp8",
        "nvfp4",
        "rowwise_bf16_wgrad",
        "bf16",
    ],
    ids=str,
)
def test_float32_layers_do_not_synchronize_where_kernels_exist(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer_of(name) for _ in range(2)]
    with qt.only("reference"):
        expected = steps_of(layers[0], layers[0])
    without_bounds(monkeypatch)
    with qt.only("triton"):
        ours = steps_of(layers[1], layers[1])
    for i, (tensor, wanted) in enumerate(zip(ours, expected, strict=True)):
        if tensor.is_floating_point():
            assert_close(f"{i}", tensor, wanted, 1e-6)


def test_recipes_that_share_operands_of_fprop_do_not_share_those_of_dgrad() -> None:
    one = recipes.get("tensorwise")
    rough = QuantSpec(E5M2, (1, None))
    other = Recipe("rough dgrad", one.fprop, GemmSpec(rough, rough), one.wgrad)
    grads: list[Tensor] = []
    for implementation in ("reference", "triton"):
        torch.manual_seed(0)
        layer, g = qt.GroupedLinear(4, K, K), rows(1)[0].detach()
        with qt.only(implementation):
            for recipe in (one, other):
                x = rows(0)[0]
                with qt.autocast(recipe):
                    layer(x, ends(STEPS[0][1])).backward(g)
        assert x.grad is not None
        grads.append(x.grad)
    assert_close("grad_x", grads[1], grads[0], 1e-6)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_batch_without_tokens_does_not_synchronize(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = qt.GroupedLinear(3, 32, 64, recipe=recipe)
    x = torch.zeros(0, 32, requires_grad=True)
    without_bounds(monkeypatch)
    with qt.only("triton"):
        y = layer(x, ends((0, 0, 0)))
        y.sum().backward()
    assert y.shape == (0, 64) and x.grad is not None and x.grad.shape == x.shape
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


class RecomputedValues(Permuted):
    """Rows in high precision, which are quantized for each group."""

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        return super().forward(*x, spec=None)

    def recompute_input(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        return super().recompute_input(saved, None)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_recomputed_rows_are_quantized_as_in_forward(recipe: str) -> None:
    places = torch.randint(0, 24, (70,), generator=torch.Generator().manual_seed(3))
    results: list[list[Tensor]] = []
    for recomputes_input in (False, True):
        layer, tokens = layer_of(recipe), rows(1, 24)[0]
        with qt.only("triton"):
            y = layer.project(RecomputedValues(recomputes_input), (tokens, places), ends(STEPS[0][1]))
            y.backward(rows(0)[1])
        assert tokens.grad is not None and layer.weight.grad is not None
        state = [tensor.clone() for tensor in layer.state_dict().values()]
        results.append([y.detach(), tokens.grad, layer.weight.grad, *state])
    for ours, expected in zip(*reversed(results), strict=True):
        assert_bitwise(ours.contiguous(), expected.contiguous())


@pytest.mark.parametrize("recipe", ["mxfp8", "rowwise", "blockwise"])
@pytest.mark.parametrize("recomputes_input", [False, True])
def test_computed_codes_and_rows_take_the_same_path(recipe: str, recomputes_input: bool) -> None:
    places = torch.randint(0, 24, (70,), generator=torch.Generator().manual_seed(3))
    results: list[list[Tensor]] = []
    for name in ("reference", "decoded"):
        layer, tokens = layer_of(recipe), rows(1, 24)[0]
        q = qt.quantize(rows(0)[0], recipes.get(recipe).fprop.a)  # type: ignore[arg-type]
        with qt.only(name):
            y = layer.project(Permuted(recomputes_input), (tokens, places), ends(STEPS[0][1])) + layer(
                q, ends(STEPS[0][1])
            )
            y.backward(rows(0)[1])
        assert tokens.grad is not None and layer.weight.grad is not None
        results.append([y.detach(), tokens.grad, layer.weight.grad])
    for ours, expected in zip(*reversed(results), strict=True):
        assert_close(recipe, ours, expected, 1e-6)


@pytest.mark.parametrize("implementation", ["decoded", "triton"])
@pytest.mark.parametrize(
    "recipe", ["tensorwise", "mxfp8", "nvfp4", RECIPES["mxfp8, dequantized"], RECIPES["squares of 1"]], ids=str
)
def test_compiled_layers_have_eager_bits_there_too(recipe: Any, implementation: str) -> None:
    torch._dynamo.reset()
    eager, compiled = layer_of(recipe), layer_of(recipe)
    run = torch.compile(lambda x, offsets: compiled(x, offsets), backend="aot_eager", fullgraph=True, dynamic=True)
    with qt.only(implementation):
        for ours, expected in zip(steps_of(compiled, run), steps_of(eager, eager), strict=True):
            assert_bitwise(ours.contiguous(), expected.contiguous())


def test_inductor_finds_saved_operands_of_the_shapes_that_it_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its cache does not notice that an operator announces other shapes.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    results: list[list[Tensor]] = []
    for compiles in (False, True):
        layer, (x, g) = layer_of("tensorwise"), rows(0)
        run = torch.compile(layer, fullgraph=True) if compiles else layer
        with qt.only("triton"):
            y = run(x, ends(STEPS[0][1]))
            y.backward(g)
        assert x.grad is not None and layer.weight.grad is not None
        results.append([y.detach(), x.grad, layer.weight.grad])
    for ours, expected in zip(*reversed(results), strict=True):
        assert_bitwise(ours, expected)


# ---- emulated GEMMs: values of codes ----

#: A multiple of every block width.
SIDE = 128


def emulated_steps(recipe: str, layout: str, how: str, implementation: str) -> list[Tensor]:
    """Train a layer of four experts for three steps; the groups are ragged, empty, and all rows in one."""
    torch.manual_seed(0)
    layer = qt.GroupedLinear(4, SIDE, SIDE, recipe=recipe, layout=layout, dtype=torch.bfloat16)
    layer.__dict__["qualified_name"] = "experts"
    name_streams(layer)
    run: Any = layer
    if how == "compiled":
        torch._dynamo.reset()
        run = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    results: list[Tensor] = []
    with qt.only(implementation):
        for count, sizes in STEPS:
            x = (torch.randn(count, SIDE) * torch.logspace(-3, 3, count)[:, None]).bfloat16().requires_grad_()
            rows_in: Any = x
            if how == "codes":
                spec = recipes.get(recipe).fprop.a
                assert spec is not None
                rows_in = qt.quantize(x, spec)
            y = run(rows_in, ends(sizes))
            layer.zero_grad()
            y.backward(torch.randn(count, SIDE).bfloat16())
            results += [y.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
            results += [] if x.grad is None else [x.grad]
            with torch.no_grad():
                layer.weight.add_(0.01)
    return results


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "blockwise", "mxfp4"])
@pytest.mark.parametrize("how", ["eager", "codes", "compiled"])
def test_layers_of_large_experts_train_as_one_group_after_the_other(
    recipe: str, layout: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "codes" and recipes.get(recipe).fprop.a.two_level:  # type: ignore[union-attr]
        pytest.skip("a tensor's factor would be shared by all groups")
    expected = emulated_steps(recipe, layout, "eager" if how == "compiled" else how, "reference")
    calls: list[Any] = []
    multiply = EmulatedGroups.multiply
    monkeypatch.setattr(EmulatedGroups, "multiply", lambda *args: calls.append(args) or multiply(*args))
    without_bounds(monkeypatch)
    ours = emulated_steps(recipe, layout, how, "triton")
    # Codes in blocks of 128 have a GEMM of their own.
    assert len(calls) == (0 if recipe == "blockwise" else 3 if how == "codes" else 6)
    for i, (tensor, wanted) in enumerate(zip(ours, expected, strict=True)):
        assert_close(f"{i}", tensor, wanted, 4e-3)


def test_emulated_layers_quantize_weights_once_per_optimizer_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from quaver.torch.backends.gpu import grouped_values

    shapes: list[int] = []
    original = grouped_values.values
    monkeypatch.setattr(grouped_values, "values", lambda x, *a, **k: shapes.append(len(x)) or original(x, *a, **k))
    layer = qt.GroupedLinear(4, SIDE, SIDE, recipe="mxfp8", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with qt.only("triton"):
        for _ in range(2):
            for _ in range(3):
                x = torch.randn(40, SIDE).bfloat16().requires_grad_()
                layer(x, ends((5, 0, 16, 19))).sum().backward()
            optimizer.step()
    assert shapes.count(4 * SIDE) == 2


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_emulated_layers_are_counted_as_one_group_after_the_other(recipe: str) -> None:
    tables = []
    for implementation in ("reference", "triton"):
        torch.manual_seed(0)
        layer = qt.GroupedLinear(4, SIDE, SIDE, recipe=recipe, dtype=torch.bfloat16)
        x = torch.randn(67, SIDE).bfloat16().requires_grad_()
        with qt.only(implementation), qt.count(layer) as counters:
            layer(x, ends((5, 3, 40, 19))).backward(torch.randn(67, SIDE).bfloat16())
        tables.append({operand: counts for operands in counters.table.values() for operand, counts in operands.items()})
    assert tables[0] == tables[1] and tables[0]
