"""Dequantize operands of any layout on a GPU: one read of the codes, one write of the values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.kernels.mxfp8 import decode as decode_kernel
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu.buffers import whole
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec
from quaver.torch.backends.gpu.tensorwise import DTYPES as CODES
from quaver.torch.backends.gpu.tensorwise import integers, tiles
from quaver.torch.numerics.quantized import BLOCKS, FLOAT8, Quantized

#: Rows and columns of a program's block, and its warps.
BLOCK = 64, 128, 4
DTYPES = torch.bfloat16, torch.float32


def holds(spec: QuantSpec, dtype: torch.dtype, outer: bool = True) -> bool:
    """Return True if a dtype represents the values of an operand times its scales; `outer` as in `decode`."""
    if dtype is torch.float32 or spec.power_of_two or spec.scale == "two_level":
        return True
    return not outer and (spec.block[1] is None or spec.two_level)


def reason(q: Quantized, dtype: torch.dtype, outer: bool = True) -> str:
    """Return why `decode` does not support these, or ""."""
    if dtype not in DTYPES:
        return f"values are decoded to bfloat16 or float32, not to {dtype}"
    if not holds(q.spec, dtype, outer):
        return f"bfloat16 cannot represent the values of {q.spec} times its scales; decode to float32"
    if not (q.spec.format.packed or q.spec.format.name in FLOAT8):
        return f"its kernel decodes FP8 and E2M1, not {q.spec.format}"
    width = q.stored_block[1]
    if width is None or 128 % width == 0 or width % 128 == 0:
        return ""
    return f"its kernel takes blocks of a divisor or a multiple of 128 elements, not of {width}"


def decode(q: Quantized, dtype: torch.dtype = torch.bfloat16, outer: bool = True) -> Tensor:
    """Return an operand's data times its scales.

    Exact in both dtypes, equal to `Quantized.dequantize`, except that values beyond the dtype become its largest
    number. A NaN scale makes its block NaN.

    Args:
        q: [rows, k], stored transposed or not, scales swizzled or not.
        dtype: bfloat16 or float32.
        outer: True to apply row and tensor scales too (for two-level scales: the factor). Without them values stay near
            1 however large the operand is, and the caller applies the scales to the product.

    Returns:
        [rows, k]; for a transposed operand a transposed view, which a GEMM reads as well.

    Raises:
        ValueError: the dtype would round the products, or there is no kernel for the block.
    """
    why = reason(q, dtype, outer)
    if why:
        raise ValueError(why)
    if q.data.numel() == 0:
        return torch.empty(q.shape, dtype=dtype, device=q.device)
    data = q.data if q.data.stride(-1) == 1 else q.data.contiguous()
    scale = _scale(q, outer)
    factor = q.tensor_factor if outer else None
    out: Tensor = _passes((data, scale), q.spec, q.stored_shape, q.stored_block, q.swizzled, dtype, own=(factor,))[0]
    return out.t() if q.transposed else out


def reason_dequantize(q: Quantized, dtype: torch.dtype) -> str:
    """Return why `dequantize` does not support an operand, or ""."""
    return (
        reason(q, torch.float32) if dtype.is_floating_point and dtype.itemsize <= 4 else f"it has no kernel for {dtype}"
    )


def dequantize(q: Quantized, dtype: torch.dtype) -> Tensor:
    """Return data times scales, rounded once; arguments as for `quaver.torch.operations.ops.DEQUANTIZE`."""
    exact = dtype is torch.bfloat16 and holds(q.spec, dtype)
    return decode(q, dtype if exact else torch.float32).to(dtype)


def _scale(q: Quantized, outer: bool) -> Tensor | None:
    """Return the stored scales to apply, or None."""
    if q.spec.scale == "unit" or (not outer and q.spec.block[1] is None):
        return None
    if isinstance(q.scale, Tensor):
        return q.scale
    return torch.full((1, 1), q.scale, dtype=torch.float32, device=q.device)


@LaunchPlanCache
def _passes(
    tensors_in: Sequence[Any],
    spec: QuantSpec,
    shape: tuple[int, int],
    block: tuple[int | None, int | None],
    swizzled: bool,
    dtype: torch.dtype,
) -> LaunchPlan:
    data, scale, factor = tensors_in
    rows, columns = shape
    out = whole(shape, dtype)
    grid, constants, warps = tiles(shape, BLOCK)
    height, width = block
    scale_strides = (0, 0) if scale is None or swizzled else scale.stride()
    across = -(-columns // ((width or columns) * BLOCKS))
    numbers = (rows, columns, data.stride(0), *scale_strides, columns, across)
    kind = "e8m0" if spec.scale == "e8m0" else "two_level" if spec.two_level else "float32"
    constants |= {
        "KIND": kind,
        "BR": height or 0,
        "BC": width or 0,
        "SWIZZLED": swizzled,
        "POWER_OF_TWO": spec.scale == "two_level",
        "CODES": CODES.get(spec.format.name),
        "INTEGERS": integers(data.device),
    }
    return LaunchPlan(
        tensors_in, (out,), [LaunchSpec(decode_kernel, grid, (data, scale, factor, out), numbers, constants, warps)]
    )
