"""Which experts a token goes to, and how much each counts: scores of logits, the k best, weights.

Sources: Shazeer et al. 2017, arXiv:1701.06538 (softmax of the k best); Switch, arXiv:2101.03961, and Mixtral,
arXiv:2401.04088; DeepSeek-V2, arXiv:2405.04434, and V3, arXiv:2412.19437 (sigmoid, groups, a bias that only chooses);
the square root of softplus is DeepSeek-V4's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.recipes.text import instance
from quaver.reference.moe import TINY, check_route
from quaver.torch.operations import ops

# ---- routing ---------------------------------------------------------------------------------------------

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


# ---- balancing -------------------------------------------------------------------------------------------
# What keeps experts evenly busy: losses of a `Routing`, and a bias that is moved in place of a loss.
#
# All are functions of what `route` gives: a layer has no loss of its own, and nothing is remembered between calls.


def token_counts(indices: Tensor, experts: int, mask: Tensor | None = None) -> Tensor:
    """How many choices fell on each expert.

    Args:
        indices: [T, k].
        mask: bool [T], False for tokens that do not count, such as padding.
    Returns:
        int64 [experts]. Exact.
    """
    ones = torch.ones_like(indices) if mask is None else mask.to(indices.dtype).unsqueeze(1).expand_as(indices)
    counts = torch.zeros(experts, dtype=torch.int64, device=indices.device)
    return counts.scatter_add(0, indices.reshape(-1), ones.reshape(-1))


def balance_loss(
    routing: Routing, *, sequences: int = 1, mask: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """E × the sum over experts of (share of choices that fell on it) × (mean of its probability).

    It is 1 where experts are equally busy and equally probable. The share has no gradient.

    Args:
        routing: of T tokens.
        sequences: into so many parts of T / sequences tokens, one after the other, is the batch divided, and the loss
            is the mean of theirs: DeepSeek's sequence-wise loss. 1 balances the whole batch, as Switch does.
        mask: bool [T], False for tokens that do not count, such as padding.
        counts: [E], choices of more tokens than these, such as `token_counts` summed over ranks: the shares are theirs,
            which balances a batch that lies on many ranks. With sequences=1 alone.
    Returns:
        A float32 scalar, differentiable; 0 of no tokens. It is 1 / k of the one in transformers, which sums shares.
    Raises:
        ValueError: sequences that do not divide the tokens, a mask or counts of another shape.
    Source: Fedus et al. 2021, arXiv:2101.03961, equation 4; Lepikhin et al. 2020, arXiv:2006.16668; DeepSeek-V3,
    arXiv:2412.19437, equations 17 to 20; Qiu et al. 2025, arXiv:2501.11873, of counts.
    """
    indices, probabilities = routing.indices, routing.probabilities
    (tokens, k), experts = indices.shape, probabilities.shape[1]
    _check(tokens, sequences, mask)
    if counts is not None and (sequences != 1 or tuple(counts.shape) != (experts,)):
        raise ValueError(f"counts are of a whole batch: give [{experts}] with sequences=1, not {tuple(counts.shape)}")
    each = tokens // sequences
    kept = torch.ones_like(probabilities[:, 0]) if mask is None else mask.to(probabilities.dtype)
    if mask is not None:
        probabilities = probabilities.masked_fill(~mask.unsqueeze(1), 0)
    if counts is None:
        ones = kept.unsqueeze(1).expand(tokens, k).reshape(sequences, each * k)
        chosen = kept.new_zeros((sequences, experts))
        chosen = chosen.scatter_add(1, indices.reshape(sequences, each * k), ones)
    else:
        chosen = counts.to(kept.dtype).unsqueeze(0)
    shares = chosen / chosen.sum(1, keepdim=True).clamp(min=1)
    size = kept.view(sequences, each).sum(1, keepdim=True).clamp(min=1)
    means = probabilities.view(sequences, each, experts).sum(1) / size
    return experts * (shares.detach() * means).sum(1).mean()


def z_loss(routing: Routing, mask: Tensor | None = None) -> Tensor:
    """The mean over tokens of the square of log(sum of exp(logits)), which keeps logits small.

    Args:
        mask: bool [T], False for tokens that do not count.
    Returns:
        A scalar of the logits' dtype, differentiable; 0 of no tokens.
    Source: Zoph et al. 2022, arXiv:2202.08906, equation 5.
    """
    logits = routing.logits
    _check(logits.shape[0], 1, mask)
    squares = torch.logsumexp(logits, -1).square()
    if mask is None:
        return squares.sum() / max(1, logits.shape[0])
    return torch.where(mask, squares, 0.0).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def update_bias(bias: Tensor, counts: Tensor, rate: float = 1e-3) -> None:
    """Raise the bias of experts with fewer choices than the mean by `rate`, and lower it of those with more, in place.

    Call it once a step, with the choices of all ranks and micro-batches: the bias then balances without a loss.

    Args:
        bias: [E], as `route` takes it: float32, since steps of 1e-3 vanish in 16 bits.
        counts: [E], of `token_counts`.
    Raises:
        ValueError: shapes that differ, or a bias in 16 bits.
    Exact. Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437.
    """
    if bias.shape != counts.shape or bias.dim() != 1:
        raise ValueError(f"bias and counts are of the same experts; these are {tuple(bias.shape)} and {counts.shape}")
    if bias.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"bias is {bias.dtype}, in which steps of {rate} vanish: keep it in float32")
    # Compared as whole numbers: a float32 mean of large counts is off.
    bias += rate * torch.sign(counts.sum() - counts * counts.shape[0]).to(bias.dtype)


def _check(tokens: int, sequences: int, mask: Tensor | None) -> None:
    if sequences < 1 or tokens % sequences:
        raise ValueError(f"{sequences} sequences do not divide {tokens} tokens: give the batch's number of sequences")
    if mask is not None and (tuple(mask.shape) != (tokens,) or mask.dtype is not torch.bool):
        raise ValueError(
            f"mask is bool [{tokens}], one a token; this one is {mask.dtype} {tuple(mask.shape)}: flatten it"
        )


# ---- router ----------------------------------------------------------------------------------------------
# The matrix that scores experts for each token, in high precision under every recipe, and how tokens choose by it.


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How each token chooses experts: the arguments of `route`, and what a router has besides."""

    # How many there are, and how many a token goes to.
    experts: int
    k: int
    scores: str = "softmax"
    softmax_first: bool = False
    groups: int | None = None
    top_groups: int | None = None
    best_of_group: int | None = None
    scale: float = 1.0
    normalize: bool | None = None
    # A parameter that is added to the logits, as gpt-oss has it.
    router_bias: bool = False
    # A buffer that is added to scores where experts are chosen, and moved by `Router.update_bias`.
    balance_bias: bool = False

    def check(self) -> None:
        """Refuse what does not fit. Raises: ValueError."""
        given = self.groups, self.top_groups, self.best_of_group, None, self.normalize
        check_route((0, self.experts), self.k, self.scores, self.softmax_first, *given)


class Router(nn.Module):
    """Logits of all experts for each token, and the choice by them.

    Args:
        dim: features of a token.
        choice: how experts are chosen.
    Parameters: `weight` [experts, dim], and `bias` [experts] if there is one, which begin as nn.Linear's. Buffer:
        `balance` [experts], float32 whatever the module is cast to, 0 at first.
    No recipe and no torch.autocast reaches it: logits are float32's, or float64's, of any dtype of weights.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    balance: Tensor | None

    def __init__(
        self, dim: int, choice: RoutingConfig, *, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        choice.check()
        self.dim, self.choice = dim, choice
        self.weight = nn.Parameter(torch.empty((choice.experts, dim), device=device, dtype=dtype))
        bias = nn.Parameter(torch.empty(choice.experts, device=device, dtype=dtype)) if choice.router_bias else None
        self.register_parameter("bias", bias)
        balance = torch.zeros(choice.experts, dtype=torch.float32, device=device) if choice.balance_bias else None
        self.register_buffer("balance", balance)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill weight and bias as nn.Linear does, and balance with 0."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.dim) if self.dim else 0.0
            nn.init.uniform_(self.bias, -bound, bound)
        if self.balance is not None:
            nn.init.zeros_(self.balance)

    def forward(self, x: Tensor) -> Routing:
        """The routing of x [T, dim]."""
        choice, wide = self.choice, torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(ops.autocast_device(x), enabled=False):
            bias = None if self.bias is None else self.bias.to(wide)
            logits = F.linear(x.to(wide), self.weight.to(wide), bias)
            return route(
                logits,
                choice.k,
                scores=choice.scores,
                softmax_first=choice.softmax_first,
                groups=choice.groups,
                top_groups=choice.top_groups,
                best_of_group=choice.best_of_group,
                bias=self.balance,
                scale=choice.scale,
                normalize=choice.normalize,
            )

    def update_bias(self, counts: Tensor, rate: float = 1e-3) -> None:
        """Move `balance` towards even choices, once a step.

        Args:
            counts: [experts], choices of all tokens of the step, as `token_counts` gives them, summed over ranks.
        Raises:
            ValueError: there is no balance: make the router with balance_bias=True.
        """
        if self.balance is None:
            raise ValueError("this router has no balance to move: make it with balance_bias=True")
        update_bias(self.balance, counts, rate)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move and cast, but leave the balance its dtype: steps of 1e-3 vanish in 16 bits."""
        balance = self._buffers.pop("balance", None)
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers["balance"] = balance
        if balance is not None:
            fresh = balance.is_meta and not self.weight.is_meta
            like = torch.zeros_like if fresh else torch.Tensor.to
            self._buffers["balance"] = like(balance, device=self.weight.device)
        return self

    def extra_repr(self) -> str:
        choice = self.choice
        return f"{self.dim}, experts={choice.experts}, k={choice.k}, scores={choice.scores!r}" + (
            f", groups={choice.groups}, top_groups={choice.top_groups}" * (choice.groups is not None)
        )
