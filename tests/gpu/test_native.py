"""On a card: whole layers on kernels and cuBLASLt against the reference, forward, backward and compiled."""

import math

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.recipes import RECIPES, get
from quaver.torch import ops, reference

pytestmark = pytest.mark.gpu
#: Tokens that are no multiple of 16, and some that are.
TOKENS = (64, 37)
QUANTIZING = [name for name, build in RECIPES.items() if build().quantizes]
#: Relative RMS of bf16 results: one rounding on either side, and what fast accumulation of 13 bits may add.
BOUND = 1e-2


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def run(layer: torch.nn.Module, x: Tensor, g: Tensor, recipe: str) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    layer.zero_grad()
    with qt.autocast(get(recipe)):
        y = layer(x)
    y.backward(g)
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("recipe", QUANTIZING)
@pytest.mark.filterwarnings("ignore:.*decoded operands:UserWarning")
def test_a_linear_layer_is_the_references(recipe: str, tokens: int) -> None:
    layer = qt.Linear(256, 384, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(tokens, 384, device="cuda", dtype=torch.bfloat16)
    found = run(layer, x, g, recipe)
    layer.__dict__.pop("_weights", None)
    if layer._buffers.get("history") is not None:
        layer.history.zero_()
        layer.factor.zero_()
    if layer._buffers.get("count") is not None:
        layer.count[:2] = 0
    with qt.only("reference"):
        expected = run(layer, x, g, recipe)
    for name, value in expected.items():
        assert distance(found[name], value) < BOUND, name


@pytest.mark.parametrize("recipe", QUANTIZING)
@pytest.mark.filterwarnings("ignore:.*decoded operands:UserWarning")
def test_products_are_those_of_float64(recipe: str) -> None:
    """Without fast accumulation: 1e-6 where GEMMs are emulated; what a native one adds is measured, not promised."""
    spec = get(recipe).fprop
    assert spec.a is not None and spec.b is not None
    a = ops.quantize(torch.randn(96, 512, device="cuda"), spec.a)
    b = ops.quantize(torch.randn(64, 512, device="cuda"), spec.b)
    expected = reference.double(a) @ reference.double(b).t()
    how = next(name for name, why in ops.MATMUL.explain(a, b, torch.float32, None, False) if not why)
    error = distance(ops.matmul(a, b, torch.float32), expected)
    assert error < (1e-3 if how == "native" else 1e-6), how


@pytest.mark.parametrize("recipe", QUANTIZING)
@pytest.mark.filterwarnings("ignore:.*decoded operands:UserWarning")
def test_an_overflow_reaches_the_output(recipe: str) -> None:
    layer = qt.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    x[3, 5] = math.inf
    with qt.autocast(get(recipe)):
        assert layer(x)[3].isnan().all()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
@pytest.mark.filterwarnings("ignore:.*decoded operands:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_layer_has_the_eager_bits(recipe: str) -> None:
    torch.compiler.reset()
    layer = qt.Linear(256, 256, device="cuda", dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))
