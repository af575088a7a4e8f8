"""Transformer Engine's functions of routers over `quaver.torch.route`."""

import torch
from torch import Tensor

from quaver.torch.blocks.experts.routing import Routing, route


def fused_topk_with_score_function(
    logits: Tensor, topk: int, use_pre_softmax: bool = False, num_groups: int | None = None,
    group_topk: int | None = None, scaling_factor: float | None = None, score_function: str = "softmax",
    expert_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights [T, experts], 0 of an expert that a token has not chosen, and which it has, bool [T, experts].

    Raises:
        ValueError: as `quaver.torch.route`.
    """
    routing = route(
        logits,
        topk,
        scores=score_function,
        softmax_first=use_pre_softmax and score_function == "softmax",
        groups=num_groups,
        top_groups=group_topk,
        bias=expert_bias,
        scale=1.0 if scaling_factor is None else scaling_factor,
    )
    weights = torch.zeros_like(routing.logits).scatter(1, routing.indices, routing.weights)
    return weights.to(logits.dtype), _chosen(routing)


def fused_compute_score_for_moe_aux_loss(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """Which experts each token would choose, bool [T, experts], and scores that add up to 1."""
    routing = route(logits, topk, scores=score_function)
    return _chosen(routing), routing.probabilities


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """coeff experts / (topk T²) times the sum over experts of their tokens times their probabilities."""
    of_experts = probs.float().sum(0) * tokens_per_expert
    return of_experts.sum() * (coeff * num_experts / (topk * total_num_tokens**2))


def _chosen(routing: Routing) -> Tensor:
    return torch.zeros_like(routing.logits, dtype=torch.bool).scatter(1, routing.indices, True)
