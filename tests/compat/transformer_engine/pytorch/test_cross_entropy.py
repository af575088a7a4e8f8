"""`parallel_cross_entropy` on one rank is torch's, and saves the logits for backward, no copy of them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quaver.compat.transformer_engine.pytorch as te
from tests.close import assert_bitwise, assert_close


def given(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 5, 64).to(dtype).requires_grad_(), torch.randint(0, 64, (2, 5))
    targets[0, 1] = -100
    return logits, targets


def test_losses_and_gradients_equal_torch() -> None:
    logits, targets = given()
    for smoothing in (0.0, 0.1):
        flat = logits.float().view(-1, 64), targets.flatten()
        expected = F.cross_entropy(*flat, reduction="none", label_smoothing=smoothing).view(2, 5)
        losses = te.parallel_cross_entropy(logits, targets.flatten(), smoothing)
        assert losses.dtype is torch.float32
        assert_close("losses", losses, expected, 1e-6)
        mean = te.parallel_cross_entropy(logits, targets, smoothing, reduce_loss=True)
        assert_close("mean", mean, expected.sum() / 9, 1e-6)
        (g,), (h,) = torch.autograd.grad(mean, logits), torch.autograd.grad(expected.sum() / 9, logits)
        assert_close("gradient", g, h, 3e-3)
    # Of no token torch's mean is NaN, and its is 0.
    assert te.parallel_cross_entropy(logits, torch.full((2, 5), 7), reduce_loss=True, ignore_idx=7) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduces", [False, True])
def test_the_logits_alone_are_saved(dtype: torch.dtype, reduces: bool) -> None:
    logits, targets = given(dtype)
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        te.parallel_cross_entropy(logits, targets, reduce_loss=reduces)
    assert logits.untyped_storage().data_ptr() in saved
    # Beside them a target and two numbers of each of ten tokens, and how many count.
    assert sum(saved.values()) <= logits.untyped_storage().nbytes() + 10 * 16 + 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_may_take_the_memory_of_the_logits(dtype: torch.dtype) -> None:
    logits, targets = given(dtype)
    (expected,) = torch.autograd.grad(te.parallel_cross_entropy(logits, targets, 0.1, reduce_loss=True), logits)
    own: Any = logits.detach().clone().requires_grad_()
    loss = te.parallel_cross_entropy(own, targets, 0.1, reduce_loss=True, overwrite_input=True)
    (g,) = torch.autograd.grad(loss, own, retain_graph=True)
    assert_bitwise(g, expected)
    assert g.data_ptr() == own.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, own)
    with pytest.raises(ValueError, match="cannot be overwritten: give contiguous ones"):
        te.parallel_cross_entropy(own.detach().transpose(0, 1), targets.T, overwrite_input=True)


def test_invalid_arguments_give_a_clear_error() -> None:
    logits, targets = given()
    for changed, sentence in ((targets[:1], "need integers of shape"), (targets + 64, "is outside 0 … 63")):
        with pytest.raises(ValueError, match=sentence):
            te.parallel_cross_entropy(logits, changed)
