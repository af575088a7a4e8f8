"""Several layers of one input."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.linear import fused_projections
from quaver.torch.linear.autograd import IDENTITY_INPUT
from quaver.torch.linear.linear import Linear
from tests.close import assert_close
from tests.pairs import case_name, pairs

BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: qt.MLP(32, 64, "gelu"),
    "norm": lambda: qt.LayerNormLinear(32, 64),
    "transformer": lambda: qt.TransformerLayer(32, 4, 64, activation="swiglu", normalization="RMSNorm", bias=False),
    "mamba": lambda: qt.Mamba2(32, head_dim=8, state=16, normalization="RMSNorm"),
    "experts": lambda: qt.MoE(32, 24, qt.MixtureConfig(experts=4, k=2, shared=16), normalization="RMSNorm"),
    "experts in eight bits": lambda: qt.MoE(
        32, 24, qt.MixtureConfig(experts=4, k=2), bias=True, eight_bit_activations=True
    ),
}


@pytest.mark.parametrize(
    ("read", "tokens", "recipe"),
    pairs(((0,), (1, 3), (2,), ()), (16, 512), ("delayed", "mxfp8", "nvfp4")),
    ids=case_name,
)
def test_layers_whose_output_nothing_reads_have_no_gradient(recipe: str, tokens: int, read: tuple[int, ...]) -> None:
    """Compute as if each layer were called separately. Output 0 is the input of the layers."""
    torch.manual_seed(0)
    layers = nn.ModuleList([Linear(64, 16, recipe=recipe) for _ in range(3)])
    results = []
    for together in (True, False):
        own: Any = copy.deepcopy(layers)
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = x * 2.0
        if together:
            outputs = fused_projections.project(IDENTITY_INPUT, (y,), list(own), return_input=True)
        else:
            outputs = (y, *(layer(y) for layer in own))
        loss = sum(outputs[i].square().sum() for i in read)
        if together:
            # The backward of a function that returns no gradient does not make the output a used one.
            loss = loss + Blocked.apply(outputs[1]).sum()
        if read or together:
            loss.backward()
        results.append([x.grad, *(p.grad for p in own.parameters()), *(b.clone() for b in own.buffers())])
    assert [g is None for g in results[0]] == [g is None for g in results[1]]
    for a, b in zip(*results, strict=True):
        if a is not None:
            assert_close("", a, b, 1e-6)


class Blocked(torch.autograd.Function):
    """Identity without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
@pytest.mark.parametrize("width", [32, 128])
def test_an_input_of_another_width_is_refused_before_a_kernel_reads_it(recipe: str, width: int) -> None:
    layers = [qt.Linear(64, 16, recipe=recipe) for _ in range(2)]
    for x in (torch.randn(8, width), torch.randn(8, width, requires_grad=True)):
        with pytest.raises(ValueError, match=r"Linear\(64 → 16\) got an input of shape .*its last axis must be 64"):
            fused_projections.project(IDENTITY_INPUT, (x,), layers)


@pytest.mark.filterwarnings("ignore:torch.float64 is computed in high precision")
@pytest.mark.parametrize("recipe", [*recipes.RECIPES, None], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_float64_is_never_quantized(block: str, recipe: str | None) -> None:
    """Neither by a plan, nor as what backward saves in eight bits."""
    torch.manual_seed(0)
    layer = BLOCKS[block]().double()
    x = torch.randn(2, 6, 32, dtype=torch.float64, requires_grad=True)
    results = []
    for active_context in (nullcontext() if recipe is None else qt.autocast(recipe), qt.autocast(enabled=False)):
        with active_context:
            y = layer(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])))
    for ours, high in zip(*results, strict=True):
        assert_close(block, ours, high, 1e-12)
