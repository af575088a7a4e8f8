"""The transpose of codes as bytes of its own, for GEMMs that read their operands row by row only."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quaver.kernels.quantizing.transpose import transpose as kernel
from quaver.torch.backends.gpu.launching.launch import aligned
from quaver.torch.backends.gpu.launching.passes import Launch, Pass, Passes
from quaver.torch.backends.gpu.launching.rooms import in_words, whole
from quaver.torch.backends.gpu.quantizing.codes import grid, padded
from quaver.torch.numerics.quantized import filled

#: Rows and columns of a program's block, and its warps.
BLOCK = 128, 128, 4
#: Bytes that rows are a multiple of.
LINE = 16


def transpose(codes: Tensor) -> Tensor:
    """Eight-bit codes [rows, k] to [k, rows], rows padded with zeros to 16 bytes: the [k, rows] view of the buffer.

    Codes whose rows do not lie whole int32 apart are copied first.
    """
    rows, k = codes.shape
    if codes.numel() == 0:
        return codes.new_empty((k, rows))
    if codes.stride(0) == 1 and codes.stride(1) != 1:
        # It is a transpose already, of memory that lies as it is wanted.
        return filled(codes.t(), padded(rows))[:, :rows]
    words = _in_words(codes if _lies_well(codes) else filled(codes, padded(k)))
    out: Tensor = _passes((words,), k, codes.dtype)[0]
    return out[:, :rows]


def _lies_well(codes: Tensor) -> bool:
    """True if rows are whole lines of 16 bytes, from a multiple of 16 on, the last one too."""
    rows, k = codes.shape
    stride = codes.stride(0)
    if codes.stride(1) != 1 or stride % LINE or stride < k or not aligned(codes):
        return False
    return codes.is_meta or rows * stride <= codes.untyped_storage().nbytes() - codes.storage_offset()


def _in_words(codes: Tensor) -> Tensor:
    """Such codes as int32, with what fills the rows; nothing of that is written anywhere."""
    return codes.as_strided((codes.shape[0], codes.stride(0)), (codes.stride(0), 1)).view(torch.int32)


def _pass(given: Sequence[Tensor], k: int, dtype: torch.dtype) -> Pass:
    (words,) = given
    rows = words.shape[0]
    out = in_words(whole((k, padded(rows)), dtype))
    bm, bn, warps = BLOCK
    programs, tall = grid(-(-padded(rows) // bm), -(-k // bn))
    constants = {"BM": bm, "BN": bn, "EVEN": rows % bm == 0 and k % bn == 0, "TALL": tall}
    numbers = (rows, k, words.stride(0) // 4, padded(rows) // 16)
    return Pass(given, (out,), [Launch(kernel, programs, (words, out), numbers, constants, warps)])


_passes = Passes(_pass)
