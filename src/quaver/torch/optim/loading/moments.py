"""Moments of a state dict as float32, whichever library wrote them.

torch's are floats. torchao's low-bit optimizers keep tensors with a `dequantize` of their own. MS-AMP's are objects
with `value`, codes or float16 numbers, and `meta.scale_inv`, by which these are multiplied. Sources: torchao.optim
0.18; Azure/MS-AMP, msamp/optim/adamw.py.
"""

from typing import Any

import torch
from torch import Tensor

from quaver.core.states.codes import FLOAT32, StateSpec
from quaver.torch.optim import codes
from quaver.torch.optim.loading.rules import DAMAGED
from quaver.torch.optim.stepping import layout

#: MS-AMP's dtypes stand for formats: torch had none of eight bits when it was written.
MSAMP = {torch.uint8: torch.float8_e4m3fn, torch.int8: torch.float8_e5m2}


def spec_of(name: str, saved: Any, scale: Any, spec: StateSpec) -> StateSpec:
    """How a moment was written by a preset of ours whose spec is `spec`: a small one in float32, unless the weight was
    codes at that time. Raises: ValueError, of what is neither."""
    dtype = getattr(saved, "dtype", type(saved).__name__)
    if dtype == codes.code_dtype(spec.of) and spec.of.scaled == (scale is not None):
        return spec
    if dtype is torch.float32 and scale is None:
        return FLOAT32
    raise ValueError(
        f"{name} was saved as {dtype} {'without' if scale is None else 'with'} scales, and its preset keeps "
        f"{spec.text}; {DAMAGED}"
    )


def check_scales(name: str, saved: Tensor, scale: Tensor, spec: StateSpec) -> None:
    """Refuse scales that do not fit their codes. Raises: ValueError."""
    # A release that did not flatten trailing dimensions had other blocks.
    flat = [layout.flat(saved.shape, rows_of) for rows_of in range(max(saved.dim(), 1))]
    shapes = {codes.scale_shape(shape, spec.block, spec.of.numbers) for shape in flat}
    dtype = codes.SCALE_DTYPES[spec.scale]
    if tuple(scale.shape) not in shapes or scale.dtype != dtype:
        raise ValueError(
            f"{name}_scale has shape {tuple(scale.shape)} and dtype {scale.dtype}, and codes {tuple(saved.shape)} of "
            f"{spec.text} have scales of {dtype} of shape {' or '.join(map(str, sorted(shapes)))}; {DAMAGED}"
        )


def values(saved: Any, scale: Tensor | None, spec: StateSpec | None) -> Tensor:
    """A moment, float32 of the parameter's shape.

    Args:
        saved: as it lies in the state dict.
        scale: of ours.
        spec: how ours was written; None: another library's.
    Raises:
        ValueError: integers of an unknown library.
    """
    if spec is not None:
        # Dimensions that blocks run on over are one dimension of the scales.
        flattened = scale is not None and 0 < scale.dim() < saved.dim()
        held = saved.flatten(scale.dim() - 1) if flattened else saved  # type: ignore[union-attr]
        return codes.decode(held, scale, spec).view(saved.shape)
    meta = getattr(saved, "meta", None)
    if meta is not None and hasattr(meta, "scale_inv"):
        value: Tensor = saved.value
        number = value.view(MSAMP[value.dtype]) if value.dtype in MSAMP else value
        return number.float() * meta.scale_inv.float()
    if type(saved) is not Tensor and hasattr(saved, "codes") and hasattr(saved, "dequantize"):
        decoded: Tensor = saved.dequantize()
        return decoded.float()
    if not isinstance(saved, Tensor) or not saved.is_floating_point():
        kind = saved.dtype if isinstance(saved, Tensor) else type(saved).__name__
        raise ValueError(
            f"a moment in the state dict is {kind}, and its group names no preset: Quaver reads states of torch.optim, "
            "torchao.optim, MS-AMP and its own; for another library save them as float32"
        )
    return saved.float()
