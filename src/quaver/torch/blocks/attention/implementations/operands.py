"""Quantized operands of attention: a matrix for each (batch, head), all in two plain tensors."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.numerics.quantized import decode_scales, storage
from quaver.torch.operations import ops


class Heads(NamedTuple):
    """Matrices [rows, k] of every (batch, head), each quantized on its own; original ≈ data × scale."""

    #: float8 [B, H, rows, k].
    data: Tensor
    #: float32 or E8M0's exponents, uint8 [B, H, blocks of rows, blocks of k].
    scale: Tensor
    #: How each matrix is quantized.
    spec: QuantSpec

    def part(self, batch: slice, heads: slice) -> "Heads":
        return Heads(self.data[batch, heads], self.scale[batch, heads], self.spec)

    def decode(self) -> Tensor:
        """float64 [B, H, rows, k]: data × scale."""
        scale = decode_scales(self.scale, self.spec, None).double()
        width = self.spec.block[1]
        if width is not None and width > 1:
            scale = scale.repeat_interleave(width, -1)[..., : self.data.shape[-1]]
        return self.data.float().double().mul_(scale)


def quantize_heads(x: Tensor, spec: QuantSpec) -> Heads:
    """Quantize x [B, H, rows, k] along k, every (batch, head) as if it were alone.

    Exact: the bits of `quaver.core.reference.quantize` of each matrix.
    """
    batch, heads, rows, k = x.shape
    # One scale for a matrix is one scale for its elements in a row.
    whole = spec.per_tensor
    line = QuantSpec(spec.format, (1, None), spec.scale) if whole else spec
    lines = x.reshape(batch * heads, rows * k) if whole else x.reshape(batch * heads * rows, k)
    # One that lies transposed would come back so.
    q = ops.QUANTIZE(lines.contiguous(), line).plain()
    return Heads(q.data.view(x.shape), _as_tensor(q.scale, x).view(scales_shape(tuple(x.shape), spec)), spec)


def quantize_along_rows(x: Tensor, spec: QuantSpec, known: Heads) -> Heads | None:
    """x.T [B, H, k, rows] quantized along rows; None where that is the transpose of what is `known` of x."""
    return None if known.spec == spec and spec.transposable else quantize_heads(x.mT, spec)


def along_rows(known: Heads | None, turned: Heads | None) -> Tensor:
    """float64 [B, H, rows, k] of what was quantized along rows, given as `quantize_along_rows` leaves it."""
    if turned is not None:
        return turned.decode().mT
    assert known is not None
    return known.decode()


def scales_shape(shape: tuple[int, ...], spec: QuantSpec) -> tuple[int, ...]:
    """Shape of the scales of matrices [B, H, rows, k]."""
    return (*shape[:2], *spec.blocks(*shape[2:]))


def empty_heads(like: Tensor, shape: tuple[int, ...], spec: QuantSpec) -> Heads:
    """What `quantize_heads` returns for a tensor of this shape, without values."""
    data = like.new_empty(shape, dtype=storage(spec.format))
    narrow = torch.uint8 if spec.scale == "e8m0" else torch.float32
    return Heads(data, like.new_empty(scales_shape(shape, spec), dtype=narrow), spec)


def _as_tensor(scale: Tensor | float, like: Tensor) -> Tensor:
    assert isinstance(scale, Tensor) or math.prod(like.shape[:2]) == 1
    return scale if isinstance(scale, Tensor) else like.new_full((1, 1), scale, dtype=torch.float32)
