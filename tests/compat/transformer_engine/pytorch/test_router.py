"""Transformer Engine's functions of routers, against plain formulas."""

import pytest
import torch

from quaver.compat.transformer_engine.pytorch.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
from tests.close import assert_close


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("first", [False, True])
def test_weights_of_the_chosen_experts(function: str, first: bool) -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(11, 8), torch.randn(8) * (function != "softmax")
    weights, routing_map = fused_topk_with_score_function(
        logits, 2, first, None, None, 2.5, function, bias if bias.any() else None
    )
    scores = {
        "softmax": logits.softmax(-1) if first else logits,
        "sigmoid": logits.sigmoid(),
        "sqrtsoftplus": torch.nn.functional.softplus(logits).sqrt(),
    }[function]
    _, best = (scores + bias).topk(2)
    chosen = scores.gather(1, best)
    if function != "softmax":
        chosen = chosen / chosen.sum(1, keepdim=True)
    elif not first:
        chosen = chosen.softmax(-1)
    expected = torch.zeros(11, 8).scatter(1, best, chosen * 2.5)
    assert_close("weights", weights, expected, 1e-6)
    assert torch.equal(routing_map, expected > 0) and routing_map.dtype is torch.bool


def test_groups_limit_the_choice() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 8)
    _, routing_map = fused_topk_with_score_function(logits, 2, False, 4, 1, None, "sigmoid")
    groups = routing_map.view(9, 4, 2).any(-1).sum(1)
    assert (groups == 1).all() and (routing_map.sum(1) == 2).all()


def test_the_balancing_loss() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 8, requires_grad=True)
    routing_map, scores = fused_compute_score_for_moe_aux_loss(logits, 2, "softmax")
    assert_close("scores", scores, logits.softmax(-1), 1e-6)
    counts = routing_map.sum(0)
    loss = fused_moe_aux_loss(scores, counts, 9, 8, 2, 0.01)
    expected = (logits.softmax(-1).mean(0) * counts / (9 * 2)).sum() * 8 * 0.01
    assert_close("loss", loss, expected, 1e-6)
    (g,) = torch.autograd.grad(loss, logits)
    assert g.any()
