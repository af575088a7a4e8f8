"""`parallel_cross_entropy` on one rank is torch's."""

import torch
import torch.nn.functional as F

import quaver.compat.transformer_engine.pytorch as te
from tests.close import assert_close


def test_losses_and_gradients_are_torchs() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 5, 11).bfloat16().requires_grad_(), torch.randint(0, 11, (2, 5))
    targets[0, 1] = -100
    for smoothing in (0.0, 0.1):
        flat = logits.float().view(-1, 11), targets.flatten()
        expected = F.cross_entropy(*flat, reduction="none", label_smoothing=smoothing).view(2, 5)
        losses = te.parallel_cross_entropy(logits, targets, smoothing)
        assert losses.dtype is torch.float32
        assert_close("losses", losses, expected, 1e-6)
        mean = te.parallel_cross_entropy(logits, targets, smoothing, reduce_loss=True)
        assert_close("mean", mean, expected.sum() / 9, 1e-6)
        (g,), (h,) = torch.autograd.grad(mean, logits), torch.autograd.grad(expected.sum() / 9, logits)
        assert_close("gradient", g, h, 1e-2)
