"""Weights that exist only in codes and whose rows ranks have: what these tell one another around a step.

A scale of the whole weight follows from its largest magnitude, and so does one of a block of which several ranks have
rows: before anything is rounded, ranks agree on these in **one** all-reduce of integers for all weights. Once all is
written, they tell each other the scales of their rows in one all-gather, since a layer has those of its whole weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.torch.linear import store_weight
from quaver.torch.numerics.rounding import magnitude_bits
from quaver.torch.optim import master_weights
from quaver.torch.optim.step import layout
from quaver.torch.optim.step.noise import Place
from quaver.torch.optim.step.step import GlobalAmax, ParameterTensors, StepConfig, largest, stepped

#: torch 2.13 has given it this name, and warns of the earlier one.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ShardSegment(NamedTuple):
    """Rows of a rank that are whole blocks of a weight's scales, or a part of one row of blocks; or one matrix of a
    stack."""

    #: Of the rank's part.
    rows: slice
    #: Of the rank's rows of blocks; None where the weight has one scale, or scales by columns.
    blocks: slice | None
    #: The number, in the whole weight, of a row of blocks of which other ranks have rows, too; None of whole blocks.
    crosses_shards: int | None
    #: The number of a stack's matrix.
    group: int | None = None


def segments(p: Tensor, way: StepConfig) -> list[ShardSegment]:
    """This rank's part of a parameter, cut where a row of blocks begins that another rank has something of, or ends."""
    part, spec = layout.place(p), way.master_format.spec
    if layout.is_stack(p, spec, way.rule.whole):
        n = p.shape[1]
        cuts = [slice(group * n, (group + 1) * n) for group in range(p.shape[0])]
        return [
            ShardSegment(rows, None if spec is None else layout.blocks_of(p, spec, group), None, group)
            for group, rows in enumerate(cuts)
        ]
    every = slice(0, layout.local(p).shape[0] if layout.local(p).dim() else 1)
    if spec is None or not layout.divided(p):
        return [ShardSegment(every, None, None)]
    height, start, whole = spec.block[0], part.start[0], part.whole[0]
    if height is None:
        return [ShardSegment(every, None, None if way.predicts else 0)]
    stop = start + part.part[0]
    if start == stop:
        return []
    first = min(stop, -(-start // height) * height)
    last = stop if stop == whole else max(first, stop // height * height)
    pieces = []
    for a, b in pairwise(sorted({start, first, last, stop})):
        blocks = slice(a // height - start // height, -(-b // height) - start // height)
        apart = a % height != 0 or (b % height != 0 and b != whole)
        pieces.append(ShardSegment(slice(a - start, b - start), blocks, a // height if apart else None))
    return pieces


def straddling(p: Tensor, way: StepConfig) -> list[int]:
    """The rows of blocks of a parameter's scales that lie on several ranks and are measured: the same on all ranks."""
    spec, cuts = way.master_format.spec, layout.divided(p)
    if spec is None or way.predicts or not cuts:
        return []
    height, rows = spec.block[0], p.shape[0]
    if height is None:
        return [0]
    part = -(-rows // p.device_mesh.size(cuts[0][1]))  # type: ignore[attr-defined]
    return sorted({cut // height for cut in range(part, rows, part) if cut % height})


def of_segment(parts: ParameterTensors, segment: ShardSegment) -> ParameterTensors:
    """A segment of all tensors of a part."""
    if segment.blocks is None and segment.group is None:
        return parts
    weight = tuple(
        t[segment.blocks if i == 1 and segment.blocks is not None else segment.rows] for i, t in enumerate(parts.weight)
    )
    moments = tuple(tuple(t[segment.rows] for t in held) for held in parts.moments)
    return ParameterTensors(weight, moments, tuple(t[segment.rows] for t in parts.gradient))


def at_segment(part: Place, segment: ShardSegment) -> Place:
    """Where a segment of a part lies in the whole parameter."""
    if segment.group is not None:
        return Place((segment.group, *part.start[1:]), (1, *part.part[1:]), part.whole)
    if segment.blocks is None:
        return part
    first = part.start[0] + segment.rows.start
    rows = segment.rows.stop - segment.rows.start
    return Place((first, *part.start[1:]), (rows, *part.part[1:]), part.whole)


class SteppingParameter(NamedTuple):
    """A parameter that is about to step."""

    p: Tensor
    way: StepConfig
    #: Of codes that ranks have parts of.
    parts: ParameterTensors | None
    #: As a step takes them; none of what a kernel steps.
    scalars: tuple[Tensor, ...]
    factor: Tensor | None
    #: Of its blocks, if the way predicts scales.
    amax: Tensor | None


@dataclass
class _AmaxBits:
    """Bits of magnitudes that ranks agree on, int32."""

    bits: Tensor
    #: Where they go; else `told` of a row of blocks, -1 for the largest gradient and moments.
    into: Tensor | None = None
    row: int = -1


def agree(all_of_them: Sequence[SteppingParameter], alone: set[Tensor]) -> dict[Tensor, dict[int, Tensor]]:
    """Have ranks agree on what scales of their weights follow from; all ranks call it alike.

    Args:
        alone: parameters of whose blocks a rank has measured its own rows alone; emptied.
    Returns:
        By parameter, and by row of blocks, the amaxes after the step, float32; under -1 the largest gradient and
        moments. What `alone` is about is written to the given `amax`.
    Raises:
        RuntimeError: another rank does not come here.
    """
    by_group: dict[Any, list[tuple[Tensor, _AmaxBits]]] = {}
    for one in all_of_them:
        groups = layout.groups(one.p) if one.way.master_format.spec is not None else ()
        for group in groups:
            by_group.setdefault(group, []).extend((one.p, entry) for entry in _entries(one, one.p in alone))
    alone.clear()
    told: dict[Tensor, dict[int, Tensor]] = {}
    for group, entries in by_group.items():
        if not entries:
            continue
        flat = torch.cat([entry.bits.view(-1) for _, entry in entries])
        try:
            dist.all_reduce(flat, dist.ReduceOp.MAX, group)
        except RuntimeError as error:
            raise RuntimeError(
                f"this rank asked the others for amaxes of weights in codes, as each step does, in vain ({error}); "
                "step on all ranks or on none, such as by nonfinite='skip' or an all-reduce of what a skip goes by"
            ) from error
        for (p, entry), bits in zip(entries, flat.split([e.bits.numel() for _, e in entries]), strict=True):
            amaxes = bits.view(torch.float32).view(entry.bits.shape)
            if entry.into is None:
                told.setdefault(p, {})[entry.row] = amaxes
            else:
                entry.into.copy_(amaxes)
    return told


def _entries(one: SteppingParameter, alone: bool) -> list[_AmaxBits]:
    """What a rank knows of a weight that others ask for: of as many numbers on all ranks."""
    way, spec, parts = one.way, one.way.master_format.spec, one.parts
    assert spec is not None and parts is not None
    entries = []
    if way.predicts:
        if alone and spec.block[0] is None:
            assert one.amax is not None
            entries.append(_AmaxBits(magnitude_bits(one.amax), one.amax))
        if way.rule.asks:
            entries.append(_AmaxBits(magnitude_bits(torch.stack(largest(way, parts, one.factor)))))
    own = {segment.crosses_shards: segment for segment in segments(one.p, way)}
    columns = 1 if spec.block[1] is None else -(-one.p.shape[1] // spec.block[1])
    for row in straddling(one.p, way):
        bits = torch.zeros((1, columns), dtype=torch.int32, device=parts.weight[0].device)
        if row in own and parts.weight[0].numel():
            after = stepped(way, of_segment(parts, own[row]), one.scalars, one.factor)
            bits = magnitude_bits(master_weights.block_amax(spec, after.weight))
        entries.append(_AmaxBits(bits, row=row))
    return entries


def told_of(told: Mapping[int, Tensor], segment: ShardSegment) -> GlobalAmax | None:
    """What a segment's step is told, of what `agree` gave for its parameter; None: the rank's rows say all."""
    if not told:
        return None
    others = tuple(told[-1].unbind()) if -1 in told else ()
    return GlobalAmax(others, None if segment.crosses_shards is None else told[segment.crosses_shards])


def tell_scales(all_of_them: Sequence[SteppingParameter]) -> None:
    """Have all ranks have the scales of all rows of their weights, and the amaxes of those with one scale in all."""
    by_group: dict[Any, list[SteppingParameter]] = {}
    for one in all_of_them:
        for group in layout.groups(one.p) if one.way.master_format.spec is not None else ():
            by_group.setdefault(group, []).append(one)
    for group, every in by_group.items():
        own = torch.cat([_sent(one) for one in every])
        gathered = own.new_empty((dist.get_world_size(group), own.numel()))
        all_gather(gathered.view(-1), own, group)
        at = 0
        for one in every:
            size = _sent(one).numel()
            _take(one, gathered[:, at : at + size])
            at += size


def _scale(one: SteppingParameter) -> Tensor:
    """Of the whole weight."""
    owner = store_weight.owner(one.p)
    assert owner is not None
    scale = owner._buffers["weight_scale"]
    assert scale is not None
    return scale


def _sent(one: SteppingParameter) -> Tensor:
    """What this rank tells, uint8: of as many bytes on all ranks."""
    spec, scale, part = one.way.master_format.spec, _scale(one), layout.place(one.p)
    assert spec is not None
    if spec.block[0] is None:
        # Of a rank without rows, nothing: what it has is that of the step before.
        bits = [scale.int() if scale.dtype is torch.uint8 else magnitude_bits(scale)]
        bits += [] if one.amax is None else [magnitude_bits(one.amax)]
        told = torch.cat([t.reshape(-1) for t in bits])
        return (told if part.part[0] else torch.zeros_like(told)).view(torch.uint8)
    rows = scale[layout.block_rows(part, spec.block[0])]
    buffer = scale.new_zeros((_most(one.p, spec.block[0]), scale.shape[1]))
    buffer[: rows.shape[0]] = rows
    return buffer.view(-1).view(torch.uint8)


def _take(one: SteppingParameter, gathered: Tensor) -> None:
    """Write what all ranks have told, uint8 [ranks, bytes]."""
    spec, scale = one.way.master_format.spec, _scale(one)
    assert spec is not None
    if spec.block[0] is None:
        # NaN, where a rank's rows have one, is the largest.
        bits = gathered.contiguous().view(torch.int32).amax(0)
        of_scale = bits[: scale.numel()].view(scale.shape)
        scale.copy_(of_scale if scale.dtype is torch.uint8 else of_scale.view(torch.float32))
        if one.amax is not None:
            one.amax.copy_(bits[scale.numel() :].view(torch.float32).view(one.amax.shape))
        return
    height, ranks = spec.block[0], gathered.shape[0]
    for rank in range(ranks):
        blocks = layout.block_rows(_on(one.p, rank, ranks), height)
        rows = gathered[rank].contiguous().view(scale.dtype).view(-1, scale.shape[1])
        scale[blocks] = rows[: blocks.stop - blocks.start]


def _on(p: Tensor, rank: int, ranks: int) -> Place:
    """Where another rank's rows lie in a parameter."""
    whole, part = p.shape[0], -(-p.shape[0] // ranks)
    start = min(whole, part * rank)
    return Place((start, 0), (min(whole, start + part) - start, p.shape[1]), tuple(p.shape))


def _most(p: Tensor, height: int) -> int:
    """The most rows of blocks that any rank has something of."""
    ranks = dist.get_world_size(layout.groups(p)[0])
    every = [layout.block_rows(_on(p, rank, ranks), height) for rank in range(ranks)]
    return max(blocks.stop - blocks.start for blocks in every)
