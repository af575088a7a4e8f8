"""Grouped products of decoded operands by kernels of our own: any dtype, any card from Ampere on, no word from the host
of how many rows a group has."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.kernels.emulating.groups import multiply_groups, sum_groups
from quaver.torch.backends.gpu.launching.passes import Launch, Pass, Passes
from quaver.torch.backends.gpu.launching.rooms import whole

#: Rows, columns and depth of a program's block, and its warps: of bf16 values, and of float32 ones.
BLOCKS = {torch.bfloat16: (64, 128, 64, 4), torch.float32: (32, 32, 32, 4)}


def multiply(
    x: Tensor,
    w: Tensor,
    ends: Tensor,
    n: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    of_rows: Tensor | None = None,
    of_columns: Tensor | None = None,
) -> Tensor:
    """x [T, k] by each group's matrix of w [groups · n, k], transposed: [T, n], zeros for rows of no group.

    Args:
        x, w: bf16 both, or float32 both, row by row.
        ends: int32 [groups].
        bias: [groups, n].
        of_rows, of_columns: scales that the values lack, float32 [T] and [groups · n].
    """
    given = (x, w, ends, *_lines(of_rows, of_columns, bias))
    y: Tensor = _multiplies(given, n, dtype)[0]
    return y


def add_up(
    x: Tensor,
    w: Tensor,
    ends: Tensor,
    line: int,
    dtype: torch.dtype,
    of_rows: Tensor | None = None,
    of_columns: Tensor | None = None,
) -> Tensor:
    """x [m, slots] by w [n, slots], transposed, summed over each group's slots: [groups, m, n].

    Args:
        ends: int32 [groups], where its slots end.
        line: slots of which each group has a multiple.
        of_rows, of_columns: float32 [groups, m] and [groups, n].
    """
    given = (x, w, ends, *_lines(of_rows, of_columns))
    y: Tensor = _sums(given, line, dtype)[0]
    return y


def _lines(*given: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.reshape(-1).contiguous() for t in given]


def _multiply_pass(given: Sequence[Any], n: int, dtype: torch.dtype) -> Pass:
    x, w, ends, of_rows, of_columns, bias = given
    (rows, k), groups = x.shape, ends.shape[0]
    bm, bn, bk, warps = BLOCKS[x.dtype]
    y = whole((rows, n), dtype)._replace(zeros=True)
    grid = (-(-rows // bm) + groups, -(-n // bn))
    constants = {"BM": bm, "BN": bn, "BK": bk, "EVEN": k % bk == 0 and n % bn == 0}
    tensors = (x, w, y, of_rows, of_columns, bias, ends)
    numbers = (groups, n, k, x.stride(0), w.stride(0))
    return Pass(given, (y,), [Launch(multiply_groups, grid, tensors, numbers, constants, warps)])


def _sum_pass(given: Sequence[Any], line: int, dtype: torch.dtype) -> Pass:
    x, w, ends, of_rows, of_columns = given
    (m, _), n, groups = x.shape, w.shape[0], ends.shape[0]
    bm, bn, bk, warps = BLOCKS[x.dtype]
    y = whole((groups, m, n), dtype)
    even = m % bm == 0 and n % bn == 0 and line % bk == 0
    constants = {"BM": bm, "BN": bn, "BK": bk, "EVEN": even}
    numbers = (m, n, x.stride(0), w.stride(0))
    grid = (-(-m // bm), -(-n // bn), groups)
    tensors = (x, w, y, of_rows, of_columns, ends)
    return Pass(given, (y,), [Launch(sum_groups, grid, tensors, numbers, constants, warps)])


_multiplies = Passes(_multiply_pass)
_sums = Passes(_sum_pass)
