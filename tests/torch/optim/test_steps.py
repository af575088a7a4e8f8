"""Steps that are skipped, refused, warned of, or taken in backward; learning rates and schedulers of torch's."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quaver.torch import optim
from quaver.torch.quantized_tensor import QuantizedTensor, memory_of
from tests.pairs import pairs
from tests.torch.optim.models import loss_of, model_of

PRESETS = ["float32", "exact", "balanced", "lean"]


def state_of(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    buffers = [value for _, value in sorted(model.state_dict().items())]
    return [*buffers, *(value for state in optimizer.state.values() for value in state.values())]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)
        for a, b in zip(map(memory_of, ours), map(memory_of, theirs), strict=True)
    )


#: Optimizer, shape and dtype of a parameter, options, and a word of the error.
WRONG: list[tuple[Any, Any, Any, dict[str, Any], str]] = [
    *((optim.AdamW, (2, 2), None, {name: True}, f"{name}=True") for name in ("amsgrad", "foreach", "fused")),
    (optim.AdamW, (2, 2), None, {"lr": -1.0}, "given lr"),
    (optim.AdamW, (2, 2), None, {"lr": torch.tensor(-1.0)}, "given lr"),
    (optim.AdamW, (2, 2), None, {"lr": torch.ones(2)}, r"lr of shape \(2,\)"),
    (optim.AdamW, (2, 2), None, {"betas": (1.0, 0.9)}, "given betas"),
    (optim.AdamW, (2, 2), None, {"betas": (0.9,)}, "given betas"),
    (optim.AdamW, (2, 2), None, {"eps": -1.0}, "given eps"),
    (optim.AdamW, (2, 2), None, {"weight_decay": float("nan")}, "given weight_decay"),
    (optim.AdamW, (2, 2), None, {"seed": 1.5}, "given seed"),
    (optim.AdamW, (2, 2), None, {"preset": "laen"}, "did you mean 'lean'"),
    (optim.AdamW, (2, 2), None, {"nonfinite": "stop"}, "nonfinite is 'stop'"),
    (optim.AdamW, (2, 2), torch.complex64, {}, "complex64"),
    (optim.AdamW, (2, 2), torch.float64, {}, "float64"),
    (optim.SGD, (2, 2), None, {"nesterov": True}, "nesterov is True with momentum"),
    (optim.Muon, (2,), None, {}, "Muon steps matrices"),
    (optim.Muon, (8, 8, 3, 3), None, {}, "a parameter has shape"),
    (optim.Muon, (3, 64, 64), None, {"preset": "msamp"}, "stack of matrices"),
]


@pytest.mark.parametrize(("kind", "shape", "dtype", "options", "message"), WRONG)
def test_wrong_options_and_parameters_raise(
    kind: Any, shape: Any, dtype: Any, options: dict[str, Any], message: str
) -> None:
    p = nn.Parameter(torch.zeros(shape, dtype=dtype))
    with pytest.raises(ValueError, match=message):
        kind([p], **options)
    with pytest.raises(TypeError, match="has no option 'momentun'"):
        kind([p], momentun=0.9)


def test_a_refused_group_is_not_added() -> None:
    p, wrong = nn.Parameter(torch.zeros(80, 80)), nn.Parameter(torch.zeros(80, 80, dtype=torch.complex64))
    vector = nn.Parameter(torch.zeros(80))
    for optimizer, own, message in (
        (optim.AdamW([p], preset="lean"), [nn.Parameter(torch.zeros(80, 80)), wrong], "complex64"),
        (optim.Muon([p], preset="lean"), [vector], "Muon steps matrices"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": own})
        assert [group["params"] for group in optimizer.param_groups] == [[p]]
        own[0].sum().backward()
        assert own[0].grad is not None, "its gradients are not taken"


def test_tied_weights_are_stepped_once_or_refused() -> None:
    p = nn.Parameter(torch.zeros(80, 80))
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="in a group twice"):
        optim.AdamW([p, p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optim.AdamW([{"params": [p]}, {"params": [p]}])
    words, head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
    head.weight = words.weight
    (group,) = optim.AdamW(nn.Sequential(words, head), preset="lean").param_groups
    assert group["params"] == [words.weight] and group["preset"] == "float32"


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize(
    ("preset", "bad", "where"),
    pairs(PRESETS, (float("nan"), float("inf")), ("loss", "gradient")),
)
def test_a_gradient_that_is_not_finite_skips_the_step_or_raises(
    preset: str, bad: float, where: str, nonfinite: Any
) -> None:
    """Also a gradient in codes that is multiplied beyond its range."""
    model = model_of()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, preset=preset, nonfinite=nonfinite)
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [tensor.clone() for tensor in state_of(model, optimizer)]
    (loss_of(model, 2) * (bad if where == "loss" else 1.0)).backward()
    if where == "gradient":
        model[0].weight.grad.mul_(1e38 if bad == float("inf") else bad).mul_(1e38)
    if nonfinite == "raise":
        with pytest.raises(ValueError, match=r"are not finite, .* nothing was changed"):
            optimizer.step()
    else:
        optimizer.step()
        assert int(optimizer.skipped) == 1
    assert same(state_of(model, optimizer), before)


@pytest.mark.parametrize(
    ("preset", "outstanding"), [("float32", 1), ("exact", 1 << 30), ("balanced", 50_000), ("lean", 1)]
)
def test_steps_in_backward_are_the_steps_after_it(preset: str, outstanding: int) -> None:
    model, twin = model_of(), model_of()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, preset=preset)
    reference = optim.AdamW(twin.parameters(), lr=1e-3, preset=preset)
    optimizer.step_in_backward(outstanding_bytes=outstanding)
    for seed in range(3):
        with optimizer.accumulating(), reference.accumulating():
            loss_of(model, 10 + seed).backward()
            loss_of(twin, 10 + seed).backward()
        loss_of(model, seed).backward()
        loss_of(twin, seed).backward()
        optimizer.step()
        reference.step()
        assert all(p.grad is None for p in model.parameters())
        reference.zero_grad()
        trained = {id(p): n for n, p in model.named_parameters()}
        ours = {
            f"{trained[id(p)]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items()
        }
        names = {id(p): n for n, p in twin.named_parameters()}
        for p, state in reference.state.items():
            for key, value in state.items():
                assert torch.equal(ours[f"{names[id(p)]}/{key}"], value), (names[id(p)], key)
        assert same(list(model.state_dict().values()), list(twin.state_dict().values()))


def test_a_step_in_backward_is_clipped_by_the_norm_of_the_step_before() -> None:
    model, twin = model_of(), model_of()
    optimizer = optim.SGD(model.parameters(), lr=1e-3, preset="float32")
    reference = optim.SGD(twin.parameters(), lr=1e-3, preset="float32")
    optimizer.step_in_backward(outstanding_bytes=1, max_norm=1e-3)
    norm = None
    for seed in range(3):
        loss_of(model, seed).backward()
        optimizer.step()
        loss_of(twin, seed).backward()
        own = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()])
        if norm is not None:
            for p in twin.parameters():
                p.grad *= (1e-3 / (norm + 1e-6)).clamp(max=1.0)
        reference.step()
        reference.zero_grad()
        norm = own
        for p, r in zip(model.parameters(), twin.parameters(), strict=True):
            p, r = (t.dequantize() if isinstance(t, QuantizedTensor) else t for t in (p, r))
            torch.testing.assert_close(p.detach().float(), r.detach().float(), rtol=1e-5, atol=1e-7)


def test_a_step_in_backward_clips_parameters_frozen_at_its_creation() -> None:
    """And parameters with assigned gradients, which backward does not see."""
    p, q, r = (nn.Parameter(torch.zeros(8)) for _ in range(3))
    q.requires_grad_(False)
    optimizer = optim.SGD([p, q, r], lr=1.0, preset="float32")
    optimizer.step_in_backward(max_norm=1e-3)
    q.requires_grad_(True)
    for _ in range(2):
        before = [t.detach().clone() for t in (p, q, r)]
        (p.sum() + q.sum()).backward()
        r.grad = torch.ones(8)
        optimizer.step()
        moved = torch.cat([t.detach() - was for t, was in zip((p, q, r), before, strict=True)])
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_options_that_need_all_gradients_are_refused_for_steps_in_backward() -> None:
    model = model_of()
    optimizer = optim.AdamW(model.parameters(), nonfinite="skip")
    with pytest.raises(ValueError, match="nonfinite is 'skip', which needs all gradients"):
        optimizer.step_in_backward()
    optimizer = optim.AdamW(model.parameters())
    optimizer.step_in_backward()
    with pytest.raises(ValueError, match="give step_in_backward a max_norm"):
        optimizer.clip_grad_norm_(1.0)


def test_a_learning_rate_too_small_for_residuals_warns_once() -> None:
    model = model_of()
    optimizer = optim.AdamW(model.parameters(), lr=1e-7, preset="lean")
    loss_of(model, 1).backward()
    with pytest.warns(UserWarning, match=r"the learning rate is 1e-07, and .* use preset balanced"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_learning_rate_may_be_a_tensor_and_schedulers_move_it() -> None:
    runs = []
    for lr in (1e-2, torch.tensor(1e-2)):
        model = model_of()
        optimizer = optim.AdamW(model.parameters(), lr=lr, preset="balanced")
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for seed in range(4):
            loss_of(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        runs.append(state_of(model, optimizer))
    for a, b in zip(*runs, strict=True):
        # A tensor holds the rate in float32.
        torch.testing.assert_close(a.float(), b.float(), rtol=0.02, atol=2.0)


def test_models_have_their_embeddings_in_float32_and_groups_may_be_added() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(100, 64), "layer": nn.Linear(64, 100)})
    # Options of torch that change no result.
    optimizer = optim.AdamW(model, preset="lean", foreach=False, capturable=True)
    late = nn.Parameter(torch.randn(80, 80))
    optimizer.add_param_group({"params": [late], "preset": "exact"})
    for p in (*model.parameters(), late):
        p.grad = torch.randn_like(p, dtype=p.grad_dtype)
    optimizer.step()
    every = (*model.named_parameters(), ("late", late))
    state = {
        name: optimizer.state[p].get("exp_avg_codes", optimizer.state[p].get("exp_avg")).dtype for name, p in every
    }
    assert state == {
        "words.weight": torch.float32,
        "layer.weight": torch.int8,
        "layer.bias": torch.float32,
        "late": torch.bfloat16,
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_zeros_and_empty_parameters_step(preset: str) -> None:
    empty, zero = nn.Parameter(torch.zeros(0, 8)), nn.Parameter(torch.ones(80, 80))
    optimizer = optim.AdamW([empty, zero], lr=0.1, weight_decay=0.0, preset=preset)
    for _ in range(3):
        for p in (empty, zero):
            p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
        optimizer.step()
    assert torch.equal(zero.detach(), torch.ones(80, 80))


@pytest.mark.parametrize("preset", ["float32", "balanced"])
def test_a_momentum_enabled_later_begins_with_the_next_gradient(preset: str) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64, 80))
    q = nn.Parameter(p.detach().clone())
    ours, theirs = optim.SGD([p], lr=0.1, preset=preset), torch.optim.SGD([q], lr=0.1)
    for momentum in (0.0, 0.0, 0.9, 0.9, 0.0, 0.9):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0].update(momentum=momentum, dampening=0.3)
        p.grad, q.grad = (torch.randn(64, 80, generator=torch.Generator().manual_seed(1)) for _ in range(2))
        ours.step()
        theirs.step()
    tolerance = 2e-6 if preset == "float32" else 2e-2
    torch.testing.assert_close(p, q, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("change", "preset"),
    [("shape", "float32"), ("dtype", "float32"), ("preset", "float32"), ("shape", "lean"), ("dtype", "lean")],
)
def test_a_state_of_another_shape_dtype_or_preset_is_refused_before_anything_steps(change: str, preset: str) -> None:
    torch.manual_seed(0)
    first, other = nn.Parameter(torch.randn(80)), nn.Parameter(torch.randn(64, 80))
    optimizer = optim.AdamW([first, other], preset=preset)
    first.grad, other.grad = torch.ones(80), torch.ones(64, 80)
    optimizer.step()
    if change == "shape":
        other.data = other.data[:1].clone()
    elif change == "dtype":
        other.data = other.data.bfloat16()
    else:
        optimizer.param_groups[0]["preset"] = "flashoptim"
    other.grad = torch.ones_like(other)
    saved, before = optimizer.state_dict(), first.detach().clone()
    with pytest.raises(ValueError, match=r"of a parameter of shape \(.*, 80\).*changed after the state was made"):
        optimizer.step()
    assert torch.equal(first, before)
    if change == "dtype":
        with pytest.warns(UserWarning, match="is created from the weight"):
            optimizer.load_state_dict(saved)
        optimizer.step()
