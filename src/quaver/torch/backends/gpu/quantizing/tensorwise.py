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
    taking_words,
)
from quaver.torch.backends.gpu.quantizing.ways import (
    FACTOR,
    NEWEST,
    NOTHING,
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
    zeros,
)
from quaver.torch.numerics.quantized import FLOAT8, Quantized

#: Rows and columns of a program's block, and its warps.
AMAX_BLOCK = 32, 512, 4
CAST_BLOCK = 128, 64, 4


def measure(x: Tensor) -> Tensor:
    """The amax of a matrix [rows, columns], float32 [1, 1], by one pass over it."""
    out = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    _amaxes((x, out, workspace(x.device)), (x,))
    return out


def _amax_job(tensors: tuple[Tensor | None, ...]) -> Job:
    """What measures a matrix, of it, what is written and the meeting place."""
    x = tensors[0]
    assert x is not None
    rows, columns = x.shape
    bm, bn, warps = AMAX_BLOCK
    even = rows % bm == 0 and columns % bn == 0
    # 128 masked loads a thread do not fit its registers.
    bm = bm if even else bm // 4
    programs, tall = grid(-(-rows // bm), -(-columns // bn))
    numbers = (rows, columns, x.stride(0), programs[0] * programs[1])
    constants = {"BM": bm, "BN": bn, "EVEN": even, "TALL": tall}
    return Job(amax_kernel, programs, tensors, numbers, constants, warps)


_amaxes = Launches(lambda tensors: launcher(*_amax_job(tensors)))


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


def _cast_job(tensors: tuple[Any, ...], spec: QuantSpec) -> Job:
    """What casts a matrix: of x, its codes, its transpose's as int32, their scale, the amax, the factor, an amax that
    is given, a history's newest, the meeting place and the sums of blocks of rows, which are None where they are not
    taken."""
    x, q, qt, _, _, factor, amax, newest, work, partial = tensors
    rows, k = x.shape
    bm, bn, warps = CAST_BLOCK
    # Blocks reach over the zeros that end the rows of both results; four codes of the transpose are a word.
    down, across = rows if qt is None else 4 * qt.shape[1], k if q is None else q.shape[1]
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
    lines = 0 if qt is None else qt.shape[1] // 4
    numbers = (rows, k, x.stride(0), 0 if q is None else q.shape[1], lines, programs[0] * programs[1])
    return Job(cast_kernel, programs, tensors, numbers, constants, warps)


def _cast_launch(tensors: tuple[Any, ...], spec: QuantSpec) -> Run:
    run = launcher(*_cast_job((*tensors[:2], in_words(tensors[2]), *tensors[3:]), spec))
    return taking_words(run, cast_kernel, 2)


_casts = Launches(_cast_launch)


def decided(x: Tensor, spec: QuantSpec, other: QuantSpec | None, wanted: Wanted) -> Way | None:
    """`per_tensor` of matrices like x, contiguous, whose sides are multiples of 16; both operands, or None."""
    if other is None:
        return None
    x = without_memory(x)
    (rows, k), codes, device, large = x.shape, FLOAT8[spec.format.name], x.device, x.numel() > SMALL
    kept, views = wanted.transpose, wanted.views
    q = row_major((rows, k), codes, fresh=large or wanted.codes or (kept and views))
    scale = row_major((1, 1), torch.float32, fresh=large or kept)
    qt = None if views else codes_in_words((k, rows), codes, kept, large or kept)
    partial = Room((-(-rows // CAST_BLOCK[0]), k), (k, 1), torch.float32, fresh=large) if wanted.sums else None
    top, work = row_major((1, 1), torch.float32, fresh=wanted.codes), zeros(4)
    of_q, of_scale, of_qt, of_partial, of_top, of_work = (
        told_of(room, device) for room in (q, scale, qt, partial, top, work)
    )

    def launches(known: bool | None, notes: bool | None) -> list[Launch]:
        factor, newest = None if known is None else of_top, of_top if notes else None
        meets, takes = (of_work, 7) if known else (None, NOTHING)
        tensors = (x, of_q, of_qt, of_scale, of_top, factor, None, newest, meets, of_partial)
        places = (0, 1, 3, 2, 6, FACTOR, NOTHING, NEWEST, takes, 5)
        cast = Launch(_cast_job(tensors, spec), places)
        return [cast] if known else [Launch(_amax_job((x, of_top, of_work)), (0, 6, 7)), cast]

    rooms = (q, scale, qt, None, partial, top, work)
    # What is kept of a view is the right side of a GEMM: the codes as they are.
    results = (1, 2, 1 if views and kept else 3, 2, 6 if wanted.transpose else 5)
    return Way(x.shape, rooms, launches, results, views and not kept)
