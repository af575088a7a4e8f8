"""Backward of what fprop consumed, dequantized: the gradients of the function that forward computed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.costs.ledger import saved_bytes
from quaver.recipes.spec import GemmSpec, Recipe
from tests.close import assert_bitwise, assert_close
from tests.torch.linear.composition import compose

HIGH = GemmSpec(None, None)
NAMES = [n for n, r in recipes.RECIPES.items() if r().quantizes and r().delayed is None]


def dequantized(name: str, **gemms: GemmSpec) -> Recipe:
    """A recipe whose backward multiplies dequantized operands, except in the given GEMMs."""
    gemms = {"dgrad": HIGH, "wgrad": HIGH} | gemms
    return replace(recipes.get(name), name=f"{name}, dequantized", dequantized_backward=True, **gemms)  # type: ignore[arg-type]


def run(layer: nn.Module, recipe: Recipe, x: Tensor, g: Tensor) -> list[Tensor]:
    """Output and the gradients of input, weight and bias."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    with qt.autocast(recipe):
        y = layer(x)
    y.backward(g)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(17, 33, 9), (40, 160, 136)], ids=str)
def test_it_equals_a_plain_composition(name: str, shape: tuple[int, int, int]) -> None:
    tokens, k, n = shape
    layer, x, g = qt.Linear(k, n), torch.randn(tokens, k), torch.randn(tokens, n) * 1e-3
    expected = compose(layer, dequantized(name), x, g)
    for what, got, right in zip(
        vars(expected), run(layer, dequantized(name), x, g), vars(expected).values(), strict=True
    ):
        assert_close(what, got, right, 1e-6)


def test_it_is_the_gradient_of_the_values_that_were_multiplied() -> None:
    layer, x, g = qt.Linear(64, 48, False), torch.randn(32, 64), torch.randn(32, 48)
    recipe = dequantized("mxfp8")
    xs, ws = (qt.dequantize(qt.quantize(t, recipe.fprop.a)).requires_grad_() for t in (x, layer.weight.detach()))  # type: ignore[arg-type]
    nn.functional.linear(xs, ws).backward(g)
    _, of_x, of_w = run(layer, recipe, x, g)
    assert_bitwise(of_x, xs.grad)
    assert_bitwise(of_w, ws.grad)


@pytest.mark.parametrize("gemm", ["dgrad", "wgrad"])
def test_one_gemm_of_backward_may_be_quantized(gemm: str) -> None:
    recipe = dequantized("mxfp8", **{gemm: getattr(recipes.mxfp8(), gemm)})
    layer, x, g = qt.Linear(64, 32), torch.randn(32, 64), torch.randn(32, 32)
    expected = compose(layer, recipe, x, g)
    for what, got, right in zip(vars(expected), run(layer, recipe, x, g), vars(expected).values(), strict=True):
        assert_close(what, got, right, 1e-6)


def saved_by_backward(recipe: Any, layer: nn.Module, x: Tensor) -> int:
    """Bytes saved for backward, without parameters."""
    parameters = {p.data_ptr() for p in layer.parameters()}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() not in parameters:
            saved[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), qt.autocast(recipe):
        layer(x)
    return sum(saved.values())


def test_backward_keeps_codes() -> None:
    layer, x = qt.Linear(256, 128, dtype=torch.bfloat16), torch.randn(64, 256, dtype=torch.bfloat16)
    recipe = dequantized("mxfp8")
    assert saved_by_backward(recipe, layer, x) == saved_bytes(recipe, 64, 256) == 64 * 256 * 33 // 32
    plain = replace(recipe, name="plain", dequantized_backward=False)
    assert saved_by_backward(plain, layer, x.clone().requires_grad_()) == saved_bytes(plain, 64, 256) == 2 * 64 * 256


def test_blocks_equal_their_parts() -> None:
    """Layers that read a norm's and an activation's output, one of which is recomputed in backward."""
    recipe = dequantized("tensorwise")
    mlp = qt.LayerNormMLP(96, 160, "swiglu", fused=False)
    x, g = torch.randn(24, 96), torch.randn(24, 96)
    whole = run(mlp, recipe, x, g)

    def plain(x: Tensor) -> Tensor:
        y = mlp.norm(x)  # type: ignore[operator]
        return mlp.down_proj(qt.activate("swiglu", mlp.gate_proj(y), mlp.up_proj(y)))  # type: ignore[operator, no-any-return]

    x.requires_grad_()
    mlp.zero_grad()
    with qt.autocast(recipe):
        plain(x).backward(g)
    for got, right in zip(whole[1:], [x.grad, *(p.grad for p in mlp.parameters())], strict=True):
        assert_bitwise(got, right)


def test_layers_of_one_input_share_only_common_operands() -> None:
    """One layer saves the input and the next its codes, in both orders."""
    keeps, values = replace(recipes.tensorwise(), wgrad=HIGH), dequantized("tensorwise")
    x, g = torch.randn(16, 64), torch.randn(16, 32)
    layers = [qt.Linear(64, 32, recipe=r) for r in (keeps, values, keeps)]
    for layer in layers:
        expected = compose(layer, layer.recipe, x, g).grad_weight  # type: ignore[arg-type]
        shared = x.clone().requires_grad_() * 1
        sum(each(shared) for each in layers).backward(g)  # type: ignore[attr-defined]
        assert_close("grad_weight", layer.weight.grad, expected, 1e-6)
        for each in layers:
            each.zero_grad()


@pytest.mark.parametrize("name", ["tensorwise", "nvfp4"])
def test_compiled_and_recomputed_it_has_the_same_bits(name: str) -> None:
    recipe, x, g = dequantized(name), torch.randn(32, 64), torch.randn(32, 64)
    model = nn.Sequential(qt.Linear(64, 64), nn.GELU(), qt.Linear(64, 64))
    eager = run(model, recipe, x, g)
    torch.compiler.reset()
    compiled = run(torch.compile(model, backend="aot_eager", fullgraph=True), recipe, x, g)  # type: ignore[arg-type]

    class Again(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return qt.checkpoint(model, x)  # type: ignore[no-any-return]

        def parameters(self, recurse: bool = True) -> Any:
            return model.parameters(recurse)

        def zero_grad(self, set_to_none: bool = True) -> None:
            model.zero_grad(set_to_none)

    for other in (compiled, run(Again(), recipe, x, g)):
        for got, right in zip(other, eager, strict=True):
            assert_bitwise(got, right)


def test_weights_that_are_codes_are_the_values_that_were_multiplied() -> None:
    recipe = dequantized("mxfp8")
    with qt.quantized_init(recipe):
        layer = qt.Linear(64, 32)
    layer.weight.requires_grad_(False)
    x, g = torch.randn(16, 64, requires_grad=True), torch.randn(16, 32)
    with qt.autocast(recipe):
        layer(x).backward(g)
    plain = qt.plain_state_dict(layer)["weight"]
    assert_bitwise(x.grad, g @ plain.float())
