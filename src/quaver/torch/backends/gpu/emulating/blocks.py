"""Operands in blocks that share a power of two, as bf16 values: a launch from a matrix, one from what is kept."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.core.numbers.formats import E4M3, E5M2, Format
from quaver.core.spec import QuantSpec
from quaver.kernels.emulating.blocks import kept_values_of_blocks, values_of_blocks
from quaver.torch.backends.gpu.launching.passes import Launch, Pass, Passes
from quaver.torch.backends.gpu.launching.rooms import Room, whole
from quaver.torch.backends.gpu.quantizing.codes import DTYPES, grid, integers
from quaver.torch.numerics.quantized import FLOAT8

#: Rows and columns of a program's block, and its warps; of blocks of 128 rows they are as many.
BLOCK, TALL_BLOCK = (64, 128, 4), (128, 128, 8)
WIDTHS = 16, 32, 64, 128


def serves(spec: QuantSpec, other: QuantSpec) -> bool:
    """True if `values` takes a matrix by the first spec, and its transpose by the second."""
    height, width = spec.block
    powers = spec.power_of_two and spec.scale != "unit" and width in WIDTHS and height in (1, width)
    return powers and spec == other and spec.rounding == "nearest" and not spec.hadamard


def values(x: Tensor, spec: QuantSpec, keeps: bool) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
    """A matrix [rows, columns], contiguous, as operands of bf16 GEMMs.

    Args:
        spec: of it and of its transpose; `serves` says which.
        keeps: whether the transpose is kept for later.
    Returns:
        The values of its codes; those of its transpose's codes, lying as x lies (None where they are kept, or where
        blocks are square, so that both are the same); and what is kept of them, for `kept_values`: codes and scales.
    Exact: what `Quantized.dequantize` gives; but 2**128 and more, which no bf16 holds, becomes its largest number.
    """
    along, down, codes, scales = _passes((x,), spec, keeps)
    return along, down, None if codes is None else (codes, scales)


def kept_values(codes: Tensor, scales: Tensor, spec: QuantSpec) -> Tensor:
    """What is kept of a transpose as bf16 values, lying as the matrix lay."""
    out: Tensor = _kept((codes, scales), spec)[0]
    return out


def kept_format(fmt: Format) -> Format | None:
    """The eight-bit format in which a format's values are kept, or None where none holds them all."""
    return next((f for f in (E4M3, E5M2) if _holds(f, fmt)), None)


def _holds(wide: Format, fmt: Format) -> bool:
    step, smallest = fmt.emin - fmt.mantissa_bits, wide.emin - wide.mantissa_bits
    return wide.mantissa_bits >= fmt.mantissa_bits and smallest <= step and wide.max >= fmt.max


def _blocks(rows: int, columns: int, width: int) -> tuple[tuple[int, int], dict[str, Any], int]:
    bm, bn, warps = TALL_BLOCK if width == TALL_BLOCK[0] else BLOCK
    programs, tall = grid(-(-rows // bm), -(-columns // bn))
    even = rows % bm == 0 and columns % bn == 0
    return programs, {"BM": bm, "BN": bn, "EVEN": even, "TALL": tall, "WIDTH": width}, warps


def _pass(given: Sequence[Any], spec: QuantSpec, keeps: bool) -> Pass:
    (x,) = given
    rows, columns = x.shape
    width, fmt = spec.block[1], spec.format
    assert width is not None
    kept = kept_format(fmt) if keeps else None
    square = spec.block[0] == width
    along = whole((rows, columns), torch.bfloat16)
    down = codes = scales = None
    if kept is not None and not square:
        codes = whole((rows, columns), FLOAT8[kept.name])
        scales = whole((-(-rows // width), columns), torch.uint8)
    elif not square:
        down = whole((rows, columns), torch.bfloat16)
    programs, constants, warps = _blocks(rows, columns, width)
    constants |= {
        "SQUARE": square,
        "MANTISSA": fmt.mantissa_bits,
        "EMIN": fmt.emin,
        "EMAX": fmt.emax,
        "TOP_MANTISSA": fmt.max_mantissa,
        "CODES": None if codes is None or kept is None else DTYPES[kept.name],
        "INTEGERS": integers(x.device),
    }
    rooms: tuple[Room | None, ...] = (along, down, codes, scales)
    numbers = (rows, columns, x.stride(0))
    return Pass(given, rooms, [Launch(values_of_blocks, programs, (x, *rooms), numbers, constants, warps)])


def _kept_pass(given: Sequence[Any], spec: QuantSpec) -> Pass:
    codes, scales = given
    rows, columns = codes.shape
    assert spec.block[1] is not None
    programs, constants, warps = _blocks(rows, columns, spec.block[1])
    kept = kept_format(spec.format)
    assert kept is not None
    constants |= {"CODES": DTYPES[kept.name], "INTEGERS": integers(codes.device)}
    out = whole((rows, columns), torch.bfloat16)
    tensors = (codes, scales, out)
    return Pass(given, (out,), [Launch(kept_values_of_blocks, programs, tensors, (rows, columns), constants, warps)])


_passes = Passes(_pass)
_kept = Passes(_kept_pass)
