"""Operands with two-level scales as bf16 values: a launch that measures, one from the matrix, one from what is kept."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.kernels.emulating.two_level import amaxes, kept_values_in_two_levels, values_in_two_levels
from quaver.torch.backends.gpu.launching.launch import workspace
from quaver.torch.backends.gpu.launching.passes import Launch, Pass, Passes
from quaver.torch.backends.gpu.launching.rooms import Room, whole
from quaver.torch.backends.gpu.quantizing.block_scaled import halves
from quaver.torch.backends.gpu.quantizing.codes import grid, integers
from quaver.torch.backends.gpu.quantizing.tensorwise import measure

#: Rows and columns of a program's block, and its warps; where both results are values; with random words too.
BLOCK, BOTH_BLOCK, RANDOM_BLOCK = (128, 128, 4), (128, 128, 8), (64, 128, 8)
WIDTH = 16


class Noise(NamedTuple):
    """What rounding at random draws from, of a matrix and of its transpose."""

    seed: int
    stream: int
    turned_stream: int
    #: int64 of two elements and more: how often each was rounded so. It moves on.
    counts: Tensor


def serves(spec: QuantSpec, other: QuantSpec) -> bool:
    """True if `values` takes a matrix by the first spec, and its transpose by the second."""
    lines = spec.block == other.block == (1, WIDTH) and not spec.hadamard
    squares = spec == other and spec.block == (WIDTH, WIDTH) and spec.rounding == "nearest" and not spec.hadamard
    return spec.scale == other.scale == "two_level" and (lines or squares)


def values(
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    keeps: bool,
    noise: Noise | None = None,
    straight: bool = True,
    turned: bool = True,
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None]:
    """A matrix [rows, columns], contiguous, whole sixteens of rows, as operands of bf16 GEMMs; as `blocks.values`.

    Args:
        other: of the transpose.
        noise: where either is rounded at random.
        straight, turned: which of the two is wanted.
    """
    square = spec.block[0] == WIDTH
    straight, turned = straight or square, turned and not square
    rotated = turned and other.hadamard
    plain = straight or (turned and not rotated)
    top = turned_top = drawn = None
    if rotated or noise is not None:
        moves = straight and spec.rounding == "stochastic", turned and other.rounding == "stochastic"
        count = None if noise is None else noise.counts
        top, turned_top, drawn = _amaxes((x,), plain, rotated, moves, own=(workspace(x.device), count))
    else:
        top = measure(x)
    key_words: tuple[int, ...] = (1,) * 8
    if noise is not None:
        words = noise.stream, noise.turned_stream, noise.seed, noise.seed >> 32
        key_words = tuple(half for word in words for half in halves(word))
    own = (top, turned_top if rotated else top, drawn)
    along, down, codes, scales = _passes((x,), spec, other, keeps, straight, turned, key_words, own=own)
    return along, down, None if codes is None else (codes, scales)


def kept_values(codes: Tensor, scales: Tensor) -> Tensor:
    """What is kept of a transpose as bf16 values, lying as the matrix lay."""
    out: Tensor = _kept((codes, scales))[0]
    return out


def _launch(
    kernel: Any, shape: tuple[int, int], block: tuple[int, int, int], tensors: Any, numbers: Any, **constants: Any
) -> Launch:
    (rows, columns), (bm, bn, warps) = shape, block
    programs, tall = grid(-(-rows // bm), -(-columns // bn))
    even = rows % bm == 0 and columns % bn == 0
    known = {"BM": bm, "BN": bn, "EVEN": even, "TALL": tall, **constants}
    return Launch(kernel, programs, tensors, numbers, known, warps)


def _amaxes_pass(given: Sequence[Any], plain: bool, rotated: bool, moves: tuple[bool, bool]) -> Pass:
    x, work, count = given
    rows, columns = x.shape
    top, turned_top = (whole((1, 1), torch.float32) if wanted else None for wanted in (plain, rotated))
    drawn = None if count is None else whole((2,), torch.int64)
    bm, bn, _ = BLOCK
    programs = -(-rows // bm) * -(-columns // bn)
    tensors = (x, top, turned_top, work, count, drawn)
    numbers = (rows, columns, x.stride(0), programs)
    launch = _launch(amaxes, x.shape, BLOCK, tensors, numbers, FIRST=moves[0], SECOND=moves[1])
    return Pass(given, (top, turned_top, drawn), [launch])


def _pass(
    given: Sequence[Any],
    spec: QuantSpec,
    other: QuantSpec,
    keeps: bool,
    straight: bool,
    turned: bool,
    key_words: tuple[int, ...],
) -> Pass:
    x, top, turned_top, drawn = given
    rows, columns = x.shape
    along = whole((rows, columns), torch.bfloat16) if straight else None
    down = whole((rows, columns), torch.bfloat16) if turned and not keeps else None
    codes = scales = None
    if turned and keeps:
        codes = whole((rows // WIDTH, 2, columns), torch.int32)
        # A row more, of which the first place is the tensor's.
        scales = whole((rows // WIDTH + 1, columns), torch.uint8)
    rooms: tuple[Room | None, ...] = (along, down, codes, scales)
    random = "stochastic" in (spec.rounding, other.rounding)
    launch = _launch(
        values_in_two_levels,
        x.shape,
        RANDOM_BLOCK if random else BLOCK if down is None else BOTH_BLOCK,
        (x, *rooms, top, turned_top, drawn),
        (rows, columns, x.stride(0), *key_words),
        SQUARE=spec.block[0] == WIDTH,
        HADAMARD=other.hadamard,
        STOCHASTIC=spec.rounding == "stochastic",
        TURNED_STOCHASTIC=other.rounding == "stochastic",
        INTEGERS=integers(x.device),
    )
    return Pass(given, rooms, [launch])


def _kept_pass(given: Sequence[Any]) -> Pass:
    codes, _ = given
    blocks, _, columns = codes.shape
    shape = (blocks * WIDTH, columns)
    out = whole(shape, torch.bfloat16)
    launch = _launch(kept_values_in_two_levels, shape, BLOCK, (*given, out), shape, INTEGERS=integers(codes.device))
    return Pass(given, (out,), [launch])


_amaxes = Passes(_amaxes_pass)
_passes = Passes(_pass)
_kept = Passes(_kept_pass)
