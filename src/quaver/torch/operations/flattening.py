"""Quantized operands as the plain tensors that an opaque operator takes and returns.

Scales travel as tensors; what a spec does not use is an empty tensor.
"""

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized, pack, storage


def flat(q: Quantized) -> tuple[Tensor, Tensor, Tensor, str, bool, int, bool]:
    """An operand as `matmul` takes it."""
    scale = q.scale if isinstance(q.scale, Tensor) else q.data.new_full((1, 1), q.scale, dtype=torch.float32)
    factor = scale.new_empty(0) if q.tensor_factor is None else q.tensor_factor
    return q.data, scale, factor, q.spec.text, q.turned, q.lying_shape[1], q.swizzled


def restored(
    data: Tensor, scale: Tensor, factor: Tensor, text: str, turned: bool, columns: int, swizzled: bool
) -> Quantized:
    """The operand that `flat` was given."""
    spec = QuantSpec.parse(text)
    data = data.view(storage(spec.format))
    layout = (data.shape[0], columns)
    shape = layout[::-1] if turned else layout
    host = spec.per_tensor and data.is_cpu and scale.is_floating_point()
    tensor_factor = factor if spec.two_level else None
    return Quantized(data, scale.item() if host else scale, spec, shape, turned, tensor_factor, swizzled=swizzled)


def parts(q: Quantized, turned: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(data, scales, tensor factor, amax) of an operand; turned, those of its transpose, but for packed data."""
    # No result of an operator may be another one too.
    none, top = (q.data.new_empty(0, dtype=torch.float32) for _ in range(2))
    data, scale = q.data, q.plain_scale() if isinstance(q.scale, Tensor) else none.new_full((1, 1), q.scale)
    if q.spec.format.packed:
        data, scale = (pack(q.codes()), scale.t()) if q.turned else (data, scale)
    elif q.turned is not turned:
        data, scale = data.t(), scale.t()
    if q.spec.per_tensor:
        top = q.amax if isinstance(q.amax, Tensor) else none.new_full((1, 1), q.amax or 0.0)
    return data.contiguous(), scale.contiguous(), none if q.tensor_factor is None else q.tensor_factor, top


def empty_parts(x: Tensor, spec: QuantSpec, turned: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `parts` returns of x [rows, k] quantized, or of x [k, rows] turned, in shapes and dtypes alone."""
    rows, k = (x.shape[1], x.shape[0]) if turned else (x.shape[0], x.shape[1])
    k = spec.padded(k)
    blocks = spec.blocks(rows, k)
    if spec.format.packed:
        shape = (rows, (k + 1) // 2)
    elif turned:
        shape, blocks = (k, rows), blocks[::-1]
    else:
        shape = (rows, k)
    narrow = spec.scale == "e8m0" or spec.two_level
    return (
        x.new_empty(shape, dtype=storage(spec.format)),
        x.new_empty(blocks, dtype=torch.uint8 if narrow else torch.float32),
        x.new_empty((1, 1) if spec.two_level else (0,), dtype=torch.float32),
        x.new_empty((1, 1) if spec.per_tensor else (0,), dtype=torch.float32),
    )


def joined(
    x: Tensor, spec: QuantSpec, turned: bool, data: Tensor, scale: Tensor, factor: Tensor, amax: Tensor
) -> Quantized:
    """The operand whose `parts` these are, of x [rows, k] quantized."""
    lies_turned = turned and not spec.format.packed
    tensor_factor = factor if spec.two_level else None
    return Quantized(data, scale, spec, (x.shape[0], spec.padded(x.shape[1])), lies_turned, tensor_factor, amax)
