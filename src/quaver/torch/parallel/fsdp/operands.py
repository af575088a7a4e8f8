"""Quantization of one rank's rows of a weight, and assembly of the whole operand from the shards of all ranks.

Exact: the result has the codes and scales of the whole weight. For either operand, codes have the layout [N, K] of the
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
class WeightOperand:
    """One operand made from a weight [N, K]: fprop's, or dgrad's, which is the transpose but stored in the weight's
    layout.
    """

    #: "fprop" or "dgrad".
    gemm: str
    spec: QuantSpec
    #: True if the operand is the transpose of the weight.
    transposed: bool = field(init=False)
    #: Rows of the weight in a block; None for all rows.
    height: int | None = field(init=False)
    #: Columns of the weight in a block; None for all columns.
    width: int | None = field(init=False)

    def __post_init__(self) -> None:
        transposed = self.gemm == "dgrad"
        height, width = self.spec.block[::-1] if transposed else self.spec.block
        for name, value in (("transposed", transposed), ("height", height), ("width", width)):
            object.__setattr__(self, name, value)

    def columns(self, k: int) -> int:
        """Return the number of stored columns for K, including padding."""
        return k if self.transposed else self.spec.padded(k)

    def blocks(self, k: int) -> int:
        """Return the number of blocks along K."""
        return 1 if self.width is None else -(-self.columns(k) // self.width)


def weight_operands(recipe: Recipe) -> tuple[WeightOperand, ...]:
    """Return the weight operands of a recipe; only one if fprop's codes also serve dgrad."""
    assert recipe.fprop.b is not None and recipe.dgrad.b is not None
    first = WeightOperand("fprop", recipe.fprop.b)
    return (first,) if recipe.reuse.weight else (first, WeightOperand("dgrad", recipe.dgrad.b))


class RowShard(NamedTuple):
    """The rows of a weight that a rank owns."""

    start: int
    stop: int
    #: Rows of the whole weight.
    total_rows: int
    #: Rows per rank after padding.
    rows_per_rank: int
    ranks: int
    #: Axis along which tensor parallelism has sharded the weight before, or None.
    tp_axis: int | None = None

    @classmethod
    def of(cls, n: int, ranks: int, rank: int, tp_axis: int | None = None) -> "RowShard":
        return cls(0, 0, n, -(-n // ranks), ranks, tp_axis).on(rank)

    @property
    def has_others(self) -> bool:
        """True if other ranks own further rows of a block that is as high as the weight."""
        return self.ranks > 1 or self.tp_axis is not None

    def on(self, rank: int) -> "RowShard":
        """Return the rows of another rank."""
        start = min(self.total_rows, self.rows_per_rank * rank)
        return self._replace(start=start, stop=min(self.total_rows, start + self.rows_per_rank))


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
    last = stop if stop == rows.total_rows else max(first, stop // height * height)
    cuts = sorted({start, first, last, stop})
    return [
        ShardPiece(a, b, a // height, a % height != 0 or (b % height != 0 and b != rows.total_rows))
        for a, b in pairwise(cuts)
    ]


def cut_across(rows: RowShard, operand: WeightOperand) -> bool:
    """True if tensor parallelism has cut every block row, so that ranks with the same rows must agree on amaxes."""
    return rows.tp_axis == 1 and operand.width is None and operand.height is not None


def crossing_blocks(rows: RowShard, height: int | None) -> list[int]:
    """Return the indices of block rows of the whole weight that cross shards."""
    if height is None:
        # Includes ranks without rows: a scale of the whole height is not sent.
        return [0] if rows.has_others else []
    if rows.rows_per_rank >= rows.total_rows:
        return []
    return sorted(
        {cut // height for cut in range(rows.rows_per_rank, rows.total_rows, rows.rows_per_rank) if cut % height}
    )


def block_rows(rows: RowShard, height: int) -> range:
    """Return the block rows that a rank has at least one row of."""
    return range(rows.start // height, -(-rows.stop // height)) if rows.stop > rows.start else range(0)


def most_block_rows(rows: RowShard, height: int) -> int:
    """Return the largest number of block rows that any rank has."""
    return max(len(block_rows(rows.on(rank), height)) for rank in range(rows.ranks))


# ---- operands ----

#: Key in `SyncedAmaxes` for the amax of the whole weight, needed by two-level scales and by histories.
TENSOR_KEY = -1
#: Key in `SyncedAmaxes` for the amaxes of all block rows, used if `cut_across`.
ALL_ROWS_KEY = -2
#: Amaxes that all ranks agreed on, as int32 bit patterns. Keys and shapes: a block row: [blocks along K]; `TENSOR_KEY`:
#: [1]; `ALL_ROWS_KEY`: [block rows].
SyncedAmaxes = Mapping[int, Tensor]


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


def amaxes(x: Tensor, operand: WeightOperand, rows: RowShard, with_tensor_amax: bool) -> dict[int, Tensor]:
    """Return this rank's contribution to the amaxes that ranks agree on, with the keys and shapes of `SyncedAmaxes`.

    Args:
        x: this rank's rows [n, K].
        operand: the operand.
        rows: which rows these are.
        with_tensor_amax: also return the amax of the whole weight.
    """
    spec, transposed, width = operand.spec, operand.transposed, operand.columns(x.shape[1])
    bits = magnitude_bits(rotate(x.to(torch.float32)) if spec.hadamard and not transposed else x.to(torch.float32))
    by_key = {}
    if cut_across(rows, operand):
        assert operand.height is not None
        row_amaxes = bits.new_zeros(-(-rows.total_rows // operand.height))
        own = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=bits.device) // operand.height
        if bits.numel():
            row_amaxes.scatter_reduce_(0, own, bits.amax(1), "amax")
        by_key[ALL_ROWS_KEY] = _block_amaxes(row_amaxes, 1)
    for block in () if ALL_ROWS_KEY in by_key else crossing_blocks(rows, operand.height):
        start, stop = (
            (0, rows.total_rows) if operand.height is None else (block * operand.height, (block + 1) * operand.height)
        )
        own = bits[max(0, start - rows.start) : max(0, min(stop, rows.stop) - rows.start)]
        by_key[block] = _block_amaxes(own.amax(0) if own.shape[0] else bits.new_zeros(width), operand.width)
    if with_tensor_amax and not (spec.per_tensor and by_key):
        by_key[TENSOR_KEY] = _block_amaxes(bits.reshape(-1), None)
    return by_key


def tensor_amax(synced_amaxes: SyncedAmaxes) -> Tensor | None:
    """Return the agreed amax of the whole weight, float32 [1, 1], or None if it was not computed."""
    bits = synced_amaxes.get(TENSOR_KEY, synced_amaxes.get(0))
    return None if bits is None or bits.numel() != 1 else bits.view(torch.float32).view(1, 1)


def quantize_shard(
    x: Tensor, operand: WeightOperand, rows: RowShard, synced_amaxes: SyncedAmaxes, factor: ScalarOverride
) -> OperandShard:
    """Quantize this rank's shard of an operand.

    Args:
        x: this rank's rows [n, K], float32, bfloat16 or float16.
        operand: the operand.
        rows: which rows these are.
        synced_amaxes: amaxes that all ranks agreed on.
        factor: delayed-scaling factor, as in `quantize`.
    """
    spec, k = operand.spec, x.shape[1]
    cut = pieces(rows, operand.height)
    done = []
    for p in cut:
        piece = x[p.start - rows.start : p.stop - rows.start]
        done.append(_piece(piece, operand, p.block, p.crosses_shards, synced_amaxes, factor))
    bytes_of_row = -(-operand.columns(k) // 2) if spec.format.packed else operand.columns(k)
    codes = torch.zeros((rows.rows_per_rank, bytes_of_row), dtype=torch.uint8, device=x.device)
    for p, (data, _, _) in zip(cut, done, strict=True):
        codes[p.start - rows.start : p.stop - rows.start] = data
    if not done:
        # Common scales follow from the agreed amaxes, so a rank without rows computes them from a row of zeros.
        done = [
            _piece(x.new_zeros((1, k)), operand, 0, operand.height is None or spec.two_level, synced_amaxes, factor)
        ]
    tensor_factor = done[0][2]
    if operand.height is None:
        return OperandShard(codes, None, done[0][1], tensor_factor)
    shape = most_block_rows(rows, operand.height), bytes_of_scales(operand, k)
    scales = torch.zeros(shape, dtype=torch.uint8, device=x.device)
    first = rows.start // operand.height
    for p, (_, scale, _) in zip(cut, done, strict=False):
        assert isinstance(scale, Tensor)
        scales[p.block - first : p.block - first + scale.shape[0]] = scale.contiguous().view(torch.uint8)
    return OperandShard(codes, scales, None, tensor_factor)


def _piece(
    x: Tensor,
    operand: WeightOperand,
    block: int,
    crosses_shards: bool,
    synced_amaxes: SyncedAmaxes,
    factor: ScalarOverride,
) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """Quantize whole blocks, or part of one block row. Returns codes, scales, and the tensor factor of two-level
    scales.
    """
    spec = operand.spec
    oriented = x.t() if operand.transposed else x
    synced_bits = _synced_bits(operand, block, crosses_shards, synced_amaxes, x.shape[0])
    if spec.two_level and synced_bits is not None:
        wide = oriented.to(torch.float32)
        tensor = synced_amaxes[TENSOR_KEY].view(torch.float32)
        q = reference.two_level(rotate(wide) if spec.hadamard else wide, spec, tensor, synced_bits)
    elif spec.two_level:
        q = quantize(oriented, spec, synced_amaxes[TENSOR_KEY].view(torch.float32).view(1, 1))
    else:
        q = quantize(oriented, spec, None if synced_bits is None else synced_bits.view(torch.float32), factor=factor)
    return *_as_the_weight(q, operand), q.tensor_factor


def _synced_bits(
    operand: WeightOperand, block: int, crosses_shards: bool, synced_amaxes: SyncedAmaxes, rows: int
) -> Tensor | None:
    """Return the agreed amax bits for `rows` rows from a block row on, in the operand's shape, or None."""
    row_amaxes = synced_amaxes.get(ALL_ROWS_KEY)
    if row_amaxes is not None and row_amaxes.numel():
        assert operand.height is not None
        block_amaxes = row_amaxes[block : block + -(-rows // operand.height)]
        return block_amaxes.view((1, -1) if operand.transposed else (-1, 1))
    synced_bits = synced_amaxes.get(block) if crosses_shards else None
    return None if synced_bits is None else synced_bits.view((-1, 1) if operand.transposed else (1, -1))


def _as_the_weight(q: Quantized, operand: WeightOperand) -> tuple[Tensor, Tensor | float]:
    """Return the codes as bytes and the stored scales, both in the weight's layout."""
    scale = q.plain_scale() if isinstance(q.scale, Tensor) else q.scale
    if q.transposed == operand.transposed:
        return q.data.view(torch.uint8), scale
    codes = q.stored_codes().t()
    if operand.spec.format.packed:
        codes = pack(codes)
    return codes, scale.t() if isinstance(scale, Tensor) else scale


def _block_amaxes(line: Tensor, width: int | None) -> Tensor:
    """Return the maximum of each block in a row of magnitude bits; subnormals count as 0 (`reference.block_bits`)."""
    if width is None or not line.numel():
        block_amax = line.amax().view(1) if line.numel() else line.new_zeros(0 if width else 1)
    else:
        block_amax = torch.nn.functional.pad(line, (0, -line.numel() % width)).view(-1, width).amax(1)
    return torch.where(block_amax < SMALLEST_NORMAL_BITS, 0, block_amax)


def _in_bytes(operand: WeightOperand) -> bool:
    """True if a stored scale is one byte, not a float32."""
    return operand.spec.scale == "e8m0" or operand.spec.two_level


def bytes_of_scales(operand: WeightOperand, k: int) -> int:
    """Return the bytes of the scales of one block row."""
    return operand.blocks(k) * (1 if _in_bytes(operand) else 4)


def scale_buffer_shape(operand: WeightOperand, rows: RowShard, k: int) -> tuple[int, int] | None:
    """Return the shape of a byte buffer for reordered scales, or None if the gathered scales are already in order."""
    if operand.height is None or rows.rows_per_rank % operand.height == 0 or rows.rows_per_rank >= rows.total_rows:
        return None
    return -(-rows.total_rows // operand.height), bytes_of_scales(operand, k)


@dataclass(frozen=True)
class OperandGather:
    """This rank's input to the all-gather of one operand, and the assembly of the whole operand from its outputs."""

    operand: WeightOperand
    shape: tuple[int, int]
    rows: RowShard
    local_shard: OperandShard
    #: Largest magnitude of the weight, or None if not computed.
    amax: Tensor | None
    #: Records of writes to the tensors above, which another CUDA stream may have made.
    write_events: Sequence[CrossStream] = ()

    def assemble(self, gathered: Sequence[Tensor], out: Tensor | None = None) -> Quantized:
        """Return the whole operand as a view of the gathered bytes.

        Args:
            gathered: codes of all ranks in rank order, and their scales if they are sent.
            out: uint8 buffer in the shape of `scale_buffer_shape` for reordered scales; None allocates one.
        """
        for each in self.write_events:
            each.wait()
        operand, shard, n = self.operand, self.local_shard, self.rows.total_rows
        data = gathered[0].view(-1, shard.codes.shape[1])[:n].view(storage(operand.spec.format))
        scale = shard.common
        if shard.scales is not None:
            scale = self._scales(gathered[1].view(-1, shard.scales.shape[1]), out)
        shape = self.shape[::-1] if operand.transposed else self.shape
        return Quantized(data, scale, operand.spec, shape, operand.transposed, shard.tensor_factor, self.amax)  # type: ignore[arg-type]

    def _scales(self, every: Tensor, out: Tensor | None) -> Tensor:
        height, most = self.operand.height, every.shape[0] // self.rows.ranks
        assert height is not None
        shape = scale_buffer_shape(self.operand, self.rows, self.shape[1])
        if shape is None:
            ordered = every[: -(-self.rows.total_rows // height)]
        else:
            ordered = torch.empty(shape, dtype=torch.uint8, device=every.device) if out is None else out
            for rank in range(self.rows.ranks):
                blocks = block_rows(self.rows.on(rank), height)
                ordered[blocks.start : blocks.stop] = every[rank * most : rank * most + len(blocks)]
        return ordered if _in_bytes(self.operand) else ordered.view(torch.float32)
