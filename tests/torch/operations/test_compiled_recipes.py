"""Specs and recipes that are built inside a compiled function: data, which a compiler makes as eager mode does."""

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import quaver
import quaver.torch as qt
from quaver import E2M3, E4M3, Format, GemmSpec, QuantSpec, Recipe
from quaver.torch.state.history import amax

LAYER = qt.Linear(64, 32)


@pytest.fixture(autouse=True)
def _without_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide layers of other tests: compiled autocast rolls all live histories, at 0.14 s of tracing for each layer."""
    monkeypatch.setattr(amax, "_histories", {})


def spec(x: Tensor) -> Tensor:
    return qt.quantize(x, QuantSpec(E4M3, (1, 32), "e8m0")).dequantize()


def spec_of_own_format(x: Tensor) -> Tensor:
    return qt.quantize(x, QuantSpec(OWN, (1, 16), "fp32")).dequantize()


def recipe_of_the_table(x: Tensor) -> Tensor:
    with qt.autocast(quaver.recipes.mxfp8(weight_2d=True)):
        y: Tensor = LAYER(x)
    return y


def recipe_by_name(x: Tensor) -> Tensor:
    with qt.autocast(quaver.recipes.get("mxfp4")):
        y: Tensor = LAYER(x)
    return y


def recipe_of_ones_own(x: Tensor) -> Tensor:
    line = QuantSpec(E2M3, (1, 32), "e8m0")
    gemm = GemmSpec(line, line)
    with qt.autocast(Recipe("mine", gemm, gemm, gemm)):
        y: Tensor = LAYER(x)
    return y


OWN = Format(name="e3m4", bits=8, exponent_bits=3, mantissa_bits=4, bias=3, max=15.5)


#: Options that no other test uses.
unseen = itertools.count(1001)


@pytest.mark.parametrize(
    "function", [spec, spec_of_own_format, recipe_of_the_table, recipe_by_name, recipe_of_ones_own]
)
def test_layers_built_inside_a_compiled_function_have_the_eager_bits(function: Callable[[Tensor], Tensor]) -> None:
    torch.compiler.reset()
    # Recipes are built while Dynamo traces; the graph is the same as in other tests.
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for _ in range(3):
        x = torch.randn(16, 64)
        assert torch.equal(compiled(x), function(x))
    # A recipe built elsewhere does not recompile either.
    quaver.recipes.delayed(history=next(unseen))
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(torch.randn(16, 64))


def test_a_thread_that_has_entered_no_autocast_compiles_once() -> None:
    def doubled(x: Tensor) -> Tensor:
        with qt.autocast("mxfp8"):
            return x * 2

    torch.compiler.reset()
    compiled, results = torch.compile(doubled, fullgraph=True, backend="eager"), []

    def run() -> None:
        for x in (torch.ones(2), torch.zeros(2)):
            results.append(compiled(x).sum().item())

    with torch._dynamo.config.patch(error_on_recompile=True):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert results == [4, 0]
