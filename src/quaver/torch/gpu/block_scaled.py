"""quantize on a GPU in narrow blocks, MXFP8 and NVFP4: scales are written in the order that Blackwell's GEMMs read.

The transpose of an operand is written as such beside it, or instead: of four bits, and of scales in that order, nothing
can be read the other way round.
"""

from typing import Any

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.kernels.mxfp8 import mxfp8_columns, mxfp8_rows
from quaver.kernels.nvfp4 import nvfp4_along, nvfp4_down, rotated_amax
from quaver.torch import reference
from quaver.torch.gpu.device import architecture
from quaver.torch.gpu.launch import Run, aligned, keep, launcher, table, workspace
from quaver.torch.quantized import STORAGE, Quantized
from quaver.torch.swizzle import BLOCKS, ROWS

#: Rows and columns of a program's block, and its warps.
MX_ROWS_BLOCK = 128, 128, 4
MX_COLUMNS_BLOCK = 128, 128, 8
NV_BLOCK = 128, 128, 4
#: With random words in registers too.
NV_STOCHASTIC_BLOCK = {"along": (128, 64, 4), "down": (64, 128, 4)}

_mx = table()
_nv = table()
_rotated = table()


def reason(x: Tensor, spec: QuantSpec, amax: Any = None, factor: Any = None, *_: object) -> str:
    """Why no kernel of this file quantizes so, or ""."""
    if spec.scale == "e8m0" and spec.block in ((1, 32), (32, 32)):
        if spec.rounding != "nearest" or spec.hadamard:
            return "its kernel for E8M0 scales rounds to nearest and does not rotate"
        return "" if amax is None and factor is None else "its kernel for E8M0 scales measures its own amaxes"
    if spec.two_level and spec.block in ((1, 16), (16, 16)):
        if spec.rounding == "stochastic" and spec.padded(x.shape[1]) % 4:
            return f"its kernel draws random words for four elements at a time, and k is {x.shape[1]}"
        return ""
    return "it has no kernel for this spec"


def quantize(
    x: Tensor, spec: QuantSpec, amax: Any = None, factor: Any = None, noise: Any = (0, 0, 0), *_: object
) -> Quantized:
    """As `quaver.torch.reference.quantize`, bit for bit, `amax` apart: blocks' amaxes are not kept.

    Args:
        x: [rows, k], with any strides; a transpose is read as it lies.
    """
    if x.numel() == 0 or reason(x, spec, amax, factor):
        return reference.quantize(x, spec, amax, factor, noise)
    down = x.stride(1) != 1 and x.stride(0) == 1
    x = x.t() if down else rowwise(x)
    if spec.two_level:
        return _nvfp4(x, spec, amax, noise, down)
    q: Quantized = _mxfp8(x, spec, not down, down)[down]
    return q


def quantize_both(
    x: Tensor, spec: QuantSpec, other: QuantSpec, amax: Any = None, noise: Any = (0, 0, 0), other_noise: Any = (0, 0, 0)
) -> tuple[Quantized, Quantized]:
    """x [rows, k] by a spec and its transpose by another; MXFP8 from one read of x."""
    x = rowwise(x)
    if spec == other and spec.scale == "e8m0":
        return _mxfp8(x, spec, True, True)
    return quantize(x, spec, amax, None, noise), quantize(x.t(), other, amax, None, other_noise)


def rowwise(x: Tensor) -> Tensor:
    """x with its last axis contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def _mxfp8(x: Tensor, spec: QuantSpec, straight: bool, turned: bool) -> tuple[Any, Any]:
    """x [rows, k] and its transpose, each where it is wanted."""
    rows, k = x.shape
    q, s = _room(rows, k, spec, x.device) if straight else (None, None)
    qt, st = _room(k, rows, spec, x.device) if turned else (None, None)
    key = (rows, k, x.stride(0), x.dtype, x.device, aligned(x), spec, straight, turned)
    run = _mx.get(key)
    if turned:
        assert qt is not None
        tensors = (x, qt if q is None else q, s, qt.view(torch.int32), st)
    else:
        tensors = (x, q, s)
    if run is None:
        run = keep(_mx, key, _mx_launch(x, spec, tensors, straight))
    run(*tensors)
    return _made(q, s, rows, k, spec), _made(qt, st, k, rows, spec)


def _made(q: Tensor | None, s: Tensor | None, rows: int, k: int, spec: QuantSpec) -> Quantized | None:
    return None if q is None or s is None else Quantized(q[:, :k], s, spec, (rows, k), swizzled=True)


def _room(rows: int, k: int, spec: QuantSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """The whole buffers of codes and of scales, which a kernel fills."""
    q = torch.empty((rows, -(-k // 16) * 16), dtype=STORAGE[spec.format.name], device=device)
    width = spec.block[1]
    assert width is not None
    tiles = -(-rows // ROWS) * across(k, width)
    return q, torch.empty(tiles * ROWS * BLOCKS, dtype=torch.uint8, device=device)


def across(k: int, width: int) -> int:
    """Tiles of scales side by side."""
    return -(-k // (width * BLOCKS))


def _mx_launch(x: Tensor, spec: QuantSpec, tensors: tuple[Tensor | None, ...], straight: bool) -> Run:
    rows, k = x.shape
    columns = len(tensors) > 3
    bm, bn, warps = MX_COLUMNS_BLOCK if columns else MX_ROWS_BLOCK
    grid = -(-k // bn), -(-rows // bm)
    fmt = spec.format
    constants: dict[str, Any] = {"BM": bm, "BN": bn, "EVEN": rows % bm == 0 and k % bn == 0}
    q_stride = -(-k // 16) * 16
    if columns:
        numbers: tuple[int, ...] = (rows, k, x.stride(0), q_stride, -(-rows // 16) * 4, across(k, 32), across(rows, 32))
        constants["ROWS"] = straight
    else:
        numbers = (rows, k, x.stride(0), q_stride, across(k, 32))
        constants["NEAR"] = (bm + 1) * max(x.stride(0), q_stride) < 2**31
    constants |= {
        "SQUARE": spec.block[0] == 32,
        "EMAX": fmt.emax,
        "TOP_MANTISSA": fmt.max_mantissa,
        "INTEGERS": architecture(x.device) == 89,
    }
    fn = mxfp8_columns if columns else mxfp8_rows
    return launcher(fn, grid, tensors, numbers, constants, warps)


def measure(x: Tensor) -> Tensor:
    # Its file dispatches to this one.
    from quaver.torch.gpu.quantize import measure as of

    return of(x)


def rotated(x: Tensor, down: bool) -> Tensor:
    """The amax, float32 [1, 1], of x [rows, columns] after a Hadamard along its rows, or along its columns if `down`."""
    rows, columns = x.shape
    out = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    work = workspace(x.device)
    key = (rows, columns, x.stride(0), x.dtype, x.device, aligned(x), down)
    run = _rotated.get(key)
    if run is None:
        bm, bn, warps = NV_BLOCK
        grid = -(-columns // bn), -(-rows // bm)
        numbers = (rows, columns, x.stride(0), grid[0] * grid[1])
        constants = {"BM": bm, "BN": bn, "EVEN": rows % bm == 0 and columns % bn == 0, "DOWN": down}
        run = keep(_rotated, key, launcher(rotated_amax, grid, (x, out, work), numbers, constants, warps))
    run(x, out, work)
    return out


def _nvfp4(x: Tensor, spec: QuantSpec, amax: Any, noise: Any, down: bool) -> Quantized:
    """x, or its transpose if `down`, whose last axis is contiguous."""
    rows, k = x.shape[::-1] if down else x.shape
    k = spec.padded(k)
    measured = None
    if amax is None:
        measured = rotated(x, down) if spec.hadamard else measure(x)
    top = measured if amax is None else torch.as_tensor(amax, dtype=torch.float32, device=x.device)
    q = torch.empty((rows, -(-k // 32) * 16), dtype=torch.uint8, device=x.device)
    s = torch.empty(-(-rows // ROWS) * across(k, 16) * ROWS * BLOCKS, dtype=torch.uint8, device=x.device)
    factor = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    count = None
    if spec.rounding == "stochastic":
        count = noise[2] if isinstance(noise[2], Tensor) else torch.full((1,), noise[2], device=x.device)
        noise = _signed(noise[1]), _signed(noise[0]), _signed(noise[0] >> 32)
    else:
        noise = (0, 0, 0)
    key = (*x.shape, x.stride(0), x.dtype, x.device, aligned(x), spec, down, noise)
    tensors = (x, q.view(torch.int32), s, factor, top, count)
    run = _nv.get(key)
    if run is None:
        run = keep(_nv, key, _nv_launch(x, spec, tensors, k, noise, down))
    run(*tensors)
    return Quantized(q[:, : -(-k // 2)], s, spec, (rows, k), tensor_factor=factor, amax=measured, swizzled=True)


def _signed(word: int) -> int:
    """The low 32 bits as an int32."""
    return (int(word) & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _nv_launch(
    x: Tensor, spec: QuantSpec, tensors: tuple[Tensor | None, ...], k: int, noise: tuple[int, int, int], down: bool
) -> Run:
    rows, columns = x.shape
    way = "down" if down else "along"
    bm, bn, warps = NV_STOCHASTIC_BLOCK[way] if spec.rounding == "stochastic" else NV_BLOCK
    grid = -(-columns // bn), -(-rows // bm)
    constants = {
        "BM": bm,
        "BN": bn,
        "EVEN": rows % bm == 0 and columns % bn == 0,
        "POWER_OF_TWO": spec.scale == "two_level",
        "SQUARE": spec.block[0] == 16,
        "HADAMARD": spec.hadamard,
        "STOCHASTIC": spec.rounding == "stochastic",
        "INTEGERS": architecture(x.device) == 89,
    }
    numbers = (rows, columns, x.stride(0), k, -(-k // 32) * 4, across(k, 16), *noise)
    return launcher(nvfp4_down if down else nvfp4_along, grid, tensors, numbers, constants, warps)
