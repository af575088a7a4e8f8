"""Launches for one scale per tensor: measure the amax, cast, and transpose codes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quaver.kernels.tensorwise import amax as amax_kernel
from quaver.kernels.tensorwise import cast as cast_kernel
from quaver.kernels.tensorwise import transpose as kernel
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu.buffers import BufferSpec, in_words, row_major, whole
from quaver.torch.backends.gpu.device import architecture
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec, aligned, workspace
from quaver.torch.backends.gpu.quantize_launch import QuantizeLaunch, RequestedOperands, without_memory, zeros
from quaver.torch.numerics.quantized import FLOAT8, Quantized, filled

# ---- eight-bit codes: buffers and kernel constants ----
# Rows are padded with zeros to a multiple of 16 bytes, as GEMMs require of k, so that any number of tokens works. The
# kernels write the padding too.

#: Triton's dtypes of the formats.
DTYPES = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}

#: Maximum number of programs along the second axis of a grid; the first allows 2**31 - 1.
SECOND_AXIS = 65535


def tiles(
    shape: Sequence[int], block: tuple[int, int, int], covered: Sequence[int] = ()
) -> tuple[tuple[int, int], dict[str, Any], int]:
    """Divide a matrix [rows, columns] among programs, neighbours in a row adjacent.

    Args:
        block: rows and columns of a program's block, and its warps.
        covered: rows and columns that the programs cover, if more than the shape.

    Returns:
        The grid, the constants that describe the blocks, and the warps.
    """
    (rows, columns), (bm, bn, warps), (height, width) = shape, block, covered or shape
    down, across = -(-height // bm), -(-width // bn)
    tall = down > SECOND_AXIS
    constants = {"BM": bm, "BN": bn, "EVEN": rows % bm == 0 and columns % bn == 0, "TALL": tall}
    return ((down, across) if tall else (across, down)), constants, warps


def empty_codes(rows: int, k: int, spec: QuantSpec, device: torch.device) -> Tensor:
    """Allocate eight-bit codes [rows, k padded to 16 bytes], which a kernel fills completely."""
    return torch.empty((rows, padded(k)), dtype=FLOAT8[spec.format.name], device=device)


def buffer_for_codes(rows: int, k: int, spec: QuantSpec) -> BufferSpec:
    """Return the buffer spec of `empty_codes`."""
    return row_major((rows, padded(k)), FLOAT8[spec.format.name])


def codes_in_words(rows: int, k: int, spec: QuantSpec, transposed: bool = False) -> BufferSpec:
    """Return the buffer spec of codes that a kernel writes as int32, four each; `transposed` makes it a transposed
    view.
    """
    return in_words(row_major((rows, padded(k)), FLOAT8[spec.format.name], transposed))


def padded(k: int) -> int:
    """Round k up to a multiple of 16, the stored length of a row of codes."""
    return -(-k // 16) * 16


def format_constants(spec: QuantSpec, device: torch.device) -> dict[str, Any]:
    """Return the kernel constants of a format and of the way its scales are computed."""
    fmt = spec.format
    return {
        "POWER_OF_TWO": spec.power_of_two,
        "EMAX": fmt.emax,
        "TOP_MANTISSA": fmt.max_mantissa,
        "MAX": float(fmt.max),
        "INTEGERS": integers(device),
    }


def integers(device: torch.device) -> int:
    """Return how kernels encode: by a cast (0) or on the bits, as in `quaver.kernels.numerics.encode`."""
    arch = architecture(device)
    return 0 if arch > 89 else 1 if arch == 89 else 2


def of(codes: Tensor, k: int) -> Tensor:
    """Return the k columns of a buffer without its padding."""
    return codes if codes.shape[1] == k else codes[:, :k]


Build = Callable[[Tensor, QuantSpec | None, QuantSpec | None, RequestedOperands, Tensor | None], QuantizeLaunch]


def quantize_by(
    build: Build, x: Tensor, spec: QuantSpec | None, other: QuantSpec | None, amax: Tensor | None = None
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize x [rows, k] with contiguous last axis by `spec`, and its transpose by `other`; either may be None.

    Args:
        build: (x, spec, other, requested operands, amax) -> the launches for matrices like x.
        amax: float32 in the layout that the launches read, or None to measure it.
    """
    rows, k = x.shape
    q, scale, qt, transposed_scale, _ = _quantizations((x, amax), build, spec, other)
    return _operand_of(q, scale, spec, rows, k), _operand_of(qt, transposed_scale, other, k, rows)


@LaunchPlanCache
def _quantizations(
    tensors_in: Sequence[Any], build: Build, spec: QuantSpec | None, other: QuantSpec | None
) -> LaunchPlan:
    one = build(tensors_in[0], spec, other, RequestedOperands(), tensors_in[1])
    return LaunchPlan(tensors_in, one.results, one.launches(None))


def _operand_of(q: Tensor | None, scale: Any, spec: QuantSpec | None, rows: int, k: int) -> Quantized | None:
    if q is None or spec is None:
        return None
    if spec.scale == "e8m0":
        return Quantized(of(q, k), scale.view(torch.uint8), spec, (rows, k), swizzled=True)
    width = spec.block[1]
    return Quantized(of(q, k), scale if width is None else scale[:, : -(-k // width)], spec, (rows, k))


# ---- one scale per tensor ----

#: Rows and columns of a program's block, and its warps.
AMAX_BLOCK = 32, 512, 4
CAST_BLOCK = 128, 64, 4


def measure(x: Tensor) -> Tensor:
    """Measure the amax of a matrix [rows, columns] in one pass; returns float32 [1, 1]."""
    top: Tensor = _measures((x,), own=(workspace(x.device),))[0]
    return top


@LaunchPlanCache
def _measures(tensors_in: Sequence[Any]) -> LaunchPlan:
    top = whole((1, 1), torch.float32)
    return LaunchPlan(tensors_in, (top,), [_measuring(tensors_in[0], top, tensors_in[1])])


def _measuring(x: Tensor, top: BufferSpec, work: Tensor | BufferSpec) -> LaunchSpec:
    """Return the launch that measures x, with its output and workspace."""
    rows, columns = x.shape
    bm, bn, warps = AMAX_BLOCK
    even = rows % bm == 0 and columns % bn == 0
    # 128 masked loads per thread do not fit the registers.
    programs, constants, warps = tiles(x.shape, (bm if even else bm // 4, bn, warps))
    numbers = (rows, columns, x.stride(0), programs[0] * programs[1])
    return LaunchSpec(amax_kernel, programs, (x, top, work), numbers, constants | {"EVEN": even}, warps)


def per_tensor(
    x: Tensor,
    spec: QuantSpec,
    amax: Tensor | None,
    factor: Tensor | None,
    is_set: bool,
    both: bool,
    untransposed: bool = True,
    newest: Tensor | None = None,
    measured_amax: Tensor | None = None,
    sums: bool = False,
) -> Quantized:
    """Quantize x with one scale for the tensor.

    Args:
        x: [rows, k] with contiguous last axis.
        amax: float32 of one element, or None to measure it.
        factor: encode factor of delayed scaling, float32 of one element, 0 if unset; or None.
        is_set: True if `factor` is known to be nonzero, so that one pass suffices.
        both: True to write the transpose too, stored as `cached_transpose`.
        untransposed: False to write and return only the transpose.
        newest: newest amax of a history, float32 of one element, raised to this one if that is finite.
        measured_amax: amax of x, float32 of one element, if the producer of x has measured it; unlike `amax` it is not
            combined with what the cast finds.
        sums: True to sum x over its rows in the same read, returned as `partial_sums`.
    """
    rows, k = x.shape
    measured = amax is None and not (is_set and factor is not None)
    known = measured_amax if measured else None
    wanted = untransposed, both or not untransposed, sums
    own = known, factor, amax, newest, workspace(x.device)
    q, qt, scale, top, partial = _casts((x,), spec, measured, wanted, own=own)
    top = top if known is None else known
    operand = transposed = None
    recorded_amax = newest is not None
    if q is not None:
        operand = Quantized(of(q, k), scale, spec, (rows, k), amax=top, recorded_amax=recorded_amax)
    if qt is not None:
        transposed = Quantized(of(qt, rows), scale, spec, (k, rows), amax=top, recorded_amax=recorded_amax)
    if operand is None:
        assert transposed is not None
        transposed.partial_sums = partial
        return transposed
    operand.partial_sums = partial
    if transposed is not None:
        operand.cached_transpose, transposed.cached_transpose = transposed, operand
    return operand


@LaunchPlanCache
def _casts(tensors_in: Sequence[Any], spec: QuantSpec, measured: bool, wanted: tuple[bool, bool, bool]) -> LaunchPlan:
    x, known, factor, amax, newest, work = tensors_in
    rows, k = x.shape
    q = buffer_for_codes(rows, k, spec) if wanted[0] else None
    qt = codes_in_words(k, rows, spec) if wanted[1] else None
    scale, top = whole((1, 1), torch.float32), whole((1, 1), torch.float32) if known is None else None
    partial = buffer_for_sums(rows, k) if wanted[2] else None
    workspace = None if measured else work
    launches = [_cast((x, q, qt, scale, known if top is None else top, factor, amax, newest, workspace, partial), spec)]
    if measured and top is not None:
        launches.insert(0, _measuring(x, top, work))
    return LaunchPlan(tensors_in, (q, qt, scale, top, partial), launches)


def buffer_for_sums(rows: int, k: int) -> BufferSpec:
    """Return the buffer spec for sums that the cast of a matrix [rows, k] writes: float32 [blocks of rows, k]."""
    return whole((-(-rows // CAST_BLOCK[0]), k), torch.float32)


def _cast(tensors: tuple[Any, ...], spec: QuantSpec) -> LaunchSpec:
    """Return the launch that casts a matrix.

    Tensors are x, codes, transposed codes as int32, scale, amax, factor, given amax, newest amax of a history,
    workspace, and sums of blocks of rows; absent ones are None.
    """
    x, q, qt, _, _, factor, amax, newest, work, partial = tensors
    rows, k = x.shape
    # Blocks cover the zero padding of both results, because an int32 holds four codes of the transpose.
    covered = rows if qt is None else padded(rows), k if q is None else padded(k)
    programs, constants, warps = tiles(x.shape, CAST_BLOCK, covered)
    constants |= {
        "ROWS": q is not None,
        "COLUMNS": qt is not None,
        "MEASURED": work is None,
        "FACTOR": factor is not None,
        "KNOWN_AMAX": amax is not None,
        "NEWEST": newest is not None,
        "SUMS": partial is not None,
        "dtype": DTYPES[spec.format.name],
        **format_constants(spec, x.device),
    }
    lines = 0 if qt is None else padded(rows) // 16
    numbers = (rows, k, x.stride(0), 0 if q is None else padded(k), lines, programs[0] * programs[1])
    return LaunchSpec(cast_kernel, programs, tensors, numbers, constants, warps)


def plan_launch(
    x: Tensor, spec: QuantSpec, other: QuantSpec | None, wanted: RequestedOperands
) -> QuantizeLaunch | None:
    """Plan `per_tensor` for contiguous matrices like x with sides that are multiples of 16; both operands, or None."""
    if other is None:
        return None
    x = without_memory(x)
    rows, k = x.shape
    q, scale, top = buffer_for_codes(rows, k, spec), whole((1, 1), torch.float32), whole((1, 1), torch.float32)
    qt = None if wanted.views else codes_in_words(k, rows, spec, wanted.transpose)
    partial, work = buffer_for_sums(rows, k) if wanted.sums else None, zeros(4)
    factor, newest = whole((1, 1), torch.float32), whole((1, 1), torch.float32)

    def launches(delayed: tuple[bool, bool] | None) -> list[LaunchSpec]:
        known, records = delayed or (False, False)
        own = factor if delayed else None, None, newest if records else None
        cast = _cast((x, q, qt, scale, top, *own, work if known else None, partial), spec)
        return [cast] if known else [_measuring(x, top, work), cast]

    if wanted.transpose:
        # The cached operand of a view is the right side of a GEMM: the codes as they are.
        transposed = q if qt is None else qt
        return QuantizeLaunch((x, factor, newest), (q, scale, transposed, scale, top), (work,), launches)
    return QuantizeLaunch((x, factor, newest), (q, scale, qt, scale, partial), (top, work), launches)


# ---- copying the transpose of codes, for GEMMs that read rows only ----

#: Rows and columns of a program's block, and its warps.
BLOCK = 128, 128, 4
#: The bytes of a row must be a multiple of this.
LINE = 16


def transpose(codes: Tensor) -> Tensor:
    """Transpose eight-bit codes [rows, k] to [k, rows], with rows zero-padded to 16 bytes; returns the view [k, rows].

    Codes whose row stride is not a whole number of int32 are copied first.
    """
    rows, k = codes.shape
    if codes.numel() == 0:
        return codes.new_empty((k, rows))
    if codes.stride(0) == 1 and codes.stride(1) != 1:
        # Already a transposed view, so the underlying memory is the result.
        return filled(codes.t(), padded(rows))[:, :rows]
    words = _in_words(codes if _has_whole_lines(codes) else filled(codes, padded(k)))
    out: Tensor = _passes((words,), k, codes.dtype)[0]
    return out[:, :rows]


def _has_whole_lines(codes: Tensor) -> bool:
    """Return True if all rows, including the last, are whole and aligned 16-byte lines."""
    rows, k = codes.shape
    stride = codes.stride(0)
    if codes.stride(1) != 1 or stride % LINE or stride < k or not aligned(codes):
        return False
    return codes.is_meta or rows * stride <= codes.untyped_storage().nbytes() - codes.storage_offset()


def _in_words(codes: Tensor) -> Tensor:
    """View such codes as int32 including their padding, which is read but never written out."""
    return codes.as_strided((codes.shape[0], codes.stride(0)), (codes.stride(0), 1)).view(torch.int32)


@LaunchPlanCache
def _passes(tensors_in: Sequence[Tensor], k: int, dtype: torch.dtype) -> LaunchPlan:
    (words,) = tensors_in
    rows = words.shape[0]
    out = in_words(whole((k, padded(rows)), dtype))
    programs, constants, warps = tiles((rows, k), BLOCK, (padded(rows), k))
    numbers = (rows, k, words.stride(0) // 4, padded(rows) // 16)
    return LaunchPlan(tensors_in, (out,), [LaunchSpec(kernel, programs, (words, out), numbers, constants, warps)])
