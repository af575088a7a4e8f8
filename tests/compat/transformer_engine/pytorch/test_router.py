"""Transformer Engine's functions of routers, against plain formulas."""

import pytest
import torch

from quaver.compat.transformer_engine.pytorch.router import (
    RoutingMapFormat,
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


@pytest.mark.parametrize("experts", [8, 11])
def test_logits_of_a_batch_and_maps_of_bits(experts: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, experts, requires_grad=True)
    weights, chosen = fused_topk_with_score_function(logits, 3, False, None, None, None, "sigmoid", None)
    assert weights.shape == logits.shape and torch.equal(chosen, weights > 0)
    weights.sum().backward()
    for form in ("bitmap_u8", "BITMAP_U8", 1, RoutingMapFormat.BITMAP_U8):
        _, packed = fused_topk_with_score_function(logits, 3, False, None, None, None, "sigmoid", None, form)
        assert packed.shape == (2, 5, -(-experts // 8)) and packed.dtype is torch.uint8
        bits = [[bool(row[e // 8] >> (e % 8) & 1) for e in range(experts)] for row in packed.view(10, -1)]
        assert torch.equal(torch.tensor(bits), chosen.view(10, experts))
    aux, scores = fused_compute_score_for_moe_aux_loss(logits, 3, "sigmoid", routing_map_format="bitmap_u8")
    assert torch.equal(aux, packed) and scores.shape == logits.shape
    with pytest.raises(ValueError, match="give 'bytemap' or 'bitmap_u8'"):
        fused_topk_with_score_function(logits, 3, routing_map_format="bits")


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_indices_of_the_chosen_experts_are_written_in_the_place_of_a_map(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 8, requires_grad=True)
    others = (False, None, None, None, "sigmoid", None)
    expected, chosen = fused_topk_with_score_function(logits, 3, *others)
    indices = torch.full((10, 3), -1, dtype=dtype)
    weights, given = fused_topk_with_score_function(logits, 3, *others, topk_indices=indices)
    assert given is indices and torch.equal(weights, expected)
    named = torch.zeros(10, 8, dtype=torch.bool).scatter(1, indices.long(), True)
    assert torch.equal(named, chosen.view(10, 8)) and (named.sum(1) == 3).all()
    (g,), (h,) = (torch.autograd.grad(w.square().sum(), logits) for w in (weights, expected))
    assert torch.equal(g, h)
    for wrong in (indices[:, :2], indices.float()):
        with pytest.raises(ValueError, match=r"give int16, int32 or int64 \[10, 3\]"):
            fused_topk_with_score_function(logits, 3, *others, topk_indices=wrong)
