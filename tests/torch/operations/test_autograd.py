"""A gradient of a quantized layer exists under create_graph=True, and its own derivative is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import quaver.torch as qt
from quaver import recipes
from quaver.torch.linear.autograd import IDENTITY_INPUT
from quaver.torch.linear.fused_projections import project
from quaver.torch.linear.grouped.layer import grouped_matmul
from tests.torch.nn.attention.quantized import attention_fp8


def test_a_loss_that_is_nonlinear_in_the_second_of_two_layers_is_refused_too() -> None:
    first, second = (qt.Linear(64, 48, recipe="tensorwise") for _ in range(2))
    x = torch.randn(32, 64, requires_grad=True)
    for loss in (lambda a, b: a.sum() + b.square().sum(), lambda a, b: a.square().sum() + b.sum()):
        (of_x,) = torch.autograd.grad(loss(*project(IDENTITY_INPUT, (x,), (first, second))), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            torch.autograd.grad(of_x.square().sum(), x)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "delayed"])
@pytest.mark.parametrize(
    "recomputed", [qt.checkpoint, lambda layer, x: checkpoint(layer, x, use_reentrant=False)], ids=["ours", "torchs"]
)
def test_under_checkpointing_a_gradient_may_stay_in_the_graph(recomputed: Callable[..., Any], recipe: str) -> None:
    """Tensors saved for backward are unpacked once."""
    block = qt.LayerNormMLP(64, 64, "swiglu", recipe=recipe)
    x = torch.randn(32, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    for module in (block, qt.Linear(64, 64, recipe=recipe)):
        (of_x,) = torch.autograd.grad(recomputed(module, x).square().sum(), x, create_graph=True)
        assert of_x.requires_grad
        if module is block and recipe != "delayed":
            assert torch.equal(of_x, expected)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            of_x.sum().backward()


def _norm(x: torch.Tensor) -> torch.Tensor:
    return qt.RMSNorm(64)(x)


def _attention(x: torch.Tensor) -> torch.Tensor:
    spec = recipes.mxfp8(attention=True).attention
    assert spec is not None
    heads = x.view(1, 1, *x.shape)
    return attention_fp8(heads, heads, heads, spec=spec)


def _grouped(x: torch.Tensor) -> torch.Tensor:
    weight = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(1))
    return grouped_matmul(x, weight, torch.tensor([16, 32], dtype=torch.int32), recipe="tensorwise")


@pytest.mark.parametrize("function", [_norm, _attention, _grouped])
def test_functions_that_hold_no_layer_too(function: Callable[..., Any]) -> None:
    x = torch.randn(32, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x).square().sum(), x)
    y = checkpoint(function, x, use_reentrant=False)
    (of_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.equal(of_x, expected)
    with pytest.raises(NotImplementedError, match="derivative"):
        of_x.sum().backward()
