"""`FusedAdam` and `FusedSGD` step as torch's do, and keep moments in the dtypes that are asked for."""

from typing import Any

import pytest
import torch
from torch import nn

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
    kept = sum(
        t.numel() * t.element_size() for s in optimizers[0].state.values() for t in s.values() if torch.is_tensor(t)
    )
    assert kept < 3.1 * 128 * 128


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


def test_what_is_not_there_is_a_sentence() -> None:
    p = [nn.Parameter(torch.zeros(4))]
    for options, sentence in (
        ({"amsgrad": True}, "has no amsgrad"),
        ({"exp_avg_dtype": torch.int8}, "exp_avg_dtype is torch.int8; give one of"),
        ({"use_decoupled_grad": True}, "use_decoupled_grad is not there"),
    ):
        with pytest.raises(ValueError, match=sentence):
            te.FusedAdam(p, **options)  # type: ignore[arg-type]


def test_betas_come_third() -> None:
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
