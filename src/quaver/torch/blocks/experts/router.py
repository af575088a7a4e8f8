"""The matrix that scores experts for each token, in high precision under every recipe, and how tokens choose by it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.core.reference.experts import check_route
from quaver.torch.blocks.experts.balancing import update_bias
from quaver.torch.blocks.experts.routing import Routing, route
from quaver.torch.operations import ops


@dataclass(frozen=True, kw_only=True)
class Choice:
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

    def __init__(self, dim: int, choice: Choice, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
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
