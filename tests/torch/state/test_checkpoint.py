"""Test that activation checkpointing recomputes the first pass in backward and records nothing twice."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import quaver.torch as qt
from quaver import recipes
from quaver.torch.linear import linear as linear_module
from tests.close import assert_bitwise
from tests.pairs import alternating
from tests.torch.linear.fast_plans import by_fast_plan

ALL = pytest.mark.parametrize("name", recipes.RECIPES)
KINDS = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def some(first: int) -> Any:
    """Stateful recipes with both kinds of checkpoint, others with one kind, alternating over the tests."""
    return pytest.mark.parametrize(
        ("name", "use_reentrant"), alternating(recipes.RECIPES, [False, True], ["delayed", "nvfp4"], first)
    )


Forward = Callable[[nn.Module, Tensor], Tensor]


def model() -> nn.Sequential:
    blocks = [nn.Sequential(qt.Linear(48, 64), nn.GELU(), qt.Linear(64, 48), nn.Dropout(0.1)) for _ in range(2)]
    return nn.Sequential(*blocks, qt.Linear(48, 16))


def train(net: nn.Module, forward: Forward, steps: int = 3) -> dict[str, Tensor]:
    """Train some steps; return outputs, gradients and buffers."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    tensors = {}
    for i in range(steps):
        x = (torch.randn(2, 9, 48) * (i + 1)).requires_grad_()
        y = forward(net, x)
        y.square().sum().backward()
        assert x.grad is not None
        tensors |= {f"output {i}": y.detach(), f"grad_input {i}": x.grad}
        tensors |= {f"grad of {n} {i}": p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        tensors |= {f"{n} {i}": b.clone() for n, b in net.named_buffers()}
        optimizer.step()
        optimizer.zero_grad()
    return tensors


def assert_alike(nets: list[nn.Module], forwards: list[Forward], steps: int = 3) -> None:
    one, other = (train(net, forward, steps) for net, forward in zip(nets, forwards, strict=True))
    assert list(one) == list(other) and any("grad of" in key for key in one)
    for key, value in one.items():
        assert_bitwise(other[key], value, key)


def twins() -> list[nn.Module]:
    net = model()
    return [net, copy.deepcopy(net)]


@some(0)
def test_checkpointing_changes_no_bit(name: str, use_reentrant: bool) -> None:
    """Autocast has ended before backward, where the recomputation runs."""

    def plain(net: nn.Module, x: Tensor) -> Tensor:
        with qt.autocast(name):
            return net(x)  # type: ignore[no-any-return]

    def checkpointed(net: nn.Module, x: Tensor) -> Tensor:
        with qt.autocast(name):
            for block in net.children():
                x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    assert_alike(twins(), [plain, checkpointed])


@some(1)
def test_converted_models_too(name: str, use_reentrant: bool) -> None:
    class Blocks(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint_sequential(self, 2, x, use_reentrant=use_reentrant)
            return y

    nets = [model()]
    nets.append(Blocks(*copy.deepcopy(nets[0])))
    for net in nets:
        qt.convert(net, name)
    assert_alike(nets, [lambda net, x: net(x)] * 2)


@some(0)
def test_under_torch_autocast_too(name: str, use_reentrant: bool) -> None:
    def plain(net: nn.Module, x: Tensor) -> Tensor:
        with qt.autocast(name), torch.autocast("cpu", torch.bfloat16):
            return net(x).float()  # type: ignore[no-any-return]

    def checkpointed(net: nn.Module, x: Tensor) -> Tensor:
        with qt.autocast(name), torch.autocast("cpu", torch.bfloat16):
            for block in net.children():
                x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x.float()

    assert_alike(twins(), [plain, checkpointed], 2)


@ALL
def test_autocast_inside_the_checkpointed_function_rolls_once(name: str) -> None:
    def plain(net: nn.Module, x: Tensor) -> Tensor:
        with qt.autocast(name):
            return net(x)  # type: ignore[no-any-return]

    def inside(net: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(plain, net, x, use_reentrant=False)
        return y

    assert_alike(twins(), [plain, inside])


@KINDS
def test_a_part_switched_off_stays_off(use_reentrant: bool) -> None:
    def plain(net: nn.Module, x: Tensor) -> Tensor:
        first, second, head = net.children()
        with qt.autocast("mxfp8"):
            x = first(x)
            with qt.autocast(enabled=False):
                x = second(x)
            return head(x)  # type: ignore[no-any-return]

    def checkpointed(net: nn.Module, x: Tensor) -> Tensor:
        first, second, head = net.children()
        with qt.autocast("mxfp8"):
            x = checkpoint(first, x, use_reentrant=use_reentrant)
            with qt.autocast(enabled=False):
                x = checkpoint(second, x, use_reentrant=use_reentrant)
            return head(x)  # type: ignore[no-any-return]

    assert_alike(twins(), [plain, checkpointed])


@KINDS
@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_micro_batches_accumulate_the_same_with_checkpointing(name: str, use_reentrant: bool) -> None:
    """All forwards under one autocast, then all backwards."""

    def run(net: nn.Module, x: Tensor, block: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        with qt.autocast(name):
            outputs = []
            for part in x.chunk(3, 1):
                for child in net.children():
                    part = block(child, part)
                outputs.append(part)
        return torch.cat(outputs, 1)

    assert_alike(
        twins(),
        [
            lambda net, x: run(net, x, lambda child, part: child(part)),
            lambda net, x: run(net, x, lambda child, part: checkpoint(child, part, use_reentrant=use_reentrant)),
        ],
    )


@pytest.mark.parametrize("chosen", [True, False], ids=["fast plan", "general plan"])
def test_codes_that_are_made_again_come_with_their_scale(chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards without gradients roll histories between a forward and its backward; codes of ones are exact."""
    if not chosen:
        monkeypatch.setattr(linear_module, "make_plan", lambda *_: None)
    tokens, recipe = 16, recipes.delayed()
    layer = qt.Linear(64, 64, bias=False)
    x = torch.ones(tokens, 64, requires_grad=True)

    def step(value: float, gradients: bool) -> None:
        with torch.set_grad_enabled(gradients), qt.autocast(recipe):
            layer(torch.full((tokens, 64), value))

    step(1.0, True)
    step(1.0, True)
    with qt.autocast(recipe):
        y = checkpoint(layer, x, use_reentrant=False)
    assert by_fast_plan(y) is chosen
    for _ in range(3):
        step(1000.0, True)
        step(1000.0, False)
    y.sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, torch.full((64, 64), float(tokens)))


def test_a_recomputed_input_is_recorded_once_under_separate_specs_per_gemm() -> None:
    """A history cleared between forward and backward stays cleared."""
    delayed = recipes.delayed()
    assert delayed.fprop.a is not None
    other = dataclasses.replace(delayed.fprop.a, rounding="stochastic")
    recipe = dataclasses.replace(delayed, fprop=dataclasses.replace(delayed.fprop, a=other))
    block = qt.LayerNormMLP(64, 64, "swiglu", recipe=recipe)
    history = block.down_proj.history
    with qt.autocast(recipe):
        y = block(torch.randn(32, 64, requires_grad=True))
    recorded_amax = history[0, 0].clone()
    assert recorded_amax > 0
    history[:, 0] = 0
    y.sum().backward()
    assert history[0, 0] == 0
