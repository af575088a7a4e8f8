"""The rows of all groups quantized at once, each group as if there were no other, without asking how many rows it has.

Where blocks lie, what each measures and which noise it draws is computed on the device from the groups' ends. The twin
of `quaver.torch.numerics.reference` for many operands in one tensor, with the bits of one after the other.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quaver.core.spec import QuantSpec
from quaver.torch.numerics import reference
from quaver.torch.numerics.groups import Laid, Offsets, Slots, of_groups
from quaver.torch.numerics.hadamard import rotate, turned_rotate
from quaver.torch.numerics.philox import philox4x32
from quaver.torch.numerics.quantized import Quantized, decode_scales, pack, unpack, values_of
from quaver.torch.numerics.rounding import (
    INFINITY_BITS,
    SMALLEST_NORMAL_BITS,
    encode,
    flush,
    magnitude_bits,
)

#: Bytes at whose multiples GEMMs want groups to begin, along what they sum over.
LINE = 16
_LOW = 0xFFFFFFFF


class Draw(NamedTuple):
    """What groups' operands are rounded with at random: see `quaver.torch.numerics.philox`."""

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
    x: Tensor, spec: QuantSpec, offsets: Offsets, summed: bool, factors: Tensor | None = None, draw: Draw | None = None
) -> Laid:
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
        y = turned_rotate(y) if summed else rotate(y)
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
    return Laid(data, scale, factor, spec, summed, slots, k, top)


def turned(laid: Laid, offsets: Offsets) -> Laid:
    """Rows as their transposes, of a spec whose blocks are square: the same codes and scales."""
    spec = laid.spec
    assert spec.transposable and not laid.summed
    slots = offsets.slots(multiple(spec))
    codes = unpack(laid.data, laid.shape[1]) if spec.format.packed else laid.data.view(torch.uint8)
    codes = slots.take(codes).t()
    data = pack(codes) if spec.format.packed else codes.contiguous().view(laid.data.dtype)
    return Laid(data, laid.scale, laid.factor, spec, True, slots, slots.count, laid.amax)


def given(q: Quantized, offsets: Offsets) -> Laid:
    """Rows that were quantized before they were given to groups, as an operand of each: no block has rows of several
    groups, or all share the one scale."""
    assert not q.turned
    scale = q.plain_scale() if isinstance(q.scale, Tensor) else q.data.new_full((1, 1), q.scale, dtype=torch.float32)
    if q.spec.block[0] is None:
        scale = scale.expand(offsets.groups, scale.shape[1])
    factor = None if q.tensor_factor is None else q.tensor_factor.expand(offsets.groups, 1)
    return Laid(q.data, scale, factor, q.spec, False, offsets.slots(1), q.shape[1])


def row_scales(laid: Laid, offsets: Offsets) -> tuple[Tensor, Tensor | None]:
    """Stored scales of rows, [T, blocks of k], and what those of two levels are divided by, [T, 1]."""
    assert not laid.summed
    segments = _segments(offsets, laid.slots, laid.spec, False)
    factor = None if laid.factor is None else of_groups(laid.factor, laid.slots.group)
    return _along(laid.scale, segments), factor


def slot_scales(laid: Laid) -> Tensor:
    """Decode scales of an operand that is summed over slots, as its blocks lie: float32 [slots, blocks of k]."""
    assert laid.summed
    segments = _segments(None, laid.slots, laid.spec, True)
    factor = None if laid.factor is None else of_groups(laid.factor, segments.group)
    return _along(decode_scales(laid.scale, laid.spec, factor), segments)


def dequantized(laid: Laid, offsets: Offsets) -> Tensor:
    """Rows [slots, k], float32: data × scale."""
    stored, factor = row_scales(laid, offsets)
    return values(laid) * _spread(decode_scales(stored, laid.spec, factor), laid.spec.block[1], laid.k)


def values(laid: Laid) -> Tensor:
    """The data without scales, float32 as they lie: [slots, k], or of transposes [k, slots]."""
    if laid.data.is_floating_point():
        return laid.data.to(torch.float32)
    codes = unpack(laid.data, laid.shape[1]) if laid.spec.format.packed else laid.data
    return values_of(codes, laid.spec.format)


class Segments(NamedTuple):
    """Where blocks lie along slots: one a slot, one a group, or each so many slots of a group."""

    #: None where each slot is one, else how many there are.
    total: int | None
    #: The segment of each slot, `total` where it is of none; None where they lie in turn, `height` slots each.
    of_slot: Tensor | None
    height: int
    #: The group of each segment.
    group: Tensor
    groups: int


def _segments(offsets: Offsets | None, slots: Slots, spec: QuantSpec, summed: bool) -> Segments:
    groups, height = slots.groups, spec.block[1 if summed else 0]
    if height == 1:
        return Segments(None, None, 1, slots.group, groups)
    if height is None:
        of_group = torch.arange(groups, dtype=torch.int64, device=slots.group.device)
        return Segments(groups, slots.group, 0, of_group, groups)
    if summed:
        return Segments(slots.count // height, None, height, slots.group[::height], groups)
    # As the transposes of these rows have them.
    assert offsets is not None
    wide = offsets.slots(multiple(spec))
    at = of_groups((wide.ends - wide.filled) // height, slots.group) + slots.place // height
    count = wide.count // height
    of_slot = torch.where(slots.group < groups, at, count)
    return Segments(count, of_slot, height, wide.group[::height], groups)


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


def _segment_bits(bits: Tensor, segments: Segments) -> Tensor:
    """The largest of each segment; those of subnormals count as 0."""
    if segments.total is not None and segments.of_slot is None:
        bits = bits.view(segments.total, segments.height, bits.shape[1])
        bits = bits.amax(1) if bits.numel() else bits.new_zeros((segments.total, bits.shape[2]))
    elif segments.total is not None:
        tops = bits.new_zeros((segments.total + 1, bits.shape[1]))
        assert segments.of_slot is not None
        bits = _largest(tops, segments.of_slot, bits)[:-1]
    return torch.where(bits < SMALLEST_NORMAL_BITS, 0, bits)


def _largest(tops: Tensor, at: Tensor, bits: Tensor) -> Tensor:
    """The largest of what goes to each place, in place."""
    index = at if bits.dim() == 1 else at.unsqueeze(1).expand_as(bits)
    return tops.scatter_reduce_(0, index, bits, "amax")


def _scales(
    blocks: Tensor, spec: QuantSpec, segments: Segments, factors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Encode factors and stored scales of blocks, factors of two-level scales [groups, 1], and the groups' amaxes."""
    if spec.scale == "unit":
        one = torch.ones(blocks.shape, dtype=torch.float32, device=blocks.device)
        return one, one, None, None
    if spec.two_level:
        of_segment = blocks.amax(1) if blocks.shape[1] else blocks.new_zeros(blocks.shape[0])
        tops = _largest(blocks.new_zeros(segments.groups + 1), segments.group, of_segment)[:-1]
        e, scale, _ = reference.two_levels(blocks, of_groups(tops, segments.group).unsqueeze(1), spec)
        tops = tops.unsqueeze(1)
        return e, scale, reference.two_levels(tops, tops, spec)[2], None
    e = reference.factors(blocks, spec)
    if factors is not None:
        own = of_groups(factors, segments.group).unsqueeze(1)
        e = torch.where(own == 0, e, own)
    scale = reference.stored_scale(blocks, blocks < INFINITY_BITS, e, spec)
    if spec.scale == "e8m0":
        e = torch.where(blocks == 0, 0.0, e)
    return e, scale, None, blocks.view(torch.float32).view(-1) if spec.per_tensor else None


def _along(of_segments: Tensor, segments: Segments) -> Tensor:
    """What belongs to each slot, of what segments have; 0 where it is of none."""
    if segments.total is None:
        return of_segments
    if segments.of_slot is None:
        return of_segments.repeat_interleave(segments.height, 0)
    return of_groups(of_segments, segments.of_slot)


def _spread(of_blocks: Tensor, width: int | None, k: int) -> Tensor:
    """[segments, blocks of k] to [segments, k], or what broadcasts to that."""
    return of_blocks if width in (None, 1) else of_blocks.repeat_interleave(width, 1)[:, :k]


def _uniform(draw: Draw, slots: Slots, k: int, spec: QuantSpec, summed: bool) -> Tensor:
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
