"""Test layers with GEMMs that the GPU does not support: the results of CPU emulation, with few saved tensors."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.costs import ledger
from quaver.costs.hardware import GPUS
from quaver.recipes.spec import Recipe
from quaver.torch.backends.gpu import capture, emulation, launch, scaled_mm
from quaver.torch.linear import plan_emulated
from quaver.torch.state import weight_cache
from tests.close import assert_bitwise, assert_close
from tests.operands import variants
from tests.torch.backends.gpu.pretend import as_on_a_gpu, become

T, K, N = 32, 48, 64
RECIPES = ["mxfp8", "mxfp6", "mxfp4", "blockwise", "nvfp4"]


@pytest.fixture
def on_ada(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with as_on_a_gpu(monkeypatch):
        become(89, monkeypatch)
        yield


def layers(recipe: str, dtype: torch.dtype, bias: bool = True) -> tuple[qt.Linear, qt.Linear]:
    """Two layers with the same weight and the same noise stream."""
    first = qt.Linear(K, N, bias=bias, dtype=dtype, recipe=recipe)
    second = qt.Linear(K, N, bias=bias, dtype=dtype, recipe=recipe)
    second.load_state_dict({k: v.clone() for k, v in first.state_dict().items()})
    return first, second


def results(layer: qt.Linear, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.float().mul(torch.linspace(-1, 1, N)).square().sum().backward()
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_agrees_with_the_emulation_on_a_cpu(recipe: str, dtype: torch.dtype) -> None:
    first, second = layers(recipe, dtype)
    x = torch.randn(2, T // 2, K).to(dtype)
    expected = results(second, x)
    with pytest.MonkeyPatch.context() as patch, as_on_a_gpu(patch):
        # Alternate between Ampere, where Triton has no FP8 type, and Ada, where it rounds incorrectly.
        become(80 if dtype is torch.bfloat16 else 89, patch)
        ours = results(first, x)
        assert plan_emulated.build(x, first.weight, recipes.get(recipe)) is not None
    # Sums in another order: of half precision an element in a thousand falls on the other side.
    bound = 1e-6 if dtype is torch.float32 else 1e-3
    for name, a, b in zip(("output", "of input", "of weight", "of bias"), ours, expected, strict=True):
        assert_close(f"{recipe} {name}", a.float(), b.float(), bound)


def test_layers_of_one_shape_that_get_a_recipe_later_have_their_own_noise(on_ada: None) -> None:
    x = torch.randn(T, K).bfloat16()
    for layer in [qt.Linear(K, N, dtype=torch.bfloat16) for _ in range(2)]:
        drawn = []
        for _ in range(3):
            layer.zero_grad()
            with qt.autocast("nvfp4"):
                drawn.append(results(layer, x)[1:3])
        assert isinstance(layer.count, Tensor) and int(layer.count[1]) == 3
        assert not any(torch.equal(a, b) for pair in pairwise(drawn) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_bias_may_have_any_layout(recipe: str, on_ada: None) -> None:
    x, values = torch.randn(T, K).bfloat16(), torch.randn(2 * N).bfloat16()
    first, second = layers(recipe, torch.bfloat16)
    for bias in (values[::2], values[:1].expand(N)):
        first.bias, second.bias = torch.nn.Parameter(bias), torch.nn.Parameter(bias.clone().contiguous())
        assert_bitwise(first(x), second(x), "without a plan")
        assert_bitwise(results(first, x)[0], results(second, x)[0], "decided")


def test_a_stochastically_rounded_input_draws_new_noise_in_each_step(on_ada: None) -> None:
    nvfp4 = recipes.nvfp4()
    assert nvfp4.fprop.a is not None and nvfp4.wgrad.b is not None
    line, down = (replace(spec, rounding="stochastic") for spec in (nvfp4.fprop.a, nvfp4.wgrad.b))
    recipe = Recipe("drawn", replace(nvfp4.fprop, a=line), nvfp4.dgrad, replace(nvfp4.wgrad, b=down))
    layer, x = qt.Linear(K, N, dtype=torch.bfloat16, recipe=recipe), torch.randn(T, K).bfloat16()
    first, second = results(layer, x)[0], results(layer, x)[0]
    assert first.isfinite().all() and not torch.equal(first, second)


@pytest.mark.parametrize("direct", [True, False])
def test_a_product_that_fills_a_gpu_is_rounded_by_its_gemm(
    direct: bool, on_ada: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("wide", "narrow"):
        multiply = getattr(plan_emulated, name)
        monkeypatch.setattr(plan_emulated, name, lambda *a, m=multiply, n=name: calls.append(n) or m(*a))
    first, second = layers("mxfp8", torch.bfloat16)
    x = torch.randn(T, K).bfloat16()
    ours = results(first, x)
    assert calls == ["wide"] * 3
    calls.clear()
    monkeypatch.setattr(scaled_mm, "FILLS", T * N if direct else N * N)
    become(89, monkeypatch)
    again = results(second, x)
    # Of fprop T × N, of dgrad T × K, of wgrad N × K.
    assert calls == (["narrow", "wide", "narrow"] if direct else ["wide"] * 3)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.parametrize(("recipe", "of_codes"), [("mxfp8", 1.0), ("mxfp6", 1.0), ("blockwise", 1.0), ("nvfp4", 0.5)])
def test_backward_keeps_codes_and_scales(recipe: str, of_codes: float, on_ada: None) -> None:
    layer = qt.Linear(K, N, bias=False, dtype=torch.bfloat16, recipe=recipe)
    y: Any = layer(torch.randn(T, K).bfloat16().requires_grad_())
    _, codes, scales = y.grad_fn.saved_tensors
    assert codes.nbytes == of_codes * T * K
    assert scales.nbytes <= T * K / 16 + K


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise", "nvfp4(stochastic_rounding=False)"])
def test_backward_recomputes_the_values_of_a_weight_that_was_freed(recipe: str, on_ada: None) -> None:
    """As FSDP2 frees weights between forward and backward."""
    layer, x = qt.Linear(K, N, dtype=torch.bfloat16, recipe=recipe), torch.randn(T, K).bfloat16()
    grads = []
    for freed in (False, True):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        if freed:
            weight_cache.free(layer)
        grads.append(torch.autograd.grad(y.sum(), leaf)[0])
    assert_bitwise(*grads)


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_forwards_and_captures_have_the_bits_of_training(recipe: str, on_ada: None) -> None:
    (layer, other), x = layers(recipe, torch.bfloat16), torch.randn(2, T // 2, K).bfloat16()
    expected = results(layer, x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_bitwise(layer(x), expected[0], mode.__name__)
    with capture.rehearsing(torch.device("cpu")):
        for name, ours, trained in zip(("y", "x", "w", "b"), results(other, x), expected, strict=True):
            assert_bitwise(ours, trained, f"captured: {name}")
    if "count" in layer._buffers:
        assert torch.equal(layer.count, other.count)
    assert not capture.rehearsed


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4(stochastic_rounding=False)"])
def test_a_frozen_weight_is_rounded_once_and_serves_training_too(
    recipe: str, on_ada: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (layer, other), x = layers(recipe, torch.bfloat16), torch.randn(T, K).bfloat16()
    expected = results(other, x)
    rounded: list[tuple[int, ...]] = []
    for name in ("values", "two_level_values"):
        run = getattr(emulation, name)
        monkeypatch.setattr(emulation, name, lambda m, *a, run=run: rounded.append(tuple(m.shape)) or run(m, *a))
    with qt.frozen(layer):
        for mode in (torch.inference_mode, torch.no_grad, torch.no_grad):
            with mode():
                assert_bitwise(layer(x), expected[0])
        assert rounded.count((N, K)) == 1
        for ours, trained in zip(results(layer, x), expected, strict=True):
            assert_bitwise(ours, trained)
        # Square blocks have one result for both GEMMs; other transposes were not made without gradients.
        assert rounded.count((N, K)) == (1 if "nvfp4" in recipe else 2)


def test_layers_whose_input_or_weight_needs_no_gradient_have_a_plan(on_ada: None) -> None:
    (layer, other), x = layers("mxfp6", torch.bfloat16), torch.randn(T, K).bfloat16()
    _, grad_input, grad_weight, _ = results(other, x)
    layer(x).float().mul(torch.linspace(-1, 1, N)).square().sum().backward()
    assert_bitwise(layer.weight.grad, grad_weight)  # type: ignore[arg-type]
    layer.weight.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    y: Any = layer(leaf)
    assert y.grad_fn.constants[0].plan.cache_name == plan_emulated.VALUES
    y.float().mul(torch.linspace(-1, 1, N)).square().sum().backward()
    assert_bitwise(leaf.grad, grad_input)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RECIPES)
def test_nonfinite_values_make_nan_and_the_largest_numbers_do_not(recipe: str, on_ada: None) -> None:
    layer = qt.Linear(K, N, bias=False, dtype=torch.bfloat16, recipe=recipe)
    with torch.no_grad():
        layer.weight.mul_(1e-6)
    x = torch.randn(T, K).bfloat16()
    x[1, 3] = torch.finfo(torch.bfloat16).max
    assert layer(x.clone().requires_grad_()).isfinite().all()
    x[1, 3] = torch.inf
    y = layer(x.requires_grad_())
    assert y[1].isnan().all()
    y.float().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad[:, 3].isnan().all()


def test_explain_says_that_values_are_written(on_ada: None) -> None:
    layer = qt.Linear(K, N, dtype=torch.bfloat16, recipe="mxfp6")
    rows = {row.what: row for row in qt.explain(layer, torch.randn(T, K).bfloat16()).rows}
    assert rows["input"].how == "e2m3[1x32]:e8m0, as bf16 values" and rows["input"].runs == "triton"
    assert rows["fprop GEMM"].how == "float32 accumulation of bf16 values"
    assert rows["weight.T"].how == "e2m3[1x32]:e8m0, as bf16 values"
    odd = {row.what: row for row in qt.explain(layer, torch.randn(T + 1, K).bfloat16()).rows}
    assert odd["input"].how == "e2m3[1x32]:e8m0" and odd["input"].runs == "cpu_mx"


@pytest.mark.parametrize("gpu", ["a100", "l40s", "h200", "b200", "rtx5090"])
def test_the_ledger_prices_the_steps_that_there_are(gpu: str) -> None:
    card = GPUS[gpu]
    assert scaled_mm.FILLS == ledger.FILLS
    with launch.recording(card.capability[0] * 10 + card.capability[1]):
        for name, recipe in variants().items():
            at_once = ledger.values_at_once(recipe, card, T, K, N)
            if recipe.delayed is None:
                assert at_once is (plan_emulated.reason_unsupported(recipe, torch.device("cpu")) == ""), name
