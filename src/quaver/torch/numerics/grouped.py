"""Quantize the rows of all groups at once, with the bits of separate groups, without copying group sizes to the host.

Block positions, amaxes and noise are computed on the device from the groups' ends. It is the counterpart of
`quaver.torch.numerics.reference` for many operands in one tensor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import (
    BLOCKS,
    ROWS,
    Quantized,
    decode_scales,
    pack,
    spread,
    unpack,
    unswizzle,
    values_of,
)
from quaver.torch.numerics.rounding import (
    INFINITY_BITS,
    SMALLEST_NORMAL_BITS,
    encode,
    flush,
    halves,
    magnitude_bits,
    noise_stream,
    rotate,
    transposed_rotate,
    unit_interval,
)

# ---- groups of rows ----
# Rows are sorted by group. Slots pad each group to a multiple of some number:
#
# group    [7 rows][][23 rows]          ends 7, 7, 30
# slots    [7 rows 9 free][][23 rows 9 free]    where each group begins at a multiple of 16


class GroupOffsets:
    """Ends of groups of rows, on the device, and on the host after the first call of `bounds`, which synchronizes."""

    def __init__(self, ends: Tensor, rows: int) -> None:
        self.ends = ends
        self.rows = rows
        self._bounds: list[tuple[int, int]] | None = None
        self._slots: dict[int, GroupSlots] = {}

    @property
    def groups(self) -> int:
        return self.ends.shape[0]

    def has_rows(self) -> Tensor:
        """Return bool [groups], True for groups that have rows; does not synchronize."""
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1)) > 0

    def bounds(self) -> list[tuple[int, int]]:
        """Return (first row, row after the last) of each group.

        Raises:
            ValueError: offsets do not ascend from 0 to at most the number of rows.
        """
        if self._bounds is None:
            # Values on meta are unknown, but shapes do not depend on them.
            ends = [0] * self.groups if self.ends.is_meta else self.ends.tolist()
            starts = [0, *ends][: len(ends)]
            if any(start > end for start, end in zip(starts, ends, strict=True)) or (ends and ends[-1] > self.rows):
                raise ValueError(
                    f"offsets are the ends of the groups among {self.rows} rows, ascending; these are {ends}: give "
                    "group_sizes.cumsum(0)"
                )
            self._bounds = list(zip(starts, ends, strict=True))
        return self._bounds

    def slots(self, multiple: int) -> "GroupSlots":
        """Return the padded layout in which each group begins at a multiple of `multiple`; does not synchronize."""
        slots = self._slots.get(multiple)
        if slots is None:
            slots = self._slots[multiple] = GroupSlots(self.ends, self.rows, multiple)
        return slots


class GroupSlots:
    """Padded layout of groups: each group has a multiple of some number of slots, of which the last may be free.

    The number of slots depends only on the numbers of rows and groups. All else is computed on the device.
    """

    def __init__(self, ends: Tensor, rows: int, multiple: int) -> None:
        self.multiple, self.rows, self.groups = multiple, rows, ends.shape[0]
        self.count = slots(rows, self.groups, multiple)
        self._ends = ends

    @cached_property
    def sizes(self) -> Tensor:
        """Number of rows of each group, int64 [groups]."""
        return torch.diff(self._ends, prepend=self._ends.new_zeros(1)).long()

    @cached_property
    def filled(self) -> Tensor:
        """Number of slots of each group, int64 [groups]."""
        return (self.sizes + (self.multiple - 1)) // self.multiple * self.multiple

    @cached_property
    def ends(self) -> Tensor:
        """End of each group's slots, int32 [groups]."""
        return self._ends if self.multiple == 1 else self.filled.cumsum(0, dtype=torch.int32)

    @cached_property
    def group(self) -> Tensor:
        """Group of each slot, or the number of groups if it has none, int64 [slots]."""
        at = torch.arange(self.count, dtype=torch.int32, device=self._ends.device)
        return torch.searchsorted(self.ends, at, right=True)

    @cached_property
    def place(self) -> Tensor:
        """Index of each slot within its group, arbitrary for slots of no group, int64 [slots]."""
        at = torch.arange(self.count, dtype=torch.int64, device=self._ends.device)
        return at - gather_groups(self.ends - self.filled, self.group)

    @cached_property
    def row(self) -> Tensor:
        """Row of each slot, or the number of rows if it is free, int64 [slots]."""
        first = (self._ends - self.sizes).long()
        taken = (self.group < self.groups) & (self.place < gather_groups(self.sizes, self.group))
        return torch.where(taken, gather_groups(first, self.group) + self.place, self.rows)

    def take(self, x: Tensor) -> Tensor:
        """Move rows [rows, k] to their slots, with zeros in free ones; returns [slots, k]."""
        if self.multiple == 1:
            return x.masked_fill((self.group == self.groups).unsqueeze(1), 0)
        if self.rows == 0:
            return x.new_zeros((self.count, *x.shape[1:]))
        free = self.row == self.rows
        return x.index_select(0, self.row.clamp(max=self.rows - 1)).masked_fill_(free.unsqueeze(1), 0)


def slots(rows: int, groups: int, multiple: int) -> int:
    """Return a number of slots that suffices for any distribution of the rows."""
    return rows if multiple == 1 else (rows + groups * (multiple - 1)) // multiple * multiple


def gather_groups(numbers: Tensor, group: Tensor) -> Tensor:
    """Gather numbers [groups, ...] by the group of each slot; 0 for slots of no group."""
    none = numbers.new_zeros((1, *numbers.shape[1:]))
    return torch.cat([numbers, none]).index_select(0, group)


def sum_rows(g: Tensor, offsets: GroupOffsets, dtype: torch.dtype) -> Tensor:
    """Sum g [T, N] over each group's rows in float32; returns [groups, N]."""
    total = torch.zeros((offsets.groups + 1, g.shape[1]), dtype=torch.float32, device=g.device)
    return total.index_add_(0, offsets.slots(1).group, g.float())[:-1].to(dtype)


@dataclass(slots=True, eq=False)
class GroupedOperand:
    """Operands of all groups in one tensor on a device, with group sizes known to the device only.

    No block spans two groups. The axis that is divided by group (rows or tokens) has its blocks in `segments`.
    """

    #: Rows to be summed over k, [slots, k]; or if `for_wgrad`, transposes to be summed over slots, [k, slots]. Four-bit
    #: codes are packed two to a byte along the contraction axis.
    data: Tensor
    #: Stored scales, [segments, blocks of k] in both cases.
    scale: Tensor
    #: Factors of two-level scales, by which a group's scales are divided, float32 [groups, 1].
    factor: Tensor | None
    spec: QuantSpec
    #: True if products sum over slots.
    for_wgrad: bool
    slots: GroupSlots
    #: Length of the contraction axis in codes.
    k: int
    #: Amax of each group, float32 [groups], if one scale serves a group.
    amax: Tensor | None = None
    #: The transposes of these rows, summed over slots, if the same launch has written them.
    transpose: "GroupedOperand | None" = None
    #: True if the uint8 scales are in the order of `swizzle`, whole tiles for each group: [rows of all tiles, blocks].
    swizzled: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and length of the contraction axis in codes."""
        return self.data.shape[0], self.k


def by_rows(spec: QuantSpec) -> bool:
    """Return True if rows of all groups can be quantized at once: no two rows share a scale or noise."""
    return spec.block[0] == 1 and spec.rounding == "nearest" and not spec.two_level


def in_lines(t: Tensor) -> bool:
    """Return True if rows (or columns) begin at multiples of 16 bytes, as torch's grouped GEMM requires."""
    line, rows, columns = 16 // t.element_size(), t.stride(-2), t.stride(-1)
    stride, features = (rows, t.shape[-1]) if columns == 1 else (columns, t.shape[-2])
    return 1 in (rows, columns) and stride >= features and stride % line == 0 and t.data_ptr() % 16 == 0


def rows_of(q: Quantized, start: int, end: int) -> Quantized:
    """Return a range of rows of an operand without a copy; ranges must be whole blocks."""
    assert not q.transposed
    height, scale = q.spec.block[0], q.scale
    if isinstance(scale, Tensor) and height is not None:
        scale = q.plain_scale()[start // height : -(-end // height)]
    return Quantized(q.data[start:end], scale, q.spec, (end - start, q.shape[1]), tensor_factor=q.tensor_factor)


# ---- quantization ----

#: Alignment in bytes that GEMMs need for groups along the contraction axis.
LINE = 16


class GroupedNoise(NamedTuple):
    """Noise for stochastic rounding of all groups: see `quaver.torch.numerics.rounding`."""

    seed: int
    #: Philox stream of each group.
    streams: Sequence[int] | Tensor
    counts: Sequence[int] | Tensor

    def of(self, group: int) -> tuple[int, int, int]:
        return self.seed, int(self.streams[group]), int(self.counts[group])


def multiple(spec: QuantSpec) -> int:
    """Return the divisor of each group's slots if products sum over slots."""
    line = 2 * LINE if spec.format.packed else LINE
    # Blackwell's GEMMs read the scales of four blocks at once.
    tile = 4 * (spec.block[1] or 1) if spec.scale == "e8m0" or spec.two_level else 1
    return math.lcm(line, spec.block[1] or 1, 16 if spec.hadamard else 1, tile)


def quantize(
    x: Tensor,
    spec: QuantSpec,
    offsets: GroupOffsets,
    for_wgrad: bool,
    factors: Tensor | None = None,
    draw: GroupedNoise | None = None,
) -> GroupedOperand:
    """Quantize rows x [T, k], each group as an operand of its own.

    Codes and scales of each group equal those of `reference.quantize` on its rows alone.

    Args:
        for_wgrad: False quantizes rows, to be summed over k; True quantizes transposes, to be summed over rows.
        factors: encode factors of delayed scaling, float32 [groups]; 0 is unset.
        draw: noise for stochastic rounding.
    """
    width = spec.block[0 if for_wgrad else 1]
    slots = offsets.slots(multiple(spec) if for_wgrad else 1)
    y = slots.take(x.detach()).to(torch.float32)
    if spec.hadamard:
        y = transposed_rotate(y) if for_wgrad else rotate(y)
    u = None
    if spec.rounding == "stochastic":
        assert draw is not None
        y, u = flush(y), _uniform(draw, slots, y.shape[1], spec, for_wgrad)
    segments = _segments(offsets, slots, spec, for_wgrad)
    blocks = _segment_bits(_across(magnitude_bits(y), width), segments)
    e, scale, factor, top = _scales(blocks, spec, segments, factors)
    data = encode(y * _along(spread(e, (1, width), (len(e), y.shape[1])), segments), spec, u)
    k = y.shape[0 if for_wgrad else 1]
    if for_wgrad:
        data = pack(data.t()) if spec.format.packed else data.t().contiguous()
    elif spec.format.packed:
        data = pack(data)
    return GroupedOperand(data, scale, factor, spec, for_wgrad, slots, k, top)


def unswizzled(operand: GroupedOperand, offsets: GroupOffsets) -> GroupedOperand:
    """Return an operand with plain scales."""
    if not operand.swizzled:
        return operand
    spec, flat = operand.spec, operand.scale
    if operand.for_wgrad:
        width = spec.block[1]
        assert width is not None
        rows, blocks = operand.data.shape[0], operand.slots.count // width
        tall, across = -(-rows // ROWS), -(-blocks // BLOCKS)
        tiles = flat.reshape(tall * across, -1)[tile_places(operand.slots, width, tall).reshape(-1)]
        scale = unswizzle(tiles.reshape(-1), rows, blocks).t().contiguous()
    else:
        filled, own = offsets.slots(ROWS), offsets.slots(1)
        first = gather_groups(filled.ends - filled.filled, own.group)
        at = (first + own.place).clamp(0, max(filled.count - 1, 0))
        blocks = -(-operand.k // (spec.block[1] or 1))
        scale = unswizzle(flat.reshape(-1), flat.shape[0], blocks).index_select(0, at)
    return replace(operand, scale=scale, swizzled=False, transpose=None)


def tile_places(slots: GroupSlots, width: int, tall: int) -> Tensor:
    """Return where each tile of transposes' swizzled scales is stored, int64 [tall, tiles side by side].

    All tiles of a group precede those of the next group, ordered by rows within the group; tiles of no group come last.
    """
    group = slots.group[:: width * BLOCKS]
    group_tiles = slots.filled // (width * BLOCKS)
    first = group_tiles.cumsum(0) - group_tiles
    before, own = gather_groups(first, group), gather_groups(group_tiles, group)
    column = torch.arange(group.shape[0], dtype=torch.int64, device=group.device)
    row = torch.arange(tall, dtype=torch.int64, device=group.device).unsqueeze(1)
    none = group == slots.groups
    behind = group_tiles.sum() * tall + row * none.sum() + none.cumsum(0) - 1
    return torch.where(none, behind, before * tall + row * own + column - before)


def quantize_both(
    x: Tensor,
    spec: QuantSpec | None,
    other: QuantSpec | None,
    offsets: GroupOffsets,
    factors: Tensor | None = None,
    draw: GroupedNoise | None = None,
    other_draw: GroupedNoise | None = None,
    _: Tensor | None = None,
) -> tuple[GroupedOperand | None, GroupedOperand | None]:
    """Quantize rows x [T, k] by `spec`, and their transposes by `other`; either may be None."""
    rows = None if spec is None else quantize(x, spec, offsets, False, factors, draw)
    return rows, None if other is None else quantize(x, other, offsets, True, factors, other_draw)


def transposed(operand: GroupedOperand, offsets: GroupOffsets) -> GroupedOperand:
    """Transpose rows quantized in square blocks: same codes and scales."""
    spec = operand.spec
    assert spec.transposable and not operand.for_wgrad
    slots = offsets.slots(multiple(spec))
    codes = unpack(operand.data, operand.shape[1]) if spec.format.packed else operand.data.view(torch.uint8)
    codes = slots.take(codes).t()
    data = pack(codes) if spec.format.packed else codes.contiguous().view(operand.data.dtype)
    # Scales of rows move with the rows; others have one place per block or group in both layouts.
    scale = slots.take(operand.scale) if spec.block[0] == 1 else operand.scale
    return GroupedOperand(data, scale, operand.factor, spec, True, slots, slots.count, operand.amax)


def from_quantized(q: Quantized, offsets: GroupOffsets) -> GroupedOperand:
    """Convert rows that were quantized before grouping to a `GroupedOperand`.

    No block may have rows of several groups, unless all share one scale.
    """
    assert not q.transposed
    scale = q.plain_scale() if isinstance(q.scale, Tensor) else q.data.new_full((1, 1), q.scale, dtype=torch.float32)
    if q.spec.block[0] is None:
        scale = scale.expand(offsets.groups, scale.shape[1])
    factor = None if q.tensor_factor is None else q.tensor_factor.expand(offsets.groups, 1)
    return GroupedOperand(q.data, scale, factor, q.spec, False, offsets.slots(1), q.shape[1])


def row_scales(operand: GroupedOperand, offsets: GroupOffsets) -> tuple[Tensor, Tensor | None]:
    """Return the stored scales of rows, [T, blocks of k], and the factors of two-level scales, [T, 1] or None."""
    assert not operand.for_wgrad
    if operand.spec.block[0] == 1 and operand.factor is None:
        return operand.scale, None
    segments = _segments(offsets, operand.slots, operand.spec, False)
    factor = None if operand.factor is None else gather_groups(operand.factor, operand.slots.group)
    return _along(operand.scale, segments), factor


def slot_scales(operand: GroupedOperand) -> Tensor:
    """Return the decode scales of an operand that is summed over slots, float32 [slots, blocks of k]."""
    assert operand.for_wgrad
    segments = _segments(None, operand.slots, operand.spec, True)
    factor = None if operand.factor is None else gather_groups(operand.factor, segments.group)
    return _along(decode_scales(operand.scale, operand.spec, factor), segments)


def dequantized(operand: GroupedOperand, offsets: GroupOffsets) -> Tensor:
    """Return the dequantized rows, float32 [slots, k]."""
    operand = unswizzled(operand, offsets)
    stored, factor = row_scales(operand, offsets)
    scales = decode_scales(stored, operand.spec, factor)
    return values(operand) * spread(scales, (1, operand.spec.block[1]), (len(scales), operand.k))


def values(operand: GroupedOperand) -> Tensor:
    """Return the values without scales in storage order, float32 [slots, k], or [k, slots] for transposes."""
    if operand.data.is_floating_point():
        return operand.data.to(torch.float32)
    codes = unpack(operand.data, operand.shape[1]) if operand.spec.format.packed else operand.data
    return values_of(codes, operand.spec.format)


class BlockSegments(NamedTuple):
    """Block boundaries along slots: one block per slot, per group, or per fixed number of slots of a group."""

    #: Number of segments; None if each slot is one.
    total: int | None
    #: Segment of each slot, `total` if none; None if segments are consecutive runs of `height` slots.
    slot_segment: Tensor | None
    height: int
    #: Group of each segment.
    group: Tensor
    groups: int


def _segments(offsets: GroupOffsets | None, slots: GroupSlots, spec: QuantSpec, for_wgrad: bool) -> BlockSegments:
    groups, height = slots.groups, spec.block[1 if for_wgrad else 0]
    if height == 1:
        return BlockSegments(None, None, 1, slots.group, groups)
    if height is None:
        segment_group = torch.arange(groups, dtype=torch.int64, device=slots.group.device)
        return BlockSegments(groups, slots.group, 0, segment_group, groups)
    if for_wgrad:
        return BlockSegments(slots.count // height, None, height, slots.group[::height], groups)
    # The same blocks as those of the transposes of these rows.
    assert offsets is not None
    wide = offsets.slots(multiple(spec))
    at = gather_groups((wide.ends - wide.filled) // height, slots.group) + slots.place // height
    count = wide.count // height
    slot_segment = torch.where(slots.group < groups, at, count)
    return BlockSegments(count, slot_segment, height, wide.group[::height], groups)


def _across(bits: Tensor, width: int | None) -> Tensor:
    """Return the maximum of each block along k, for magnitude bits [slots, k]."""
    rows, k = bits.shape
    if width == 1:
        return bits
    if k == 0:
        return bits.new_zeros((rows, 1 if width is None else 0))
    if width is None:
        return bits.amax(1, keepdim=True)
    blocks = -(-k // width)
    return pad(bits, (0, blocks * width - k)).view(rows, blocks, width).amax(2)


def _segment_bits(bits: Tensor, segments: BlockSegments) -> Tensor:
    """Return the maximum of each segment; subnormals count as 0."""
    if segments.total is not None and segments.slot_segment is None:
        bits = bits.view(segments.total, segments.height, bits.shape[1])
        bits = bits.amax(1) if bits.numel() else bits.new_zeros((segments.total, bits.shape[2]))
    elif segments.total is not None:
        amax_values = bits.new_zeros((segments.total + 1, bits.shape[1]))
        assert segments.slot_segment is not None
        bits = _largest(amax_values, segments.slot_segment, bits)[:-1]
    return torch.where(bits < SMALLEST_NORMAL_BITS, 0, bits)


def _largest(amax_values: Tensor, at: Tensor, bits: Tensor) -> Tensor:
    """Scatter the maximum to each index, in place."""
    index = at if bits.dim() == 1 else at.unsqueeze(1).expand_as(bits)
    return amax_values.scatter_reduce_(0, index, bits, "amax")


def _scales(
    blocks: Tensor, spec: QuantSpec, segments: BlockSegments, factors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return encode factors and stored scales of blocks, two-level factors [groups, 1], and amaxes of groups."""
    if spec.scale == "unit":
        one = torch.ones(blocks.shape, dtype=torch.float32, device=blocks.device)
        return one, one, None, None
    if spec.two_level:
        segment_amax = blocks.amax(1) if blocks.shape[1] else blocks.new_zeros(blocks.shape[0])
        amax_values = _largest(blocks.new_zeros(segments.groups + 1), segments.group, segment_amax)[:-1]
        e, scale, _ = reference.two_levels(blocks, gather_groups(amax_values, segments.group).unsqueeze(1), spec)
        amax_values = amax_values.unsqueeze(1)
        return e, scale, reference.two_levels(amax_values, amax_values, spec)[2], None
    e = reference.factors(blocks, spec)
    if factors is not None:
        own = gather_groups(factors, segments.group).unsqueeze(1)
        e = torch.where(own == 0, e, own)
    scale = reference.stored_scale(blocks, blocks < INFINITY_BITS, e, spec)
    if spec.scale == "e8m0":
        e = torch.where(blocks == 0, 0.0, e)
    return e, scale, None, blocks.view(torch.float32).view(-1) if spec.per_tensor else None


def _along(values: Tensor, segments: BlockSegments) -> Tensor:
    """Gather values of segments by slot; 0 for slots of no segment."""
    if segments.total is None:
        return values
    if segments.slot_segment is None:
        return values.repeat_interleave(segments.height, 0)
    return gather_groups(values, segments.slot_segment)


def _uniform(draw: GroupedNoise, slots: GroupSlots, k: int, spec: QuantSpec, for_wgrad: bool) -> Tensor:
    """Return the uniform number in (0, 1) for each element's stochastic rounding, float32 [slots, k]."""
    device = slots.group.device
    stream = noise_stream(draw.seed, numbers_on(draw.streams, device), numbers_on(draw.counts, device), device)
    key, upper = (gather_groups(word.view(-1), slots.group).unsqueeze(1) for word in stream)
    columns = torch.arange(k, dtype=torch.int64, device=device)
    if for_wgrad:
        padded = (slots.sizes + 15) // 16 * 16 if spec.hadamard else slots.sizes
        index = columns * gather_groups(padded, slots.group).unsqueeze(1) + slots.place.unsqueeze(1)
    else:
        index = slots.place.unsqueeze(1) * k + columns
    which, (first, second, third, fourth) = index & 3, halves(index >> 2, key, upper)
    drawn = torch.where(which < 2, torch.where(which == 0, first, second), torch.where(which == 2, third, fourth))
    return unit_interval(drawn.to(torch.float32))


def numbers_on(values: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Return streams or counts as contiguous int64 on a device."""
    return values.to(device).contiguous() if isinstance(values, Tensor) else _cached_numbers(tuple(values), device)


@lru_cache(1024)
def _cached_numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return host numbers as a cached device tensor, for numbers that stay the same, such as streams."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int64, device=device)
