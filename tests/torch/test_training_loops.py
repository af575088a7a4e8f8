"""What training scripts do around a model: loss scaling, averaged weights, accumulation, clipping, threads."""

import copy
import math
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.state.history import roll
from tests.close import assert_bitwise, assert_close
from tests.pairs import alternating, pairs

QUANTIZED = pytest.mark.parametrize("name", [n for n, r in recipes.RECIPES.items() if r().quantizes])


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(qt.Linear(32, 48, dtype=dtype), nn.ReLU(), qt.Linear(48, 16, dtype=dtype))


def snapshot(net: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in net.state_dict().items()}


# GradScaler.


@pytest.mark.parametrize(("name", "where"), alternating(recipes.RECIPES, ["loss", "gradient", "input"], ["delayed"]))
def test_grad_scaler_skips_on_an_infinity_and_histories_stay_clean(name: str, where: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(bad: bool) -> None:
        x = torch.randn(8, 32)
        if bad and where == "input":
            x[0, 0] = math.inf
        with qt.autocast(name), torch.autocast("cpu", torch.float16):
            y = net(x).float()
        if bad and where == "gradient":
            y.register_hook(lambda g: g.index_fill(0, torch.tensor(3), math.inf))
        loss = y.square().mean() * (math.inf if bad and where == "loss" else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(3):
        step(False)
    before, scale = snapshot(net), scaler.get_scale()
    step(True)
    assert scaler.get_scale() == scale / 2
    for key, value in net.named_parameters():
        assert_bitwise(value, before[key], key)
    roll.roll_all()
    for key, value in net.named_buffers():
        assert value.isfinite().all(), key
        if key.endswith("factor"):
            assert ((value > 0) & (value < 2.0**30)).all(), key
    step(False)
    assert scaler.get_scale() == scale / 2
    assert not torch.equal(net[0].weight, before["0.weight"]) and net[0].weight.isfinite().all()


# Averages of weights.


@pytest.mark.parametrize(("name", "use_buffers", "kind"), pairs(recipes.RECIPES, [False, True], ["mean", "EMA"]))
def test_averaged_models(name: str, use_buffers: bool, kind: str) -> None:
    average = None if kind == "mean" else get_ema_multi_avg_fn(0.9)
    net = model()
    qt.convert(net, name)
    averaged = AveragedModel(net, multi_avg_fn=average, use_buffers=use_buffers)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    weights = []
    for _ in range(4):
        net(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(net)
        weights.append(net[0].weight.detach().clone())
    if average is None:
        assert_close("mean", averaged.module[0].weight, torch.stack(weights).mean(0), 1e-5)
    x = torch.randn(8, 32)
    with torch.no_grad():
        y = averaged(x)
        plain = nn.functional.linear(x, averaged.module[0].weight, averaged.module[0].bias).relu()
        plain = nn.functional.linear(plain, averaged.module[2].weight, averaged.module[2].bias)
    assert_close("output", y, plain, 0.4 if name in ("nvfp4", "mxfp4") else 0.2)
    # The original model trains on as if it had not been averaged.
    net(torch.randn(8, 32)).square().mean().backward()


def test_a_copy_neither_disturbs_nor_is_disturbed() -> None:
    """Averages, teachers and snapshots are copies; a history belongs to one layer."""
    nets = [model()]
    nets.append(copy.deepcopy(nets[0]))
    for net in nets:
        qt.convert(net, recipes.delayed(history=4))
    states = []
    for net, copies in zip(nets, (False, True), strict=True):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            teacher = copy.deepcopy(net) if copies else None
            x = torch.randn(8, 32)
            if teacher is not None:
                with torch.no_grad():
                    teacher(x * 1e3)
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(snapshot(net))
    for key, value in states[0].items():
        assert_bitwise(states[1][key], value, key)


# Accumulation.


@pytest.mark.parametrize("name", ["mxfp8", "rowwise"])
def test_micro_batches_add_up_to_the_batch(name: str) -> None:
    """For recipes whose tokens share no scales in fprop and dgrad; wgrad's token blocks are complete in both runs."""
    net = qt.Linear(64, 48)
    x = torch.randn(128, 64)
    outcomes = []
    for parts in (1, 2, 4):
        net.zero_grad()
        with qt.autocast(name):
            outputs = [net(part) for part in x.chunk(parts)]
        for y in outputs:
            y.backward(torch.ones_like(y))
        assert net.weight.grad is not None
        outcomes.append((torch.cat(outputs), net.weight.grad.clone()))
    for y, grad in outcomes[1:]:
        assert_bitwise(y, outcomes[0][0])
        assert_close("grad_weight", grad, outcomes[0][1], 1e-6 if name == "mxfp8" else 0.05)


@QUANTIZED
def test_accumulated_gradients_land_in_the_same_tensor(name: str) -> None:
    net = model()
    x = torch.randn(8, 32)
    with qt.autocast(name):
        net(x).sum().backward()
        assert net[0].weight.grad is not None
        at, first = net[0].weight.grad.data_ptr(), net[0].weight.grad.clone()
        net(x).sum().backward()
    assert net[0].weight.grad.data_ptr() == at
    assert_close("twice", net[0].weight.grad, 2 * first, 0.5 if name == "nvfp4" else 1e-6)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, (torch.float32, torch.bfloat16)[number % 2]) for number, name in enumerate(recipes.RECIPES)],
)
def test_a_small_model_learns(name: str, dtype: torch.dtype) -> None:
    net, teacher = model(dtype), nn.Linear(32, 16, dtype=dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=6e-3)
    losses = []
    for _ in range(30):
        x = torch.randn(64, 32, dtype=dtype)
        with qt.autocast(name):
            loss = (net(x) - teacher(x).detach()).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "nvfp4"])
def test_two_threads_train_two_models(name: str) -> None:
    """Each thread has its own autocast recipe; each model trains as it does alone."""
    nets = [model() for _ in range(2)]
    alone = [copy.deepcopy(net) for net in nets]
    for net in (*nets, *alone):
        qt.convert(net, name)

    def train(net: nn.Module, results: list[Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            loss = net(torch.randn(8, 32, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.detach())

    expected: list[list[Tensor]] = [[], []]
    for net, results in zip(alone, expected, strict=True):
        train(net, results)
    got: list[list[Tensor]] = [[], []]
    threads = [threading.Thread(target=train, args=pair) for pair in zip(nets, got, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, want in zip(got, expected, strict=True):
        assert_bitwise(torch.stack(one), torch.stack(want))
