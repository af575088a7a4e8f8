"""A small layer with kernels chosen beforehand has the bits, gradients and state of the general plan, on a CPU."""

import math
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.backends.cpu import gemm
from quaver.torch.linear import linear as linear_module
from quaver.torch.linear.autograd import IDENTITY_INPUT
from quaver.torch.linear.fused_projections import project
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


def layer_and_input() -> tuple[qt.Linear, Tensor]:
    layer, x = qt.Linear(K, N, recipe="tensorwise"), torch.randn(T, K, requires_grad=True)
    assert by_fast_plan(layer(x))
    return layer, x


@pytest.mark.parametrize("tokens", [T, 200])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_plans_hold_neither_an_input_nor_a_weight(recipe: str, tokens: int) -> None:
    layer, x = qt.Linear(64, 64, recipe=recipe), torch.randn(tokens, 64, requires_grad=True)
    layer(x)
    weights = weakref.ref(layer.weight), weakref.ref(x)
    del layer, x
    assert linear_module.plans and not any(weight() for weight in weights)


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
