"""Masks, windows and head counts to try attention on, and what a loop over queries in float64 makes of them."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

B, H, D, DV = 2, 4, 8, 6

#: Queries and keys: alike, fewer queries, fewer keys, and one query.
LENGTHS = [(7, 7), (5, 7), (7, 5), (1, 7)]
GROUPS = [4, 2, 1]
MASK_TYPES = [
    "none",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
]
WINDOWS = [None, (2, -1), (0, 0), (3, 1), (-1, 2)]


def cases() -> list[Any]:
    """(mask type, window, queries, keys); windows that look ahead only where nothing hides that."""
    return [
        (mask_type, window, *lengths)
        for mask_type in MASK_TYPES
        for window in WINDOWS
        for lengths in LENGTHS
        if not ("causal" in mask_type and window is not None and window[1] > 0)
    ]


def operands(
    queries: int, keys: int, groups: int = 2, width: int = DV, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Sq, H, D], k [B, Sk, G, D], v [B, Sk, G, width], which want gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, queries, H, D), (B, keys, groups, D), (B, keys, groups, width)
    q, k, v = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)
    return q, k, v


def padding(length: int) -> Tensor:
    """[B, length]: one sequence of the full length, one of nothing but padding after the first two thirds."""
    return torch.arange(length) >= torch.tensor([length, length - length // 3])[:, None]


def mask_of(mask_type: str, queries: int, keys: int) -> Any:
    if mask_type == "arbitrary":
        mask = torch.rand(B, 1, queries, keys, generator=torch.Generator().manual_seed(3)) < 0.5
        # A query that sees nothing.
        mask[1, :, queries - 1] = True
        return mask
    return (padding(queries), padding(keys)) if mask_type.startswith("padding") else None


def hides(mask_type: str, window: Any, queries: int, keys: int, mask: Any, chunk: int | None = None) -> np.ndarray:
    """[B, Sq, Sk] by the definition, pair by pair."""
    left, right = window or (-1, -1)
    out = np.zeros((B, queries, keys), bool)
    for b, i, j in np.ndindex(*out.shape):
        at, first = i, 0
        hidden = False
        if mask_type.startswith("padding"):
            of_queries, of_keys = (m.numpy() for m in mask)
            hidden = bool(of_queries[b, i] or of_keys[b, j])
            first = next((n for n in range(keys) if not of_keys[b, n]), keys)
            if mask_type.endswith("bottom_right"):
                at += int((~of_keys[b]).sum()) - int((~of_queries[b]).sum())
        elif mask_type == "arbitrary":
            hidden = bool(mask[b, 0, i, j])
        elif mask_type.endswith("bottom_right"):
            at += keys - queries
        hidden |= "causal" in mask_type and j > at
        hidden |= right >= 0 and j - at > right
        hidden |= left >= 0 and at - j > left
        hidden |= chunk is not None and (at - first) // chunk != (j - first) // chunk
        out[b, i, j] = hidden
    return out


def expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: np.ndarray,
    *,
    bias: Any = 0.0,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
) -> np.ndarray:
    """[B, Sq, H, Dv] in float64, of hidden [B, Sq, Sk]."""
    qs, ks, vs = (x.detach().double().numpy() for x in (q, k, v))
    batch, queries, heads, dim = qs.shape
    keys, groups = ks.shape[1:3]
    bias = np.broadcast_to(bias, (batch, heads, queries, keys))
    out = np.zeros((batch, queries, heads, vs.shape[-1]))
    for b, i, h in np.ndindex(batch, queries, heads):
        group = h // (heads // groups)
        scores = ks[b, :, group] @ qs[b, i, h] * (1 / math.sqrt(dim) if scale is None else scale)
        scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
        scores = scores + bias[b, h, i]
        seen = ~hidden[b, i]
        if seen.any():
            weights = np.exp(scores[seen])
            out[b, i, h] = weights @ vs[b, seen, group] / (weights.sum() + (0 if sinks is None else np.exp(sinks[h])))
    return out


def gradients(y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Of a fixed weighting of the output."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y)
    return torch.autograd.grad(y, inputs, weights)
