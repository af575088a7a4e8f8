"""Test that our optimizers equal torch's in float32, and follow float32 within the precision of their codes."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.reference import optim as bounds
from quaver.torch import optim
from tests.pairs import alternating
from tests.torch.optim.models import full_weight

#: Our optimizer, torch's, and options.
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW, maximize": (optim.AdamW, torch.optim.AdamW, {"betas": (0.8, 0.95), "maximize": True}),
    "Adam": (optim.Adam, torch.optim.Adam, {"weight_decay": 0.1}),
    "SGD": (optim.SGD, torch.optim.SGD, {"weight_decay": 0.1}),
    "SGD, momentum": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "SGD, nesterov": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Muon": (optim.Muon, torch.optim.Muon, {}),
    "Muon, rms": (optim.Muon, torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}),
}


def gradients(number: int, shape: tuple[int, ...], decades: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    size = torch.logspace(-decades, 0, shape[-1])
    return [torch.randn(shape, generator=draw) * size for _ in range(number)]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_float32_a_rule_equals_torch(name: str, dtype: torch.dtype) -> None:
    ours, torchs, options = PAIRS[name]
    start = torch.randn(70, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    p, r = nn.Parameter(start.clone()), nn.Parameter(start.float().clone())
    optimizer, reference = ours([p], lr=1e-2, preset="float32", **options), torchs([r], lr=1e-2, **options)
    for gradient in gradients(20, (70, 96)):
        p.grad, r.grad = gradient.to(dtype), gradient.to(dtype).float()
        optimizer.step()
        reference.step()
    error, moved = (float((weight - r).detach().abs().max()) for weight in (full_weight(optimizer, p), start.float()))
    # In ulps of weights of magnitude four; Muon's polynomial runs in bfloat16, which amplifies an ulp of momentum.
    assert error <= (0.03 * moved if "Muon" in name else 1e-5)


@pytest.mark.parametrize("preset", ["float32", "lean"])
def test_muon_steps_groups_of_adamw_as_adamw_does(preset: str) -> None:
    starts = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((70, 96), (50, 96), (96,))]
    ours, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "preset": preset, "seed": 3}
    rest = {"params": ours[1:], "rule": "adamw", "betas": (0.8, 0.9), "eps": 1e-6}
    muon = optim.Muon([{"params": ours[:1]}, rest], **options)
    # The same parameter numbers, on which noise depends.
    alone = [optim.Muon(theirs[:1], **options), optim.AdamW(theirs, betas=(0.8, 0.9), eps=1e-6, **options)]
    for step in range(4):
        for p, r in zip(ours, theirs, strict=True):
            draw = torch.Generator().manual_seed(step)
            for each in (p, r):
                each.grad = torch.randn(p.shape, generator=draw.manual_seed(step))
                for hook in (each._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
                    hook(each)
        muon.step()
        first = theirs[0].detach().clone()
        theirs[0].grad = None
        alone[1].step()
        assert torch.equal(theirs[0], first)
        for optimizer in (muon, *alone):
            optimizer.zero_grad()
    for p, r in zip(ours[1:], theirs[1:], strict=True):
        assert torch.equal(p, r)
    with pytest.raises(ValueError, match="rule='lion'; give 'muon' or 'adamw'"):
        optim.Muon([{"params": ours[:1], "rule": "lion"}])
    again = optim.Muon([{"params": ours[:1]}, {"params": ours[1:], "rule": "adamw"}], **options)
    again.load_state_dict(muon.state_dict())
    assert again.param_groups[1]["rule"] == "adamw" and set(again.state[ours[2]]) == set(muon.state[ours[2]])


def test_lion_matches_its_formula() -> None:
    p = nn.Parameter(torch.randn(70, 96, generator=torch.Generator().manual_seed(0)))
    optimizer = optim.Lion([p], lr=1e-2, weight_decay=0.1, preset="float32")
    w, m = p.detach().double(), torch.zeros(70, 96, dtype=torch.float64)
    for gradient in gradients(20, (70, 96)):
        p.grad = gradient
        optimizer.step()
        w = w - 1e-2 * (0.1 * w + (0.9 * m + 0.1 * gradient.double()).sign())
        m = 0.99 * m + 0.01 * gradient.double()
    assert float((p - w).detach().abs().max()) <= 1e-5


@pytest.mark.parametrize("beta", [0.0, 1e-20, 0.1, 0.9, 1 - 2.0**-53])
def test_a_small_gradient_after_a_large_one_counts_at_any_beta(beta: float) -> None:
    """m + (g - m)(1 - β) would lose a gradient of 1e-3 next to moments of 1e6 if β is small."""
    of: dict[str, tuple[type[optim.Optimizer], dict[str, Any], dict[str, tuple[float, int]]]] = {
        "AdamW": (optim.AdamW, {"betas": (beta, beta)}, {"exp_avg": (beta, 1), "exp_avg_sq": (beta, 2)}),
        "Adam": (optim.Adam, {"betas": (beta, beta)}, {"exp_avg": (beta, 1), "exp_avg_sq": (beta, 2)}),
        "Lion": (optim.Lion, {"betas": (beta, beta)}, {"exp_avg": (beta, 1)}),
        "Muon": (optim.Muon, {"momentum": beta}, {"momentum_buffer": (beta, 1)}),
    }
    draw = torch.Generator().manual_seed(0)
    sizes = (1e6, 1e-3, 1.0)
    drawn = [torch.randn(8, 8, generator=draw) * size for size in sizes]
    for name, (make, options, moments) in of.items():
        p = nn.Parameter(torch.zeros(8, 8))
        optimizer = make([p], lr=1e-3, preset="float32", weight_decay=0.0, **options)
        for gradient in drawn:
            before = p.detach().clone()
            p.grad = gradient.clone()
            optimizer.step()
            if name == "Lion" and beta < 1e-12:
                assert torch.equal((before - p).sign().detach(), gradient.sign())
        for key, (b, power) in moments.items():
            exact, size = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, 8, dtype=torch.float64)
            for gradient in drawn:
                exact = b * exact + (1 - b) * gradient.double() ** power
                size = b * size + (1 - b) * gradient.double().abs() ** power
            torch.testing.assert_close(optimizer.state[p][key].double() / size, exact / size, rtol=0, atol=1e-6)


#: Largest deviation relative to the distance of float32 weights after 30 steps; 0.1 for the other presets.
NEAR = {"float32": 1e-4, "exact": 0.01, "bnb8": 0.6, "torchao8": 0.6}


@pytest.mark.parametrize("preset", optim.PRESETS)
@pytest.mark.parametrize("make", [optim.Adam, optim.AdamW])
def test_a_gradient_with_a_square_beyond_float32_leaves_weights_finite(
    make: type[optim.Optimizer], preset: str
) -> None:
    p = nn.Parameter(torch.zeros(4, 96))
    optimizer = make([p], lr=1e-3, preset=preset)
    for step in range(4):
        gradient = torch.ones(4, 96)
        if step == 0:
            gradient[0, 5], gradient[1, 7] = 2e19, -1e38
        p.grad = gradient.to(p.grad_dtype)
        optimizer.step()
    assert p.isfinite().all()
    assert (p[2:] < 0).all()


@pytest.mark.parametrize(
    ("preset", "recipe"),
    [
        *alternating(optim.PRESETS, ("none", "tensorwise", "bfloat16"), ("balanced", "lean")),
        *product(("lean",), ("rowwise", "blockwise", "mxfp8", "mxfp8 2d")),
    ],
)
def test_every_preset_follows_float32(preset: str, recipe: str) -> None:
    torch.manual_seed(0)
    layer = qt.Linear(160, 136, bias=False, dtype=torch.bfloat16 if recipe == "bfloat16" else torch.float32)
    if recipe not in ("none", "bfloat16"):
        full = recipes.mxfp8(weight_2d=True) if recipe == "mxfp8 2d" else recipe
        qt.quantize_weights(layer, full)
    start = layer.weight.detach().float() if recipe in ("none", "bfloat16") else qt.plain_state_dict(layer)["weight"]
    start = start.float().clone()
    r = nn.Parameter(start.clone())
    optimizer = optim.AdamW(layer.parameters(), lr=1e-3, preset=preset)
    reference = torch.optim.AdamW([r], lr=1e-3)
    # The dynamic map rounds small second moments to zero, after which a step is as large as 1 / eps allows.
    decades = 0 if "8" in preset else 3
    for gradient in gradients(30, (136, 160), decades):
        layer.weight.grad, r.grad = gradient.to(layer.weight.grad_dtype or gradient.dtype), gradient.clone()
        optimizer.step()
        reference.step()
    error = float((full_weight(optimizer, layer.weight) - r).detach().norm() / (r - start).detach().norm())
    assert error <= NEAR.get(preset, 0.1) + (0.01 if recipe == "bfloat16" else 0.0)


def test_the_bound_of_adam_holds_and_is_reached() -> None:
    for betas in ((0.9, 0.95), (0.9, 0.999), (0.5, 0.9)):
        for step in (1, 2, 10, 300):
            # These gradients give equality in the Cauchy-Schwarz inequality.
            b1, b2 = betas
            g = [(b1 / b2) ** (step - i) for i in range(1, step + 1)]
            m = sum((1 - b1) * b1 ** (step - i) * g[i - 1] for i in range(1, step + 1)) / (1 - b1**step)
            v = sum((1 - b2) * b2 ** (step - i) * g[i - 1] ** 2 for i in range(1, step + 1)) / (1 - b2**step)
            assert m / v**0.5 == pytest.approx(bounds.adam(step, *betas), rel=1e-6)
        assert bounds.adam(10000, *betas) == pytest.approx(bounds.adam_limit(*betas), rel=1e-3)
