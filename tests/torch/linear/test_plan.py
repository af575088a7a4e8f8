"""A small layer with kernels chosen beforehand has the bits, gradients and state of the general plan, on a CPU."""

import math
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import GemmSpec, Recipe
from quaver.torch.backends.cpu import gemm
from quaver.torch.linear import linear as linear_module
from quaver.torch.linear import plan_cpu
from quaver.torch.linear.autograd import IDENTITY_INPUT
from quaver.torch.linear.fused_projections import project
from quaver.torch.state import weight_cache
from tests import forked
from tests.close import assert_bitwise
from tests.operands import nasty
from tests.pairs import pairs
from tests.torch.linear.fast_plans import by_fast_plan, general_plans

T, K, N = 12, 24, 40

RECIPES = {
    "tensorwise": recipes.tensorwise(),
    "any scale": recipes.tensorwise(power_of_two=False),
    "E4M3": recipes.tensorwise(format="e4m3"),
    "delayed": recipes.delayed(),
    "short, with a margin": recipes.delayed(history=2, margin=1),
    "most recent, any scale": recipes.delayed(history=3, algorithm="most_recent", power_of_two=False),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pair(recipe: Recipe, dtype: torch.dtype, bias: bool = True, k: int = K, n: int = N) -> tuple[qt.Linear, qt.Linear]:
    first, second = (qt.Linear(k, n, bias=bias, dtype=dtype, recipe=recipe) for _ in range(2))
    second.load_state_dict({k: v.clone() for k, v in first.state_dict().items()})
    return first, second


def train(layer: qt.Linear, inputs: list[Tensor], gradients: list[Tensor], direct: bool) -> dict[str, Tensor]:
    """Outputs and gradients of every step, and the final state; the weight changes after every other step."""
    tensors = {}
    for number, (value, g) in enumerate(zip(inputs, gradients, strict=True)):
        x = value.clone().requires_grad_()
        layer.zero_grad()
        with qt.autocast(layer.recipe):
            y = layer(x)
        # The general plan creates the state of delayed scaling.
        assert by_fast_plan(y) is direct
        y.backward(g)
        assert x.grad is not None
        tensors |= {f"output {number}": y.detach(), f"input {number}": x.grad}
        tensors |= {f"{name} {number}": p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
        if number % 2:
            with torch.no_grad():
                layer.weight.mul_(0.75)
    return tensors | {name: b.clone() for name, b in layer.named_buffers()}


@pytest.mark.parametrize(("name", "dtype", "bias"), pairs(RECIPES, DTYPES, [True, False]), ids=str)
def test_bits_and_state_equal_the_general_path(name: str, dtype: torch.dtype, bias: bool) -> None:
    _compare(RECIPES[name], dtype, bias, (3, T // 3), K, N)


def _compare(
    recipe: Recipe, dtype: torch.dtype, bias: bool, lead: tuple[int, ...], k: int, n: int, some: slice = slice(None)
) -> None:
    tokens = math.prod(lead)
    inputs = [torch.from_numpy(v).to(dtype).view(*lead, k) for v in list(nasty((tokens, k)).values())[some]]
    values = list(reversed(nasty((tokens, n), 1).values()))[some]
    gradients = [torch.from_numpy(v).to(dtype).view(*lead, n) for v in values]
    first, second = pair(recipe, dtype, bias, k, n)
    ours = train(first, inputs, gradients, True)
    with general_plans():
        theirs = train(second, inputs, gradients, False)
    assert ours.keys() == theirs.keys()
    for what in ours:
        assert_bitwise(ours[what], theirs[what], what)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_a_small_and_a_large_layer_of_one_input_read_the_same_codes(recipe: str) -> None:
    """Of one input, though the steps of the two may have other rows."""
    small, large = (qt.Linear(64, n, recipe=recipe) for n in (8, 1024))
    assert 64 * 64 * 8 <= gemm.SMALL < 64 * 64 * 1024
    for layers in ((small, large), (large, small)):
        results = []
        for way in (nullcontext(), general_plans()):
            x = torch.linspace(-3, 2, 64 * 64).view(64, 64).requires_grad_()
            with way:
                outputs = project(IDENTITY_INPUT, (x,), layers)
            torch.cat([y.square() for y in outputs], 1).sum().backward()
            results.append([*outputs, x.grad, *(layer.weight.grad for layer in layers)])
            small.zero_grad()
            large.zero_grad()
        for ours, theirs in zip(*results, strict=True):
            assert_bitwise(ours.detach(), theirs.detach())


def test_every_shape_of_input_has_its_step() -> None:
    first, second = pair(RECIPES["tensorwise"], torch.float32)
    for shape in [(K,), (1, K), (T, K), (2, 3, K), (2, 1, 3, K), (T, K)]:
        x = torch.randn(shape)
        ours = train(first, [x], [torch.ones(*shape[:-1], N)], True)
        with general_plans():
            theirs = train(second, [x], [torch.ones(*shape[:-1], N)], False)
        for what in ours:
            assert_bitwise(ours[what], theirs[what], f"{what} of {shape}")


def test_alternating_lengths_are_planned_once_for_all_layers_and_few_plans_are_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers, decided, decide = [qt.Linear(K, N, recipe="tensorwise") for _ in range(2)], [], plan_cpu.build
    monkeypatch.setattr(linear_module, "MAX_PLANS", 16)

    def counted(x: Tensor, *rest: Any) -> Any:
        decided.append(len(x))
        return decide(x, *rest)

    monkeypatch.setattr(plan_cpu, "build", counted)
    for tokens in [T, T + 1, T, T + 1, T]:
        for layer in layers:
            assert by_fast_plan(layer(torch.randn(tokens, K, requires_grad=True)))
    assert decided == [T, T + 1]
    for tokens in range(1, 3 * linear_module.MAX_PLANS):
        assert by_fast_plan(layers[0](torch.randn(tokens, K, requires_grad=True)))
        assert len(linear_module.plans) <= linear_module.MAX_PLANS


def layer_and_input() -> tuple[qt.Linear, Tensor]:
    layer, x = qt.Linear(K, N, recipe="tensorwise"), torch.randn(T, K, requires_grad=True)
    assert by_fast_plan(layer(x))
    return layer, x


def test_observed_layers_take_the_general_path() -> None:
    layer, x = layer_and_input()
    with qt.count(layer) as counters:
        assert not by_fast_plan(layer(x))
    assert counters.table
    with torch.autocast("cpu", torch.bfloat16):
        assert not by_fast_plan(layer(x))
    with qt.only("reference"):
        assert not by_fast_plan(layer(x))
    assert by_fast_plan(layer(x))


def test_no_plan_is_made_while_the_layer_is_observed() -> None:
    layer = qt.Linear(K, N, recipe="tensorwise")
    x = torch.randn(T, K, requires_grad=True)
    with qt.only("reference"):
        assert not by_fast_plan(layer(x))
    assert not linear_module.plans
    assert by_fast_plan(layer(x))


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "mxfp6", "rowwise", "blockwise", "mxfp8"])
def test_recipes_of_other_scales_take_the_general_path(recipe: str) -> None:
    layer = qt.Linear(K, N, recipe=recipe)
    assert not by_fast_plan(layer(torch.randn(T, K, requires_grad=True)))


def test_unsupported_calls_take_the_general_path() -> None:
    layer, x = layer_and_input()
    assert not by_fast_plan(layer(x.detach()))
    assert not by_fast_plan(layer(torch.randn(K, T).t().requires_grad_()))
    assert not by_fast_plan(layer(torch.randn(0, K, requires_grad=True)))
    assert by_fast_plan(layer(x))
    layer.weight.requires_grad_(False)
    assert not by_fast_plan(layer(x))
    with pytest.raises(ValueError, match="float32 weights and got a"):
        layer(x.bfloat16())
    layer.weight = nn.Parameter(torch.randn(K, N).t())
    assert not by_fast_plan(layer(x))
    with torch.no_grad():
        assert layer(x).grad_fn is None


@pytest.mark.parametrize("gemm", ["fprop", "dgrad"])
def test_a_recipe_with_an_unquantized_input_gemm_takes_the_general_path(gemm: str) -> None:
    plain = GemmSpec(None, None)
    recipe = replace(recipes.rowwise(), name="plain", wgrad=plain, **{gemm: plain})
    assert not by_fast_plan(qt.Linear(K, N, recipe=recipe)(torch.randn(T, K, requires_grad=True)))


@pytest.mark.parametrize("tokens", [T, 200])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_plans_hold_neither_an_input_nor_a_weight(recipe: str, tokens: int) -> None:
    layer, x = qt.Linear(64, 64, recipe=recipe), torch.randn(tokens, 64, requires_grad=True)
    layer(x)
    weights = weakref.ref(layer.weight), weakref.ref(x)
    del layer, x
    assert linear_module.plans and not any(weight() for weight in weights)


def test_a_weight_of_another_shape_has_its_own_plan() -> None:
    layer, x = qt.Linear(K, N, bias=False, recipe="tensorwise"), torch.randn(T, K, requires_grad=True)
    assert by_fast_plan(layer(x))
    layer.weight = nn.Parameter(torch.randn(N, K + 1))
    with pytest.raises(ValueError, match="got an input of shape"):
        layer(x)
    large = gemm.SMALL // (T * K) + 1
    layer.weight = nn.Parameter(torch.randn(large, K))
    y = layer(x)
    assert y.shape == (T, large) and not by_fast_plan(y)


def test_on_meta_nothing_is_computed() -> None:
    layer, _ = layer_and_input()
    layer.to("meta")
    assert layer(torch.empty(T, K, device="meta", requires_grad=True)).shape == (T, N)


def test_nothing_is_decided_for_a_weight_that_is_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    with qt.quantized_init("tensorwise"):
        layer = qt.Linear(K, N)
    plans: list[object] = []
    monkeypatch.setattr(linear_module, "make_plan", lambda *args: plans.append(args))
    with qt.autocast("tensorwise"):
        layer(torch.randn(T, K, requires_grad=True))
    assert not plans


def test_no_default_of_torch_reaches_a_step() -> None:
    """Each in a fork of a process that has imported torch alone: what quaver makes as it is imported has it too."""
    code = f"""
import os, sys, torch
if child := os.fork():
    status = os.waitpid(child, 0)[1]
    assert status == 0, "default dtype"
    torch.set_default_device("meta")
else:
    torch.set_default_dtype(torch.float16)
import quaver.torch as qt
own = dict(dtype=torch.float32, device="cpu")
layer = qt.Linear({K}, {N}, bias=False, recipe="tensorwise", **own)
torch.nn.init.ones_(layer.weight)
# Its factor leaves float16.
x = torch.full(({T}, {K}), 2.0**-30, **own).requires_grad_()
y = layer(x)
assert (y == {K} * 2.0**-30).all()
y.sum().backward()
assert (x.grad == {N}).all()
"""
    forked.bare("torch").run([sys.executable, "-c", code], check=True)


def test_a_weight_that_is_computed_is_quantized_each_time() -> None:
    layer, x = layer_and_input()
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())
    y = layer(x)
    assert by_fast_plan(y)
    y.sum().backward()
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(2.0)
    with general_plans():
        expected = layer(x)
    assert_bitwise(layer(x).detach(), expected.detach())


def test_a_weight_written_in_place_is_requantized_and_detected_by_backward() -> None:
    layer, x = layer_and_input()
    layer.bias.data.zero_()  # type: ignore[union-attr]
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert torch.equal(layer(x), y * 2)


@pytest.mark.parametrize("way", ["direct", "general"])
def test_an_output_may_be_written_to(way: str) -> None:
    layer = qt.Linear(K, N, recipe="tensorwise")
    for shape in [(T, K), (3, T // 3, K), (K,)]:
        x = torch.randn(shape, requires_grad=True)
        expected = torch.autograd.grad(layer(x).relu().square().sum(), (x, layer.weight))
        with general_plans() if way == "general" else nullcontext():
            y = layer(x)
        assert by_fast_plan(y) == (way == "direct")
        grads = torch.autograd.grad(y.relu_().square().sum(), (x, layer.weight))
        for grad, value in zip(grads, expected, strict=True):
            assert_bitwise(grad, value)


def test_two_forwards_before_their_backwards_keep_their_own_codes() -> None:
    layer, _ = layer_and_input()
    inputs = [torch.randn(T, K, requires_grad=True) for _ in range(2)]
    alone = [torch.autograd.grad(layer(x).square().sum(), (x, layer.weight)) for x in inputs]
    outputs = [layer(x) for x in inputs]
    for x, y, expected in zip(inputs, outputs, alone, strict=True):
        for grad, value in zip(torch.autograd.grad(y.square().sum(), (x, layer.weight)), expected, strict=True):
            assert_bitwise(grad, value)


GRADIENTS = {
    "expanded": torch.linspace(-1, 1, N).expand(T, N),
    "expanded the other way": torch.linspace(-1, 1, T)[:, None].expand(T, N),
    "column by column": torch.from_numpy(nasty((N, T))["normal"]).t(),
}


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_backward_takes_any_gradient_and_ignores_torchs_autocast(gradient: Tensor) -> None:
    first, second = pair(RECIPES["tensorwise"], torch.float32)
    runs = []
    for layer, ours in ((first, True), (second, False)):
        x = torch.linspace(-1, 1, T * K).view(T, K).requires_grad_()
        layer.zero_grad()
        with nullcontext() if ours else general_plans():
            y = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            y.backward(gradient)
        assert by_fast_plan(y) is ours
        assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
        runs.append((x.grad, layer.weight.grad, layer.bias.grad))
    for a, b in zip(*runs, strict=True):
        assert_bitwise(a, b)


def test_an_autocast_of_another_device_does_not_matter() -> None:
    layer, x = layer_and_input()
    y = layer(x)
    torch.set_autocast_enabled("cuda", True)
    try:
        y.sum().backward()
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert x.grad is not None


def test_backward_counts_even_if_forward_did_not() -> None:
    layer, x = layer_and_input()
    y = layer(x)
    with qt.count(layer) as counters:
        y.sum().backward()
    assert counters.table[""]["grad_output"].elements == T * N


def test_second_derivatives_are_refused() -> None:
    layer, x = layer_and_input()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("shape", [(T, K, N), (1, 256, 512)])
def test_backward_saves_one_byte_per_element(shape: tuple[int, int, int]) -> None:
    tokens, k, n = shape
    layer, x = qt.Linear(k, n, recipe="tensorwise"), torch.randn(tokens, k, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)  # noqa: F841
    # The saved codes and their scale.
    assert sum(t.nbytes for t in saved if t is not layer.weight) == tokens * k + 8
    # The graph node holds no decoded weight with more than a few elements.
    entry = weight_cache.lookup(layer, "fprop", layer.weight, layer.recipe.fprop.b, 0.0)  # type: ignore[union-attr, arg-type]
    assert entry is not None and entry.quantized is not None
    assert (entry.quantized.decoded is None) == (n * k > gemm.REMEMBERED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise", "mxfp8"])
def test_a_cached_weight_serves_lengths_that_need_another_layout(name: str, dtype: torch.dtype) -> None:
    """Alternating small and large products, one after the other and both before their backwards."""
    lengths = [4, 64, 4]
    assert 4 * 64 * 96 < gemm.SMALL < 64 * 64 * 96
    layers = pair(RECIPES.get(name) or recipes.get(name), dtype, True, 64, 96)
    inputs = [torch.randn(tokens, 64).to(dtype).requires_grad_() for tokens in lengths]

    def gradients(layer: qt.Linear, together: bool) -> list[Tensor]:
        layer.zero_grad()
        grads: list[Tensor] = []
        outputs = []
        for x in inputs:
            with qt.autocast(layer.recipe):
                outputs.append(layer(x))
            if not together:
                grads += torch.autograd.grad(outputs[-1].square().sum(), (x, layer.weight))
        if together:
            for x, y in zip(inputs, outputs, strict=True):
                grads += torch.autograd.grad(y.square().sum(), (x, layer.weight))
        return [*(y.detach() for y in outputs), *grads]

    for together in (False, True):
        ours = gradients(layers[0], together)
        with general_plans():
            theirs = gradients(layers[1], together)
        for one, other in zip(ours, theirs, strict=True):
            assert_bitwise(one, other)


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8"])
@pytest.mark.parametrize("tokens", [64, 160])
def test_a_transposed_input_is_read_row_by_row(name: str, tokens: int) -> None:
    """Through RMSNorm, which preserves the layout, and as a direct input."""
    x, g = torch.randn(64, tokens, requires_grad=True), torch.randn(tokens, 64)
    block = qt.LayerNormLinear(64, 64, normalization="RMSNorm", recipe=name)

    def through_norm(x: Tensor) -> Tensor:
        return block(x)  # type: ignore[no-any-return]

    def through_identity(x: Tensor) -> Tensor:
        return project(IDENTITY_INPUT, (x,), (block.linear,))[0]

    for run in (through_norm, through_identity):
        results = []
        for layout in (lambda x: x.t(), lambda x: x.t().contiguous()):
            with qt.autocast(name):
                y = run(layout(x))
            results.append([y.detach(), *torch.autograd.grad(y, (x, block.linear.weight), g)])
        for one, other in zip(*results, strict=True):
            assert_bitwise(one, other)


def test_plans_are_dropped_only_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "MAX_PLANS", 8)
    layer = qt.Linear(K, N, recipe="tensorwise")
    for tokens in range(1, 2 * linear_module.MAX_PLANS):
        layer(torch.randn(tokens, K, requires_grad=True))
        assert len(linear_module.plans) == min(tokens, linear_module.MAX_PLANS)
