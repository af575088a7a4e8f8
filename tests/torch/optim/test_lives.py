"""Test models and optimizers around steps: copies, other parameters, layouts, initial values."""

import copy
import dataclasses
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import quaver.torch as qt
from quaver.torch import optim
from quaver.torch.numerics import rounding
from quaver.torch.optim.quantized_gradient import QuantizedGradient
from quaver.torch.quantized_tensor import memory_of
from tests.pairs import alternating, case_name, pairs
from tests.torch.optim.models import full_weight, loss_of, model_of


def train(model: nn.Module, optimizer: optim.Optimizer, seed: int) -> None:
    loss_of(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("preset", ["balanced", "lean"])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_copy_of_model_and_optimizer_continues_identically(first: str, preset: str) -> None:
    model = model_of()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, preset=preset, statistics=True)
    train(model, optimizer, 1)
    if first == "model":
        model2, optimizer2 = copy.deepcopy((model, optimizer))
    else:
        optimizer2, model2 = copy.deepcopy((optimizer, model))
    for seed in (2, 3):
        train(model, optimizer, seed)
        train(model2, optimizer2, seed)
    for (name, a), b in zip(model.state_dict().items(), model2.state_dict().values(), strict=True):
        assert bool((a.float() == b.float()).all()), name


def test_the_newest_optimizer_receives_the_gradients_and_a_freed_one_none() -> None:
    model = model_of()
    first = optim.AdamW(model.parameters(), preset="float32")
    second = optim.AdamW(model.parameters(), preset="lean")
    loss_of(model).backward()
    assert [type(p.grad) is QuantizedGradient for p in model.parameters()] == [True, False, True, False]
    second.zero_grad()
    del first, second
    loss_of(model).backward()
    assert all(type(p.grad) is Tensor for p in model.parameters())


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("preset", ["lean", "balanced"])
def test_the_next_optimizer_finds_gradients_as_they_were(preset: str, in_backward: bool) -> None:
    """torch's optimizer after ours has been freed without garbage collection; ours while the other one exists."""
    layer = nn.Linear(80, 80)
    gc.disable()
    try:
        first = optim.AdamW(layer.parameters(), preset=preset)
        if in_backward:
            first.step_in_backward(1)
        layer(torch.ones(2, 80)).sum().backward()
        first.step()
        first.zero_grad()
        del first
        layer(torch.ones(2, 80)).sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32
        torch.optim.AdamW(layer.parameters()).step()
    finally:
        gc.enable()
    layer.zero_grad()
    first = optim.AdamW(layer.parameters(), preset=preset)
    if in_backward:
        first.step_in_backward(1)
    second = optim.AdamW(layer.parameters(), preset="float32")
    layer(torch.ones(2, 80)).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32
    before = layer.weight.detach().clone()
    second.step()
    assert not torch.equal(layer.weight.detach(), before)


@pytest.mark.parametrize(
    ("rule", "preset", "compiled"),
    [
        *((rule, preset, False) for preset, rule in alternating(optim.PRESETS, ("AdamW", "SGD", "Lion"), ("lean",))),
        pytest.param("AdamW", "float32", True, marks=pytest.mark.slow),
    ],
)
def test_float16_weights_move_as_float32_ones_do_and_are_these_rounded(rule: str, preset: str, compiled: bool) -> None:
    shape = (512, 512) if compiled else (70, 96)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    p, r = nn.Parameter(start.clone()), nn.Parameter(start.float())
    of_float = dataclasses.replace(optim.PRESETS[preset], gradient="float32")
    options: dict[str, Any] = {"lr": 1e-4, "preset": of_float, "compile": compiled}
    ours, theirs = (getattr(optim, rule)([each], **options) for each in (p, r))
    for step in range(40):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step)).half()
        p.grad, r.grad = gradient, gradient.float()
        ours.step()
        theirs.step()
    assert torch.equal(p.detach(), r.detach().half()) and not torch.equal(p.detach(), start)
    again, q = getattr(optim, rule)([twin := nn.Parameter(p.detach().clone())], **options), twin
    again.load_state_dict(ours.state_dict())
    for each, optimizer in ((p, ours), (q, again)):
        # Weights that a mask sets to zero are stepped from zero.
        each.data[::2] = 0
        each.grad = torch.zeros_like(each)
        optimizer.step()
    assert torch.equal(p, q) and float(p.detach()[::2].abs().max()) <= 2e-4


@pytest.mark.parametrize("name", ["quantize_weights", "dequantize_weights"])
def test_parameters_that_a_model_no_longer_has_are_refused(name: str) -> None:
    model = model_of() if name == "dequantize_weights" else nn.Sequential(qt.Linear(160, 192))
    optimizer = optim.AdamW(model.parameters(), preset="balanced")
    getattr(qt, name)(model, *(["tensorwise"] if name == "quantize_weights" else []))
    with pytest.raises(ValueError, match=f"was replaced by {name} after the optimizer was created"):
        optimizer.step()


@pytest.mark.parametrize(("preset", "bound"), [("float32", 0.0), ("balanced", 2.0**-20), ("lean", 2.0**-11)])
def test_the_initial_value_that_a_layer_keeps_begins_the_master(preset: str, bound: float) -> None:
    with qt.quantized_init("tensorwise", keep_initial="cpu"):
        layer = qt.Linear(160, 192)
    initial = qt.initial_value(layer.weight)
    assert initial is not None
    optimizer = optim.AdamW(layer.parameters(), lr=0.0, weight_decay=0.0, preset=preset)
    codes = memory_of(layer.weight).view(torch.uint8).clone()
    layer.weight.grad = torch.zeros(192, 160, dtype=layer.weight.grad_dtype)
    optimizer.step()
    weight = full_weight(optimizer, layer.weight)
    error, largest = (float(tensor.detach().abs().max()) for tensor in (weight - initial, initial))
    assert error <= bound * largest
    assert float((codes != memory_of(layer.weight).view(torch.uint8)).float().mean()) < 0.01


def test_the_initial_value_of_a_weight_that_was_written_since_is_ignored() -> None:
    with qt.quantized_init("mxfp8", keep_initial="cpu"):
        layer, other = qt.Linear(160, 192), qt.Linear(160, 192)
    for write in (lambda: layer.weight.copy_(other.weight), lambda: layer.set_weight(torch.ones(192, 160))):
        with torch.no_grad():
            write()
        expected = layer.weight.dequantize()
        optimizer = optim.AdamW(layer.parameters(), lr=0.0, weight_decay=0.0, preset="float32")
        layer.weight.grad = torch.zeros(192, 160)
        optimizer.step()
        assert torch.equal(layer.weight.dequantize(), expected)


@pytest.mark.parametrize("preset", ["exact", "lean"])
def test_memory_in_another_order_takes_the_same_steps(preset: str) -> None:
    weight = torch.randn(64, 32, 3, 3, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1)
    gradients = [torch.randn(weight.shape, generator=draw) for _ in range(3)]
    results = []
    for order in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(weight.clone().to(memory_format=order))
        optimizer = optim.AdamW([p], lr=1e-2, preset=preset)
        for gradient in gradients:
            p.grad = gradient.to(p.grad_dtype or torch.float32).to(memory_format=order)
            optimizer.step()
        results.append(p.detach())
    assert not torch.equal(results[0], weight)
    assert torch.equal(*results)


@pytest.mark.parametrize("preset", ["balanced", "lean"])
def test_a_pickled_optimizer_goes_on_with_its_model_and_not_without_one(preset: str) -> None:
    model = model_of()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, preset=preset)
    train(model, optimizer, 0)
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    again, taken = torch.load(file, weights_only=False)
    alone = pickle.loads(pickle.dumps(optimizer))
    for p in alone.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"shape \(192, 160\) belongs to no layer, as in an optimizer that was pickled"
    ):
        alone.step()
    for seed in (1, 2):
        train(model, optimizer, seed)
        train(again, taken, seed)
        assert torch.equal(loss_of(model, 9), loss_of(again, 9))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(memory_of(p).view(torch.uint8), memory_of(q).view(torch.uint8))
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, taken.state[q][key]), key


def test_a_fake_step_leaves_nothing_to_real_ones() -> None:
    """Values cached for a seed are real tensors; fake tensors before and after have separate values."""
    seed, device = 0x5EED_0F_FA4E, torch.device("cpu")
    for real in (False, True):
        with FakeTensorMode():
            p = nn.Parameter(torch.ones(128, 64, dtype=torch.bfloat16))
            p.grad = torch.ones_like(p)
            optim.AdamW([p], lr=1e-3, preset="exact", seed=seed).step()
            rounding.uniform(4, 4, seed, 1, 0, device)
        if not real:
            first = rounding.uniform(4, 4, seed, 1, 0, device)
    assert torch.equal(first, rounding.uniform(4, 4, seed, 1, 0, device))


@pytest.mark.parametrize(
    ("config", "preset", "recipe"),
    pairs(
        ("load_state_dict", "set_weight", "state_dict before the first step"),
        ("float32", "msamp", "balanced", "lean"),
        ("tensorwise", "blockwise"),
    ),
    ids=case_name,
)
def test_a_step_continues_from_weights_written_since_the_last_one(config: str, preset: str, recipe: str) -> None:
    """As after a rollback to another checkpoint: master weights and amaxes must not be the old ones."""
    model = model_of(recipe)
    layers: list[Any] = [model[0], model[2]]
    large = copy.deepcopy(model)
    for layer in (large[0], large[2]):
        layer.set_weight(8 * layer.weight.unwrap().dequantize())  # type: ignore[operator, arg-type]
    optimizer = optim.AdamW(model.parameters(), lr=1e-4, preset=preset)
    if config == "state_dict before the first step":
        optimizer.state_dict()
    else:
        train(model, optimizer, 1)
    if config == "set_weight":
        for layer, other in zip(layers, (large[0], large[2]), strict=True):
            layer.set_weight(other.weight.unwrap().dequantize())  # type: ignore[arg-type]
    else:
        model.load_state_dict(large.state_dict())
    before = [layer.weight.unwrap().dequantize() for layer in layers]
    train(model, optimizer, 2)
    for layer, was in zip(layers, before, strict=True):
        # Half a step of a code is 1/16 of its value.
        assert ((layer.weight.unwrap().dequantize() - was).abs() <= was.abs() / 8 + 1e-3).all()


@pytest.mark.parametrize("preset", ["float32", "balanced"])
def test_codes_that_are_swapped_out_and_back_lose_nothing(preset: str) -> None:
    """As when averaged weights are swapped in for an evaluation."""
    model, other = model_of(), model_of()
    runs = []
    for swaps in (False, True):
        again = copy.deepcopy(model)
        optimizer = optim.AdamW(again.parameters(), lr=1e-4, preset=preset)
        for seed in range(3):
            train(again, optimizer, seed)
            if swaps:
                own = copy.deepcopy(again.state_dict())
                again.load_state_dict(other.state_dict())
                again.load_state_dict(own)
        weights = (memory_of(p).view(torch.int8) for p in again.parameters())
        runs.append([*optimizer.state[again[0].weight].values(), *weights])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
