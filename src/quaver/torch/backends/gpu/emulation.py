"""Emulated operands: bf16 values of blockwise quantized matrices, made in one launch from a matrix or from saved codes.

Also kernels that finish float32 products, and grouped GEMMs of decoded operands.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.kernels.emulation import (
    cached_values_in_two_levels,
    cached_values_of_blocks,
    multiply_groups,
    sum_groups,
    values_in_two_levels,
    values_of_blocks,
)
from quaver.kernels.emulation import fold as fold_kernel
from quaver.kernels.emulation import round_two as round_two_kernel
from quaver.recipes.formats import E4M3, E5M2, Format
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu.block_scaled import amaxes_launch, halves
from quaver.torch.backends.gpu.buffers import BufferSpec, whole
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec, workspace
from quaver.torch.backends.gpu.tensorwise import DTYPES, integers, measure, tiles
from quaver.torch.numerics.quantized import FLOAT8

# ---- blocks with power-of-two scales ----

#: Rows and columns of a program's block, and its warps; the tall one is for square blocks of 128.
BLOCK, TALL_BLOCK = (64, 128, 4), (128, 128, 8)
WIDTHS = 16, 32, 64, 128


def serves(spec: QuantSpec, other: QuantSpec) -> bool:
    """Return True if `values` supports a matrix by the first spec and its transpose by the second."""
    height, width = spec.block
    powers = spec.power_of_two and spec.scale != "unit" and width in WIDTHS and height in (1, width)
    return powers and spec == other and spec.rounding == "nearest" and not spec.hadamard


def values(
    x: Tensor, spec: QuantSpec, saves_codes: bool, straight: bool = True, transposed: bool = True
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None]:
    """Round a contiguous matrix [rows, columns] to the bf16 values of its codes.

    Equals `Quantized.dequantize`, except that values of 2**128 and more become bf16's largest number.

    Args:
        spec: spec of the matrix and of its transpose, supported by `serves`.
        saves_codes: True to save codes of the transpose for backward instead of returning its values.
        straight, transposed: which of the two results are needed.

    Returns:
        The values of the matrix, or None; those of its transpose in the layout of x (None if saved as codes, or if
        blocks are square, so that both are the same); and the saved codes and scales for `saved_values`, or None.
    """
    square = spec.block[0] == spec.block[1]
    straight, transposed = straight or square, transposed and not square
    along, down, codes, scales = _passes((x,), spec, saves_codes, straight, transposed)
    return along, down, None if codes is None else (codes, scales)


def saved_values(codes: Tensor, scales: Tensor, spec: QuantSpec) -> Tensor:
    """Decode the saved codes of a transpose to bf16 values, in the layout of the matrix."""
    out: Tensor = _decode_saved((codes, scales), spec)[0]
    return out


def saved_format(fmt: Format) -> Format | None:
    """Return the eight-bit format that holds all values of a format, in which they are saved; None if there is none."""
    return next((f for f in (E4M3, E5M2) if _holds(f, fmt)), None)


def _holds(wide: Format, fmt: Format) -> bool:
    step, smallest = fmt.emin - fmt.mantissa_bits, wide.emin - wide.mantissa_bits
    return wide.mantissa_bits >= fmt.mantissa_bits and smallest <= step and wide.max >= fmt.max


@LaunchPlanCache
def _passes(
    tensors_in: Sequence[Any], spec: QuantSpec, saves_codes: bool, straight: bool, transposed: bool
) -> LaunchPlan:
    (x,) = tensors_in
    rows, columns = x.shape
    width, fmt = spec.block[1], spec.format
    assert width is not None
    stored_format = saved_format(fmt) if saves_codes else None
    along = whole((rows, columns), torch.bfloat16) if straight else None
    down = codes = scales = None
    if stored_format is not None and transposed:
        codes = whole((rows, columns), FLOAT8[stored_format.name])
        scales = whole((-(-rows // width), columns), torch.uint8)
    elif transposed:
        down = whole((rows, columns), torch.bfloat16)
    programs, constants, warps = tiles(x.shape, TALL_BLOCK if width == TALL_BLOCK[0] else BLOCK)
    constants |= values_constants(spec, codes is not None, x.device)
    buffers: tuple[BufferSpec | None, ...] = (along, down, codes, scales)
    numbers = (rows, columns, x.stride(0))
    return LaunchPlan(
        tensors_in, buffers, [LaunchSpec(values_of_blocks, programs, (x, *buffers), numbers, constants, warps)]
    )


def values_constants(spec: QuantSpec, saves_codes: bool, device: torch.device) -> dict[str, Any]:
    """Return the constants of `values_of_blocks` that follow from a spec."""
    fmt, stored = spec.format, saved_format(spec.format)
    return {
        "WIDTH": spec.block[1],
        "SQUARE": spec.block[0] == spec.block[1],
        "MANTISSA": fmt.mantissa_bits,
        "EMIN": fmt.emin,
        "EMAX": fmt.emax,
        "TOP_MANTISSA": fmt.max_mantissa,
        "CODES": DTYPES[stored.name] if saves_codes and stored is not None else None,
        "INTEGERS": integers(device),
    }


@LaunchPlanCache
def _decode_saved(tensors_in: Sequence[Any], spec: QuantSpec) -> LaunchPlan:
    codes, scales = tensors_in
    width, stored_format = spec.block[1], saved_format(spec.format)
    assert stored_format is not None
    programs, constants, warps = tiles(codes.shape, TALL_BLOCK if width == TALL_BLOCK[0] else BLOCK)
    constants |= {"WIDTH": width, "CODES": DTYPES[stored_format.name], "INTEGERS": integers(codes.device)}
    out = whole(codes.shape, torch.bfloat16)
    tensors = (codes, scales, out)
    return LaunchPlan(
        tensors_in, (out,), [LaunchSpec(cached_values_of_blocks, programs, tensors, codes.shape, constants, warps)]
    )


# ---- finishing float32 products: scales, bias and rounding in one launch ----

#: Rows and columns of a program's block and its warps; the same for `round_two` in elements.
FOLD_BLOCK = 16, 256, 4
FLAT, FLAT_WARPS = 4096, 4


def fold(
    y: Tensor, dtype: torch.dtype, bias: Tensor | None = None, row_scales: Tensor | None = None,
    column_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply y [rows, columns], contiguous float32, by row and column scales, and add bias [columns].

    Rounds in float32 after each step, and once to `dtype`.

    Args:
        dtype: dtype of the result.
        bias: of any dtype that kernels read.
        row_scales, column_scales: float32 scales, one per row or column, or a single one.
    """
    out: Tensor = _folds((y, *_lines(row_scales, column_scales, bias)), dtype)[0]
    return out


def round_two(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round two contiguous float32 matrices to another dtype in one launch."""
    rounded: tuple[Tensor, Tensor] = tuple(_two((a, b), dtype))
    return rounded


@LaunchPlanCache
def _folds(tensors_in: Sequence[Any], dtype: torch.dtype) -> LaunchPlan:
    y, row_scales, column_scales, bias = tensors_in
    out = whole(y.shape, dtype)
    programs, constants, warps = tiles(y.shape, FOLD_BLOCK)
    constants |= {
        "ONE_ROW": row_scales is not None and row_scales.numel() == 1,
        "ONE_COLUMN": column_scales is not None and column_scales.numel() == 1,
    }
    tensors = (y, row_scales, column_scales, bias, out)
    return LaunchPlan(tensors_in, (out,), [LaunchSpec(fold_kernel, programs, tensors, y.shape, constants, warps)])


@LaunchPlanCache
def _two(tensors_in: Sequence[Any], dtype: torch.dtype) -> LaunchPlan:
    a, b = tensors_in
    buffers = whole(tuple(a.shape), dtype), whole(tuple(b.shape), dtype)
    first, second = (-(-t.numel() // FLAT) for t in (a, b))
    even = a.numel() % FLAT == 0 and b.numel() % FLAT == 0
    numbers = (a.numel(), b.numel(), first)
    launch = LaunchSpec(
        round_two_kernel, (first + second,), (a, b, *buffers), numbers, {"B": FLAT, "EVEN": even}, FLAT_WARPS
    )
    return LaunchPlan(tensors_in, buffers, [launch])


# ---- grouped products of decoded operands by Triton kernels ----
# For any dtype and any GPU from Ampere on, without copying the group sizes to the host.

#: Rows, columns and depth of a program's block, and its warps, by dtype.
BLOCKS = {torch.bfloat16: (64, 128, 64, 4), torch.float32: (32, 32, 32, 4)}


def multiply(
    x: Tensor,
    w: Tensor,
    ends: Tensor,
    n: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    row_scales: Tensor | None = None,
    column_scales: Tensor | None = None,
) -> Tensor:
    """Multiply x [T, k] by each group's transposed matrix of w [groups · n, k]; returns [T, n], zeros for rows of no
    group.

    Args:
        x, w: row-major, both bf16 or both float32.
        ends: int32 [groups].
        bias: [groups, n].
        row_scales, column_scales: scales to apply to the product, float32 [T] and [groups · n].
    """
    tensors_in = (x, w, ends, *_lines(row_scales, column_scales, bias))
    y: Tensor = _multiplies(tensors_in, n, dtype)[0]
    return y


def add_up(
    x: Tensor,
    w: Tensor,
    ends: Tensor,
    line: int,
    dtype: torch.dtype,
    row_scales: Tensor | None = None,
    column_scales: Tensor | None = None,
) -> Tensor:
    """Multiply x [m, slots] by transposed w [n, slots], summed over each group's slots; returns [groups, m, n].

    Args:
        ends: int32 [groups], the end of each group's slots.
        line: each group's slots are a multiple of this.
        row_scales, column_scales: float32 [groups, m] and [groups, n].
    """
    tensors_in = (x, w, ends, *_lines(row_scales, column_scales))
    y: Tensor = _sums(tensors_in, line, dtype)[0]
    return y


def _lines(*tensors_in: Tensor | None) -> list[Tensor | None]:
    """Return contiguous vectors, as kernels read them, of views and of an expanded bias."""
    return [None if t is None else t.reshape(-1).contiguous() for t in tensors_in]


@LaunchPlanCache
def _multiplies(tensors_in: Sequence[Any], n: int, dtype: torch.dtype) -> LaunchPlan:
    x, w, ends, row_scales, column_scales, bias = tensors_in
    (rows, k), groups = x.shape, ends.shape[0]
    bm, bn, bk, warps = BLOCKS[x.dtype]
    y = whole((rows, n), dtype)._replace(zeros=True)
    grid = (-(-rows // bm) + groups, -(-n // bn))
    constants = {"BM": bm, "BN": bn, "BK": bk, "EVEN": k % bk == 0 and n % bn == 0}
    tensors = (x, w, y, row_scales, column_scales, bias, ends)
    numbers = (groups, n, k, x.stride(0), w.stride(0))
    return LaunchPlan(tensors_in, (y,), [LaunchSpec(multiply_groups, grid, tensors, numbers, constants, warps)])


@LaunchPlanCache
def _sums(tensors_in: Sequence[Any], line: int, dtype: torch.dtype) -> LaunchPlan:
    x, w, ends, row_scales, column_scales = tensors_in
    (m, _), n, groups = x.shape, w.shape[0], ends.shape[0]
    bm, bn, bk, warps = BLOCKS[x.dtype]
    y = whole((groups, m, n), dtype)
    even = m % bm == 0 and n % bn == 0 and line % bk == 0
    constants = {"BM": bm, "BN": bn, "BK": bk, "EVEN": even}
    numbers = (m, n, x.stride(0), w.stride(0))
    grid = (-(-m // bm), -(-n // bn), groups)
    tensors = (x, w, y, row_scales, column_scales, ends)
    return LaunchPlan(tensors_in, (y,), [LaunchSpec(sum_groups, grid, tensors, numbers, constants, warps)])


# ---- two-level scales: bf16 values in two launches, measure and round ----

#: Rows and columns of a program's block and its warps: one result as values, both, and with noise too.
TWO_LEVEL_BLOCK, BOTH_BLOCK, RANDOM_BLOCK = (128, 128, 4), (128, 128, 8), (64, 128, 8)
WIDTH = 16


class StochasticRounding(NamedTuple):
    """Noise for stochastic rounding of a matrix and of its transpose."""

    seed: int
    stream: int
    transposed_stream: int
    #: int64 of at least two elements: how often each was rounded before; the kernels advance it.
    counts: Tensor


def serves_two_level(spec: QuantSpec, other: QuantSpec) -> bool:
    """Return True if `two_level_values` supports a matrix by the first spec and its transpose by the second."""
    lines = spec.block == other.block == (1, WIDTH) and not spec.hadamard
    squares = spec == other and spec.block == (WIDTH, WIDTH) and spec.rounding == "nearest" and not spec.hadamard
    return spec.scale == other.scale == "two_level" and (lines or squares)


def two_level_values(
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    saves_codes: bool,
    noise: StochasticRounding | None = None,
    straight: bool = True,
    transposed: bool = True,
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None]:
    """Round a contiguous matrix [rows, columns], rows a multiple of 16, to the values of its codes; returns as
    `values`.

    Args:
        other: spec of the transpose.
        noise: needed if either is rounded stochastically.
        straight, transposed: which of the two results are needed.
    """
    square = spec.block[0] == WIDTH
    straight, transposed = straight or square, transposed and not square
    rotated = transposed and other.hadamard
    plain = straight or (transposed and not rotated)
    top = transposed_top = drawn = None
    if rotated or noise is not None:
        moves = straight and spec.rounding == "stochastic", transposed and other.rounding == "stochastic"
        count = None if noise is None else noise.counts
        top, transposed_top, drawn = _amaxes((x,), plain, rotated, moves, own=(workspace(x.device), count))
    else:
        top = measure(x)
    key_words: tuple[int, ...] = (1,) * 8
    if noise is not None:
        words = noise.stream, noise.transposed_stream, noise.seed, noise.seed >> 32
        key_words = tuple(half for word in words for half in halves(word))
    own = (top, transposed_top if rotated else top, drawn)
    along, down, codes, scales = _two_level_passes(
        (x,), spec, other, saves_codes, straight, transposed, key_words, own=own
    )
    return along, down, None if codes is None else (codes, scales)


def cached_two_level_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode the saved codes of a transpose to bf16 values, in the layout of the matrix."""
    out: Tensor = cached_two_level((codes, scales), False)[0]
    return out


@LaunchPlanCache
def _amaxes(tensors_in: Sequence[Any], plain: bool, rotated: bool, moves: tuple[bool, bool]) -> LaunchPlan:
    x, work, count = tensors_in
    top, transposed_top = (whole((1, 1), torch.float32) if wanted else None for wanted in (plain, rotated))
    drawn = None if count is None else whole((2,), torch.int64)
    launch = amaxes_launch(x, (top, transposed_top, work, count, drawn), moves)
    return LaunchPlan(tensors_in, (top, transposed_top, drawn), [launch])


@LaunchPlanCache
def _two_level_passes(
    tensors_in: Sequence[Any],
    spec: QuantSpec,
    other: QuantSpec,
    saves_codes: bool,
    straight: bool,
    transposed: bool,
    key_words: tuple[int, ...],
) -> LaunchPlan:
    x, top, transposed_top, drawn = tensors_in
    rows, columns = x.shape
    along = whole((rows, columns), torch.bfloat16) if straight else None
    down = whole((rows, columns), torch.bfloat16) if transposed and not saves_codes else None
    codes = scales = None
    if transposed and saves_codes:
        codes = whole((rows // WIDTH, 2, columns), torch.int32)
        # One more row, whose first element stores the tensor factor.
        scales = whole((rows // WIDTH + 1, columns), torch.uint8)
    buffers: tuple[BufferSpec | None, ...] = (along, down, codes, scales)
    random = "stochastic" in (spec.rounding, other.rounding)
    block = RANDOM_BLOCK if random else TWO_LEVEL_BLOCK if down is None else BOTH_BLOCK
    programs, constants, warps = tiles(x.shape, block)
    constants |= {
        "SQUARE": spec.block[0] == WIDTH,
        "HADAMARD": other.hadamard,
        "STOCHASTIC": spec.rounding == "stochastic",
        "TRANSPOSED_STOCHASTIC": other.rounding == "stochastic",
        "INTEGERS": integers(x.device),
    }
    tensors, numbers = (x, *buffers, top, transposed_top, drawn), (rows, columns, x.stride(0), *key_words)
    return LaunchPlan(
        tensors_in, buffers, [LaunchSpec(values_in_two_levels, programs, tensors, numbers, constants, warps)]
    )


@LaunchPlanCache
def cached_two_level(tensors_in: Sequence[Any], each: bool) -> LaunchPlan:
    """Plan `cached_two_level_values`; each: every block of rows has its own tensor factor."""
    codes, _ = tensors_in
    blocks, _, columns = codes.shape
    shape = (blocks * WIDTH, columns)
    out = whole(shape, torch.bfloat16)
    programs, constants, warps = tiles(shape, TWO_LEVEL_BLOCK)
    constants |= {"INTEGERS": integers(codes.device), "EACH": each}
    launch = LaunchSpec(cached_values_in_two_levels, programs, (*tensors_in, out), shape, constants, warps)
    return LaunchPlan(tensors_in, (out,), [launch])
