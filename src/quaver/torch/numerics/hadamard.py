"""The 16-point rotation in torch tensors: the twin of `quaver.core.numbers.hadamard`."""

import torch
from torch import Tensor

from quaver.core.numbers.hadamard import GROUP, SIGNS


def rotate(x: Tensor) -> Tensor:
    """float32 [rows, k] to [rows, ceil16(k)], groups of 16 along k rotated, the tail padded with zeros. Exact."""
    rows, k = x.shape
    groups = -(-k // GROUP)
    if k != groups * GROUP:
        x = torch.nn.functional.pad(x, (0, groups * GROUP - k))
    y = x.reshape(rows, groups, GROUP) * torch.tensor(SIGNS, dtype=torch.float32, device=x.device)
    for stride in (1, 2, 4, 8):
        pairs = y.view(rows, groups, GROUP // (2 * stride), 2, stride)
        a, b = pairs.unbind(3)
        y = torch.stack([a + b, a - b], 3)
    return y.view(rows, groups * GROUP).mul_(0.25)


def turned_rotate(x: Tensor) -> Tensor:
    """`rotate` of the transpose, transposed: float32 [k, rows] to [ceil16(k), rows], where whole lines are added."""
    k, rows = x.shape
    groups = -(-k // GROUP)
    if k != groups * GROUP:
        x = torch.nn.functional.pad(x, (0, 0, 0, groups * GROUP - k))
    y = x.view(groups, GROUP, rows) * torch.tensor(SIGNS, dtype=torch.float32, device=x.device)[:, None]
    for stride in (1, 2, 4, 8):
        a, b = y.view(groups, GROUP // (2 * stride), 2, stride, rows).unbind(2)
        difference = a - b
        a.add_(b)
        b.copy_(difference)
    return y.view(groups * GROUP, rows).mul_(0.25)
