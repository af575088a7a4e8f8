"""Choosing the next token from logits: the likeliest, or at random among the likely."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Raises: ValueError for numbers outside their range."""

    # Logits are divided by it; 0 takes the likeliest token.
    temperature: float = 0.8
    # How many of the likeliest tokens to choose from; 0: all.
    top_k: int = 50
    # Only the likeliest tokens that together have this probability.
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; give 0 for the likeliest token, or a number above it")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; give the number of tokens to choose from, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give a probability above 0 and up to 1")


def sample(logits: np.ndarray, how: Sampling, random: np.random.Generator) -> int:
    """The token that follows.

    Args:
        logits: [vocab], one row.
        how: temperature first, then top_k, then top_p of what is left.
        random: drawn from once, unless the temperature is 0.
    Raises: ValueError where a logit is NaN or none is finite.
    Exact: of equal logits the earlier token counts as the likelier.
    Source: top_p is nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751.
    """
    logits = np.asarray(logits, np.float64)
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        raise ValueError("the model's logits are not finite; its weights or its recipe's scales have overflowed")
    if how.temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[: how.top_k or None]
    with np.errstate(over="ignore"):  # of what is divided by next to nothing
        weights = np.exp((logits[order] - logits[order[0]]) / how.temperature)
    below = np.cumsum(weights)
    kept = int(np.searchsorted(below, how.top_p * below[-1])) + 1
    kept = min(kept, len(order))
    return int(order[np.searchsorted(below[:kept], random.random() * below[kept - 1], side="right")])
