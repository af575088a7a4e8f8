"""quantize on a GPU in narrow blocks, MXFP8 and NVFP4: scales are written in the order that Blackwell's GEMMs read.

The transpose of an operand is written as such, beside it or instead: neither four-bit codes nor scales in that order
can be read the other way round.
"""

from typing import Any

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.kernels.quantizing.mxfp8 import mxfp8_columns, mxfp8_rows
from quaver.kernels.quantizing.nvfp4 import nvfp4_along, nvfp4_down, rotated_amax
from quaver.torch.backends.gpu.launching.device import architecture
from quaver.torch.backends.gpu.launching.launch import Launches, Run, launcher, workspace
from quaver.torch.backends.gpu.quantizing.codes import empty_codes
from quaver.torch.backends.gpu.quantizing.codes import grid as over
from quaver.torch.backends.gpu.quantizing.tensorwise import measure
from quaver.torch.backends.gpu.quantizing.ways import (
    SMALL,
    Job,
    Launch,
    Room,
    Wanted,
    Way,
    codes_in_words,
    row_major,
    told_of,
    without_memory,
)
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import FLOAT8, Quantized
from quaver.torch.numerics.swizzling import BLOCKS, ROWS

#: Rows and columns of a program's block, and its warps.
MX_ROWS_BLOCK = 128, 128, 4
MX_COLUMNS_BLOCK = 128, 128, 8
NV_BLOCK = 128, 128, 4
#: With random words in registers too: along rows, and down columns.
NV_STOCHASTIC_BLOCKS = (128, 64, 4), (64, 128, 4)


def with_exponents(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    """True if `by_exponents` takes these specs, of a matrix and of its transpose."""
    one = spec or other
    assert one is not None
    kinds = one.scale == "e8m0" and one.block in ((1, 32), (32, 32)) and one.format.name in FLOAT8
    return kinds and one.rounding == "nearest" and not one.hadamard and (None in (spec, other) or spec == other)


def with_two_levels(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    """True if `by_two_levels` takes these: one spec, since random words and the rotation belong to a direction."""
    one = spec or other
    assert one is not None
    return None in (spec, other) and one.two_level and one.block in ((1, 16), (16, 16))


def by_exponents(
    x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, amax: Tensor | None = None
) -> tuple[Quantized | None, Quantized | None]:
    """x [rows, k], its last axis contiguous, and its transpose in blocks of 32 or 32 × 32, as the reference does it.

    The blocks' amaxes are not kept; where they are given the reference runs.
    """
    one = spec or other
    assert one is not None
    if amax is not None:
        turned = None if other is None else reference.quantize(x.t(), other, amax.t() if spec else amax)
        return (None if spec is None else reference.quantize(x, spec, amax)), turned
    rows, k = x.shape
    q, s = (None, None) if spec is None else _room(rows, k, one, x.device)
    qt, st = (None, None) if other is None else _room(k, rows, one, x.device)
    if qt is None:
        assert s is not None
        tensors: tuple[Any, ...] = (x, q, s.view(torch.int32))
    else:
        tensors = (x, qt if q is None else q, s, qt.view(torch.int32), st)
    _mx(tensors, (x,), one, q is not None)
    return _operand_of(q, s, rows, k, one), _operand_of(qt, st, k, rows, one)


def _operand_of(q: Tensor | None, s: Tensor | None, rows: int, k: int, spec: QuantSpec) -> Quantized | None:
    return None if q is None or s is None else Quantized(q[:, :k], s, spec, (rows, k), swizzled=True)


def _room(rows: int, k: int, spec: QuantSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    return empty_codes(rows, k, spec, device), _empty_scales(rows, k, 32, device)


def _empty_scales(rows: int, k: int, width: int, device: torch.device) -> Tensor:
    """Room for the swizzled scales of blocks of `width`: whole tiles, which a kernel fills."""
    return torch.empty(-(-rows // ROWS) * ROWS * across(k, width) * BLOCKS, dtype=torch.uint8, device=device)


def across(k: int, width: int) -> int:
    """Tiles of scales side by side."""
    return -(-k // (width * BLOCKS))


def _mx_job(tensors: tuple[Any, ...], spec: QuantSpec, straight: bool) -> Job:
    x = tensors[0]
    rows, k = x.shape
    columns = len(tensors) > 3
    bm, bn, warps = MX_COLUMNS_BLOCK if columns else MX_ROWS_BLOCK
    grid, tall = over(-(-rows // bm), -(-k // bn))
    q_stride = -(-k // 16) * 16
    constants: dict[str, Any] = {
        "BM": bm,
        "BN": bn,
        "EVEN": rows % bm == 0 and k % bn == 0,
        "TALL": tall,
        "SQUARE": spec.block[0] == 32,
        "EMAX": spec.format.emax,
        "TOP_MANTISSA": spec.format.max_mantissa,
        "INTEGERS": architecture(x.device) == 89,
    }
    if columns:
        numbers = rows, k, x.stride(0), q_stride, -(-rows // 16) * 4, across(k, 32), across(rows, 32)
        return Job(mxfp8_columns, grid, tensors, numbers, constants | {"ROWS": straight}, warps)
    constants["NEAR"] = (bm + 1) * max(x.stride(0), q_stride) < 2**31
    return Job(mxfp8_rows, grid, tensors, (rows, k, x.stride(0), q_stride, across(k, 32)), constants, warps)


_mx = Launches(lambda *decided: launcher(*_mx_job(*decided)))


def decided(x: Tensor, spec: QuantSpec, other: QuantSpec | None, wanted: Wanted) -> Way | None:
    """`by_exponents` of matrices like x, contiguous, whose sides are multiples of 16; both operands, or None."""
    if other is None:
        return None
    x = without_memory(x)
    (rows, k), codes, large, kept = x.shape, FLOAT8[spec.format.name], x.numel() > SMALL, wanted.transpose
    fresh = large or wanted.codes
    scales = [-(-down // ROWS) * ROWS * across(wide, 32) * BLOCKS for down, wide in ((rows, k), (k, rows))]
    s_room, st_room = (
        Room((n,), (1,), torch.float8_e8m0fnu, _as_bytes, each)
        for n, each in zip(scales, (fresh, large or kept), strict=True)
    )
    turned = codes_in_words((k, rows), codes, kept, large or kept)
    rooms = (row_major((rows, k), codes, fresh=fresh), s_room, turned, st_room, None)
    q, s, qt, st = (told_of(room, x.device) for room in rooms[:4])
    launches = [Launch(_mx_job((x, q, s, qt, st), spec, True), (0, 1, 2, 3, 4))]
    return Way(x.shape, rooms, lambda *_: launches)


def _as_bytes(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8)


def by_two_levels(
    x: Tensor, spec: QuantSpec, amax: Tensor | None = None, noise: Any = (0, 0, 0), down: bool = False
) -> Quantized:
    """x, its last axis contiguous, or its transpose if `down`, with one scale for 16 or 16 × 16, as the reference does.

    Args:
        amax: the tensor's, float32 of one element, or None to measure it (after the rotation where there is one).
        noise: (seed, tensor id, count); a count that is a tensor is not waited for.
    """
    rows, k = x.shape[::-1] if down else x.shape
    k = spec.padded(k)
    random = spec.rounding == "stochastic"
    if random and k % 4:
        # Kernels draw words for four elements at once.
        return reference.quantize(x.t() if down else x, spec, amax, None, noise)
    measured = (rotated(x, down) if spec.hadamard else measure(x)) if amax is None else None
    q = torch.empty((rows, -(-k // 32) * 16), dtype=torch.uint8, device=x.device)
    s = _empty_scales(rows, k, 16, x.device)
    factor = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    count = _count(noise[2], x.device) if random else None
    key_words = (*_halves(noise[1]), *_halves(noise[0]), *_halves(noise[0] >> 32)) if random else (1,) * 6
    tensors = (x, q.view(torch.int32), s, factor, measured if amax is None else amax, count)
    _nv(tensors, (x,), spec, key_words, down)
    return Quantized(q[:, : -(-k // 2)], s, spec, (rows, k), tensor_factor=factor, amax=measured, swizzled=True)


def _count(count: Tensor | int, device: torch.device) -> Tensor:
    if isinstance(count, Tensor):
        return count.to(device, torch.int64)
    return torch.full((1,), count, dtype=torch.int64, device=device)


def _halves(word: Tensor | int) -> tuple[int, int]:
    """The low 32 bits as `quaver.kernels.bits.philox.whole_word` takes them, so that all layers share compiled
    kernels."""
    bits = int(word) & 0xFFFFFFFF
    return 2 * (bits & 0xFFFF) + 1, 2 * (bits >> 16) + 1


def _nv_launch(tensors: tuple[Any, ...], spec: QuantSpec, key_words: tuple[int, ...], down: bool) -> Run:
    x = tensors[0]
    rows, columns = x.shape
    k = spec.padded(rows if down else columns)
    bm, bn, warps = NV_STOCHASTIC_BLOCKS[down] if spec.rounding == "stochastic" else NV_BLOCK
    grid, tall = over(-(-rows // bm), -(-columns // bn))
    constants = {
        "BM": bm,
        "BN": bn,
        "EVEN": rows % bm == 0 and columns % bn == 0,
        "TALL": tall,
        "POWER_OF_TWO": spec.scale == "two_level",
        "SQUARE": spec.block[0] == 16,
        "HADAMARD": spec.hadamard,
        "STOCHASTIC": spec.rounding == "stochastic",
        "INTEGERS": architecture(x.device) == 89,
    }
    numbers = (rows, columns, x.stride(0), k, -(-k // 32) * 4, across(k, 16), *key_words)
    return launcher(nvfp4_down if down else nvfp4_along, grid, tensors, numbers, constants, warps)


_nv = Launches(_nv_launch)


def rotated(x: Tensor, down: bool) -> Tensor:
    """The amax, float32 [1, 1], of x [rows, columns] after the rotation along its rows, or its columns if `down`."""
    out = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    _rotated((x, out, workspace(x.device)), (x,), down)
    return out


def _rotated_launch(tensors: tuple[Tensor, Tensor, Tensor], down: bool) -> Run:
    x = tensors[0]
    rows, columns = x.shape
    bm, bn, warps = NV_BLOCK
    grid, tall = over(-(-rows // bm), -(-columns // bn))
    numbers = (rows, columns, x.stride(0), grid[0] * grid[1])
    even = rows % bm == 0 and columns % bn == 0
    constants = {"BM": bm, "BN": bn, "EVEN": even, "TALL": tall, "DOWN": down}
    return launcher(rotated_amax, grid, tensors, numbers, constants, warps)


_rotated = Launches(_rotated_launch)
