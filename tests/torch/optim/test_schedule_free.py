"""Test Schedule-Free AdamW: its steps, the switch between trained and averaged weights, state dicts and losses."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver.reference.optim import ScheduleFreeState, schedule_free_adamw
from quaver.torch import optim
from quaver.torch.optim import layout
from quaver.torch.quantized_tensor import memory_of
from tests.pairs import pairs
from tests.torch.optim.models import full_weight

SHAPE = (136, 160)
KINDS = ("float32", "bfloat16", "tensorwise", "rowwise", "blockwise", "mxfp8")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"warmup_steps": 7, "r": 1.0, "weight_decay": 0.1},
    {"weight_lr_power": 0.0, "betas": (0.5, 0.9), "eps": 1e-3},
]
#: Distance of neighbouring values that a preset stores, relative to the largest weight.
RESOLUTION = {"float32": 2.0**-22, "exact": 2.0**-22, "balanced": 2.0**-18, "lean": 2.0**-10}
RESOLUTION |= {"msamp": 2.0**-10, "coat": 2.0**-22}


def gradient(step: int) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(SHAPE, generator=draw) * torch.logspace(-3, 0, SHAPE[1])


def layer_of(kind: str) -> Any:
    torch.manual_seed(0)
    layer = qt.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    if kind in KINDS[2:]:
        qt.quantize_weights(layer, kind)
    return layer


def run(optimizer: Any, steps: range) -> None:
    (p,) = optimizer.param_groups[0]["params"]
    for step in steps:
        p.grad = gradient(step).to(p.grad_dtype or torch.float32)
        optimizer.step()
    p.grad = None


def bits(t: Tensor) -> Tensor:
    return memory_of(t.detach()).contiguous().view(torch.uint8).clone()


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare weights and states of two optimizers bit for bit."""
    (p,), (q,) = ours.param_groups[0]["params"], theirs.param_groups[0]["params"]
    assert torch.equal(bits(p), bits(q))
    assert torch.equal(full_weight(ours, p), full_weight(theirs, q))
    for name, value in theirs.state[q].items():
        assert torch.equal(ours.state[p][name], value), name


@pytest.mark.parametrize("options", OPTIONS)
def test_in_float32_steps_equal_the_reference_and_upstreams_recurrence(options: dict[str, Any]) -> None:
    """The reference averages x; upstream stores y and z. The learning rate changes twice."""
    p = nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)))
    optimizer = optim.ScheduleFreeAdamW([p], lr=1e-2, preset="float32", **options)
    group = {name: optimizer.param_groups[0][name] for name in ("betas", "eps", "weight_decay", "warmup_steps")}
    group |= {name: optimizer.param_groups[0][name] for name in ("r", "weight_lr_power")}
    (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
    start = p.detach().double().numpy()
    state = ScheduleFreeState(start, np.zeros(SHAPE), np.zeros(SHAPE))
    y, z, v, lr_max, weight_sum = start, start, np.zeros(SHAPE), -1.0, 0.0
    for step, base in enumerate([1e-2] * 20 + [5e-3] * 10 + [2e-2] * 10):
        optimizer.param_groups[0]["lr"] = base
        p.grad = gradient(step)
        optimizer.step()
        g = gradient(step).double().numpy()
        state = schedule_free_adamw(state, g, lr=base, **group)
        lr = base * min(1.0, (step + 1) / max(group["warmup_steps"], 1))
        lr_max = max(lr, lr_max)
        weight = (step + 1) ** group["r"] * lr_max ** group["weight_lr_power"]
        weight_sum += weight
        c = weight / weight_sum
        v = beta2 * v + (1 - beta2) * g**2
        d = g / (np.sqrt(v / (1 - beta2 ** (step + 1))) + eps) + decay * y
        y = (1 - c) * y + c * z + lr * (beta1 * (1 - c) - 1) * d
        z = z - lr * d
    for ours, reference, upstream in (
        (p, state.y, y),
        (optimizer.state[p]["z_minus_y"], state.u, z - y),
        (optimizer.state[p]["exp_avg_sq"], state.v, v),
    ):
        np.testing.assert_allclose(reference, upstream, rtol=0, atol=1e-12)
        # In ulps of weights of magnitude four.
        np.testing.assert_allclose(ours.detach().numpy(), reference, rtol=0, atol=1e-5)
    assert float(optimizer.state[p]["lr_max"]) == pytest.approx(lr_max, rel=1e-12)
    assert float(optimizer.state[p]["weight_sum"]) == pytest.approx(weight_sum, rel=1e-12)
    optimizer.eval()
    np.testing.assert_allclose(p.detach().numpy(), y - (1 - beta1) / beta1 * (z - y), rtol=0, atol=1e-5)


@pytest.mark.parametrize("preset", ["float32", "exact", "balanced", "lean"])
def test_zeros_subnormals_and_outliers_leave_weights_at_the_reference(preset: str) -> None:
    layer = layer_of("bfloat16")
    p, lr = layer.weight, 1e-2
    optimizer = optim.ScheduleFreeAdamW([p], lr=lr, preset=preset)
    start = p.detach().float().clone()
    state = ScheduleFreeState(start.double().numpy(), np.zeros(SHAPE), np.zeros(SHAPE))
    for step in range(4):
        g = gradient(step)
        g[0], g[1, ::2], g[2, :64] = 0.0, g[1, ::2] * 1e-41, -0.0
        # Squares beyond float32.
        g[3, 7], g[4, 70] = 2e19, -1e38
        p.grad = g.bfloat16() if preset != "float32" else g.to(p.dtype)
        g = p.grad.float()
        optimizer.step()
        state = schedule_free_adamw(state, g.double().numpy(), lr=lr, betas=(0.9, 0.999), eps=1e-8)
    weight = full_weight(optimizer, p)
    assert torch.equal(weight[0], start[0]) and torch.equal(weight[2, :64], start[2, :64])
    error = (weight.double() - torch.from_numpy(state.y)).abs()
    # Blocks of moments have one scale, which an outlier of a gradient raises for v but not for u.
    error[3:5] = 0
    assert float(error.norm() / (weight - start).norm()) <= {"float32": 1e-4, "exact": 0.01}.get(preset, 0.1)
    # Every update is at most 2 learning rates here.
    assert bool(((weight - start).abs() <= 4 * 2 * lr).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("nonfinite", ["keep", "skip", "raise"])
def test_gradients_that_are_not_finite(nonfinite: str, bad: float) -> None:
    layer = layer_of("tensorwise")
    optimizer = optim.ScheduleFreeAdamW(layer.parameters(), lr=1e-2, preset="balanced", nonfinite=nonfinite)
    run(optimizer, range(2))
    p, g = layer.weight, gradient(2)
    before, states = bits(p), {name: value.clone() for name, value in optimizer.state[p].items()}
    g[5, 7] = bad
    p.grad = g.to(p.grad_dtype)
    if nonfinite == "raise":
        with pytest.raises(ValueError, match="gradients of 1 parameters are not finite"):
            optimizer.step()
    else:
        optimizer.step()
    if nonfinite == "keep":
        assert bool(full_weight(optimizer, p)[5, 7].isnan())
    else:
        assert torch.equal(bits(p), before)
        assert all(torch.equal(value, states[name]) for name, value in optimizer.state[p].items())


@pytest.mark.parametrize(("preset", "kind"), pairs(tuple(RESOLUTION), KINDS))
def test_eval_gives_the_average_and_train_returns_within_two_roundings(preset: str, kind: str) -> None:
    layer = layer_of(kind)
    p = layer.weight
    optimizer: Any = optim.ScheduleFreeAdamW([p], lr=1e-2, preset=preset)
    optimizer.eval()
    optimizer.train()
    run(optimizer, range(5))
    y, states = full_weight(optimizer, p), {name: value.clone() for name, value in optimizer.state[p].items()}
    config = optimizer.config(p, optimizer.param_groups[0])
    spec = config.moments[0]
    codes, scale = (*layout.moment_tensors(states, "z_minus_y", spec), None)[:2]
    u = optim.codes.decode(codes, scale, spec)
    x = y - (1 - 0.9) / 0.9 * u
    assert float((x - y).abs().max()) > 1e-3
    bound = RESOLUTION[preset] * float(y.abs().max())
    optimizer.eval()
    assert float((full_weight(optimizer, p) - x).abs().max()) <= bound
    averaged = bits(p)
    optimizer.eval()
    assert torch.equal(bits(p), averaged)
    p.grad = gradient(5).to(p.grad_dtype or torch.float32)
    with pytest.raises(ValueError, match=r"after eval\(\).*call optimizer.train\(\)"):
        optimizer.step()
    assert torch.equal(bits(p), averaged)
    optimizer.train()
    assert float((full_weight(optimizer, p) - y).abs().max()) <= 2 * bound
    for name, value in states.items():
        if name in ("step", *config.rule.numbers) or name.startswith(config.rule.names):
            assert torch.equal(optimizer.state[p][name], value), name
    run(optimizer, range(5, 7))


@pytest.mark.parametrize("preset", ["exact", "lean", "coat", "msamp", "torchao8"])
def test_convolutions_in_any_memory_order_and_scalars_are_averaged(preset: str) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 32, 3, 3, generator=draw)
    averaged = []
    for order in (torch.contiguous_format, torch.channels_last):
        parameters = [nn.Parameter(weight.clone().to(memory_format=order)), nn.Parameter(torch.ones(()))]
        optimizer = optim.ScheduleFreeAdamW(parameters, lr=1e-2, preset=preset)
        for step in range(3):
            for p in parameters:
                g = torch.randn(p.shape, generator=draw.manual_seed(step)).to(p.grad_dtype or torch.float32)
                p.grad = g.to(memory_format=order) if p.dim() else g
            optimizer.step()
        trained = [p.detach().clone() for p in parameters]
        optimizer.eval()
        averaged.append([p.detach().clone() for p in parameters])
        optimizer.train()
        for p, y, x in zip(parameters, trained, averaged[-1], strict=True):
            assert not torch.equal(x, y)
            torch.testing.assert_close(p.detach(), y, rtol=0, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(*averaged, strict=True))


@pytest.mark.parametrize(("preset", "kind"), pairs(("float32", "exact", "balanced", "lean"), KINDS))
@pytest.mark.parametrize("evaluating", [False, True])
def test_a_run_resumed_from_either_mode_equals_the_one_that_was_saved(preset: str, kind: str, evaluating: bool) -> None:
    layer, other = layer_of(kind), layer_of(kind)
    optimizer: Any = optim.ScheduleFreeAdamW(layer.parameters(), lr=1e-2, preset=preset, warmup_steps=4, seed=7)
    run(optimizer, range(3))
    if evaluating:
        optimizer.eval()
    file = io.BytesIO()
    torch.save((layer.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    model_state, state = torch.load(file, weights_only=True)
    again: Any = optim.ScheduleFreeAdamW(other.parameters(), lr=1.0, preset=preset)
    other.load_state_dict(model_state)
    again.load_state_dict(state)
    assert again.param_groups[0]["train_mode"] is not evaluating
    for each in (optimizer, again):
        each.train()
        run(each, range(3, 6))
    assert_same(again, optimizer)


def test_averages_of_lean_states_are_as_good_as_those_of_float32_states() -> None:
    """Excess loss of a regression with noise in its targets, after 300 steps."""
    target = torch.randn(96, 64, generator=torch.Generator().manual_seed(1)) / 8
    losses = []
    for preset in ("float32", "lean"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 64)).to(torch.bfloat16)
        optimizer = optim.ScheduleFreeAdamW(model.parameters(), lr=1e-2, warmup_steps=10, preset=preset)
        draw = torch.Generator().manual_seed(2)

        def loss(x: Tensor, noise: float = 0.0, model: Any = model, draw: Any = draw) -> Tensor:
            y = x @ target + noise * torch.randn(len(x), 64, generator=draw)
            return (model(x.bfloat16()).float() - y).square().mean()

        for _ in range(300):
            loss(torch.randn(64, 96, generator=draw), noise=1.0).backward()
            optimizer.step()
            optimizer.zero_grad()
        held_out = torch.randn(2048, 96, generator=draw)
        trained = loss(held_out).item()
        optimizer.eval()
        losses.append(loss(held_out).item())
        assert losses[-1] < 0.97 * trained
    # 0.3 % in the two seeds that were measured.
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_wrong_options_raise() -> None:
    p = nn.Parameter(torch.zeros(80, 80))
    with pytest.raises(ValueError, match=r"betas=\(0.0, 0.9\), and x follows from y by a division"):
        optim.ScheduleFreeAdamW([p], betas=(0.0, 0.9))
    for option in ("warmup_steps", "r", "weight_lr_power"):
        with pytest.raises(ValueError, match=f"given {option}=-1"):
            optim.ScheduleFreeAdamW([p], **{option: -1})
