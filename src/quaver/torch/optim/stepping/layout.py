"""Where a parameter's tensors lie: whole on one device, or as this rank's rows of a DTensor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from quaver.torch.linear.stored import storing
from quaver.torch.linear.stored.stored import CODES, dequantized
from quaver.torch.optim.stepping.pieces import Parts


def local(t: Tensor) -> Tensor:
    """This rank's part; all of a tensor that is whole."""
    return t.to_local() if isinstance(t, DTensor) else t


def like(p: Tensor, part: Tensor, shape: Sequence[int]) -> Tensor:
    """A state that lies as the parameter does, so that checkpoints and meshes see what it is a part of.

    Args:
        part: this rank's.
        shape: of the whole state.
    """
    if not isinstance(p, DTensor) or part.dim() == 0:
        return part
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * max(size, 1))
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def first_element(p: Tensor) -> int:
    """The place of this rank's first element in the whole parameter."""
    if not isinstance(p, DTensor):
        return 0
    row = 0
    for dim, placement in enumerate(p.placements):
        if not isinstance(placement, Shard):
            continue
        if placement.dim != 0:
            raise NotImplementedError
        size, rank = p.device_mesh.size(dim), p.device_mesh.get_local_rank(dim)
        row += -(-p.shape[0] // size) * rank
    return row * (p.numel() // max(p.shape[0], 1))


def value_of(p: Tensor) -> Tensor:
    """The weight as float32, this rank's part."""
    if p.dtype in CODES:
        layer: Any = storing.owner(p)
        assert layer is not None
        return dequantized(layer, local(p), torch.float32)
    return local(p).detach().float()


def in_rows(t: Tensor) -> Tensor:
    """A tensor that lies row by row: itself, or a copy of one that lies otherwise, as channels_last does."""
    return t if t.dim() <= 2 or t.is_contiguous() else t.contiguous()


def as_rows(parts: Parts) -> Parts:
    """All tensors as matrices: leading dimensions are rows, and a vector is one."""
    moments = tuple(tuple(rows(t) for t in held) for held in parts.moments)
    return Parts(tuple(rows(t) for t in parts.weight), moments, tuple(rows(t) for t in parts.gradient))


def rows(t: Tensor) -> Tensor:
    """A tensor as a matrix."""
    if t.dim() == 2 or t.dim() == 0:
        return t
    return t.view(1, -1) if t.dim() < 2 else in_rows(t).view(-1, t.shape[-1])
