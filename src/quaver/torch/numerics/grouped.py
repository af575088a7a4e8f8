"""The rows of all groups quantized at once, each group as if there were no other, without asking how many rows it has.

Where blocks lie, what each measures and which noise it draws is computed on the device from the groups' ends. The twin
of `quaver.torch.numerics.reference` for many operands in one tensor, with the bits of one after the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized, decode_scales, pack, unpack, values_of
from quaver.torch.numerics.rounding import (
    INFINITY_BITS,
    SMALLEST_NORMAL_BITS,
    encode,
    flush,
    magnitude_bits,
    philox4x32,
    rotate,
    transposed_rotate,
)

# ---- groups ----------------------------------------------------------------------------------------------
# Rows that lie group by group: where each group ends and its rows lie, and operands of grouped GEMMs.
#
# group    [7 rows][][23 rows]          ends 7, 7, 30
# slots    [7 rows 9 free][][23 rows 9 free]    where each group begins at a multiple of 16


class GroupOffsets:
    """Where groups of rows end: on the device, and on the host after the first call of `bounds`, which waits for it."""

    def __init__(self, ends: Tensor, rows: int) -> None:
        self.ends = ends
        self.rows = rows
        self._bounds: list[tuple[int, int]] | None = None
        self._slots: dict[int, GroupSlots] = {}

    @property
    def groups(self) -> int:
        return self.ends.shape[0]

    def bounds(self) -> list[tuple[int, int]]:
        """(first row, row after the last) of each group.

        Raises:
            ValueError: offsets that do not ascend from 0 to at most the number of rows.
        """
        if self._bounds is None:
            # On meta there are none, and shapes do not depend on it.
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
        """The rows where each group begins at a multiple of so many slots; nothing waits for the device."""
        slots = self._slots.get(multiple)
        if slots is None:
            slots = self._slots[multiple] = GroupSlots(self.ends, self.rows, multiple)
        return slots


class GroupSlots:
    """Rows of groups in slots, of which each group has a multiple of some number, the last ones of it free.

    How many slots there are depends on the numbers of rows and of groups alone. All else is computed on the device.
    """

    def __init__(self, ends: Tensor, rows: int, multiple: int) -> None:
        self.multiple, self.rows, self.groups = multiple, rows, ends.shape[0]
        self.count = slots(rows, self.groups, multiple)
        self._ends = ends

    @cached_property
    def sizes(self) -> Tensor:
        """Rows of each group: int64 [groups]."""
        return torch.diff(self._ends, prepend=self._ends.new_zeros(1)).long()

    @cached_property
    def filled(self) -> Tensor:
        """Slots of each group: int64 [groups]."""
        return (self.sizes + (self.multiple - 1)) // self.multiple * self.multiple

    @cached_property
    def ends(self) -> Tensor:
        """Where each group's slots end: int32 [groups]."""
        return self._ends if self.multiple == 1 else self.filled.cumsum(0, dtype=torch.int32)

    @cached_property
    def group(self) -> Tensor:
        """The group of each slot, the number of groups for one of none: int64 [slots]."""
        at = torch.arange(self.count, dtype=torch.int32, device=self._ends.device)
        return torch.searchsorted(self.ends, at, right=True)

    @cached_property
    def place(self) -> Tensor:
        """The place of each slot in its group, anything in one of none: int64 [slots]."""
        at = torch.arange(self.count, dtype=torch.int64, device=self._ends.device)
        return at - of_groups(self.ends - self.filled, self.group)

    @cached_property
    def row(self) -> Tensor:
        """The row of each slot, the number of rows in a free one: int64 [slots]."""
        first = (self._ends - self.sizes).long()
        taken = (self.group < self.groups) & (self.place < of_groups(self.sizes, self.group))
        return torch.where(taken, of_groups(first, self.group) + self.place, self.rows)

    def take(self, x: Tensor) -> Tensor:
        """Rows [rows, k] in their slots, zeros in free ones: [slots, k]."""
        if self.multiple == 1:
            return x.masked_fill((self.group == self.groups).unsqueeze(1), 0)
        if self.rows == 0:
            return x.new_zeros((self.count, *x.shape[1:]))
        free = self.row == self.rows
        return x.index_select(0, self.row.clamp(max=self.rows - 1)).masked_fill_(free.unsqueeze(1), 0)


def slots(rows: int, groups: int, multiple: int) -> int:
    """Slots that suffice for rows of groups, however they are distributed."""
    return rows if multiple == 1 else (rows + groups * (multiple - 1)) // multiple * multiple


def of_groups(numbers: Tensor, group: Tensor) -> Tensor:
    """What belongs to the group of each slot, of numbers [groups, ...]; 0 where there is none."""
    none = numbers.new_zeros((1, *numbers.shape[1:]))
    return torch.cat([numbers, none]).index_select(0, group)


@dataclass(slots=True, eq=False)
class GroupedOperand:
    """An operand of each group, all in one tensor on one device, without a word from the host of how many rows each
    has.

    Blocks of it are of one group: along rows or tokens, whichever is divided by group, they are `segments`.
    """

    #: Rows that are summed over k, [slots, k]; or if `summed` transposes that are summed over slots, [k, slots]. Codes
    #: of four bits are two to a byte along what is summed over.
    data: Tensor
    #: Stored scales, [segments, blocks of k] in either case.
    scale: Tensor
    #: Of two-level scales what those of a group are divided by: float32 [groups, 1].
    factor: Tensor | None
    spec: QuantSpec
    #: Whether products sum over slots.
    summed: bool
    slots: GroupSlots
    #: Codes that are summed over.
    k: int
    #: Largest magnitude of each group, float32 [groups], where one scale serves it.
    amax: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and codes that are summed over."""
        return self.data.shape[0], self.k


class WeightStack:
    """The weights of all groups, an operand [rows, k] of each, None before it is asked for: a group without tokens may
    never be."""

    __slots__ = ("amax", "parts", "unread", "whole")

    def __init__(self, parts: Sequence[Quantized | None], whole: Quantized | None = None) -> None:
        self.parts = list(parts)
        #: Of each group beside `whole`, float32 [groups], where one scale serves it.
        self.amax: Tensor | None = None
        #: On a GPU all of them at once, the rows of one below those of another, each with scales of its own: blocks of
        #: one row.
        self.whole = whole
        #: Groups whose parts were made beside those of others and have not been multiplied yet, nor counted.
        self.unread: set[int] = set()


def in_lines(t: Tensor) -> bool:
    """Whether rows, or columns, begin at multiples of 16 bytes, as torch's grouped GEMMs want them."""
    line, rows, columns = 16 // t.element_size(), t.stride(-2), t.stride(-1)
    apart, features = (rows, t.shape[-1]) if columns == 1 else (columns, t.shape[-2])
    return 1 in (rows, columns) and apart >= features and apart % line == 0 and t.data_ptr() % 16 == 0


def rows_of(q: Quantized, start: int, end: int) -> Quantized:
    """Some rows of an operand, in the same memory; where scales are of several rows, whole blocks of them."""
    assert not q.transposed
    height, scale = q.spec.block[0], q.scale
    if isinstance(scale, Tensor) and height is not None:
        scale = q.plain_scale()[start // height : -(-end // height)]
    return Quantized(q.data[start:end], scale, q.spec, (end - start, q.shape[1]), tensor_factor=q.tensor_factor)


# What waits for backward on a CPU, where each group has an operand of its own.


def dtype_of_scales(spec: QuantSpec) -> torch.dtype:
    """As which stored scales of an operand wait for backward on a CPU: those that are powers of two as their exponent,
    since of few tokens a group has many, and a float32 for each 16 elements is a fifth of what is kept.

    Exact: float8_e8m0fnu has all that are stored as powers of two: 2**-127 to 2**126, and NaN.
    """
    if spec.scale == "power_of_two" and not spec.per_tensor:
        return torch.float8_e8m0fnu
    return torch.uint8 if spec.scale == "e8m0" or spec.two_level else torch.float32


class DeferredGroupArguments(NamedTuple):
    """What `put_groups_together` needs beside tensors."""

    spec: QuantSpec
    #: Of each group its operand's shape and whether it lies as its transpose; None of one without tokens.
    parts: Sequence[tuple[tuple[int, int], bool] | None]
    #: Whether scales lie as those of transposes.
    transposed: bool
    #: Along which dimension scales are one group's after another's, and how many of it each has.
    dim: int
    sizes: list[int]


def take_groups_apart(parts: Sequence[Quantized | None]) -> tuple[list[Tensor | None], DeferredGroupArguments] | None:
    """Operands of one spec as tensors: all scales in one, uint8, and the codes of each group; None where scales wait as
    they are stored."""
    full = [q for q in parts if q is not None]
    if not full or dtype_of_scales(full[0].spec) is not torch.float8_e8m0fnu:
        return None
    # All as the first lies: a transpose of one token may lie in another way than those of several.
    transposed = full[0].transposed
    scales: list[Any] = [q.scale if q.transposed is transposed else q.scale.t() for q in full]  # type: ignore[union-attr]
    shapes = [scale.shape for scale in scales]
    # k by blocks of tokens, or blocks of tokens by blocks of k: one side is the same of all.
    dim = 0 if all(shape[1] == shapes[0][1] for shape in shapes) else 1
    # One call for all groups: of some for each the calls would take longer than the copies.
    codes = torch.cat(scales, dim).to(torch.float8_e8m0fnu).view(torch.uint8)
    places = [None if q is None else (q.shape, q.transposed) for q in parts]
    layout = DeferredGroupArguments(full[0].spec, places, transposed, dim, [shape[dim] for shape in shapes])
    return [codes, *(None if q is None else q.data for q in parts)], layout


def put_groups_together(tensors: Sequence[Tensor | None], layout: DeferredGroupArguments) -> list[Quantized | None]:
    """What `take_groups_apart` took apart, with scales in float32."""
    codes, *data = tensors
    assert codes is not None
    spec, places, all_transposed, dim, sizes = layout
    scales = iter(codes.view(torch.float8_e8m0fnu).to(torch.float32).split(sizes, dim))
    parts: list[Quantized | None] = []
    for t, of in zip(data, places, strict=True):
        if t is None or of is None:
            parts.append(None)
            continue
        shape, transposed = of
        scale = next(scales)
        parts.append(Quantized(t, scale if transposed is all_transposed else scale.t(), spec, shape, transposed))
    return parts


# ---- grouped ---------------------------------------------------------------------------------------------

#: Bytes at whose multiples GEMMs want groups to begin, along what they sum over.
LINE = 16
_LOW = 0xFFFFFFFF


class GroupedNoise(NamedTuple):
    """What groups' operands are rounded with at random: see `quaver.torch.numerics.rounding`."""

    seed: int
    #: Of each group.
    streams: Sequence[int] | Tensor
    counts: Sequence[int] | Tensor

    def of(self, group: int) -> tuple[int, int, int]:
        return self.seed, int(self.streams[group]), int(self.counts[group])


def multiple(spec: QuantSpec) -> int:
    """Slots of which a group that is summed over by this spec has a multiple."""
    line = 2 * LINE if spec.format.packed else LINE
    # Four blocks whose scales Blackwell's GEMMs read at once.
    tile = 4 * (spec.block[1] or 1) if spec.scale == "e8m0" or spec.two_level else 1
    return math.lcm(line, spec.block[1] or 1, 16 if spec.hadamard else 1, tile)


def quantize(
    x: Tensor,
    spec: QuantSpec,
    offsets: GroupOffsets,
    summed: bool,
    factors: Tensor | None = None,
    draw: GroupedNoise | None = None,
) -> GroupedOperand:
    """Rows x [T, k] of groups, as an operand of each.

    Args:
        summed: False quantizes rows, which are summed over k; True their transposes, which are summed over rows.
        factors: encode factors of delayed scaling, float32 [groups]; 0 is unset.
        draw: of stochastic rounding.
    Exact: each group's codes and scales are those of `reference.quantize` of its rows alone.
    """
    width = spec.block[0 if summed else 1]
    slots = offsets.slots(multiple(spec) if summed else 1)
    y = slots.take(x.detach()).to(torch.float32)
    if spec.hadamard:
        y = transposed_rotate(y) if summed else rotate(y)
    u = None
    if spec.rounding == "stochastic":
        assert draw is not None
        y, u = flush(y), _uniform(draw, slots, y.shape[1], spec, summed)
    segments = _segments(offsets, slots, spec, summed)
    blocks = _segment_bits(_across(magnitude_bits(y), width), segments)
    e, scale, factor, top = _scales(blocks, spec, segments, factors)
    data = encode(y * _along(_spread(e, width, y.shape[1]), segments), spec, u)
    k = y.shape[0 if summed else 1]
    if summed:
        data = pack(data.t()) if spec.format.packed else data.t().contiguous()
    elif spec.format.packed:
        data = pack(data)
    return GroupedOperand(data, scale, factor, spec, summed, slots, k, top)


def transposed(laid: GroupedOperand, offsets: GroupOffsets) -> GroupedOperand:
    """Rows as their transposes, of a spec whose blocks are square: the same codes and scales."""
    spec = laid.spec
    assert spec.transposable and not laid.summed
    slots = offsets.slots(multiple(spec))
    codes = unpack(laid.data, laid.shape[1]) if spec.format.packed else laid.data.view(torch.uint8)
    codes = slots.take(codes).t()
    data = pack(codes) if spec.format.packed else codes.contiguous().view(laid.data.dtype)
    return GroupedOperand(data, laid.scale, laid.factor, spec, True, slots, slots.count, laid.amax)


def given(q: Quantized, offsets: GroupOffsets) -> GroupedOperand:
    """Rows that were quantized before they were given to groups, as an operand of each: no block has rows of several
    groups, or all share the one scale."""
    assert not q.transposed
    scale = q.plain_scale() if isinstance(q.scale, Tensor) else q.data.new_full((1, 1), q.scale, dtype=torch.float32)
    if q.spec.block[0] is None:
        scale = scale.expand(offsets.groups, scale.shape[1])
    factor = None if q.tensor_factor is None else q.tensor_factor.expand(offsets.groups, 1)
    return GroupedOperand(q.data, scale, factor, q.spec, False, offsets.slots(1), q.shape[1])


def row_scales(laid: GroupedOperand, offsets: GroupOffsets) -> tuple[Tensor, Tensor | None]:
    """Stored scales of rows, [T, blocks of k], and what those of two levels are divided by, [T, 1]."""
    assert not laid.summed
    segments = _segments(offsets, laid.slots, laid.spec, False)
    factor = None if laid.factor is None else of_groups(laid.factor, laid.slots.group)
    return _along(laid.scale, segments), factor


def slot_scales(laid: GroupedOperand) -> Tensor:
    """Decode scales of an operand that is summed over slots, as its blocks lie: float32 [slots, blocks of k]."""
    assert laid.summed
    segments = _segments(None, laid.slots, laid.spec, True)
    factor = None if laid.factor is None else of_groups(laid.factor, segments.group)
    return _along(decode_scales(laid.scale, laid.spec, factor), segments)


def dequantized(laid: GroupedOperand, offsets: GroupOffsets) -> Tensor:
    """Rows [slots, k], float32: data × scale."""
    stored, factor = row_scales(laid, offsets)
    return values(laid) * _spread(decode_scales(stored, laid.spec, factor), laid.spec.block[1], laid.k)


def values(laid: GroupedOperand) -> Tensor:
    """The data without scales, float32 as they lie: [slots, k], or of transposes [k, slots]."""
    if laid.data.is_floating_point():
        return laid.data.to(torch.float32)
    codes = unpack(laid.data, laid.shape[1]) if laid.spec.format.packed else laid.data
    return values_of(codes, laid.spec.format)


class BlockSegments(NamedTuple):
    """Where blocks lie along slots: one a slot, one a group, or each so many slots of a group."""

    #: None where each slot is one, else how many there are.
    total: int | None
    #: The segment of each slot, `total` where it is of none; None where they lie in turn, `height` slots each.
    of_slot: Tensor | None
    height: int
    #: The group of each segment.
    group: Tensor
    groups: int


def _segments(offsets: GroupOffsets | None, slots: GroupSlots, spec: QuantSpec, summed: bool) -> BlockSegments:
    groups, height = slots.groups, spec.block[1 if summed else 0]
    if height == 1:
        return BlockSegments(None, None, 1, slots.group, groups)
    if height is None:
        of_group = torch.arange(groups, dtype=torch.int64, device=slots.group.device)
        return BlockSegments(groups, slots.group, 0, of_group, groups)
    if summed:
        return BlockSegments(slots.count // height, None, height, slots.group[::height], groups)
    # As the transposes of these rows have them.
    assert offsets is not None
    wide = offsets.slots(multiple(spec))
    at = of_groups((wide.ends - wide.filled) // height, slots.group) + slots.place // height
    count = wide.count // height
    of_slot = torch.where(slots.group < groups, at, count)
    return BlockSegments(count, of_slot, height, wide.group[::height], groups)


def _across(bits: Tensor, width: int | None) -> Tensor:
    """The largest of each block of k, of magnitude bits [slots, k]."""
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
    """The largest of each segment; those of subnormals count as 0."""
    if segments.total is not None and segments.of_slot is None:
        bits = bits.view(segments.total, segments.height, bits.shape[1])
        bits = bits.amax(1) if bits.numel() else bits.new_zeros((segments.total, bits.shape[2]))
    elif segments.total is not None:
        amax_values = bits.new_zeros((segments.total + 1, bits.shape[1]))
        assert segments.of_slot is not None
        bits = _largest(amax_values, segments.of_slot, bits)[:-1]
    return torch.where(bits < SMALLEST_NORMAL_BITS, 0, bits)


def _largest(amax_values: Tensor, at: Tensor, bits: Tensor) -> Tensor:
    """The largest of what goes to each place, in place."""
    index = at if bits.dim() == 1 else at.unsqueeze(1).expand_as(bits)
    return amax_values.scatter_reduce_(0, index, bits, "amax")


def _scales(
    blocks: Tensor, spec: QuantSpec, segments: BlockSegments, factors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Encode factors and stored scales of blocks, factors of two-level scales [groups, 1], and the groups' amaxes."""
    if spec.scale == "unit":
        one = torch.ones(blocks.shape, dtype=torch.float32, device=blocks.device)
        return one, one, None, None
    if spec.two_level:
        of_segment = blocks.amax(1) if blocks.shape[1] else blocks.new_zeros(blocks.shape[0])
        amax_values = _largest(blocks.new_zeros(segments.groups + 1), segments.group, of_segment)[:-1]
        e, scale, _ = reference.two_levels(blocks, of_groups(amax_values, segments.group).unsqueeze(1), spec)
        amax_values = amax_values.unsqueeze(1)
        return e, scale, reference.two_levels(amax_values, amax_values, spec)[2], None
    e = reference.factors(blocks, spec)
    if factors is not None:
        own = of_groups(factors, segments.group).unsqueeze(1)
        e = torch.where(own == 0, e, own)
    scale = reference.stored_scale(blocks, blocks < INFINITY_BITS, e, spec)
    if spec.scale == "e8m0":
        e = torch.where(blocks == 0, 0.0, e)
    return e, scale, None, blocks.view(torch.float32).view(-1) if spec.per_tensor else None


def _along(of_segments: Tensor, segments: BlockSegments) -> Tensor:
    """What belongs to each slot, of what segments have; 0 where it is of none."""
    if segments.total is None:
        return of_segments
    if segments.of_slot is None:
        return of_segments.repeat_interleave(segments.height, 0)
    return of_groups(of_segments, segments.of_slot)


def _spread(of_blocks: Tensor, width: int | None, k: int) -> Tensor:
    """[segments, blocks of k] to [segments, k], or what broadcasts to that."""
    return of_blocks if width in (None, 1) else of_blocks.repeat_interleave(width, 1)[:, :k]


def _uniform(draw: GroupedNoise, slots: GroupSlots, k: int, spec: QuantSpec, summed: bool) -> Tensor:
    """The number in [0, 1) that each element is rounded with, float32 [slots, k]."""
    device = slots.group.device
    streams, counts = (of_groups(_numbers(n, device), slots.group) for n in (draw.streams, draw.counts))
    columns = torch.arange(k, dtype=torch.int64, device=device)
    if summed:
        padded = (slots.sizes + 15) // 16 * 16 if spec.hadamard else slots.sizes
        index = columns * of_groups(padded, slots.group).unsqueeze(1) + slots.place.unsqueeze(1)
    else:
        index = slots.place.unsqueeze(1) * k + columns
    g = index >> 2
    drawn = philox4x32(
        g & _LOW,
        g >> 32,
        streams.unsqueeze(1).expand_as(g).contiguous(),
        (counts & _LOW).unsqueeze(1).expand_as(g).contiguous(),
        draw.seed,
    )
    which, out = index & 3, torch.zeros(index.shape, dtype=torch.int64, device=device)
    for i, word in enumerate(drawn):
        out = torch.where(which == i, word, out)
    return (out >> 8).to(torch.float32) * 2.0**-24


def _numbers(given: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    return given.to(device) if isinstance(given, Tensor) else _held(tuple(given), device)


@lru_cache(1024)
def _held(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers of the host's that stay the same from step to step, such as streams."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int64, device=device)
