"""Test that layers with an input quantized by the producing kernel have the bits of separate kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver
import quaver.torch as qt
from quaver import recipes
from quaver.torch.backends.gpu import fused_quantize
from quaver.torch.nn import activation as activation_module
from quaver.torch.nn import norm as norm_module

TOKENS, DIM, HIDDEN = 6, 48, 64
MODELS: dict[str, Callable[[], nn.Module]] = {
    "LayerNormLinear": lambda: qt.LayerNormLinear(DIM, HIDDEN),
    "RMSNorm, output returned": lambda: qt.LayerNormLinear(
        DIM, HIDDEN, normalization="RMSNorm", return_normalized=True
    ),
    "swiglu MLP": lambda: qt.LayerNormMLP(DIM, HIDDEN, "swiglu", normalization="RMSNorm", bias=False),
    "swiglu MLP in two": lambda: qt.LayerNormMLP(DIM, HIDDEN, "swiglu", fused=False, zero_centered=True),
    "gelu MLP": lambda: qt.LayerNormMLP(DIM, HIDDEN, "gelu"),
    "eight-bit MLP": lambda: qt.LayerNormMLP(DIM, HIDDEN, "geglu", eight_bit_activations=True),
    "experts": lambda: qt.MoE(DIM, HIDDEN, qt.MixtureConfig(experts=4, k=2)),
    "interleaved experts": lambda: qt.MoE(DIM, HIDDEN, qt.MixtureConfig(experts=4, k=2, interleaved=True), bias=True),
    "recomputed MLP": lambda: qt.LayerNormMLP(DIM, HIDDEN, "relu", recompute=True),
}
RECIPES = {
    "tensorwise": recipes.tensorwise(),
    "delayed": recipes.delayed(history=2),
    "rowwise": recipes.rowwise(),
    "blockwise": recipes.blockwise(),
    "mxfp8": recipes.mxfp8(),
}


@contextmanager
def unfused() -> Iterator[None]:
    """Every input operation makes its result, which is then quantized."""
    kinds: list[Any] = [norm_module.Normalization, activation_module.ActivationInputOp]
    before = [kind.quantized for kind in kinds]
    for kind in kinds:
        kind.quantized = lambda *_: None
    try:
        yield
    finally:
        for kind, method in zip(kinds, before, strict=True):
            kind.quantized = method


def trained(make: Callable[[], nn.Module], recipe: quaver.Recipe) -> list[Tensor]:
    """Everything that a step, or two of delayed scaling, and an inference give: outputs, gradients, buffers."""
    torch.manual_seed(1)
    model = make().to(torch.bfloat16)
    tensors: list[Tensor] = []
    with qt.only("triton"):
        for step in range(2 if recipe.delayed else 1):
            x = (torch.randn(2, TOKENS // 2, DIM) * (step + 1)).bfloat16().requires_grad_()
            with qt.autocast(recipe=recipe):
                out = model(x)
            out = out if isinstance(out, tuple) else (out,)
            sum(y.float().square().sum() for y in out).backward()
            tensors += [*out, x.grad]  # type: ignore[list-item]
        with torch.no_grad(), qt.autocast(recipe=recipe):
            last = model(torch.linspace(-2, 3, 3 * DIM).view(3, DIM).bfloat16())
            tensors += last if isinstance(last, tuple) else [last]
    tensors += [p.grad for p in model.parameters()]  # type: ignore[misc]
    return [t.detach().float() for t in [*tensors, *model.buffers()]]


#: What is fused by which recipe. Narrow blocks save nothing where the result is needed beside its codes.
PAIRS = [
    ("LayerNormLinear", "delayed"),
    ("LayerNormLinear", "tensorwise"),
    ("LayerNormLinear", "rowwise"),
    ("LayerNormLinear", "blockwise"),
    ("LayerNormLinear", "mxfp8"),
    ("RMSNorm, output returned", "delayed"),
    ("swiglu MLP", "delayed"),
    ("swiglu MLP", "tensorwise"),
    ("swiglu MLP", "mxfp8"),
    ("swiglu MLP in two", "delayed"),
    ("gelu MLP", "blockwise"),
    ("experts", "rowwise"),
    ("interleaved experts", "blockwise"),
    ("eight-bit MLP", "delayed"),
    ("recomputed MLP", "delayed"),
]


@pytest.mark.parametrize(("model", "recipe"), PAIRS)
def test_fused_layers_equal_the_kernels_one_after_the_other(
    model: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[bool] = []
    operand = fused_quantize.operand

    def spied(*args: Any) -> Any:
        produced = operand(*args)
        ran.append(produced is not None)
        return produced

    monkeypatch.setattr(fused_quantize, "operand", spied)
    ours = trained(MODELS[model], RECIPES[recipe])
    assert any(ran)
    with unfused():
        theirs = trained(MODELS[model], RECIPES[recipe])
    assert len(ours) == len(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), i
