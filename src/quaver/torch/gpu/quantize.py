"""quantize on a GPU: which kernel serves a spec, over which grid, into which layout.

Eight-bit data lie with their rows padded by zeros to a multiple of 16 bytes, which is what the GEMMs ask of k, so that
no number of tokens is special.
"""

from typing import Any

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.kernels.amax import amax as amax_kernel
from quaver.kernels.cast import cast as cast_kernel
from quaver.torch import reference
from quaver.torch.gpu.device import architecture
from quaver.torch.gpu.launch import Run, aligned, keep, launcher, table, workspace
from quaver.torch.quantized import STORAGE, Quantized

#: No noise: (seed, tensor id, count) of stochastic rounding.
QUIET = (0, 0, 0)
#: Rows and columns of a program's block, and its warps.
AMAX_BLOCK = 16, 512, 4
CAST_BLOCK = 128, 64, 4

_amaxes = table()
_casts = table()


def reason(x: Tensor, spec: QuantSpec, *_: object) -> str:
    """Why no kernel quantizes by this spec, or ""; the device has been asked before."""
    if not spec.per_tensor or spec.format.bits != 8 or spec.rounding != "nearest" or spec.hadamard:
        return "it has no kernel for this spec"
    return "" if spec.scale in ("fp32", "power_of_two") else f"it has no kernel for {spec.scale} scales"


def quantize(
    x: Tensor,
    spec: QuantSpec,
    amax: Tensor | float | None = None,
    factor: Tensor | float | None = None,
    noise: Any = QUIET,
    is_set: bool = False,
) -> Quantized:
    """As `quaver.torch.reference.quantize`, bit for bit.

    Args:
        is_set: whether factor is known not to be 0, so that one pass over x does.
    """
    if x.numel() == 0:
        return reference.quantize(x, spec, amax, factor, noise)
    if x.stride(1) != 1 and x.stride(0) == 1:
        return _one(x.t(), spec, amax, factor, is_set, False).T
    return _one(x if x.stride(1) == 1 else x.contiguous(), spec, amax, factor, is_set, False)


def reason_both(x: Tensor, spec: QuantSpec, other: QuantSpec, *_: object) -> str:
    """Why `quantize_both` is not for this call, or "": then two calls of `quantize` are made."""
    if x.numel() == 0:
        return "the tensor is empty"
    return reason(x, spec) if spec == other else "it has no kernel for these two specs"


def quantize_both(
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    amax: Tensor | float | None = None,
    factor: Tensor | float | None = None,
    noise: Any = QUIET,
    other_noise: Any = QUIET,
    is_set: bool = False,
) -> tuple[Quantized, Quantized]:
    """x [rows, k] by `spec` and its transpose [k, rows] by `other`, from one read of x where a kernel does that.

    Neither result refers to the other: of one that is dropped the memory is free.
    """
    q = _one(x if x.stride(1) == 1 else x.contiguous(), spec, amax, factor, is_set, architecture(x.device) < 100)
    turned, q.twin = q.T, None
    turned.twin = None
    return q, turned


def _one(x: Tensor, spec: QuantSpec, amax: Any, factor: Any, is_set: bool, both: bool) -> Quantized:
    if amax is not None:
        amax = torch.as_tensor(amax, dtype=torch.float32, device=x.device)
    if factor is not None and not isinstance(factor, Tensor):
        is_set = factor != 0.0
        factor = torch.tensor([factor], device=x.device) if is_set else None
    return per_tensor(x, spec, amax, factor, is_set, both)


def transpose(codes: Tensor) -> Tensor:
    """Eight-bit codes [rows, k] to [k, rows], rows padded with zeros to 16 bytes: the [k, rows] view of the buffer."""
    rows, k = codes.shape
    made = torch.zeros((k, -(-rows // 16) * 16), dtype=torch.uint8, device=codes.device)
    made[:, :rows] = codes.view(torch.uint8).t()
    return made.view(codes.dtype)[:, :rows]


def measure(x: Tensor) -> Tensor:
    """The amax of a matrix [rows, columns], float32 [1, 1], by one pass over it."""
    rows, columns = x.shape
    out = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    work = workspace(x.device)
    key = (rows, columns, x.stride(0), x.dtype, x.device, aligned(x))
    run = _amaxes.get(key)
    if run is None:
        bm, bn, warps = AMAX_BLOCK
        even = rows % bm == 0 and columns % bn == 0
        # 64 masked loads a thread do not fit its registers.
        bm = bm if even else bm // 2
        grid = -(-columns // bn), -(-rows // bm)
        numbers = (rows, columns, x.stride(0), grid[0] * grid[1])
        constants = {"BM": bm, "BN": bn, "EVEN": even}
        run = keep(_amaxes, key, launcher(amax_kernel, grid, (x, out, work), numbers, constants, warps))
    run(x, out, work)
    return out


def per_tensor(
    x: Tensor, spec: QuantSpec, amax: Tensor | None, factor: Tensor | None, is_set: bool, both: bool
) -> Quantized:
    """One scale for the tensor.

    Args:
        x: [rows, k], its last axis contiguous.
        amax: float32 of one element, or None to measure it.
        factor: of delayed scaling, float32 of one element, 0 where unset; or None.
        is_set: whether factor is known not to be 0: then one pass does.
        both: write the transpose too, and keep it as `twin`.
    """
    rows, k = x.shape
    measured = amax is None and not (is_set and factor is not None)
    top = measure(x) if measured else torch.empty((1, 1), dtype=torch.float32, device=x.device)
    q = empty_codes(rows, k, spec, x.device)
    qt = empty_codes(k, rows, spec, x.device) if both else None
    scale = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    work = workspace(x.device)
    key = (rows, k, x.stride(0), x.dtype, x.device, aligned(x), spec, factor is None, amax is None, measured, both)
    run = _casts.get(key)
    tensors = (x, q, None if qt is None else qt.view(torch.int32), scale, top, factor, amax, work)
    if run is None:
        run = keep(_casts, key, _cast_launch(x, spec, tensors, measured))
    run(*tensors)
    made = Quantized(q[:, :k], scale, spec, (rows, k), amax=top)
    if qt is not None:
        made.twin = Quantized(qt[:, :rows], scale, spec, (k, rows), amax=top)
        made.twin.twin = made
    return made


def _cast_launch(x: Tensor, spec: QuantSpec, tensors: tuple[Any, ...], measured: bool) -> Run:
    rows, k = x.shape
    bm, bn, warps = CAST_BLOCK
    q, qt = tensors[1], tensors[2]
    even = rows % bm == 0 and k % bn == 0
    # Blocks reach over the zeros that end the rows of both results.
    grid = -(-q.shape[1] // bn), -(-(rows if qt is None else qt.shape[1] * 4) // bm)
    turned = 0 if qt is None else qt.shape[1]
    numbers = (rows, k, x.stride(0), q.shape[1], turned, grid[0] * grid[1])
    constants = {
        "BM": bm,
        "BN": bn,
        "EVEN": even,
        "ROWS": True,
        "COLUMNS": qt is not None,
        "MEASURED": measured,
        "FACTOR": tensors[5] is not None,
        **format_constants(spec, x.device),
    }
    return launcher(cast_kernel, grid, tensors, numbers, constants, warps)


def format_constants(spec: QuantSpec, device: torch.device) -> dict[str, Any]:
    """What a kernel knows of a format and of how its scales are found."""
    fmt = spec.format
    return {
        "POWER_OF_TWO": spec.power_of_two,
        "EMAX": fmt.emax,
        "TOP_MANTISSA": fmt.max_mantissa,
        "MAX": float(fmt.max),
        "INTEGERS": architecture(device) == 89,
    }


def empty_codes(rows: int, k: int, spec: QuantSpec, device: torch.device) -> Tensor:
    """Room for eight-bit codes [rows, k], rows rounded up to 16 bytes: the whole buffer, which a kernel fills."""
    return torch.empty((rows, -(-k // 16) * 16), dtype=STORAGE[spec.format.name], device=device)
