"""Transformer Engine's router functions, implemented by `quaver.torch.route`."""

import enum
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from quaver.torch.nn.moe.routing import Routing, route


class RoutingMapFormat(enum.IntEnum):
    """Storage format of a routing map."""

    #: bool [..., experts].
    BYTEMAP = 0
    #: uint8 [..., ceil(experts / 8)]; expert e is bit e % 8 of byte e // 8.
    BITMAP_U8 = 1


def fused_topk_with_score_function(
    logits: Tensor, topk: int, use_pre_softmax: bool = False, num_groups: int | None = None,
    group_topk: int | None = None, scaling_factor: float | None = None, score_function: str = "softmax",
    expert_bias: Tensor | None = None, routing_map_format: str | int = RoutingMapFormat.BYTEMAP,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return weights of the logits' shape [..., experts], 0 for experts that are not chosen, and the routing map.

    Args:
        topk_indices: integer tensor [tokens, topk] to write the chosen experts into; it is returned instead of the map.
    Raises:
        ValueError: as in `quaver.torch.route`; an unknown map format, or indices of another shape or dtype.
    """
    tokens = logits.numel() // max(logits.shape[-1], 1)
    if topk_indices is not None and (
        topk_indices.shape != (tokens, topk) or topk_indices.dtype not in (torch.int16, torch.int32, torch.int64)
    ):
        raise ValueError(
            f"topk_indices is {topk_indices.dtype} {tuple(topk_indices.shape)}; give int16, int32 or int64 "
            f"[{tokens}, {topk}]"
        )
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
    weights = weights.to(logits.dtype).view(logits.shape)
    if topk_indices is not None:
        return weights, topk_indices.copy_(routing.indices)
    return weights, _routing_map(routing, routing_map_format, logits.shape[:-1])


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str, routing_map_format: str | int = RoutingMapFormat.BYTEMAP
) -> tuple[Tensor, Tensor]:
    """Return the routing map of the chosen experts, and scores of the logits' shape that sum to 1 per token."""
    routing = route(logits.reshape(-1, logits.shape[-1]), topk, scores=score_function)
    scores = routing.probabilities.view(logits.shape)
    return _routing_map(routing, routing_map_format, logits.shape[:-1]), scores


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """Return the auxiliary loss coeff experts / (topk T²) × Σ over experts of tokens × probabilities."""
    expert_loss = probs.float().sum(0) * tokens_per_expert
    return expert_loss.sum() * (coeff * num_experts / (topk * total_num_tokens**2))


def _routing_map(routing: Routing, form: str | int, lead: Sequence[int]) -> Tensor:
    """Return the chosen experts of each token in a format: [*lead, experts] or [*lead, bytes]."""
    try:
        kind = RoutingMapFormat[form.upper()] if isinstance(form, str) else RoutingMapFormat(form)
    except (KeyError, ValueError):
        raise ValueError(f"routing_map_format is {form!r}; give 'bytemap' or 'bitmap_u8'") from None
    chosen = torch.zeros_like(routing.logits, dtype=torch.bool).scatter(1, routing.indices, True)
    if kind is RoutingMapFormat.BYTEMAP:
        return chosen.view(*lead, chosen.shape[1])
    bits = pad(chosen, (0, -chosen.shape[1] % 8)).unflatten(1, (-1, 8)).to(torch.uint8)  # [T, bytes, 8]
    packed = (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(2, dtype=torch.uint8)
    return packed.view(*lead, packed.shape[1])
