"""Losses and gradients of rows of logits: the kernel against float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.torch.backends.gpu import cross_entropy as gpu
from quaver.torch.nn.loss import LossConfig, rows
from tests.close import assert_bitwise, assert_close
from tests.kernels.compare import DEVICE

RULES = {
    "plain": LossConfig(),
    "smoothing": LossConfig(label_smoothing=0.1),
    "z loss": LossConfig(z_loss=1e-2),
    "soft cap": LossConfig(soft_cap=5.0),
    "all": LossConfig(ignore_index=1, label_smoothing=0.2, z_loss=1e-3, soft_cap=30.0),
}
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 4e-4}
#: Smaller than a block, whole blocks, and blocks with a remainder.
COLUMNS = [2, 7, 64, 150]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: Any) -> None:
    monkeypatch.setattr(gpu, "BLOCK", 32)
    gpu._passes.plans.clear()


def exact(logits: Tensor, targets: Tensor, weights: Tensor | None, rule: LossConfig) -> tuple[Tensor, Tensor]:
    """Losses and gradients in float64 by autograd."""
    z = given = logits.double().requires_grad_()
    if rule.soft_cap:
        z = rule.soft_cap * torch.tanh(z / rule.soft_cap)
    options: Any = {"ignore_index": rule.ignore_index, "label_smoothing": rule.label_smoothing}
    losses = F.cross_entropy(z, targets, reduction="none", **options)
    losses = losses + torch.where(targets != rule.ignore_index, rule.z_loss * z.logsumexp(-1) ** 2, 0)
    (grad,) = torch.autograd.grad(losses, given, losses.new_ones(losses.shape) if weights is None else weights.double())
    return losses.detach(), grad


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_losses_and_gradients_match_float64(rule: LossConfig, dtype: torch.dtype, columns: int) -> None:
    targets = torch.randint(columns, (5,), device=DEVICE)
    targets[1] = rule.ignore_index
    logits = (torch.randn(5, columns + 3, device=DEVICE) * 8).to(dtype)[:, :columns]
    for weights in (None, torch.randn(5, device=DEVICE)):
        losses, grad = exact(logits, targets, weights, rule)
        for run in (gpu.rows, rows):
            in_place = logits.clone()
            assert_close("losses", run(in_place, targets, weights, True, rule), losses, 1e-5)
            assert_close("gradient", in_place, grad, DTYPES[dtype])
    plans = logits.clone()
    assert_close("losses alone", gpu.rows(plans, targets, None, False, rule), losses, 1e-5)
    assert_bitwise(plans, logits)


def test_infinities_and_nan_match_torch() -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.zeros(7, 70, device=DEVICE)
    logits[0, :40] = -inf
    logits[1] = -inf
    logits[2, 3] = inf
    logits[3, 69] = nan
    logits[4] = 3e38
    logits[5, 2] = -inf
    logits[6] = -3e38
    targets = torch.tensor([50, 0, 3, 1, 2, 2, 5], device=DEVICE)
    expected = F.cross_entropy(logits, targets, reduction="none")
    in_place = logits.clone()
    assert_close("losses", gpu.rows(in_place, targets, None, True, LossConfig()), expected, 1e-6)
    given = logits.clone().requires_grad_()
    F.cross_entropy(given, targets, reduction="sum").backward()
    assert_close("gradient", in_place, given.grad, 1e-6)


def test_an_ignored_row_has_no_gradient_and_an_unknown_target_gives_nan() -> None:
    logits = torch.full((4, 50), torch.nan, device=DEVICE)
    logits[1:] = 1.0
    targets = torch.tensor([-100, 50, -1, 2**40], device=DEVICE)
    in_place = logits.clone()
    losses = gpu.rows(in_place, targets, None, True, LossConfig())
    assert losses[0] == 0 and not in_place[0].any()
    assert losses[1:].isnan().all() and in_place[1:].isnan().all()
    plain = logits.clone()
    assert_bitwise(rows(plain, targets, None, True, LossConfig()), losses)
    assert_bitwise(plain, in_place)


def test_strided_targets_and_weights_are_read_in_place() -> None:
    logits = torch.randn(6, 40, device=DEVICE)
    targets = torch.randint(40, (6, 3), device=DEVICE)[:, 1]
    weights = torch.randn(1, device=DEVICE).expand(6)
    near, separate = logits.clone(), logits.clone()
    expected = gpu.rows(near, targets.clone(), weights.clone(), True, LossConfig())
    assert_bitwise(gpu.rows(separate, targets, weights, True, LossConfig()), expected)
    assert_bitwise(separate, near)
