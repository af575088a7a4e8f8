"""T5's relative position bias: a learned number per head and bucket of distances, added to attention's scores.

Source: Raffel et al. 2019 (T5), arXiv:1910.10683, and its public code's rule for the buckets.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from quaver.options import checks


class RelativePositionBias(nn.Module):
    """T5's bias of attention scores. Layers may share one, as in T5.

    Args:
        heads: number of query heads.
        buckets: number of buckets; half of them are for later keys if bidirectional.
        max_distance: distances from here on share the last bucket.
        bidirectional: False puts every later key into bucket 0, as decoders do.
        device, dtype: of the parameter. Parameter: `weight` [buckets, heads], T5's `relative_attention_bias.weight`.
    Raises:
        ValueError: too few buckets, or a max_distance that single-distance buckets already reach.
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
        """Initialize the weight from a normal distribution with standard deviation 1."""
        nn.init.normal_(self.weight)

    def forward(self, queries: int, keys: int, offset: int | Tensor = 0) -> Tensor:
        """Return the bias for attention's scores.

        Args:
            queries, keys: numbers of tokens; key 0 has position 0.
            offset: position of query 0, an int or int [B]: the number of cached tokens.
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
    """Return the bucket of each distance: one per small distance, logarithmically shared by large ones.

    Args:
        before: int64, query position minus key position.
        buckets, max_distance, bidirectional: as for `RelativePositionBias`.
    Returns:
        int64 of the same shape.

    Exact.
    """
    side = buckets // 2 if bidirectional else buckets
    near = side // 2
    distance = before.abs() if bidirectional else before.clamp(min=0)
    # Integer bounds of each shared bucket: a logarithm of the distance would round differently across machines.
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
        raise ValueError(f"a bias needs a positive number of heads, not {heads}")
    if near < 1 or (bidirectional and buckets % 2):
        least = 4 if bidirectional else 2
        raise ValueError(f"{buckets} buckets are too few or odd; give {least} or more, an even number if bidirectional")
    if max_distance <= near:
        raise ValueError(f"max_distance is {max_distance}; {buckets} buckets need more than {near}")
