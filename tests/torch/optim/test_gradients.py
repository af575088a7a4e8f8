"""Test gradients in bfloat16 and in codes: storage, accumulation and clipping."""

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quaver.torch import optim
from quaver.torch.optim import codes
from quaver.torch.optim.quantized_gradient import QuantizedGradient
from tests.torch.optim.models import loss_of, model_of

SPEC = optim.StateSpec(code="e4m3", block=128)


def backward(model: nn.Module, seed: int) -> None:
    loss_of(model, seed).backward()


def test_codes_take_the_place_of_gradients_and_small_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded in chunks, with the codes of the whole gradient."""
    monkeypatch.setattr("quaver.torch.optim.quantized_gradient.CPU_CHUNK", 1000)
    model, plain = model_of(), model_of()
    optimizer = optim.AdamW(model.parameters(), preset="lean")
    backward(model, 1)
    backward(plain, 1)
    for (name, p), r in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name.endswith("bias"):
            assert torch.equal(p.grad, r.grad)
            continue
        want, scale = codes.encode(r.grad.float(), SPEC)
        assert type(p.grad) is QuantizedGradient and p.grad.dtype is r.grad.dtype
        assert torch.equal(p.grad.codes, want) and torch.equal(p.grad.scale, scale)
        assert torch.equal(p.grad, codes.decode(want, scale, SPEC))
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["none", "tensorwise"])
@pytest.mark.parametrize("preset", ["exact", "te", "lean"])
def test_gradients_that_are_assigned_step_as_those_of_a_backward(preset: str, kind: str) -> None:
    model, twin = model_of(kind), model_of(kind)
    ours, theirs = (optim.AdamW(each.parameters(), lr=1e-3, preset=preset) for each in (model, twin))
    narrow = optim.PRESETS[preset].gradient == "bfloat16"
    for seed in (1, 2):
        backward(twin, seed)
        for p, r in zip(model.parameters(), twin.parameters(), strict=True):
            value = r.grad + 0
            if p.dim() == 2 and narrow:
                # What the step rounds as a backward does.
                assert torch.equal(r.grad, r.grad.bfloat16())
                p.grad = value * (1 + 2.0**-10)
            else:
                p.grad = value.float()
                r.grad = value.float()
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    for p, r in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.detach().float(), r.detach().float())


def test_micro_batches_add_up_in_bfloat16() -> None:
    model, twin = model_of("none"), model_of("none")
    optimizer = optim.AdamW(model.parameters(), preset="balanced")
    want = None
    for seed in (1, 2, 3):
        backward(model, seed)
        twin.zero_grad()
        backward(twin, seed)
        new = twin[0].weight.grad
        want = new.bfloat16() if want is None else want + new.bfloat16()
        assert model[0].weight.grad.value is None and torch.equal(model[0].weight.grad, want.float())
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model[0].weight.grad.add_(1.0)
    assert [t.dtype for t in model[0].weight.grad.tensors()] == [torch.bfloat16]
    optimizer.step()


def decoded(model: Any) -> list[Tensor]:
    return [torch.empty(p.shape).copy_(p.grad) for p in model.parameters()]


def test_a_second_backward_adds_in_high_precision_and_accumulating_rounds_once() -> None:
    model, plain = model_of(), model_of()
    optimizer = optim.AdamW(model.parameters(), preset="lean")
    backward(model, 1)
    first = decoded(model)
    backward(plain, 1)
    before = decoded(plain)
    backward(model, 2)
    backward(plain, 2)
    for got, one, r, earlier in zip(decoded(model), first, plain.parameters(), before, strict=True):
        torch.testing.assert_close(got - one, r.grad - earlier, rtol=0, atol=1e-6 * float(r.grad.abs().max()))
    optimizer.zero_grad()
    plain.zero_grad()
    with optimizer.accumulating():
        backward(model, 1)
        backward(model, 2)
    backward(model, 3)
    for seed in (1, 2, 3):
        backward(plain, seed)
    for p, r in zip(model.parameters(), plain.parameters(), strict=True):
        if p.dim() == 2:
            assert torch.equal(p.grad.codes, codes.encode(r.grad, SPEC)[0])


@pytest.mark.parametrize("spec", [SPEC, optim.StateSpec.parse("e4m3/tensor power_of_two")], ids=str)
def test_a_small_gradient_added_many_times_is_not_rounded_away(spec: optim.StateSpec) -> None:
    p = nn.Parameter(torch.zeros(64, 128))
    optimizer = optim.SGD([p], lr=1.0, preset=optim.Preset(name="codes", gradient=spec))
    for _ in range(100):
        p.sum().backward()
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, -100.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("order", "preset", "weights"),
    [(2.0, "lean", "tensorwise"), (1.0, "lean", "bfloat16"), ("inf", "lean", "none"), (2.0, "msamp", "none")],
)
def test_clip_grad_norm_sees_and_scales_every_gradient(order: Any, preset: str, weights: str) -> None:
    every: tuple[Any, ...] = (None, True, False, "optimizer")
    for foreach in every:
        model, twin = (model_of("none" if weights == "bfloat16" else weights) for _ in range(2))
        if weights == "bfloat16":
            model, twin = model.bfloat16(), twin.bfloat16()
        optimizer, other = (optim.AdamW(each.parameters(), lr=1e-3, preset=preset) for each in (model, twin))
        backward(model, 1)
        backward(twin, 1)
        values = decoded(model)
        want = torch.nn.utils.get_total_norm(values, order)
        if foreach == "optimizer":
            norm = optimizer.clip_grad_norm_(float(want) / 4, order)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), float(want) / 4, order, foreach=foreach)
        near = 2.0**-8 if weights == "bfloat16" else 1e-5
        assert float(norm) == pytest.approx(float(want), rel=near)
        for p, value in zip(model.parameters(), values, strict=True):
            torch.testing.assert_close(p.grad.float(), value * (want / 4 / (want + 1e-6)), rtol=4 * near, atol=0)
        # The same step as from gradients in high precision.
        for p, r in zip(model.parameters(), twin.parameters(), strict=True):
            factor = getattr(getattr(p.grad, "contents", None), "factor", None)
            if factor is not None:
                r.grad = (codes.decode(p.grad.codes, p.grad.scale, p.grad.contents.spec) * factor).to(p.grad.dtype)
            else:
                r.grad = p.grad
        if weights != "bfloat16":
            optimizer.step()
            other.step()
            for p, r in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(p.detach().float(), r.detach().float())


def test_clip_grad_value_is_exact() -> None:
    for foreach in (None, True, False):
        model = model_of()
        optimizer = optim.AdamW(model.parameters(), preset="lean")
        backward(model, 1)
        values = decoded(model)
        limit = float(values[0].abs().max()) / 4
        nn.utils.clip_grad_value_(model.parameters(), limit, foreach=foreach)
        for p, value in zip(model.parameters(), values, strict=True):
            assert torch.equal(p.grad, value.clamp(-limit, limit))
        optimizer.step()


def test_zero_grad_in_place_leaves_zeros_and_the_next_backward_is_encoded_again() -> None:
    model, plain = model_of(), model_of()
    optimizer = optim.AdamW(model.parameters(), preset="lean")
    for seeds in ((1,), (2, 3)):
        for seed in seeds:
            backward(model, seed)
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not bool(p.grad.any()) for p in model.parameters())
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0
        backward(model, 4)
        plain.zero_grad()
        backward(plain, 4)
        for p, r in zip(model.parameters(), plain.parameters(), strict=True):
            if p.dim() == 2:
                assert p.grad.value is None and torch.equal(p.grad.codes, codes.encode(r.grad, SPEC)[0])


def test_writes_to_a_gradient_or_its_views_are_used_by_the_step() -> None:
    writes: dict[str, Any] = {
        "view": lambda g: g.view(-1)[:80].zero_(),
        "row": lambda g: g[3].mul_(2.0),
        "index": lambda g: g.__setitem__(g > 0, 0.0),
        "data": lambda g: g.data.mul_(0.5),
        "detached": lambda g: g.detach().add_(1.0),
        "noise": lambda g: g.add_(torch.ones(64, 192)),
        "elementwise": lambda g: g.mul_(torch.full((64, 192), 3.0)),
        "copy": lambda g: g.copy_(torch.full((64, 192), 3.0)),
        "out": lambda g: torch.add(g, 1.0, out=g),
        "set data": lambda g: setattr(g, "data", torch.ones(64, 192)),
        "numpy": lambda g: g.numpy().__setitem__(slice(0, 8), 0.0),
        "floor": lambda g: g.div_(1e-3, rounding_mode="floor"),
        "shared": lambda g: g.share_memory_().apply_(abs),
    }
    for name, write in writes.items():
        model, twin = model_of("none"), model_of("none")
        optimizer = optim.SGD(model.parameters(), lr=1.0, preset="lean")
        other = optim.SGD(twin.parameters(), lr=1.0, preset="lean")
        backward(model, 1)
        value = decoded(model)[2]
        write(value)
        write(model[2].weight.grad)
        assert torch.equal(model[2].weight.grad, value), name
        assert model[2].weight.grad.tolist() == value.tolist()
        twin[2].weight.grad = value
        optimizer.step()
        other.step()
        assert torch.equal(model[2].weight, twin[2].weight), name


def test_a_gradient_in_codes_is_copied_saved_and_moved() -> None:
    model = model_of("none")
    optimizer = optim.AdamW(model.parameters(), preset="lean")
    backward(model, 1)
    gradient, value = model[2].weight.grad, decoded(model)[2]
    gradient.mul_(0.5)
    for copied in (copy.deepcopy(gradient), gradient.clone()):
        gradient.clone().zero_()
        assert type(copied) is QuantizedGradient and torch.equal(copied, value * 0.5)
    file = io.BytesIO()
    torch.save(gradient.clone(), file)
    file.seek(0)
    assert torch.equal(torch.load(file), value * 0.5)
    assert "QuantizedGradient(tensor(" in repr(gradient)
    assert gradient.tolist() == (value * 0.5).tolist() and np.array_equal(np.asarray(gradient), (value * 0.5).numpy())
    model.to(torch.bfloat16)
    assert torch.equal(model[2].weight.grad, (value * 0.5).bfloat16())
    assert torch.equal(model[2].weight.grad.float() + 0, (value * 0.5).bfloat16().float())
    model.to("cpu", torch.float32)
    optimizer.step()


@pytest.mark.parametrize("largest", [torch.tensor(0.5, dtype=torch.float64), torch.tensor([0.5])], ids=["wide", "one"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_norm_that_is_a_tensor_clips_as_a_float(in_backward: bool, largest: Any) -> None:
    ends = []
    for norm in (0.5, largest):
        model = model_of()
        optimizer = optim.AdamW(model.parameters(), lr=1e-3, preset="lean")
        if in_backward:
            optimizer.step_in_backward(max_norm=norm)
        for seed in (1, 2):
            backward(model, seed)
            if not in_backward:
                optimizer.clip_grad_norm_(norm)
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.detach().float() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_gradient_scaler_raises_for_steps_in_backward(unscaled: bool) -> None:
    model = model_of()
    optimizer = optim.AdamW(model.parameters(), preset="balanced")
    optimizer.step_in_backward(1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    backward(model, 1)
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="GradScaler"):
        scaler.step(optimizer)


@pytest.mark.parametrize(("unscaled", "preset"), [(False, "lean"), (True, "lean"), (True, "msamp"), (False, "float32")])
def test_a_gradient_scaler_steps_codes_as_without_it_and_skips_infinities(unscaled: bool, preset: str) -> None:
    model, plain = model_of(), model_of()
    optimizer, other = (optim.AdamW(each.parameters(), lr=1e-3, preset=preset) for each in (model, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        loss = loss_of(model, step)
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        if unscaled:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step != 1:
            loss_of(plain, step).backward()
            if unscaled:
                nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
            other.step()
            other.zero_grad()
        for p, r in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.detach().float(), r.detach().float()), step
    assert scaler.get_scale() == 2.0**9


def test_a_gradient_scaler_without_a_gradient_steps_nothing() -> None:
    p = nn.Parameter(torch.ones(80, 80))
    optimizer, scaler = optim.AdamW([p]), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.equal(p.detach(), torch.ones(80, 80))
