"""Keys and values as they travel: as they are, or as codes with their scales beside, quantized once by who has them."""

from dataclasses import replace

import torch
from torch import Tensor

from quaver import recipes
from quaver.core.spec import QuantSpec, Recipe
from quaver.torch.numerics.quantized import Quantized, storage
from quaver.torch.operations.functional import quantize


def spec_of(recipe: str | Recipe | None) -> QuantSpec | None:
    """How a recipe quantizes the input of a layer, which keys and values travel by; None for as they are.

    Raises:
        ValueError: the recipe does not, or not in eight bits that a part of a sequence can have alone.
    """
    if recipe is None:
        return None
    recipe = recipes.get(recipe)
    spec = recipe.fprop.a
    reason = ""
    if spec is None:
        reason = "quantizes no input"
    elif recipe.delayed is not None:
        reason = "scales by the amaxes of earlier steps, of which there are none for keys and values"
    elif spec.format.packed or spec.two_level or spec.hadamard:
        reason = "is not of eight bits"
    elif spec.block[0] not in (1, None) or (spec.block[0] is None and not spec.per_tensor):
        reason = "shares scales between tokens"
    if spec is None or reason:
        raise ValueError(
            f"keys and values cannot travel by recipe {recipe}, which {reason}: give quantized='mxfp8', 'rowwise', "
            "'blockwise' or 'tensorwise', or None"
        )
    return replace(spec, rounding="nearest")


def pack(x: Tensor, spec: QuantSpec | None) -> list[Tensor]:
    """What travels of x [parts, ..., D]: x itself, or its codes as bytes and its scales.

    A scale that is of a whole tensor is that of all parts here. Exact: the bits of `quaver.torch.quantize`.
    """
    x = x.contiguous()
    if spec is None:
        return [x]
    q = quantize(x.view(-1, x.shape[-1]), spec).plain()
    assert not q.turned
    scale = (
        q.scale if isinstance(q.scale, Tensor) else torch.full((1, 1), q.scale, dtype=torch.float32, device=x.device)
    )
    scale = scale.expand(x.shape[0], 1) if spec.per_tensor else scale.reshape(x.shape[0], -1)
    return [q.data.view(torch.uint8).view(x.shape), scale.contiguous()]


def unpack(parcel: list[Tensor], spec: QuantSpec | None, dtype: torch.dtype) -> Tensor:
    """x of one part of what `pack` made, without that axis."""
    if spec is None:
        return parcel[0]
    codes, scale = parcel
    shape = (codes.shape[:-1].numel(), codes.shape[-1])
    data = codes.reshape(shape).view(storage(spec.format))
    scale = scale.view(1, 1) if spec.per_tensor else scale.view(shape[0], -1)
    return Quantized(data, scale, spec, shape).dequantize().to(dtype).view(codes.shape)
