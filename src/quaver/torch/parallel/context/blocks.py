"""Attention of some queries on some keys, of all that they see: parts that are merged by their sums, in float32.

    S = cap(q kᵀ scale) + bias        m = max S        l = sum exp(S - m)        o = exp(S - m) v
    merged: m = max(m₁, m₂)        l = exp(m₁ - m) l₁ + exp(m₂ - m) l₂        o likewise; at last o / l

The largest score and the sum are kept apart: of one logarithm of both, float32 would lose a part that grows with the
scores. Plain operations; the scores of a block exist at once. Source: Milakov and Gimelshein 2018, arXiv:1805.02867;
Dao et al. 2022, arXiv:2205.14135; around a ring, Liu et al. 2023, arXiv:2310.01889.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """What is said of the scores of a block."""

    scale: float
    soft_cap: float | None
    #: True where masked out, broadcastable to [B, H, Sq, Sk]; None for nowhere.
    hidden: Tensor | None
    #: Broadcastable to [B, H, Sq, Sk].
    bias: Tensor | None


class Merged(NamedTuple):
    """Parts of the softmax of queries."""

    #: o [B, H, Sq, Dv].
    out: Tensor
    #: m [B, H, Sq], -inf where nothing is seen.
    top: Tensor
    #: l [B, H, Sq].
    total: Tensor

    def rows(self, part: slice) -> "Merged":
        """Those of some queries."""
        return Merged(self.out[:, :, part], self.top[:, :, part], self.total[:, :, part])

    def add(self, other: "Merged") -> None:
        """Merge another part of the same queries, in place."""
        top = torch.maximum(self.top, other.top)
        for old, new in zip((self.total, self.out), (other.total, other.out), strict=True):
            shape = (*top.shape, 1)[: old.dim()]
            kept, added = ((x - _finite(top)).exp().view(shape) for x in (self.top, other.top))
            old.mul_(kept).add_(new * added)
        self.top.copy_(top)

    def normalized(self) -> Tensor:
        """o / l, 0 where nothing is seen."""
        return self.out / torch.where(self.total == 0, 1.0, self.total).unsqueeze(-1)


def forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Merged:
    """Of q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv], each of G heads serving H / G of q."""
    scores, _ = _scores(q, k, block)
    top = scores.amax(-1)
    p = (scores - _finite(top).unsqueeze(-1)).exp_()
    return Merged(_of_groups(p, v), top, p.sum(-1))


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Merged, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """What a block adds to the gradients of q, k and v.

    Args:
        grad: of the output, [B, H, Sq, Dv].
        merged: of all that the queries see, sinks included; in the place of `out`, rowsum(grad ∘ output) [B, H, Sq, 1].
    """
    scores, slope = _scores(q, k, block)
    p = (scores - _finite(merged.top).unsqueeze(-1)).exp_()
    p /= torch.where(merged.total == 0, 1.0, merged.total).unsqueeze(-1)
    ds = (_of_groups(grad, v.mT) - merged.out).mul_(p)
    if block.hidden is not None:
        # 0 times what NaN or an infinity of a hidden key has become.
        ds = ds.masked_fill(block.hidden, 0)
    if slope is not None:
        ds = ds * slope
    groups = k.shape[1]
    dq = _of_groups(ds, k).mul_(block.scale)
    dk = _summed(ds, q, groups).mul_(block.scale)
    return dq, dk, _summed(p, grad, groups)


def _scores(q: Tensor, k: Tensor, block: Block) -> tuple[Tensor, Tensor | None]:
    """The scores [B, H, Sq, Sk], -inf where hidden, and soft_cap's derivative."""
    scores, slope = _of_groups(q, k.mT).mul_(block.scale), None
    if block.soft_cap is not None:
        bent = torch.tanh(scores / block.soft_cap)
        scores, slope = bent * block.soft_cap, 1 - bent * bent
    if block.bias is not None:
        scores = scores + block.bias
    if block.hidden is not None:
        scores = scores.masked_fill(block.hidden, -torch.inf)
    return scores, slope


def _finite(top: Tensor) -> Tensor:
    """-inf less -inf would be NaN."""
    return torch.where(top == -torch.inf, 0.0, top)


def _of_groups(x: Tensor, y: Tensor) -> Tensor:
    """x [B, H, n, k] @ y [B, G, k, m], each head with the group that serves it."""
    groups = y.shape[1]
    return (x.unflatten(1, (groups, -1)) @ y.unsqueeze(2)).flatten(1, 2)


def _summed(x: Tensor, y: Tensor, groups: int) -> Tensor:
    """x.T [B, H, m, n] @ y [B, H, n, k], summed over the heads that share a group."""
    return (x.mT @ y).unflatten(1, (groups, -1)).sum(2)
