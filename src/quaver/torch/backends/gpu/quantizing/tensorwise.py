"""One scale for the tensor: which launches measure it, cast it and transpose it."""

from typing import Any

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.kernels.quantizing.amax import amax as amax_kernel
from quaver.kernels.quantizing.cast import cast as cast_kernel
from quaver.torch.backends.gpu.launching.launch import Launches, Run, launcher, workspace
from quaver.torch.backends.gpu.quantizing.codes import (
    DTYPES,
    empty_codes,
    format_constants,
    grid,
    in_words,
    of,
    strides,
    taking_words,
)
from quaver.torch.numerics.quantized import Quantized

#: Rows and columns of a program's block, and its warps.
AMAX_BLOCK = 32, 512, 4
CAST_BLOCK = 128, 64, 4


def measure(x: Tensor) -> Tensor:
    """The amax of a matrix [rows, columns], float32 [1, 1], by one pass over it."""
    out = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    _amaxes((x, out, workspace(x.device)), (x,))
    return out


def amax_launch(tensors: tuple[Tensor, Tensor, Tensor]) -> Run:
    """The launch that measures a matrix: a function of it, what is written and the meeting place."""
    x = tensors[0]
    rows, columns = x.shape
    bm, bn, warps = AMAX_BLOCK
    even = rows % bm == 0 and columns % bn == 0
    # 128 masked loads a thread do not fit its registers.
    bm = bm if even else bm // 4
    programs, tall = grid(-(-rows // bm), -(-columns // bn))
    numbers = (rows, columns, x.stride(0), programs[0] * programs[1])
    constants = {"BM": bm, "BN": bn, "EVEN": even, "TALL": tall}
    return launcher(amax_kernel, programs, tensors, numbers, constants, warps)


_amaxes = Launches(amax_launch)


def per_tensor(
    x: Tensor,
    spec: QuantSpec,
    amax: Tensor | None,
    factor: Tensor | None,
    is_set: bool,
    both: bool,
    as_it_lies: bool = True,
    newest: Tensor | None = None,
    measured_amax: Tensor | None = None,
    sums: bool = False,
) -> Quantized:
    """One scale for the tensor.

    Args:
        x: [rows, k], its last axis contiguous.
        amax: float32 of one element, or None to measure it.
        factor: of delayed scaling, float32 of one element, 0 where unset; or None.
        is_set: whether factor is known not to be 0: then one pass does.
        both: write the transpose too, and keep it as `twin`.
        as_it_lies: else the transpose alone is written and returned.
        newest: float32 of one element, a history's newest amax, which is raised to this one where that is finite.
        measured_amax: the amax of x, float32 of one element, where whatever made x has measured it; unlike `amax` it
            is not combined with what the cast finds.
        sums: of x over its rows, from the same read, left as `partial_sums`.
    """
    rows, k = x.shape
    measured = amax is None and not (is_set and factor is not None)
    if measured:
        top = measure(x) if measured_amax is None else measured_amax
    else:
        top = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    q = empty_codes(rows, k, spec, x.device) if as_it_lies else None
    qt = empty_codes(k, rows, spec, x.device) if both or not as_it_lies else None
    scale = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    work = None if measured else workspace(x.device)
    partial = room_for_sums(rows, k, x.device) if sums else None
    tensors = (x, q, qt, scale, top, factor, amax, newest, work, partial)
    _casts(tensors, (x,), spec)
    operand = turned = None
    noted = newest is not None
    if q is not None:
        operand = Quantized(of(q, k), scale, spec, (rows, k), amax=top, noted=noted)
    if qt is not None:
        turned = Quantized(of(qt, rows), scale, spec, (k, rows), amax=top, noted=noted)
    if operand is None:
        assert turned is not None
        turned.partial_sums = partial
        return turned
    operand.partial_sums = partial
    if turned is not None:
        operand.twin, turned.twin = turned, operand
    return operand


def room_for_sums(rows: int, k: int, device: torch.device) -> Tensor:
    """For what a cast of a matrix [rows, k] leaves of its sums: float32 [blocks of rows, k]."""
    return torch.empty((-(-rows // CAST_BLOCK[0]), k), dtype=torch.float32, device=device)


def cast_launch(tensors: tuple[Any, ...], spec: QuantSpec) -> Run:
    """The launch that casts a matrix like x: a function of x, its codes, its transpose's, their scale, the amax, the
    factor, an amax that is given, a history's newest, the meeting place and the sums of blocks of rows, which are None
    where they are here."""
    x, q, qt, _, _, factor, amax, newest, work, partial = tensors
    rows, k = x.shape
    bm, bn, warps = CAST_BLOCK
    # Blocks reach over the zeros that end the rows of both results.
    down, across = rows if qt is None else qt.shape[1], k if q is None else q.shape[1]
    programs, tall = grid(-(-down // bm), -(-across // bn))
    constants = {
        "BM": bm,
        "BN": bn,
        "EVEN": rows % bm == 0 and k % bn == 0,
        "ROWS": q is not None,
        "COLUMNS": qt is not None,
        "MEASURED": work is None,
        "FACTOR": factor is not None,
        "GIVEN": amax is not None,
        "NEWEST": newest is not None,
        "TALL": tall,
        "SUMS": partial is not None,
        "dtype": DTYPES[spec.format.name],
        **format_constants(spec, x.device),
    }
    numbers = (rows, k, x.stride(0), *strides(q, qt), programs[0] * programs[1])
    told = (x, q, in_words(qt), *tensors[3:])
    return taking_words(launcher(cast_kernel, programs, told, numbers, constants, warps), cast_kernel, 2)


_casts = Launches(cast_launch)
