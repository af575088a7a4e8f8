"""Read moments of a state dict as float32, whichever library wrote them.

torch.optim     float tensors
torchao.optim   tensor subclasses with `codes` and `dequantize()`, version 0.18
MS-AMP          objects with `value`, FP8 codes or float16, times `meta.scale_inv` (msamp/optim/adamw.py)
Quaver          codes and scales in the format of the preset
"""

from typing import Any

import torch
from torch import Tensor

from quaver.core.states.codes import FLOAT32, StateSpec
from quaver.torch.optim import codes
from quaver.torch.optim.loading.rules import DAMAGED
from quaver.torch.optim.stepping import layout

#: The FP8 dtype of MS-AMP's codes, which it stores as integers: it is older than torch's FP8 dtypes.
MSAMP = {torch.uint8: torch.float8_e4m3fn, torch.int8: torch.float8_e5m2}


def spec_of(name: str, saved: Any, scale: Any, spec: StateSpec) -> StateSpec:
    """The format of a moment that a preset of Quaver wrote: `spec`, or float32, as for small tensors.

    Args:
        name: of the moment, for the error.
        saved: the moment in the state dict, with its `scale` or None.
        spec: the format of the preset.
    Raises:
        ValueError: a dtype, or a missing scale, that is neither.
    """
    dtype = getattr(saved, "dtype", type(saved).__name__)
    if dtype == codes.code_dtype(spec.of) and spec.of.scaled == (scale is not None):
        return spec
    if dtype is torch.float32 and scale is None:
        return FLOAT32
    raise ValueError(
        f"{name} was saved as {dtype} {'without' if scale is None else 'with'} scales, where its preset "
        f"stores {spec.text} or float32; {DAMAGED}"
    )


def check_scales(name: str, saved: Tensor, scale: Tensor, spec: StateSpec) -> None:
    """Check the shape and dtype of scales against their codes. Raises: ValueError."""
    # Earlier releases did not flatten trailing dimensions before they divided rows into blocks.
    flat = [layout.flat(saved.shape, rows_of) for rows_of in range(max(saved.dim(), 1))]
    shapes = {codes.scale_shape(shape, spec.block, spec.of.numbers) for shape in flat}
    dtype = codes.SCALE_DTYPES[spec.scale]
    if tuple(scale.shape) not in shapes or scale.dtype != dtype:
        raise ValueError(
            f"{name}_scale has shape {tuple(scale.shape)} and dtype {scale.dtype}; codes {tuple(saved.shape)} of "
            f"{spec.text} need {dtype} scales of shape {' or '.join(map(str, sorted(shapes)))}; {DAMAGED}"
        )


def values(saved: Any, scale: Tensor | None, spec: StateSpec | None) -> Tensor:
    """A moment as float32, of the parameter's shape.

    Args:
        saved: the moment in the state dict.
        scale: its scales, if Quaver wrote it as codes.
        spec: its format, if Quaver wrote it; None for another library.
    Raises:
        ValueError: integers, or an object, of an unknown library.
    """
    if spec is not None:
        # Blocks may run along several trailing dimensions, which are one dimension of the scales.
        flattened = scale is not None and 0 < scale.dim() < saved.dim()
        data = saved.flatten(scale.dim() - 1) if flattened else saved  # type: ignore[union-attr]
        return codes.decode(data, scale, spec).view(saved.shape)
    meta = getattr(saved, "meta", None)
    if meta is not None and hasattr(meta, "scale_inv"):
        value: Tensor = saved.value
        floats = value.view(MSAMP[value.dtype]) if value.dtype in MSAMP else value
        return floats.float() * meta.scale_inv.float()
    if type(saved) is not Tensor and hasattr(saved, "codes") and hasattr(saved, "dequantize"):
        decoded: Tensor = saved.dequantize()
        return decoded.float()
    if not isinstance(saved, Tensor) or not saved.is_floating_point():
        kind = saved.dtype if isinstance(saved, Tensor) else type(saved).__name__
        raise ValueError(
            f"a moment in the state dict is {kind}, and its group names no preset. Quaver reads states of torch.optim, "
            "torchao.optim, MS-AMP and its own: with another library save them as float32"
        )
    return saved.float()
