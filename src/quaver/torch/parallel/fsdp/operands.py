"""One rank's rows of a weight, quantized as they are in the whole weight, and the whole operand made of all ranks'.

Exact: the codes and scales of the whole weight. Codes and scales lie as the weight does, [N, K] and [rows of blocks,
blocks along K], for either side: so a rank's rows are bytes that follow the bytes of the rank before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu.buffers import CrossStream
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Given, Quantized, pack, storage
from quaver.torch.numerics.rounding import SMALLEST_NORMAL_BITS, magnitude_bits, rotate
from quaver.torch.operations.functional import quantize

# ---- cutting ---------------------------------------------------------------------------------------------
# Where the blocks of a weight [N, K] lie whose rows are dealt out to ranks, as torch's chunks are: pure arithmetic.
#
# A block within one rank's rows is quantized there as in the whole weight. One that lies on several ranks, which
# straddles, needs the amax of all its parts, and nothing else. Where tensor parallelism has cut the weight before, [N,
# K] is this rank's part of it, and what it cut through are blocks as high or as wide as the weight, no others.


@dataclass(frozen=True)
class OperandSide:
    """One operand that a weight [N, K] becomes: fprop's, or dgrad's, which is the transpose and lies as the weight."""

    #: "fprop" or "dgrad".
    name: str
    spec: QuantSpec
    #: Whether the operand is the transpose.
    transposed: bool = field(init=False)
    #: Rows of the weight in a block; None for all.
    height: int | None = field(init=False)
    #: Columns of the weight in a block; None for all.
    width: int | None = field(init=False)

    def __post_init__(self) -> None:
        transposed = self.name == "dgrad"
        height, width = self.spec.block[::-1] if transposed else self.spec.block
        for name, value in (("transposed", transposed), ("height", height), ("width", width)):
            object.__setattr__(self, name, value)

    def columns(self, k: int) -> int:
        """Columns that are stored of K."""
        return k if self.transposed else self.spec.padded(k)

    def blocks(self, k: int) -> int:
        """Blocks along K."""
        return 1 if self.width is None else -(-self.columns(k) // self.width)


def sides(recipe: Recipe) -> tuple[OperandSide, ...]:
    """The operands of a recipe's weight: one where fprop's serves dgrad."""
    assert recipe.fprop.b is not None and recipe.dgrad.b is not None
    first = OperandSide("fprop", recipe.fprop.b)
    return (first,) if recipe.plan.weight else (first, OperandSide("dgrad", recipe.dgrad.b))


class RowShard(NamedTuple):
    """The rows of a weight that a rank has."""

    start: int
    stop: int
    #: Of the whole weight.
    all: int
    #: That every rank's part is filled up to.
    part: int
    ranks: int
    #: The axis along which tensor parallelism has cut the weight of which this one is a part; None where it has not.
    axis: int | None = None

    @classmethod
    def of(cls, n: int, ranks: int, rank: int, axis: int | None = None) -> "RowShard":
        return cls(0, 0, n, -(-n // ranks), ranks, axis).on(rank)

    @property
    def has_others(self) -> bool:
        """Whether other ranks have the rest of a block that is as high as the weight."""
        return self.ranks > 1 or self.axis is not None

    def on(self, rank: int) -> "RowShard":
        """Those of another rank."""
        start = min(self.all, self.part * rank)
        return self._replace(start=start, stop=min(self.all, start + self.part))


class ShardPiece(NamedTuple):
    """Rows of one rank that are whole blocks, or a part of one."""

    start: int
    stop: int
    #: The row of blocks that it begins in.
    block: int
    crosses_shards: bool


def pieces(rows: RowShard, height: int | None) -> list[ShardPiece]:
    """A rank's rows, cut where a row of blocks begins that lies on another rank too, or ends."""
    start, stop = rows.start, rows.stop
    if start == stop:
        return []
    if height is None:
        return [ShardPiece(start, stop, 0, rows.has_others)]
    first = min(stop, -(-start // height) * height)
    last = stop if stop == rows.all else max(first, stop // height * height)
    cuts = sorted({start, first, last, stop})
    return [
        ShardPiece(a, b, a // height, a % height != 0 or (b % height != 0 and b != rows.all)) for a, b in pairwise(cuts)
    ]


def cut_across(rows: RowShard, side: OperandSide) -> bool:
    """Whether tensor parallelism has cut through all rows of blocks, on whose amaxes ranks with the same rows agree."""
    return rows.axis == 1 and side.width is None and side.height is not None


def straddling(rows: RowShard, height: int | None) -> list[int]:
    """The rows of blocks of the whole weight that lie on several ranks."""
    if height is None:
        # Ranks without rows, too: its scales do not travel.
        return [0] if rows.has_others else []
    if rows.part >= rows.all:
        return []
    return sorted({cut // height for cut in range(rows.part, rows.all, rows.part) if cut % height})


def block_rows(rows: RowShard, height: int) -> range:
    """The rows of blocks that a rank has something of."""
    return range(rows.start // height, -(-rows.stop // height)) if rows.stop > rows.start else range(0)


def most_block_rows(rows: RowShard, height: int) -> int:
    """The most of them that any rank has."""
    return max(len(block_rows(rows.on(rank), height)) for rank in range(rows.ranks))


# ---- operands --------------------------------------------------------------------------------------------

#: In `Agreed`: the amax of the whole weight, of two-level scales and of a history.
WHOLE = -1
#: In `Agreed`: the amaxes of all rows of blocks, where `cut_across`.
ROWS = -2
#: Bits of amaxes that all ranks agreed on, int32: [blocks along K] by row of blocks, `WHOLE`'s [1], and `ROWS`'s [rows
#: of blocks].
Agreed = Mapping[int, Tensor]


class OperandShard(NamedTuple):
    """What one rank sends of an operand, and what every rank knows of it."""

    #: uint8 [rows of a part, bytes of a row], filled up with zeros.
    codes: Tensor
    #: uint8 [rows of blocks, bytes of their scales], filled up with zeros; None where all ranks have the same scales.
    scales: Tensor | None
    #: The scales of all rows, as they lie, where these do not travel.
    common: Tensor | float | None
    #: Of two-level scales, `Quantized.tensor_factor`.
    tensor_factor: Tensor | None


def amaxes(x: Tensor, side: OperandSide, rows: RowShard, of_all: bool) -> dict[int, Tensor]:
    """This rank's part of the amaxes that ranks agree on, in the form of `Agreed`: the same keys and shapes on all.

    Args:
        x: its rows [n, K].
        of_all: whether the whole weight's is wanted, too.
    """
    spec, transposed, width = side.spec, side.transposed, side.columns(x.shape[1])
    bits = magnitude_bits(rotate(x.to(torch.float32)) if spec.hadamard and not transposed else x.to(torch.float32))
    parts = {}
    if cut_across(rows, side):
        assert side.height is not None
        lines = bits.new_zeros(-(-rows.all // side.height))
        own = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=bits.device) // side.height
        if bits.numel():
            lines.scatter_reduce_(0, own, bits.amax(1), "amax")
        parts[ROWS] = _of_blocks(lines, 1)
    for block in () if ROWS in parts else straddling(rows, side.height):
        start, stop = (0, rows.all) if side.height is None else (block * side.height, (block + 1) * side.height)
        own = bits[max(0, start - rows.start) : max(0, min(stop, rows.stop) - rows.start)]
        parts[block] = _of_blocks(own.amax(0) if own.shape[0] else bits.new_zeros(width), side.width)
    if of_all and not (spec.per_tensor and parts):
        parts[WHOLE] = _of_blocks(bits.reshape(-1), None)
    return parts


def whole(agreed: Agreed) -> Tensor | None:
    """The amax of the whole weight, float32 [1, 1], where it was asked for."""
    bits = agreed.get(WHOLE, agreed.get(0))
    return None if bits is None or bits.numel() != 1 else bits.view(torch.float32).view(1, 1)


def part(x: Tensor, side: OperandSide, rows: RowShard, agreed: Agreed, factor: Given) -> OperandShard:
    """This rank's part of an operand.

    Args:
        x: its rows [n, K], float32, bfloat16 or float16.
        factor: of delayed scaling, as `quantize` takes it.
    """
    spec, k = side.spec, x.shape[1]
    cut = pieces(rows, side.height)
    done = []
    for p in cut:
        piece = x[p.start - rows.start : p.stop - rows.start]
        done.append(_piece(piece, side, p.block, p.crosses_shards, agreed, factor))
    bytes_of_row = -(-side.columns(k) // 2) if spec.format.packed else side.columns(k)
    codes = torch.zeros((rows.part, bytes_of_row), dtype=torch.uint8, device=x.device)
    for p, (data, _, _) in zip(cut, done, strict=True):
        codes[p.start - rows.start : p.stop - rows.start] = data
    if not done:
        # What scales all ranks have in common follows from what they agreed on, not from rows.
        done = [_piece(x.new_zeros((1, k)), side, 0, side.height is None or spec.two_level, agreed, factor)]
    tensor_factor = done[0][2]
    if side.height is None:
        return OperandShard(codes, None, done[0][1], tensor_factor)
    shape = most_block_rows(rows, side.height), bytes_of_scales(side, k)
    scales = torch.zeros(shape, dtype=torch.uint8, device=x.device)
    first = rows.start // side.height
    for p, (_, scale, _) in zip(cut, done, strict=False):
        assert isinstance(scale, Tensor)
        scales[p.block - first : p.block - first + scale.shape[0]] = scale.contiguous().view(torch.uint8)
    return OperandShard(codes, scales, None, tensor_factor)


def _piece(
    x: Tensor, side: OperandSide, block: int, crosses_shards: bool, agreed: Agreed, factor: Given
) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """Codes and scales of whole blocks, or of a part of one row of blocks, and the tensor's factor."""
    spec = side.spec
    operand = x.t() if side.transposed else x
    given = _given(side, block, crosses_shards, agreed, x.shape[0])
    if spec.two_level and given is not None:
        wide = operand.to(torch.float32)
        tensor = agreed[WHOLE].view(torch.float32)
        q = reference.two_level(rotate(wide) if spec.hadamard else wide, spec, tensor, given)
    elif spec.two_level:
        q = quantize(operand, spec, agreed[WHOLE].view(torch.float32).view(1, 1))
    else:
        q = quantize(operand, spec, None if given is None else given.view(torch.float32), factor=factor)
    return *_as_the_weight(q, side), q.tensor_factor


def _given(side: OperandSide, block: int, crosses_shards: bool, agreed: Agreed, rows: int) -> Tensor | None:
    """The bits of amaxes that ranks agreed on for rows from a row of blocks on, in the operand's shape; or None."""
    lines = agreed.get(ROWS)
    if lines is not None and lines.numel():
        assert side.height is not None
        of_rows = lines[block : block + -(-rows // side.height)]
        return of_rows.view((1, -1) if side.transposed else (-1, 1))
    given = agreed.get(block) if crosses_shards else None
    return None if given is None else given.view((-1, 1) if side.transposed else (1, -1))


def _as_the_weight(q: Quantized, side: OperandSide) -> tuple[Tensor, Tensor | float]:
    """Codes as bytes and the stored scales, as the weight lies."""
    scale = q.plain_scale() if isinstance(q.scale, Tensor) else q.scale
    if q.transposed == side.transposed:
        return q.data.view(torch.uint8), scale
    codes = q.lying_codes().t()
    if side.spec.format.packed:
        codes = pack(codes)
    return codes, scale.t() if isinstance(scale, Tensor) else scale


def _of_blocks(line: Tensor, width: int | None) -> Tensor:
    """The largest of each block of a row's bits; those of subnormals count as 0, as `reference.block_bits` has it."""
    if width is None or not line.numel():
        top = line.amax().view(1) if line.numel() else line.new_zeros(0 if width else 1)
    else:
        top = torch.nn.functional.pad(line, (0, -line.numel() % width)).view(-1, width).amax(1)
    return torch.where(top < SMALLEST_NORMAL_BITS, 0, top)


def _in_bytes(side: OperandSide) -> bool:
    """Whether a stored scale is a byte, not a float32."""
    return side.spec.scale == "e8m0" or side.spec.two_level


def bytes_of_scales(side: OperandSide, k: int) -> int:
    """Bytes of the scales of one row of blocks."""
    return side.blocks(k) * (1 if _in_bytes(side) else 4)


def buffer(side: OperandSide, rows: RowShard, k: int) -> tuple[int, int] | None:
    """The shape of the bytes of scales where those of all ranks do not follow one another in what is gathered."""
    if side.height is None or rows.part % side.height == 0 or rows.part >= rows.all:
        return None
    return -(-rows.all // side.height), bytes_of_scales(side, k)


@dataclass(frozen=True)
class GatheredLayout:
    """How the parts of all ranks lie in what was gathered."""

    side: OperandSide
    shape: tuple[int, int]
    rows: RowShard
    own: OperandShard
    #: The largest magnitude of the weight, where it is known.
    amax: Tensor | None
    #: All of these, which another stream may have written.
    written: Sequence[CrossStream] = ()

    def operand(self, gathered: Sequence[Tensor], place: Tensor | None = None) -> Quantized:
        """The whole operand, a view of what was gathered.

        Args:
            gathered: codes of all ranks, one after the other, and their scales if they travel.
            place: uint8 in the shape of `buffer`, where scales are put in order; None takes a new one.
        """
        for each in self.written:
            each.wait()
        side, own, n = self.side, self.own, self.rows.all
        data = gathered[0].view(-1, own.codes.shape[1])[:n].view(storage(side.spec.format))
        scale = own.common
        if own.scales is not None:
            scale = self._scales(gathered[1].view(-1, own.scales.shape[1]), place)
        shape = self.shape[::-1] if side.transposed else self.shape
        return Quantized(data, scale, side.spec, shape, side.transposed, own.tensor_factor, self.amax)  # type: ignore[arg-type]

    def _scales(self, every: Tensor, place: Tensor | None) -> Tensor:
        height, most = self.side.height, every.shape[0] // self.rows.ranks
        assert height is not None
        shape = buffer(self.side, self.rows, self.shape[1])
        if shape is None:
            placed = every[: -(-self.rows.all // height)]
        else:
            placed = torch.empty(shape, dtype=torch.uint8, device=every.device) if place is None else place
            for rank in range(self.rows.ranks):
                blocks = block_rows(self.rows.on(rank), height)
                placed[blocks.start : blocks.stop] = every[rank * most : rank * most + len(blocks)]
        return placed if _in_bytes(self.side) else placed.view(torch.float32)
