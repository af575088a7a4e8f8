"""Products in float32 to results: scales that no operand took in, a bias, one rounding, by one launch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.kernels.emulating.fold import fold as fold_kernel
from quaver.kernels.emulating.fold import round_two as round_two_kernel
from quaver.torch.backends.gpu.launching.passes import Launch, Pass, Passes
from quaver.torch.backends.gpu.launching.rooms import whole
from quaver.torch.backends.gpu.quantizing.codes import grid

#: Rows and columns of a program's block, and its warps; elements of one of two products.
BLOCK = 16, 256, 4
FLAT, FLAT_WARPS = 4096, 4


def fold(
    y: Tensor, dtype: torch.dtype, bias: Tensor | None = None, of_rows: Tensor | None = None,
    of_columns: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y [rows, columns] float32, contiguous, times the scales of its rows and columns, plus bias [columns].

    Args:
        dtype: of the result.
        bias: of any dtype that kernels read.
        of_rows, of_columns: float32, one for each or one for all.
    Bounded: float32's roundings of the scales' products and of the sum, and one to dtype.
    """
    # The kernel reads neighbours: a view or an expanded bias lies otherwise.
    lines = [None if t is None else t.reshape(-1).contiguous() for t in (of_rows, of_columns, bias)]
    given = (y, *lines)
    out: Tensor = _folds(given, dtype)[0]
    return out


def round_two(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two float32 matrices, contiguous, in another dtype: rounded once."""
    rounded: tuple[Tensor, Tensor] = tuple(_two((a, b), dtype))
    return rounded


def _fold_pass(given: Sequence[Any], dtype: torch.dtype) -> Pass:
    y, of_rows, of_columns, bias = given
    rows, columns = y.shape
    out = whole((rows, columns), dtype)
    bm, bn, warps = BLOCK
    programs, tall = grid(-(-rows // bm), -(-columns // bn))
    constants = {
        "BM": bm,
        "BN": bn,
        "EVEN": rows % bm == 0 and columns % bn == 0,
        "TALL": tall,
        "ONE_ROW": of_rows is not None and of_rows.numel() == 1,
        "ONE_COLUMN": of_columns is not None and of_columns.numel() == 1,
    }
    tensors = (y, of_rows, of_columns, bias, out)
    return Pass(given, (out,), [Launch(fold_kernel, programs, tensors, (rows, columns), constants, warps)])


def _two_pass(given: Sequence[Any], dtype: torch.dtype) -> Pass:
    a, b = given
    rooms = whole(tuple(a.shape), dtype), whole(tuple(b.shape), dtype)
    first, second = (-(-t.numel() // FLAT) for t in (a, b))
    even = a.numel() % FLAT == 0 and b.numel() % FLAT == 0
    numbers = (a.numel(), b.numel(), first)
    launch = Launch(round_two_kernel, (first + second,), (a, b, *rooms), numbers, {"B": FLAT, "EVEN": even}, FLAT_WARPS)
    return Pass(given, rooms, [launch])


_folds = Passes(_fold_pass)
_two = Passes(_two_pass)
