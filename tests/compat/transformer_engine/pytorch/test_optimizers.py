"""`FusedAdam` and `FusedSGD` step as torch's do, and store moments in the requested dtypes."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from quaver.compat.transformer_engine.common.recipe import MXFP8BlockScaling
from quaver.compat.transformer_engine.pytorch import Linear, quantized_model_init
from quaver.compat.transformer_engine.pytorch import optimizers as te
from tests.close import assert_close


def steps(make: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(128, 128).to(dtype))
    optimizer = make([p])
    for i in range(5):
        p.grad = torch.randn(128, 128, generator=torch.Generator().manual_seed(i)).to(dtype)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam(decoupled: bool) -> None:
    theirs = torch.optim.AdamW if decoupled else torch.optim.Adam
    options: Any = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    got = steps(lambda p: te.FusedAdam(p, adam_w_mode=decoupled, **options))
    assert_close("weights", got, steps(lambda p: theirs(p, **options)), 1e-5)


def test_moments_in_fewer_bits() -> None:
    states: dict[str, Any] = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16}
    optimizers: list[Any] = []
    got = steps(lambda p: optimizers.append(te.FusedAdam(p, 1e-2, **states)) or optimizers[-1])
    assert_close("weights", got, steps(lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.0)), 1e-2)
    state_bytes = sum(
        t.numel() * t.element_size() for s in optimizers[0].state.values() for t in s.values() if torch.is_tensor(t)
    )
    assert state_bytes < 3.1 * 128 * 128


@pytest.mark.parametrize("name", ["master_weights", "store_param_remainders"])
def test_masters_of_bfloat16_weights(name: str) -> None:
    """Steps far below a bfloat16 weight's resolution add up: exactly with masters, on average without."""

    def moved(**options: Any) -> torch.Tensor:
        p = nn.Parameter(torch.ones(128, 128, dtype=torch.bfloat16))
        optimizer = te.FusedAdam([p], 1e-4, **options)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return 1 - p.detach().float()

    exact, drawn = moved(**{name: True}), moved()
    assert (exact == 1 - float(torch.tensor(0.99).bfloat16())).all() and drawn.unique().numel() > 1
    assert float(drawn.mean()) == pytest.approx(1e-2, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sgd_rounds_as_torchs_does(dtype: torch.dtype) -> None:
    options: Any = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    got = steps(lambda p: te.FusedSGD(p, 0.1, **options), dtype)
    assert torch.equal(got, steps(lambda p: torch.optim.SGD(p, 0.1, **options), dtype))


def stepped(p: nn.Parameter, attribute: str, dtype: torch.dtype, number: int = 5, **options: Any) -> te.FusedAdam:
    """Steps of gradients that an attribute of a parameter has."""
    optimizer = te.FusedAdam([{"params": [p]}, {"params": []}], 1e-2, **options)
    for i in range(number):
        gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(dtype)
        setattr(p, attribute, gradient)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masters", [torch.float32, torch.float16])
def test_decoupled_gradients_of_any_dtype_step_and_p_grad_stays(wide: torch.dtype, masters: torch.dtype) -> None:
    """Against torch's AdamW of float32 weights: the weight is its own, rounded, so small steps add up in the master."""
    torch.manual_seed(0)
    first = torch.randn(128, 64)
    p, r = nn.Parameter(first.bfloat16()), nn.Parameter(first.bfloat16().float())
    p.grad = untouched = torch.ones_like(p)
    options: Any = {"use_decoupled_grad": True, "master_weights": True, "master_weight_dtype": masters}
    optimizer = stepped(p, "decoupled_grad", wide, 50, **options)
    other = torch.optim.AdamW([r], 1e-2, weight_decay=0.0)
    for i in range(50):
        r.grad = torch.randn(r.shape, generator=torch.Generator().manual_seed(i)).to(wide).float()
        other.step()
    assert_close("weights", p.float(), r, 3e-3)
    moved, expected = p.float() - first.bfloat16().float(), r.detach() - first.bfloat16().float()
    assert_close("steps", moved, expected, 0.04)
    assert p.grad is untouched and p.grad_dtype is torch.bfloat16 and (p.grad == 1).all()
    dtypes = {name: t.dtype for name, t in optimizer.state[p].items() if t.dim() == 2}
    assert torch.int16 in dtypes.values() if masters is torch.float32 else dtypes["master"] is torch.float16
    norm = optimizer.clip_grad_norm_(1.0)
    assert norm > 1 and float(p.decoupled_grad.float().norm()) == pytest.approx(1.0, rel=1e-2)
    optimizer.zero_grad(set_to_none=False)
    assert not p.decoupled_grad.any() and p.grad is untouched
    optimizer.zero_grad()
    assert p.decoupled_grad is None and p.grad is untouched
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)
    optimizer.grad_scale = torch.ones(())
    with pytest.raises(ValueError, match=r"GradScaler only sees p\.grad"):
        optimizer.step()


@pytest.mark.parametrize("codes", [False, True])
def test_float16_masters_add_up_steps_below_the_weights_resolution(codes: bool) -> None:
    options: Any = {"master_weights": True, "master_weight_dtype": torch.float16}
    with quantized_model_init(enabled=codes, recipe=MXFP8BlockScaling()):
        layer = Linear(128, 128, params_dtype=torch.bfloat16, init_method=nn.init.ones_)
    optimizer = te.FusedAdam([layer.weight], 1e-3, **options)
    for _ in range(100):
        layer.weight.grad = torch.ones(128, 128, dtype=torch.bfloat16)
        optimizer.step()
    state = optimizer.state[layer.weight]
    assert state["master"].dtype is torch.float16 and sum(t.dim() == 0 for t in state.values()) == 2
    value = state["master"].float() * state["master_scale"]
    assert_close("masters", value, torch.full_like(value, 0.9), 1e-2)
    with torch.no_grad():
        assert_close("output", layer(torch.eye(128).bfloat16()).float(), value.T, 0.04)


@pytest.mark.parametrize("capturable", [False, True])
def test_groups_count_steps_and_state_dicts_load_both_ways(capturable: bool) -> None:
    """A count of torch's parameters becomes the group's, and the group's of Transformer Engine the parameters'."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(96, 64).bfloat16())
    options: Any = {"master_weights": True, "capturable": capturable}
    optimizer = stepped(p, "grad", torch.bfloat16, **options)
    group, empty = optimizer.param_groups
    # Also of a group that is empty on this rank: it may have parameters on the others.
    assert int(empty["step"]) == 5
    assert isinstance(group["step"], torch.Tensor if capturable else int) and int(group["step"]) == 5
    if capturable:
        assert group["step"].dtype is torch.int32 and group["step"].shape == (1,)
    state, saved = optimizer.state[p], optimizer.state_dict()
    value = ((p.detach().view(torch.int16).int() << 16) + state["remainder"].int()).view(torch.float32)
    theirs = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    group = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    without = {**group, "params": []}
    counted = {**group, "bias_correction": True, "step": 5 if capturable else torch.tensor([5], dtype=torch.int32)}
    forms = {
        "ours": saved,
        "float32 masters": {"state": {0: {**theirs, "master_param": value}}, "param_groups": [counted, without]},
        "remainders": {
            "state": {0: {**theirs, "master_param": state["remainder"]}},
            "param_groups": [counted, without],
        },
    }
    p.grad = gradient = torch.randn(96, 64).bfloat16()
    ends = []
    for name, form in forms.items():
        q = nn.Parameter(p.detach().clone())
        other = te.FusedAdam([{"params": [q]}, {"params": []}], 1e-2, **options)
        other.load_state_dict(copy.deepcopy(form))
        q.grad = gradient.clone()
        other.step()
        assert int(other.param_groups[0]["step"]) == int(other.state[q]["step"]) == 6, name
        assert isinstance(other.param_groups[0]["step"], torch.Tensor) is capturable
        ends.append((q.detach(), other.state[q]["remainder"]))
    optimizer.step()
    for weight, rest in ends:
        assert torch.equal(weight, p) and torch.equal(rest, optimizer.state[p]["remainder"])
    # torch's counts are of parameters, and there are no masters.
    form = {"state": {0: {**theirs, "step": torch.tensor(5.0)}}, "param_groups": [group, without]}
    other = te.FusedAdam([{"params": [nn.Parameter(p.detach().clone())]}, {"params": []}], 1e-2, **options)
    with pytest.warns(UserWarning, match="no remainder was saved|were converted to preset"):
        other.load_state_dict(form)
    assert int(other.param_groups[0]["step"]) == 5
    assert copy.deepcopy(other).decoupled
    counted["bias_correction"] = False
    with pytest.raises(ValueError, match="saved with bias_correction=False"):
        other.load_state_dict(forms["remainders"])


@pytest.mark.parametrize("capturable", [False, True])
def test_a_group_step_count_applies_to_parameters_with_a_late_first_gradient(capturable: bool) -> None:
    """Transformer Engine corrects the bias of all by the group's steps."""
    p, late = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    optimizer = te.FusedAdam([p, late], 1e-2, capturable=capturable)
    for i in range(10):
        p.grad, late.grad = torch.ones(64, 64), torch.ones(64, 64) if i == 9 else None
        optimizer.step()
    expected = 1e-2 * (0.1 / (1 - 0.9**10)) / (0.001 / (1 - 0.999**10)) ** 0.5
    assert -late.mean().item() == pytest.approx(expected, rel=1e-5)
    optimizer.step()
    optimizer.param_groups[0]["step"] = 0
    optimizer.step()
    assert [int(optimizer.state[q]["step"]) for q in (p, late)] == [1, 1]
    # In place, where it is a tensor.
    optimizer.param_groups[0]["step"] += 6
    optimizer.step()
    assert [int(optimizer.state[q]["step"]) for q in (p, late)] == [8, 8]


def test_missing_features_give_a_clear_error() -> None:
    p = [nn.Parameter(torch.zeros(4))]
    for options, sentence in (
        ({"amsgrad": True}, "has no amsgrad"),
        ({"exp_avg_dtype": torch.int8}, "exp_avg_dtype is torch.int8; give one of"),
        ({"capturable": True, "exp_avg_dtype": torch.bfloat16}, "both moments in torch.float32"),
        (
            {"capturable": True, "master_weights": True, "store_param_remainders": True},
            "without store_param_remainders",
        ),
        ({"master_weights": True, "master_weight_dtype": torch.bfloat16}, "give torch.float32 or torch.float16"),
    ):
        with pytest.raises(ValueError, match=sentence):
            te.FusedAdam(p, **options)  # type: ignore[arg-type]


def test_betas_are_the_third_argument() -> None:
    options: Any = {"eps": 1e-8, "weight_decay": 0.1}
    assert_close(
        "weights",
        steps(lambda p: te.FusedAdam(p, 1e-2, (0.5, 0.6), **options)),
        steps(lambda p: torch.optim.AdamW(p, 1e-2, (0.5, 0.6), **options)),
        1e-5,
    )
    # As they did in 1.x, where `bias_correction` came before them.
    with pytest.raises(ValueError, match="betas is True"):
        te.FusedAdam([nn.Parameter(torch.ones(2))], 1e-2, True)  # type: ignore[arg-type]
