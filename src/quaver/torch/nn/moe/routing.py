"""Routing of tokens to experts: scores from logits, the k best experts, and their weights; balancing losses and bias.

Sources: Shazeer et al. 2017, arXiv:1701.06538 (softmax of the k best); Switch, arXiv:2101.03961, and Mixtral,
arXiv:2401.04088; DeepSeek-V2, arXiv:2405.04434, and V3, arXiv:2412.19437 (sigmoid, groups, a bias for selection only);
the square root of softplus is DeepSeek-V4's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.recipes.text import check_instance
from quaver.reference.moe import TINY, check_route
from quaver.torch.operations import ops

# ---- route ----

#: Logit below which softplus(z) equals exp(z) in float32; above it the derivative of its root is finite.
FAR = -40.0


class Routing(NamedTuple):
    """Result of `route` for T tokens, E experts and k choices."""

    #: int64 [T, k], best expert first.
    indices: Tensor
    #: [T, k], float32, or float64 for float64 logits; differentiable.
    weights: Tensor
    #: [T, E], dtype of the weights: scores normalized to sum 1 per token, for balancing losses; differentiable.
    probabilities: Tensor
    #: [T, E], dtype of the weights: the input logits, for the z loss.
    logits: Tensor


def _root_of_softplus(z: Tensor) -> Tensor:
    near = F.softplus(z.clamp(min=FAR)).sqrt()
    return torch.where(z < FAR, (z / 2).exp(), near)


#: Score functions of logits, all monotone.
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: torch.softmax(z, -1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _root_of_softplus,
}

#: Logarithms of the score functions, up to a constant per token.
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
    """Choose k of E experts per token by their scores, and compute a weight for each.

    Without bias and groups, the k largest logits are chosen. Otherwise the k largest of score + bias are chosen, from
    the `top_groups` groups of neighbouring experts whose best scores have the largest sum.

    Args:
        logits: [T, E], float32, bfloat16, float16 or float64; computed in float32 or float64.
        k: experts per token.
        scores: a name in `SCORES`.
        softmax_first: True takes the softmax over all experts before choosing, as Qwen3 does. False takes it over the
            chosen logits only, as gpt-oss does, which equals True with normalize=True.
        groups: number of groups of E / groups experts.
        top_groups: number of groups that a token may choose from.
        best_of_group: number of scores per group that are summed; None is k / top_groups, rounded down, at least 1.
        bias: [E], added to scores for the choice but not for the weights; gets no gradient.
        scale: factor of the weights.
        normalize: divide the chosen scores by their sum; None does so for sigmoid and sqrtsoftplus if k > 1.
    Returns:
        Of equal scores the expert with the lower number is chosen. NaN counts as the largest: a token with NaN chooses
        valid experts, and all its weights are NaN; without normalization only those of NaN logits. A logit of -inf has
        score 0.
    Raises:
        ValueError: options that do not fit each other or the logits.
    Exact: the choice without bias and groups, by the logits in float32. Bounded: scores, weights and their gradients,
        relative RMS 1e-6 of float64 in float32.
    """
    check_instance("route", "logits", logits, Tensor, "torch.randn(tokens, experts)")
    bias_shape = None if bias is None else tuple(bias.shape)
    check_route(tuple(logits.shape), k, scores, softmax_first, groups, top_groups, best_of_group, bias_shape, normalize)
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
    # Computed from log scores: at logits near -60 the sum of the scores underflows any epsilon of a division.
    lowest = torch.finfo(z.dtype).min / 2
    probabilities = torch.softmax(LOG_SCORES[scores](z).clamp(min=lowest), -1)
    return Routing(indices, chosen if scale == 1.0 else chosen * scale, probabilities, z)


def best(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest values of each row of x [T, E], int64 [T, k], in descending order.

    Of equal values the first comes first; NaN is larger than infinity, and -0 equals 0. Exact: compared as float32.
    """
    bits = (x.to(torch.float32) + 0.0).view(torch.int32)
    bits = torch.where(x.isnan(), 0x7FC00000, bits)
    # The bits of negative floats sort in reverse order.
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last_first = torch.arange(x.shape[1] - 1, -1, -1, dtype=torch.int64, device=x.device)
    # The keys of a row are unique, so topk's result is unambiguous.
    keys = (order.to(torch.int64) << 32) | last_first
    return keys.topk(k, -1)[1]


def _within_groups(by: Tensor, groups: int, top: int, count: int) -> Tensor:
    """Return [T, E] with -inf for the experts outside of the best groups."""
    each = by.unflatten(1, (groups, by.shape[1] // groups))
    sums = each.topk(count, -1)[0].sum(-1)
    keep = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best(sums, top), True)
    return each.masked_fill(~keep.unsqueeze(-1), -torch.inf).flatten(1)


# ---- load balancing: losses of a `Routing`, and a bias that replaces a loss ----
#
# All are functions of `route`'s result. Layers have no loss of their own, and no state is stored between calls.


def token_counts(indices: Tensor, experts: int, mask: Tensor | None = None) -> Tensor:
    """Count how often each expert was chosen.

    Args:
        indices: [T, k].
        experts: number of experts.
        mask: bool [T], False for tokens to ignore, such as padding.
    Returns:
        int64 [experts].

    Exact.
    """
    ones = torch.ones_like(indices) if mask is None else mask.to(indices.dtype).unsqueeze(1).expand_as(indices)
    counts = torch.zeros(experts, dtype=torch.int64, device=indices.device)
    return counts.scatter_add(0, indices.reshape(-1), ones.reshape(-1))


def balance_loss(
    routing: Routing, *, sequences: int = 1, mask: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """Load-balancing loss: E × the sum over experts of (share of choices) × (mean probability).

    It is 1 if all experts are equally loaded and equally probable. The share has no gradient.

    Args:
        routing: routing of T tokens.
        sequences: number of consecutive parts of T / sequences tokens into which the batch is divided; the loss is
            their mean (DeepSeek's sequence-wise loss). 1 balances the whole batch, as Switch does.
        mask: bool [T], False for tokens to ignore, such as padding.
        counts: [E], choices of more tokens than these, such as `token_counts` summed over ranks. The shares are
            computed from them, which balances a batch that is spread over ranks. Requires sequences=1.
    Returns:
        A differentiable float32 scalar; 0 for no tokens. It is 1 / k of transformers' loss, which sums shares.
    Raises:
        ValueError: sequences that do not divide the tokens, or a mask or counts of another shape.
    Source: Fedus et al. 2021, arXiv:2101.03961, equation 4; Lepikhin et al. 2020, arXiv:2006.16668; DeepSeek-V3,
    arXiv:2412.19437, equations 17 to 20; for counts Qiu et al. 2025, arXiv:2501.11873.
    """
    indices, probabilities = routing.indices, routing.probabilities
    (tokens, k), experts = indices.shape, probabilities.shape[1]
    _check(tokens, sequences, mask)
    if counts is not None and (sequences != 1 or tuple(counts.shape) != (experts,)):
        raise ValueError(
            f"counts apply to the whole batch: give [{experts}] with sequences=1, not {tuple(counts.shape)}"
        )
    each = tokens // sequences
    token_mask = torch.ones_like(probabilities[:, 0]) if mask is None else mask.to(probabilities.dtype)
    if mask is not None:
        probabilities = probabilities.masked_fill(~mask.unsqueeze(1), 0)
    if counts is None:
        ones = token_mask.unsqueeze(1).expand(tokens, k).reshape(sequences, each * k)
        chosen = token_mask.new_zeros((sequences, experts))
        chosen = chosen.scatter_add(1, indices.reshape(sequences, each * k), ones)
    else:
        chosen = counts.to(token_mask.dtype).unsqueeze(0)
    shares = chosen / chosen.sum(1, keepdim=True).clamp(min=1)
    size = token_mask.view(sequences, each).sum(1, keepdim=True).clamp(min=1)
    means = probabilities.view(sequences, each, experts).sum(1) / size
    return experts * (shares.detach() * means).sum(1).mean()


def z_loss(routing: Routing, mask: Tensor | None = None) -> Tensor:
    """Router z-loss: the mean over tokens of log(sum of exp(logits))², which keeps logits small.

    Args:
        routing: routing of T tokens.
        mask: bool [T], False for tokens to ignore.
    Returns:
        A differentiable scalar of the logits' dtype; 0 for no tokens.
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
    """Raise the bias of experts with fewer choices than the mean by `rate`, and lower that of the others, in place.

    Call it once per step with the choices of all ranks and micro-batches; the bias then balances without a loss.

    Args:
        bias: [E], as `route` takes it: float32, since steps of 1e-3 vanish in 16 bits.
        counts: [E], from `token_counts`.
        rate: step size.
    Raises:
        ValueError: shapes that differ, or a bias in 16 bits.

    Exact. Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437.
    """
    if bias.shape != counts.shape or bias.dim() != 1:
        raise ValueError(f"bias and counts are of the same experts; these are {tuple(bias.shape)} and {counts.shape}")
    if bias.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"bias is {bias.dtype}, in which steps of {rate} vanish: use float32")
    # Compare integers: a float32 mean of large counts is inexact.
    bias += rate * torch.sign(counts.sum() - counts * counts.shape[0]).to(bias.dtype)


def _check(tokens: int, sequences: int, mask: Tensor | None) -> None:
    if sequences < 1 or tokens % sequences:
        raise ValueError(f"{sequences} sequences do not divide {tokens} tokens: give the batch's number of sequences")
    if mask is not None and (tuple(mask.shape) != (tokens,) or mask.dtype is not torch.bool):
        raise ValueError(
            f"mask is bool [{tokens}], one a token; this one is {mask.dtype} {tuple(mask.shape)}: flatten it"
        )


# ---- router: logits of all experts per token, in high precision under every recipe ----


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """Routing options: the arguments of `route`, and biases of the router."""

    # Number of experts, and number of experts per token.
    experts: int
    k: int
    scores: str = "softmax"
    softmax_first: bool = False
    groups: int | None = None
    top_groups: int | None = None
    best_of_group: int | None = None
    scale: float = 1.0
    normalize: bool | None = None
    # A bias parameter of the logits, as in gpt-oss.
    router_bias: bool = False
    # A buffer that is added to scores for the choice, updated by `Router.update_bias`.
    balance_bias: bool = False

    def check(self) -> None:
        """Raise ValueError if the options do not fit each other."""
        arguments = self.groups, self.top_groups, self.best_of_group, None, self.normalize
        check_route((0, self.experts), self.k, self.scores, self.softmax_first, *arguments)


class Router(nn.Module):
    """Router: logits of all experts for each token, and the choice by them.

    Args:
        dim: features of a token.
        choice: routing options.
        device, dtype: of the parameters. Parameters: `weight` [experts, dim], and optionally `bias` [experts],
            initialized as nn.Linear's. Buffer: `balance`
        [experts], initially 0, float32 even if the module is cast.
    Recipes and torch.autocast do not affect it: logits are computed in float32, or float64, for weights of any dtype.
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
        """Initialize weight and bias as nn.Linear does, and balance with 0."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.dim) if self.dim else 0.0
            nn.init.uniform_(self.bias, -bound, bound)
        if self.balance is not None:
            nn.init.zeros_(self.balance)

    def forward(self, x: Tensor) -> Routing:
        """Return the routing of x [T, dim]."""
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
        """Update `balance` towards an even load; call it once per step.

        Args:
            counts: [experts], choices of all tokens of the step, from `token_counts`, summed over ranks.
            rate: step size.
        Raises:
            ValueError: the router has no balance; construct it with balance_bias=True.
        """
        if self.balance is None:
            raise ValueError("this router has no balance to update: make it with balance_bias=True")
        update_bias(self.balance, counts, rate)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move and cast the module, but keep the balance's dtype: steps of 1e-3 vanish in 16 bits."""
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
