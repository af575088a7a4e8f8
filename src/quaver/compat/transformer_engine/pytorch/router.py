"""Transformer Engine's functions of routers over `quaver.torch.route`."""

import enum

import torch
from torch import Tensor
from torch.nn.functional import pad

from quaver.torch.blocks.experts.routing import Routing, route


class RoutingMapFormat(enum.IntEnum):
    """How a routing map is stored."""

    #: bool [tokens, experts].
    BYTEMAP = 0
    #: uint8 [tokens, ceil(experts / 8)], expert e is bit e % 8 of byte e // 8.
    BITMAP_U8 = 1


def fused_topk_with_score_function(
    logits: Tensor, topk: int, use_pre_softmax: bool = False, num_groups: int | None = None,
    group_topk: int | None = None, scaling_factor: float | None = None, score_function: str = "softmax",
    expert_bias: Tensor | None = None, routing_map_format: str | int = RoutingMapFormat.BYTEMAP,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights of the logits' shape [..., experts], 0 of an expert that a token has not chosen, and the routing map.

    Raises:
        ValueError: as `quaver.torch.route`; an unknown format of the map.
    """
    routing = route(
        logits.reshape(-1, logits.shape[-1]),
        topk,
        scores=score_function,
        softmax_first=use_pre_softmax and score_function == "softmax",
        groups=num_groups,
        top_groups=group_topk,
        bias=expert_bias,
        scale=1.0 if scaling_factor is None else scaling_factor,
    )
    weights = torch.zeros_like(routing.logits).scatter(1, routing.indices, routing.weights)
    return weights.to(logits.dtype).view(logits.shape), _routing_map(routing, routing_map_format)


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str, routing_map_format: str | int = RoutingMapFormat.BYTEMAP
) -> tuple[Tensor, Tensor]:
    """The routing map of the experts that each token would choose, and scores [tokens, experts] that add up to 1."""
    routing = route(logits.reshape(-1, logits.shape[-1]), topk, scores=score_function)
    return _routing_map(routing, routing_map_format), routing.probabilities


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """coeff experts / (topk T²) times the sum over experts of their tokens times their probabilities."""
    of_experts = probs.float().sum(0) * tokens_per_expert
    return of_experts.sum() * (coeff * num_experts / (topk * total_num_tokens**2))


def _routing_map(routing: Routing, form: str | int) -> Tensor:
    try:
        kind = RoutingMapFormat[form.upper()] if isinstance(form, str) else RoutingMapFormat(form)
    except (KeyError, ValueError):
        raise ValueError(f"routing_map_format is {form!r}; give 'bytemap' or 'bitmap_u8'") from None
    chosen = torch.zeros_like(routing.logits, dtype=torch.bool).scatter(1, routing.indices, True)
    if kind is RoutingMapFormat.BYTEMAP:
        return chosen
    bits = pad(chosen, (0, -chosen.shape[1] % 8)).unflatten(1, (-1, 8)).to(torch.uint8)  # [T, bytes, 8]
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(2, dtype=torch.uint8)
