"""Relative position biases: a learnt number a head for each bucket of distances, added to attention's scores.

Source: Raffel et al. 2019 (T5), arXiv:1910.10683, and its public code's rule for the buckets.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from quaver.options import checks


class RelativePositionBias(nn.Module):
    """T5's bias of scores. Layers may share one, as T5's do.

    Args:
        heads: of the queries.
        buckets: how many in all; half of them for keys that come later, if bidirectional.
        max_distance: from here on everything is in the last bucket.
        bidirectional: False puts every later key into bucket 0, as decoders do.
    Parameter: `weight` [buckets, heads], T5's `relative_attention_bias.weight`.
    Raises:
        ValueError: too few buckets, or a distance that they all reach one by one.
    """

    weight: nn.Parameter

    @checks
    def __init__(
        self,
        heads: int,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(heads, buckets, max_distance, bidirectional)
        self.heads, self.buckets, self.max_distance, self.bidirectional = heads, buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.empty(buckets, heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gaussian with deviation 1."""
        nn.init.normal_(self.weight)

    def forward(self, queries: int, keys: int, offset: int | Tensor = 0) -> Tensor:
        """The bias to hand to attention.

        Args:
            queries, keys: how many there are; key 0 stands at position 0.
            offset: where query 0 stands, a number, or int [B]: how many tokens a cache holds.
        Returns:
            [1 or B, heads, queries, keys] in the weight's dtype; differentiable in the weight.
        """
        device = self.weight.device
        where = torch.arange(queries, dtype=torch.int64, device=device)
        if isinstance(offset, Tensor):
            offset = offset.to(device).reshape(-1, 1)
        before = (where + offset)[..., None] - torch.arange(keys, dtype=torch.int64, device=device)
        buckets = relative_position_buckets(before, self.buckets, self.max_distance, self.bidirectional)
        bias = self.weight[buckets].movedim(-1, -3)
        return bias if bias.dim() == 4 else bias[None]

    def extra_repr(self) -> str:
        return f"{self.heads}, {self.buckets}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


def relative_position_buckets(before: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of each distance: near ones have one each, far ones share it on a logarithmic scale.

    Args:
        before: int64, how many positions the key stands before the query, negative after it.
        buckets, max_distance, bidirectional: as `RelativePositionBias`.
    Returns:
        int64 of the same shape.
    Exact.
    """
    side = buckets // 2 if bidirectional else buckets
    near = side // 2
    distance = before.abs() if bidirectional else before.clamp(min=0)
    # The bound of each shared bucket, from integers: a logarithm would round differently from machine to machine.
    shared = side - near
    bounds = [math.ceil(near * (max_distance / near) ** (i / shared) - 1e-9) for i in range(1, shared)]
    far = torch.full_like(distance, near)
    for bound in bounds:
        far = far + (distance >= bound)
    bucket = torch.where(distance < near, distance, far)
    return bucket + side * (before < 0) if bidirectional else bucket


def _check(heads: int, buckets: int, max_distance: int, bidirectional: bool) -> None:
    near = (buckets // 2 if bidirectional else buckets) // 2
    if heads < 1:
        raise ValueError(f"a bias of {heads} heads holds nothing; give a number above 0")
    if near < 1 or (bidirectional and buckets % 2):
        least = 4 if bidirectional else 2
        raise ValueError(f"{buckets} buckets are too few or odd; give {least} or more, an even number if bidirectional")
    if max_distance <= near:
        raise ValueError(f"max_distance is {max_distance}; {buckets} buckets need more than {near}")
