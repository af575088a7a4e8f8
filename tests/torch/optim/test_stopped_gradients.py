"""Test that weights without gradients, such as dead units, pruned weights and unused experts, stop moving."""

import pytest
import torch

from quaver.torch import optim
from quaver.torch.optim import codes
from quaver.torch.optim.layout import key_of

OWN = ("exact", "balanced", "lean")
RULES = {
    "adamw": lambda p, beta2, preset: optim.AdamW([p], lr=1e-3, betas=(0.9, beta2), weight_decay=0.0, preset=preset),
    "sgd": lambda p, beta2, preset: optim.SGD([p], lr=1e-3, momentum=0.9, preset=preset),
    "sgd, nesterov": lambda p, beta2, preset: optim.SGD([p], lr=1e-3, momentum=0.95, nesterov=True, preset=preset),
}
#: Optimizers with normalized updates, which do not decay while their moments do.
NORMALIZED = {
    "lion": lambda p, preset: optim.Lion([p], lr=1e-3, betas=(0.9, 0.99), preset=preset),
    "muon": lambda p, preset: optim.Muon([p], lr=1e-3, momentum=0.95, preset=preset),
}
BEFORE = 20
SHAPE = 64, 128
#: Rows of whole blocks whose gradients stop; in the other rows, every second element's gradient stops.
ROWS = 16


def gradient(step: int, generator: torch.Generator) -> torch.Tensor:
    g = torch.randn(SHAPE, generator=generator)
    if step >= BEFORE:
        g[:ROWS] = 0
        g[:, ::2] = 0
    return g


def step(optimizer: optim.Optimizer, p: torch.nn.Parameter, g: torch.Tensor) -> None:
    p.grad = g.to(p.grad_dtype or g.dtype)
    optimizer.step()
    optimizer.zero_grad()


def rms(x: torch.Tensor) -> torch.Tensor:
    """Stop gradients of whole blocks, and of single elements of other blocks."""
    return torch.stack([x[:ROWS].square().mean().sqrt(), x[ROWS:, ::2].square().mean().sqrt()])


def moved(rule: str, beta2: float, preset: str, steps: int) -> torch.Tensor:
    """Distance that weights moved after their gradients stopped."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(SHAPE))
    optimizer = RULES[rule](p, beta2, preset)
    before = torch.zeros(SHAPE)
    for i in range(BEFORE + steps):
        if i == BEFORE:
            before = p.detach().clone()
        step(optimizer, p, gradient(i, generator))
    return rms(p.detach() - before)


@pytest.mark.parametrize(
    ("rule", "beta2", "steps"),
    [
        ("adamw", 0.95, 100),
        ("sgd", 0.95, 80),
        *(
            pytest.param(rule, *case, marks=pytest.mark.slow)
            for rule in RULES
            for case in ((0.95, 1200), (0.999, 3000))
        ),
    ],
)
def test_a_weight_without_gradients_moves_as_far_as_with_float32_states(rule: str, beta2: float, steps: int) -> None:
    reference = moved(rule, beta2, "float32", steps)
    for preset in OWN:
        ratio = moved(rule, beta2, preset, steps) / reference
        assert (ratio <= 1.1).all(), f"{preset}: {ratio.tolist()}"


@pytest.mark.parametrize(
    ("rule", "steps"), [("lion", 150), ("muon", 50), pytest.param("muon", 400, marks=pytest.mark.slow)]
)
def test_a_momentum_without_gradients_decays_as_in_float32(rule: str, steps: int) -> None:
    # Compare the component along float32's momentum; stochastic rounding adds noise once few codes are left.
    name = {"lion": "exp_avg", "muon": "momentum_buffer"}[rule]
    generator = torch.Generator().manual_seed(0)
    parameters = {preset: torch.nn.Parameter(torch.zeros(SHAPE)) for preset in ("float32", *OWN)}
    optimizers = {preset: NORMALIZED[rule](p, preset) for preset, p in parameters.items()}
    for i in range(BEFORE + steps):
        g = gradient(i, generator)
        for preset, p in parameters.items():
            step(optimizers[preset], p, g)
        if i < BEFORE or i % 10:
            continue
        expected = optimizers["float32"].state[parameters["float32"]][name]
        for preset in OWN:
            spec, state = optim.PRESETS[preset].first, optimizers[preset].state[parameters[preset]]
            scale = state.get(f"{name}_scale")
            moment = codes.decode(state[key_of(name, spec)], scale, spec)
            smallest = torch.zeros(SHAPE) if scale is None else scale.float().repeat_interleave(64, 1) * 0.5
            left = rms(expected) / rms(smallest)
            along = rms((moment * expected).clamp(min=0).sqrt()).square() / rms(expected).square()
            assert ((along - 1).abs() <= 0.05)[left > 10].all(), f"{preset}, step {i}: {along.tolist()}"
            assert (rms(moment) <= 1.1 * rms(expected))[left > 300].all(), f"{preset}, step {i}"


@pytest.mark.parametrize("preset", ["lean"])
def test_a_momentum_in_codes_without_gradients_becomes_zero(preset: str) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(SHAPE))
    optimizer = optim.Muon([p], lr=1e-3, momentum=0.9, preset=preset)
    for i in range(BEFORE + 200):
        step(optimizer, p, gradient(i, generator))
    assert not optimizer.state[p]["momentum_buffer_codes"][ROWS:, ::2].any()
