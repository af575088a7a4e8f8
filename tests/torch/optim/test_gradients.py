"""Gradients in bfloat16 and in codes: what is kept, how they add up, and how they are clipped."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from benchmarks.measuring.memory import peak
from quaver.torch import optim
from quaver.torch.optim import codes
from quaver.torch.optim.gradients.held import encoded

SPEC = optim.StateSpec(code="e4m3", block=128)
LEAN = optim.PRESETS["lean"]


def model_of(recipe: str = "tensorwise") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(qt.Linear(160, 192), nn.GELU(), qt.Linear(192, 64))
    if recipe != "none":
        qt.quantize_weights(model, recipe)
    return model


def backward(model: nn.Module, seed: int, recipe: str = "tensorwise") -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    with qt.autocast(recipe):
        loss = model(torch.randn(32, 160, generator=draw)).square().mean()
    loss.backward()
    return loss


def test_codes_take_the_place_of_gradients_and_small_ones_stay() -> None:
    model, plain = model_of(), model_of()
    optimizer = optim.AdamW(model.parameters(), preset="lean")
    backward(model, 1)
    backward(plain, 1)
    for (name, p), r in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name.endswith("bias"):
            assert torch.equal(p.grad, r.grad)
            continue
        held = optimizer.gradients.held[p]
        want, scale = codes.encode(r.grad.float(), SPEC)
        assert p.grad is None
        assert torch.equal(held.codes, want)
        assert torch.equal(held.scale, scale)
    optimizer.step()
    optimizer.zero_grad()
    assert not optimizer.gradients.held


@pytest.mark.parametrize("text", ["e4m3/128", "e4m3/tensor power_of_two", "int8_softsign/32 floor"])
@pytest.mark.parametrize("shape", [(70, 200), (3, 40, 96), (5, 2000), (0, 96)])
def test_codes_of_a_gradient_that_is_taken_in_pieces_are_those_of_the_whole(
    text: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = optim.StateSpec.parse(text)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    cases = {"plain": whole, "zeros": whole * 0}
    if whole.numel():
        for name, value in {"nan": float("nan"), "infinity": float("inf"), "outlier": 1e30, "subnormal": 1e-40}.items():
            cases[name] = whole.clone()
            cases[name].view(-1, shape[-1])[2, 7] = value
    cases["columns first"] = whole.mT.contiguous().mT
    monkeypatch.setattr("quaver.torch.optim.gradients.held.PIECE", 1000)
    for name, gradient in cases.items():
        want, scale = codes.encode(gradient.float(), spec)
        data, scales = encoded(gradient, spec)
        assert scale is not None and data.is_contiguous() and scales.dtype == scale.dtype, name
        assert torch.equal(data, want) and torch.equal(scales.nan_to_num(-1.0), scale.nan_to_num(-1.0)), name


def test_a_gradient_becomes_codes_in_the_memory_of_a_piece() -> None:
    gradients = [torch.randn(rows, 1024) for rows in (512, 2048)]
    few, many = (peak(lambda g=g: encoded(g, SPEC)).bytes - g.numel() for g in gradients)  # type: ignore[misc]
    assert many < few * 1.05


def test_balanced_gradients_are_bfloat16() -> None:
    model = model_of()
    optimizer = optim.AdamW(model.parameters(), preset="balanced")
    before = {p.grad_dtype for p in model_of().parameters() if p.dim() == 2}
    backward(model, 1)
    assert {p.grad.dtype for p in model.parameters() if p.dim() == 2} == {torch.bfloat16}
    optimizer.zero_grad()
    del optimizer
    assert {p.grad_dtype for p in model.parameters() if p.dim() == 2} == before != {torch.bfloat16}


def test_a_second_backward_is_refused_and_accumulating_adds_up() -> None:
    model, plain = model_of(), model_of()
    optimizer = optim.AdamW(model.parameters(), preset="lean")
    backward(model, 1)
    with pytest.raises(RuntimeError, match="inside of `with optimizer"):
        backward(model, 2)
    optimizer.zero_grad()
    backward(model, 1)
    with pytest.raises(RuntimeError, match="but its last inside of"), optimizer.accumulating():
        backward(model, 2)
    optimizer.zero_grad()
    with optimizer.accumulating():
        backward(model, 1)
        backward(model, 2)
    backward(model, 3)
    for seed in (1, 2, 3):
        backward(plain, seed)
    for p, r in zip(model.parameters(), plain.parameters(), strict=True):
        held = optimizer.gradients.held.get(p)
        if held is not None:
            assert torch.equal(held.codes, codes.encode(r.grad, SPEC)[0])


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_clipping_is_exact(order: float) -> None:
    model, plain = model_of(), model_of()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, preset="lean")
    twin = optim.AdamW(plain.parameters(), lr=1e-3, preset="lean")
    backward(model, 1)
    backward(plain, 1)
    values = [
        codes.decode(held.codes, held.scale, held.spec) if (held := twin.gradients.held.get(p)) else p.grad
        for p in plain.parameters()
    ]
    want = torch.nn.utils.get_total_norm(values, order)
    norm = optimizer.clip_grad_norm_(float(want) / 4, order)
    torch.testing.assert_close(norm, want)
    for r, value in zip(plain.parameters(), values, strict=True):
        # The same step from gradients that torch has multiplied, kept as floats.
        twin.gradients.held.pop(r, None)
        r.grad = (value * (float(want) / 4 / (want + 1e-6))).to(torch.float32)
    optimizer.step()
    twin.step()
    for p, r in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.detach().float(), r.detach().float())


@pytest.mark.parametrize("largest", [torch.tensor(0.5, dtype=torch.float64), torch.tensor([0.5])], ids=["wide", "one"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_norm_that_is_a_tensor_clips_by_float32(
    monkeypatch: pytest.MonkeyPatch, in_backward: bool, largest: Any
) -> None:
    """A compiled step reads a factor's bits, and is told no dtype."""
    factors: list[Any] = []
    update = optim.AdamW._update

    def told(optimizer: Any, waiting: list[Tensor], factor: Tensor | None, overflow: Tensor | None = None) -> None:
        factors.extend(f for p in waiting if (f := optimizer._factor(p, factor)) is not None)
        update(optimizer, waiting, factor, overflow)

    monkeypatch.setattr(optim.AdamW, "_update", told)
    model = model_of()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, preset="lean")
    if in_backward:
        optimizer.step_in_backward(max_norm=largest)
    for seed in (1, 2):
        backward(model, seed)
        if not in_backward:
            optimizer.clip_grad_norm_(largest)
        optimizer.step()
        optimizer.zero_grad()
    assert factors and all(factor.dtype is torch.float32 and factor.dim() == 0 for factor in factors)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_gradient_scaler_is_told_that_it_sees_nothing(in_backward: bool, unscaled: bool) -> None:
    model = model_of()
    optimizer = optim.AdamW(model.parameters(), preset="balanced" if in_backward else "lean")
    if in_backward:
        optimizer.step_in_backward(1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    backward(model, 1)
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="GradScaler sees no gradients"):
        scaler.step(optimizer)


def test_a_gradient_scaler_without_a_gradient_steps_nothing() -> None:
    p = nn.Parameter(torch.ones(80, 80))
    optimizer, scaler = optim.AdamW([p]), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.equal(p.detach(), torch.ones(80, 80))
