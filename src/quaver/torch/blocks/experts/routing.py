"""Which experts a token goes to, and how much each counts: scores of logits, the k best, weights.

Sources: Shazeer et al. 2017, arXiv:1701.06538 (softmax of the k best); Switch, arXiv:2101.03961, and Mixtral,
arXiv:2401.04088; DeepSeek-V2, arXiv:2405.04434, and V3, arXiv:2412.19437 (sigmoid, groups, a bias that only chooses);
the square root of softplus is DeepSeek-V4's.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.core.reference.experts import TINY, check_route
from quaver.core.text.given import instance

#: Below it softplus(z) is exp(z) in float32, and the derivative of its root is still a number.
FAR = -40.0


class Routing(NamedTuple):
    """What `route` decides for T tokens, E experts and k choices."""

    #: int64 [T, k], the best first.
    indices: Tensor
    #: [T, k], float32, or float64 of such logits; differentiable.
    weights: Tensor
    #: [T, E], of the weights' dtype: scores that add up to 1 for each token, which balancing losses take;
    #: differentiable.
    probabilities: Tensor
    #: [T, E], of the weights' dtype: what was given, which the z loss takes.
    logits: Tensor


def _root_of_softplus(z: Tensor) -> Tensor:
    near = F.softplus(z.clamp(min=FAR)).sqrt()
    return torch.where(z < FAR, (z / 2).exp(), near)


#: Logits to scores, each of them monotone.
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: torch.softmax(z, -1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _root_of_softplus,
}

#: Logits to the logarithms of their scores.
LOG_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: z,
    "sigmoid": F.logsigmoid,
    "sqrtsoftplus": lambda z: torch.where(z < FAR, z, F.softplus(z.clamp(min=FAR)).log()) / 2,
}


def route(
    logits: Tensor,
    k: int,
    *,
    scores: str = "softmax",
    softmax_first: bool = False,
    groups: int | None = None,
    top_groups: int | None = None,
    best_of_group: int | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    normalize: bool | None = None,
) -> Routing:
    """Choose k of E experts for each token by their scores, and give each a weight.

    Without bias and groups the k largest logits are chosen. Else the k largest of score + bias, within the
    `top_groups` groups of neighbouring experts whose best have the largest sum.

    Args:
        logits: [T, E], float32, bfloat16, float16 or float64; computed with in float32 or float64.
        k: experts a token.
        scores: a row of `SCORES`.
        softmax_first: take the softmax over all experts and then choose, as Qwen3 does; False takes it over the chosen
            logits alone, as gpt-oss does, which with normalize=True is the same.
        groups, top_groups: into how many groups of E / groups experts, and how many of them a token may choose from.
        best_of_group: how many scores of a group are summed; None is k / top_groups, rounded down, at least 1.
        bias: [E], added to scores where experts are chosen and not where they are weighted; gets no gradient.
        scale: multiplies the weights.
        normalize: divide the chosen scores by their sum; None does of sigmoid and sqrtsoftplus where k is more than 1.
    Returns:
        Of equal scores the expert of the lower number is chosen. NaN counts as the largest: a token with one chooses
        experts that exist, and its weights are NaN, or of scores that are not normalized those of NaN logits alone.
        A logit of -inf has score 0.
    Raises:
        ValueError: options that do not fit one another or the logits.
    Exact: the choice without bias and groups, by the logits in float32. Bounded: scores, weights and their gradients,
        relative RMS 1e-6 of float64 in float32.
    """
    instance("route", "logits", logits, Tensor, "torch.randn(tokens, experts)")
    of_bias = None if bias is None else tuple(bias.shape)
    check_route(tuple(logits.shape), k, scores, softmax_first, groups, top_groups, best_of_group, of_bias, normalize)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    late = scores == "softmax" and not softmax_first
    score = z if late else SCORES[scores](z)
    with torch.no_grad():
        by = z if bias is None and groups is None else score
        by = by if bias is None else by + bias.to(by.dtype)
        if groups is not None and top_groups is not None:
            by = _within_groups(by, groups, top_groups, best_of_group or max(1, k // top_groups))
        indices = best(by, k)
    chosen = score.gather(1, indices)
    if late:
        chosen = torch.softmax(chosen, -1)
    elif normalize or (normalize is None and scores != "softmax" and k > 1):
        chosen = chosen / (chosen.sum(-1, keepdim=True) + TINY)
    # From logarithms: at logits near -60 the sum of all scores is below any floor that a division could have.
    lowest = torch.finfo(z.dtype).min / 2
    probabilities = torch.softmax(LOG_SCORES[scores](z).clamp(min=lowest), -1)
    return Routing(indices, chosen if scale == 1.0 else chosen * scale, probabilities, z)


def best(x: Tensor, k: int) -> Tensor:
    """The places of the k largest of each row of x [T, E], int64 [T, k], in descending order.

    Of equal numbers the first comes first; NaN is more than infinity, and -0 equals 0. Exact: compared as float32.
    """
    bits = (x.to(torch.float32) + 0.0).view(torch.int32)
    bits = torch.where(x.isnan(), 0x7FC00000, bits)
    # Negative numbers descend as their bits ascend.
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last_first = torch.arange(x.shape[1] - 1, -1, -1, dtype=torch.int64, device=x.device)
    # No two keys of a row are equal, so that torch has no choice among them.
    keys = (order.to(torch.int64) << 32) | last_first
    return keys.topk(k, -1)[1]


def _within_groups(by: Tensor, groups: int, top: int, count: int) -> Tensor:
    """[T, E] with -inf for the experts of all but the best groups."""
    each = by.unflatten(1, (groups, by.shape[1] // groups))
    sums = each.topk(count, -1)[0].sum(-1)
    keep = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best(sums, top), True)
    return each.masked_fill(~keep.unsqueeze(-1), -torch.inf).flatten(1)
