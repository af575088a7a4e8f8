"""Quantization of one rank's rows of a weight, and assembly of the whole operand from the shards of all ranks.

Exact: the result has the codes and scales of the whole weight. For either side, codes have the layout [N, K] of the
    weight and scales [block rows, blocks along K]. So the bytes of a rank's rows follow directly on those of the
    previous rank.
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
from quaver.torch.numerics.quantized import Quantized, ScalarOverride, pack, storage
from quaver.torch.numerics.rounding import SMALLEST_NORMAL_BITS, magnitude_bits, rotate
from quaver.torch.operations.functional import quantize

# ---- blocks and shards ----
# Index arithmetic: the blocks of a weight [N, K] whose rows are sharded like torch.chunk.
#
# A block within one rank's rows is quantized there exactly as in the whole weight. A block that crosses shards needs
# only the amax of all its rows. If tensor parallelism has sharded the weight before, [N, K] is this rank's shard. The
# only blocks it may cut are those as high or as wide as the weight.


@dataclass(frozen=True)
class OperandSide:
    """One operand made from a weight [N, K]: fprop's, or dgrad's, which is the transpose but stored in the weight's
    layout.
    """

    #: "fprop" or "dgrad".
    name: str
    spec: QuantSpec
    #: True if the operand is the transpose of the weight.
    transposed: bool = field(init=False)
    #: Rows of the weight in a block; None for all rows.
    height: int | None = field(init=False)
    #: Columns of the weight in a block; None for all columns.
    width: int | None = field(init=False)

    def __post_init__(self) -> None:
        transposed = self.name == "dgrad"
        height, width = self.spec.block[::-1] if transposed else self.spec.block
        for name, value in (("transposed", transposed), ("height", height), ("width", width)):
            object.__setattr__(self, name, value)

    def columns(self, k: int) -> int:
        """Return the number of stored columns for K, including padding."""
        return k if self.transposed else self.spec.padded(k)

    def blocks(self, k: int) -> int:
        """Return the number of blocks along K."""
        return 1 if self.width is None else -(-self.columns(k) // self.width)


def sides(recipe: Recipe) -> tuple[OperandSide, ...]:
    """Return the weight operands of a recipe; only one if fprop's codes also serve dgrad."""
    assert recipe.fprop.b is not None and recipe.dgrad.b is not None
    first = OperandSide("fprop", recipe.fprop.b)
    return (first,) if recipe.plan.weight else (first, OperandSide("dgrad", recipe.dgrad.b))


class RowShard(NamedTuple):
    """The rows of a weight that a rank owns."""

    start: int
    stop: int
    #: Rows of the whole weight.
    all: int
    #: Rows per rank after padding.
    part: int
    ranks: int
    #: Axis along which tensor parallelism has sharded the weight before, or None.
    axis: int | None = None

    @classmethod
    def of(cls, n: int, ranks: int, rank: int, axis: int | None = None) -> "RowShard":
        return cls(0, 0, n, -(-n // ranks), ranks, axis).on(rank)

    @property
    def has_others(self) -> bool:
        """True if other ranks own further rows of a block that is as high as the weight."""
        return self.ranks > 1 or self.axis is not None

    def on(self, rank: int) -> "RowShard":
        """Return the rows of another rank."""
        start = min(self.all, self.part * rank)
        return self._replace(start=start, stop=min(self.all, start + self.part))


class ShardPiece(NamedTuple):
    """Consecutive rows of one rank: either whole blocks, or part of one block row that crosses shards."""

    start: int
    stop: int
    #: Index of the block row in which the piece begins.
    block: int
    crosses_shards: bool


def pieces(rows: RowShard, height: int | None) -> list[ShardPiece]:
    """Split a rank's rows where a block row that crosses shards begins or ends."""
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
    """True if tensor parallelism has cut every block row, so that ranks with the same rows must agree on amaxes."""
    return rows.axis == 1 and side.width is None and side.height is not None


def crossing_blocks(rows: RowShard, height: int | None) -> list[int]:
    """Return the indices of block rows of the whole weight that cross shards."""
    if height is None:
        # Includes ranks without rows: a scale of the whole height is not sent.
        return [0] if rows.has_others else []
    if rows.part >= rows.all:
        return []
    return sorted({cut // height for cut in range(rows.part, rows.all, rows.part) if cut % height})


def block_rows(rows: RowShard, height: int) -> range:
    """Return the block rows that a rank has at least one row of."""
    return range(rows.start // height, -(-rows.stop // height)) if rows.stop > rows.start else range(0)


def most_block_rows(rows: RowShard, height: int) -> int:
    """Return the largest number of block rows that any rank has."""
    return max(len(block_rows(rows.on(rank), height)) for rank in range(rows.ranks))


# ---- operands ----

#: Key in `Agreed` for the amax of the whole weight, needed by two-level scales and by histories.
WHOLE = -1
#: Key in `Agreed` for the amaxes of all block rows, used if `cut_across`.
ROWS = -2
#: Amaxes that all ranks agreed on, as int32 bit patterns. Keys and shapes: a block row: [blocks along K]; `WHOLE`: [1];
#: `ROWS`: [block rows].
Agreed = Mapping[int, Tensor]


class OperandShard(NamedTuple):
    """One rank's shard of an operand, and the scales that all ranks have in common."""

    #: uint8 [rows per rank, bytes per row], padded with zeros.
    codes: Tensor
    #: uint8 [block rows, bytes of their scales], padded with zeros; None if all ranks have the same scales.
    scales: Tensor | None
    #: Scales of all rows in the weight's layout, if they are not sent; else None.
    common: Tensor | float | None
    #: `Quantized.tensor_factor` of two-level scales.
    tensor_factor: Tensor | None


def amaxes(x: Tensor, side: OperandSide, rows: RowShard, of_all: bool) -> dict[int, Tensor]:
    """Return this rank's contribution to the amaxes that ranks agree on, with the keys and shapes of `Agreed`.

    Args:
        x: this rank's rows [n, K].
        side: the operand.
        rows: which rows these are.
        of_all: also return the amax of the whole weight.
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
    for block in () if ROWS in parts else crossing_blocks(rows, side.height):
        start, stop = (0, rows.all) if side.height is None else (block * side.height, (block + 1) * side.height)
        own = bits[max(0, start - rows.start) : max(0, min(stop, rows.stop) - rows.start)]
        parts[block] = _of_blocks(own.amax(0) if own.shape[0] else bits.new_zeros(width), side.width)
    if of_all and not (spec.per_tensor and parts):
        parts[WHOLE] = _of_blocks(bits.reshape(-1), None)
    return parts


def tensor_amax(agreed: Agreed) -> Tensor | None:
    """Return the agreed amax of the whole weight, float32 [1, 1], or None if it was not computed."""
    bits = agreed.get(WHOLE, agreed.get(0))
    return None if bits is None or bits.numel() != 1 else bits.view(torch.float32).view(1, 1)


def quantize_shard(
    x: Tensor, side: OperandSide, rows: RowShard, agreed: Agreed, factor: ScalarOverride
) -> OperandShard:
    """Quantize this rank's shard of an operand.

    Args:
        x: this rank's rows [n, K], float32, bfloat16 or float16.
        side: the operand.
        rows: which rows these are.
        agreed: amaxes that all ranks agreed on.
        factor: delayed-scaling factor, as in `quantize`.
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
        # Common scales follow from the agreed amaxes, so a rank without rows computes them from a row of zeros.
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
    x: Tensor, side: OperandSide, block: int, crosses_shards: bool, agreed: Agreed, factor: ScalarOverride
) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """Quantize whole blocks, or part of one block row. Returns codes, scales, and the tensor factor of two-level
    scales.
    """
    spec = side.spec
    operand = x.t() if side.transposed else x
    agreed_bits = _agreed_bits(side, block, crosses_shards, agreed, x.shape[0])
    if spec.two_level and agreed_bits is not None:
        wide = operand.to(torch.float32)
        tensor = agreed[WHOLE].view(torch.float32)
        q = reference.two_level(rotate(wide) if spec.hadamard else wide, spec, tensor, agreed_bits)
    elif spec.two_level:
        q = quantize(operand, spec, agreed[WHOLE].view(torch.float32).view(1, 1))
    else:
        q = quantize(operand, spec, None if agreed_bits is None else agreed_bits.view(torch.float32), factor=factor)
    return *_as_the_weight(q, side), q.tensor_factor


def _agreed_bits(side: OperandSide, block: int, crosses_shards: bool, agreed: Agreed, rows: int) -> Tensor | None:
    """Return the agreed amax bits for `rows` rows from a block row on, in the operand's shape, or None."""
    lines = agreed.get(ROWS)
    if lines is not None and lines.numel():
        assert side.height is not None
        of_rows = lines[block : block + -(-rows // side.height)]
        return of_rows.view((1, -1) if side.transposed else (-1, 1))
    agreed_bits = agreed.get(block) if crosses_shards else None
    return None if agreed_bits is None else agreed_bits.view((-1, 1) if side.transposed else (1, -1))


def _as_the_weight(q: Quantized, side: OperandSide) -> tuple[Tensor, Tensor | float]:
    """Return the codes as bytes and the stored scales, both in the weight's layout."""
    scale = q.plain_scale() if isinstance(q.scale, Tensor) else q.scale
    if q.transposed == side.transposed:
        return q.data.view(torch.uint8), scale
    codes = q.stored_codes().t()
    if side.spec.format.packed:
        codes = pack(codes)
    return codes, scale.t() if isinstance(scale, Tensor) else scale


def _of_blocks(line: Tensor, width: int | None) -> Tensor:
    """Return the maximum of each block in a row of magnitude bits; subnormals count as 0 (`reference.block_bits`)."""
    if width is None or not line.numel():
        top = line.amax().view(1) if line.numel() else line.new_zeros(0 if width else 1)
    else:
        top = torch.nn.functional.pad(line, (0, -line.numel() % width)).view(-1, width).amax(1)
    return torch.where(top < SMALLEST_NORMAL_BITS, 0, top)


def _in_bytes(side: OperandSide) -> bool:
    """True if a stored scale is one byte, not a float32."""
    return side.spec.scale == "e8m0" or side.spec.two_level


def bytes_of_scales(side: OperandSide, k: int) -> int:
    """Return the bytes of the scales of one block row."""
    return side.blocks(k) * (1 if _in_bytes(side) else 4)


def buffer(side: OperandSide, rows: RowShard, k: int) -> tuple[int, int] | None:
    """Return the shape of a byte buffer for reordered scales, or None if the gathered scales are already in order."""
    if side.height is None or rows.part % side.height == 0 or rows.part >= rows.all:
        return None
    return -(-rows.all // side.height), bytes_of_scales(side, k)


@dataclass(frozen=True)
class GatheredLayout:
    """Layout of the gathered shards of one operand."""

    side: OperandSide
    shape: tuple[int, int]
    rows: RowShard
    own: OperandShard
    #: Largest magnitude of the weight, or None if not computed.
    amax: Tensor | None
    #: All tensors above that another CUDA stream may have written.
    written: Sequence[CrossStream] = ()

    def operand(self, gathered: Sequence[Tensor], place: Tensor | None = None) -> Quantized:
        """Return the whole operand as a view of the gathered bytes.

        Args:
            gathered: codes of all ranks in rank order, and their scales if they are sent.
            place: uint8 buffer in the shape of `buffer` for reordered scales; None allocates one.
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
