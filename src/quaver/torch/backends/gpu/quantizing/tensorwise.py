"""One scale for the tensor: which launches measure it, cast it and transpose it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.kernels.quantizing.amax import amax as amax_kernel
from quaver.kernels.quantizing.cast import cast as cast_kernel
from quaver.torch.backends.gpu.launching.launch import workspace
from quaver.torch.backends.gpu.launching.passes import Launch, Pass, Passes
from quaver.torch.backends.gpu.launching.rooms import Room, row_major, whole
from quaver.torch.backends.gpu.quantizing.codes import (
    DTYPES,
    codes_in_words,
    format_constants,
    grid,
    of,
    padded,
    room_for_codes,
)
from quaver.torch.backends.gpu.quantizing.ways import (
    FACTOR,
    NEWEST,
    SMALL,
    Wanted,
    Way,
    without_memory,
    zeros,
)
from quaver.torch.numerics.quantized import Quantized

#: Rows and columns of a program's block, and its warps.
AMAX_BLOCK = 32, 512, 4
CAST_BLOCK = 128, 64, 4


def measure(x: Tensor) -> Tensor:
    """The amax of a matrix [rows, columns], float32 [1, 1], by one pass over it."""
    top: Tensor = _measures((x,), own=(workspace(x.device),))[0]
    return top


def _measuring_pass(given: Sequence[Any]) -> Pass:
    top = whole((1, 1), torch.float32)
    return Pass(given, (top,), [_measuring(given[0], top, given[1])])


_measures = Passes(_measuring_pass)


def _measuring(x: Tensor, top: Room, work: Tensor | Room) -> Launch:
    """What measures a matrix, of it, what is written and the meeting place."""
    rows, columns = x.shape
    bm, bn, warps = AMAX_BLOCK
    even = rows % bm == 0 and columns % bn == 0
    # 128 masked loads a thread do not fit its registers.
    bm = bm if even else bm // 4
    programs, tall = grid(-(-rows // bm), -(-columns // bn))
    numbers = (rows, columns, x.stride(0), programs[0] * programs[1])
    constants = {"BM": bm, "BN": bn, "EVEN": even, "TALL": tall}
    return Launch(amax_kernel, programs, (x, top, work), numbers, constants, warps)


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
    known = measured_amax if measured else None
    wanted = as_it_lies, both or not as_it_lies, sums
    own = known, factor, amax, newest, workspace(x.device)
    q, qt, scale, top, partial = _casts((x,), spec, measured, wanted, own=own)
    top = top if known is None else known
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


def _cast_pass(given: Sequence[Any], spec: QuantSpec, measured: bool, wanted: tuple[bool, bool, bool]) -> Pass:
    x, known, factor, amax, newest, work = given
    rows, k = x.shape
    q = room_for_codes(rows, k, spec) if wanted[0] else None
    qt = codes_in_words(k, rows, spec) if wanted[1] else None
    scale, top = whole((1, 1), torch.float32), whole((1, 1), torch.float32) if known is None else None
    partial = room_for_sums(rows, k) if wanted[2] else None
    meets = None if measured else work
    launches = [_cast((x, q, qt, scale, known if top is None else top, factor, amax, newest, meets, partial), spec)]
    if measured and top is not None:
        launches.insert(0, _measuring(x, top, work))
    return Pass(given, (q, qt, scale, top, partial), launches)


_casts = Passes(_cast_pass)


def room_for_sums(rows: int, k: int) -> Room:
    """For what a cast of a matrix [rows, k] leaves of its sums: float32 [blocks of rows, k]."""
    return whole((-(-rows // CAST_BLOCK[0]), k), torch.float32)


def _cast(tensors: tuple[Any, ...], spec: QuantSpec) -> Launch:
    """What casts a matrix: of x, its codes, its transpose's as int32, their scale, the amax, the factor, an amax that
    is given, a history's newest, the meeting place and the sums of blocks of rows, which are None where they are not
    taken."""
    x, q, qt, _, _, factor, amax, newest, work, partial = tensors
    rows, k = x.shape
    bm, bn, warps = CAST_BLOCK
    # Blocks reach over the zeros that end the rows of both results; four codes of the transpose are a word.
    down, across = rows if qt is None else padded(rows), k if q is None else padded(k)
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
    lines = 0 if qt is None else padded(rows) // 16
    numbers = (rows, k, x.stride(0), 0 if q is None else padded(k), lines, programs[0] * programs[1])
    return Launch(cast_kernel, programs, tensors, numbers, constants, warps)


def decided(x: Tensor, spec: QuantSpec, other: QuantSpec | None, wanted: Wanted) -> Way | None:
    """`per_tensor` of matrices like x, contiguous, whose sides are multiples of 16; both operands, or None."""
    if other is None:
        return None
    x = without_memory(x)
    (rows, k), large = x.shape, x.numel() > SMALL
    kept, views = wanted.transpose, wanted.views
    q = room_for_codes(rows, k, spec, large or wanted.codes or (kept and views))
    scale = row_major((1, 1), torch.float32, fresh=large or kept)
    qt = None if views else codes_in_words(k, rows, spec, kept, large or kept)
    partial = room_for_sums(rows, k)._replace(fresh=large) if wanted.sums else None
    top, work = row_major((1, 1), torch.float32, fresh=wanted.codes), zeros(4)

    def launches(known: bool | None, notes: bool | None) -> list[Launch]:
        factor, newest = None if known is None else FACTOR, NEWEST if notes else None
        cast = _cast((x, q, qt, scale, top, factor, None, newest, work if known else None, partial), spec)
        return [cast] if known else [_measuring(x, top, work), cast]

    rooms = (q, scale, qt, None, partial, top, work)
    # What is kept of a view is the right side of a GEMM: the codes as they are.
    results = (1, 2, 1 if views and kept else 3, 2, 6 if wanted.transpose else 5)
    return Way(x, rooms, launches, results, views and not kept)
