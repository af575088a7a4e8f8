"""Questions that hold for every rule, preset and piece: what a sceptic of the numbers would ask first."""

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch import optim
from quaver.torch.optim import weights
from quaver.torch.optim.stepping import pieces

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
RULES = {
    "AdamW": (optim.AdamW, {}),
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "Lion": (optim.Lion, {"weight_decay": 0.1}),
    "SGD": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


def layer_of(recipe: str, rows: int = 96, columns: int = 128) -> qt.Linear:
    torch.manual_seed(0)
    layer = qt.Linear(columns, rows, bias=False)
    qt.quantize_weights(layer, recipe)
    return layer


def give(p: Tensor, gradient: Tensor) -> None:
    p.grad = gradient.to(p.grad_dtype or p.dtype)


def kept(optimizer: optim.Optimizer, p: Tensor) -> Tensor:
    """The weight with all that is kept of it, float32."""
    way = optimizer.way(p, optimizer.param_groups[0])
    return weights.read(way.keeping, optimizer.parts_of_weight(p, way))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("preset", ["balanced", "lean"])
def test_a_step_does_not_know_the_size_of_its_pieces(
    preset: str, rule: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = RULES[rule]
    ends = []
    for size in (1 << 16, 1 << 10):
        monkeypatch.setattr(pieces, "PIECE", size)
        layer = layer_of(recipe, 160)
        # A rate by which the scale of the weight changes at each step.
        optimizer = kind([layer.weight], lr=0.02, preset=preset, **options)
        draw = torch.Generator().manual_seed(1)
        for _ in range(3):
            give(layer.weight, torch.randn(160, 128, generator=draw))
            optimizer.step()
        states = optimizer.state[layer.weight].values()
        ends.append(
            [layer.weight.detach().view(torch.uint8), layer.weight_scale, kept(optimizer, layer.weight), *states]
        )
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b)


def hard_bits() -> Tensor:
    """Every upper half of a float32 beside lower halves at the edges, and a million drawn ones: int32 [1, n]."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    upper = torch.arange(1 << 16)[:, None] << 16
    drawn = torch.randint(0, 1 << 32, (1 << 20,), generator=torch.Generator().manual_seed(0))
    return torch.cat([(upper | low).flatten(), drawn]).to(torch.int32).view(1, -1)


def test_a_remainder_keeps_every_float32_and_a_gemm_reads_its_nan() -> None:
    weight = hard_bits().view(torch.float32)
    held = weights.write(weights.Keeping("remainder"), weight, (weight.bfloat16(),), None)
    back = weights.read(weights.Keeping("remainder"), held)
    nan = weight.isnan()
    assert torch.equal(back.view(torch.int32)[~nan], weight.view(torch.int32)[~nan])
    assert bool(back[nan].isnan().all() and held[0][nan].isnan().all())
    # Rounded to nearest, ties away from zero.
    finite = held[0].isfinite() & weight.isfinite()
    error = (held[0].double() - weight.double()).abs()[finite]
    assert bool((error <= (weight.bfloat16().double() - weight.double()).abs()[finite]).all())


@pytest.mark.parametrize("preset", ["float32", "exact", "balanced", "lean", "msamp", "coat"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_a_gradient_that_is_not_finite_touched_is_read_as_such(
    bad: float, rule: str, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nonfinite="keep": a weight that goes on as a number, or stands still for ever, would hide it."""
    monkeypatch.setattr(pieces, "PIECE", 1 << 10)
    kind, options = RULES[rule]
    layers = {recipe: layer_of(recipe) for recipe in RECIPES}
    layers |= {str(dtype): qt.Linear(128, 96, bias=False, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    parameters = [layer.weight for layer in layers.values()]
    optimizer = kind(parameters, lr=1e-2, preset=preset, **options)
    for step in range(3):
        gradient = torch.randn(96, 128, generator=torch.Generator().manual_seed(step))
        if step == 0:
            gradient[5, 7] = bad
        for p in parameters:
            give(p, gradient)
        optimizer.step()
    for name, layer in layers.items():
        read = qt.plain_state_dict(layer)["weight"]
        assert not read[5, 7].isfinite(), name
        # Of a scale that is not finite no code says a number.
        assert bool(kept(optimizer, layer.weight)[5, 7].isnan()), name
