"""Signal-to-noise ratio of a layer's output and gradients against high precision on Gaussian data, in decibels."""

import pytest
import torch

import quaver.torch as qt
from quaver.recipes import RECIPES, get
from tests.close import decibels

T, K, N = 256, 512, 512

#: Output, dgrad and wgrad in dB: three mantissa bits give 31.5 an operand and 28.5 for two; E5M2 and E3M2 have one
#: bit less.
EXPECTED = {
    "delayed": (28.5, 24.6, 24.6),
    "tensorwise": (28.5, 24.6, 24.6),
    "rowwise": (28.5, 28.5, 28.5),
    "mxfp8": (28.5, 28.5, 28.5),
    "mxfp6": (28.0, 24.5, 24.4),
    "mxfp4": (15.7, 15.7, 15.8),
}
#: The worst row of an output whose tokens differ in size by 10**±3.
SURVIVES = {"rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8"}
SPOILED = {"tensorwise", "delayed"}


def layer_and_data() -> tuple[qt.Linear, torch.Tensor, torch.Tensor]:
    layer = qt.Linear(K, N, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.normal_(0, 0.02)
    return layer, torch.randn(T, K).bfloat16(), torch.randn(T, N).bfloat16()


@pytest.mark.parametrize("name", [n for n in RECIPES if n in EXPECTED])
def test_signal_to_noise_of_the_output_and_both_gradients(name: str) -> None:
    layer, x, g = layer_and_data()
    x.requires_grad_()
    with qt.autocast(name):
        y = layer(x)
    y.backward(g)
    weight, x64, g64 = layer.weight.detach().double(), x.detach().double(), g.double()
    assert x.grad is not None and layer.weight.grad is not None
    pairs = (x64 @ weight.t(), y), (g64 @ weight, x.grad), (g64.t() @ x64, layer.weight.grad)
    measured = [float(decibels(exact.flatten(), got.detach().flatten())) for exact, got in pairs]
    shown = ", ".join(f"{what} {db:.2f}" for what, db in zip(("output", "dgrad", "wgrad"), measured, strict=True))
    assert measured == pytest.approx(EXPECTED[name], abs=0.2), f"{shown} dB, expected {EXPECTED[name]}"


@pytest.mark.parametrize("name", [n for n in RECIPES if get(n).quantizes])
def test_every_recipe_keeps_most_of_the_signal_and_loses_some(name: str) -> None:
    layer, x, _ = layer_and_data()
    with torch.no_grad(), qt.autocast(name):
        y = layer(x)
    db = float(decibels((x.double() @ layer.weight.detach().double().t()).flatten(), y.flatten()))
    spec = get(name).fprop.a
    assert spec is not None
    low, high = {4: (15, 20), 6: (27, 29)}.get(spec.format.bits, (28, 29))
    assert low < db < high, f"{db:.2f} dB"


@pytest.mark.parametrize("name", sorted(SURVIVES | SPOILED))
def test_the_worst_row_when_tokens_differ_in_size(name: str) -> None:
    layer, x, _ = layer_and_data()
    x = (x.float() * 10.0 ** (torch.rand(T, 1) * 6 - 3)).bfloat16()
    with torch.no_grad(), qt.autocast(name):
        y = layer(x)
    worst = float(decibels(x.double() @ layer.weight.detach().double().t(), y).min())
    if name in SURVIVES:
        assert worst >= 27, f"{worst:.1f} dB in the worst row"
    else:
        assert worst < 5, (
            f"{worst:.1f} dB: one scale a tensor should have lost the small rows, or this measures nothing"
        )
