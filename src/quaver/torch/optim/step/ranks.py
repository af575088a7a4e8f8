"""Communication around a step for weights stored as codes whose rows are sharded.

A per-tensor scale follows from the amax of the whole weight, and the scale of a block that crosses shards from all its
rows. Before anything is rounded, ranks agree on these amaxes in **one** integer all-reduce for all weights. After the
step they exchange the scales of their rows in one all-gather, because a layer stores the scales of its whole weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.torch.linear import stored_weight
from quaver.torch.linear.stored_weight import scales_of
from quaver.torch.numerics.rounding import magnitude_bits
from quaver.torch.optim import master_weights
from quaver.torch.optim.step import layout
from quaver.torch.optim.step.noise import ShardPosition
from quaver.torch.optim.step.step import GlobalAmax, ParameterTensors, StepConfig, apply_rule, largest

#: torch 2.13 renamed this function and warns about the earlier name.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ShardSegment(NamedTuple):
    """Rows of a rank's shard: whole blocks, or part of one block row that crosses shards; or one matrix of a stack."""

    #: Rows within the rank's shard.
    rows: slice
    #: Block rows within the rank's shard; None if the weight has one scale, or scales by columns.
    blocks: slice | None
    #: Index in the whole weight of a block row that other ranks have rows of, too; None for whole blocks.
    crosses_shards: int | None
    #: Index of the matrix in a stack, or None.
    group: int | None = None


def segments(p: Tensor, config: StepConfig) -> list[ShardSegment]:
    """Split this rank's shard of a parameter where a block row that crosses shards begins or ends."""
    position, spec = layout.place(p), config.weight_format.code_spec
    if layout.is_stack(p, spec, config.rule.needs_matrix):
        n = p.shape[1]
        cuts = [slice(group * n, (group + 1) * n) for group in range(p.shape[0])]
        return [
            ShardSegment(rows, None if spec is None else layout.blocks_of(p, spec, group), None, group)
            for group, rows in enumerate(cuts)
        ]
    every = slice(0, layout.local(p).shape[0] if layout.local(p).dim() else 1)
    if spec is None or not layout.shardings(p):
        return [ShardSegment(every, None, None)]
    height, start, num_rows = spec.block[0], position.global_offset[0], position.global_shape[0]
    if height is None:
        return [ShardSegment(every, None, None if config.predicts_scale else 0)]
    stop = start + position.local_shape[0]
    if start == stop:
        return []
    first = min(stop, -(-start // height) * height)
    last = stop if stop == num_rows else max(first, stop // height * height)
    pieces = []
    for a, b in pairwise(sorted({start, first, last, stop})):
        blocks = slice(a // height - start // height, -(-b // height) - start // height)
        crosses = a % height != 0 or (b % height != 0 and b != num_rows)
        pieces.append(ShardSegment(slice(a - start, b - start), blocks, a // height if crosses else None))
    return pieces


def crossing_blocks(p: Tensor, config: StepConfig) -> list[int]:
    """Return the indices of block rows that cross shards and have measured scales: the same on all ranks."""
    spec, cuts = config.weight_format.code_spec, layout.shardings(p)
    if spec is None or config.predicts_scale or not cuts:
        return []
    height, rows = spec.block[0], p.shape[0]
    if height is None:
        return [0]
    part = -(-rows // p.device_mesh.size(cuts[0][1]))  # type: ignore[attr-defined]
    return sorted({cut // height for cut in range(part, rows, part) if cut % height})


def of_segment(parts: ParameterTensors, segment: ShardSegment) -> ParameterTensors:
    """Select a segment from all tensors of a shard."""
    if segment.blocks is None and segment.group is None:
        return parts
    weight = tuple(
        t[segment.blocks if i == 1 and segment.blocks is not None else segment.rows] for i, t in enumerate(parts.weight)
    )
    moments = tuple(tuple(t[segment.rows] for t in moment_tensors) for moment_tensors in parts.moments)
    return ParameterTensors(weight, moments, tuple(t[segment.rows] for t in parts.gradient))


def at_segment(position: ShardPosition, segment: ShardSegment) -> ShardPosition:
    """Return the position of a shard's segment in the whole parameter."""
    if segment.group is not None:
        return ShardPosition(
            (segment.group, *position.global_offset[1:]), (1, *position.local_shape[1:]), position.global_shape
        )
    if segment.blocks is None:
        return position
    first = position.global_offset[0] + segment.rows.start
    rows = segment.rows.stop - segment.rows.start
    return ShardPosition((first, *position.global_offset[1:]), (rows, *position.local_shape[1:]), position.global_shape)


class SteppingParameter(NamedTuple):
    """A parameter whose step has been prepared."""

    p: Tensor
    config: StepConfig
    #: Tensors of a sharded weight stored as codes, else None.
    parts: ParameterTensors | None
    #: Scalars of its step; empty if a kernel steps it.
    scalars: tuple[Tensor, ...]
    factor: Tensor | None
    #: Amaxes of its blocks, if scales are predicted.
    amax: Tensor | None


@dataclass
class _AmaxBits:
    """Magnitude bits that ranks agree on, int32."""

    bits: Tensor
    #: Tensor that receives the result, or None to return it by block row; -1 stands for amaxes of gradient and moments.
    into: Tensor | None = None
    row: int = -1


def agree_on_amaxes(
    all_of_them: Sequence[SteppingParameter], local_only: set[Tensor]
) -> dict[Tensor, dict[int, Tensor]]:
    """All-reduce the amaxes that the scales of sharded weights depend on. All ranks must call it.

    Args:
        all_of_them: the parameters that step.
        local_only: parameters whose `amax` covers only this rank's rows; emptied.
    Returns:
        By parameter and block row, the amaxes after the step, float32; under -1 those of gradient and moments. For
        parameters in `local_only`, the result is written to their `amax`.
    Raises:
        RuntimeError: the collective failed, for instance because another rank did not step.
    """
    by_group: dict[Any, list[tuple[Tensor, _AmaxBits]]] = {}
    for one in all_of_them:
        groups = layout.groups(one.p) if one.config.weight_format.code_spec is not None else ()
        for group in groups:
            by_group.setdefault(group, []).extend((one.p, entry) for entry in _entries(one, one.p in local_only))
    local_only.clear()
    agreed_amaxes: dict[Tensor, dict[int, Tensor]] = {}
    for group, entries in by_group.items():
        if not entries:
            continue
        flat = torch.cat([entry.bits.view(-1) for _, entry in entries])
        try:
            dist.all_reduce(flat, dist.ReduceOp.MAX, group)
        except RuntimeError as error:
            raise RuntimeError(
                "the all-reduce of amaxes of weights stored as codes, which each step does, failed on this "
                f"rank ({error}); step on all ranks or on none, for instance by nonfinite='skip' or an "
                "all-reduce of the condition"
            ) from error
        for (p, entry), bits in zip(entries, flat.split([e.bits.numel() for _, e in entries]), strict=True):
            amaxes = bits.view(torch.float32).view(entry.bits.shape)
            if entry.into is None:
                agreed_amaxes.setdefault(p, {})[entry.row] = amaxes
            else:
                entry.into.copy_(amaxes)
    return agreed_amaxes


def _entries(one: SteppingParameter, local_only: bool) -> list[_AmaxBits]:
    """Return this rank's contributions for one weight, of the same sizes on all ranks."""
    config, spec, parts = one.config, one.config.weight_format.code_spec, one.parts
    assert spec is not None and parts is not None
    entries = []
    if config.predicts_scale:
        if local_only and spec.block[0] is None:
            assert one.amax is not None
            entries.append(_AmaxBits(magnitude_bits(one.amax), one.amax))
        if config.rule.bound_needs_amaxes:
            entries.append(_AmaxBits(magnitude_bits(torch.stack(largest(config, parts, one.factor)))))
    own = {segment.crosses_shards: segment for segment in segments(one.p, config)}
    columns = 1 if spec.block[1] is None else -(-one.p.shape[1] // spec.block[1])
    for row in crossing_blocks(one.p, config):
        bits = torch.zeros((1, columns), dtype=torch.int32, device=parts.weight[0].device)
        if row in own and parts.weight[0].numel():
            after = apply_rule(config, of_segment(parts, own[row]), one.scalars, one.factor)
            bits = magnitude_bits(master_weights.block_amax(spec, after.weight))
        entries.append(_AmaxBits(bits, row=row))
    return entries


def agreed_for(agreed_amaxes: Mapping[int, Tensor], segment: ShardSegment) -> GlobalAmax | None:
    """Return the agreed amaxes for a segment from the results of `agree_on_amaxes`; None if there are none."""
    if not agreed_amaxes:
        return None
    gradient_and_moment_amaxes = tuple(agreed_amaxes[-1].unbind()) if -1 in agreed_amaxes else ()
    return GlobalAmax(
        gradient_and_moment_amaxes, None if segment.crosses_shards is None else agreed_amaxes[segment.crosses_shards]
    )


def gather_scales(all_of_them: Sequence[SteppingParameter]) -> None:
    """All-gather the scales of all rows of sharded weights, and the amaxes of per-tensor scales."""
    by_group: dict[Any, list[SteppingParameter]] = {}
    for one in all_of_them:
        for group in layout.groups(one.p) if one.config.weight_format.code_spec is not None else ():
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
    """Return the scales of the whole weight."""
    owner = stored_weight.owner(one.p)
    assert owner is not None
    return scales_of(owner)["weight_scale"]


def _sent(one: SteppingParameter) -> Tensor:
    """Return the bytes that this rank sends, uint8 of the same size on all ranks."""
    spec, scale, position = one.config.weight_format.code_spec, _scale(one), layout.place(one.p)
    assert spec is not None
    if spec.block[0] is None:
        # A rank without rows sends zeros: its scale is still that of the previous step.
        bits = [scale.int() if scale.dtype is torch.uint8 else magnitude_bits(scale)]
        bits += [] if one.amax is None else [magnitude_bits(one.amax)]
        agreed_amaxes = torch.cat([t.reshape(-1) for t in bits])
        return (agreed_amaxes if position.local_shape[0] else torch.zeros_like(agreed_amaxes)).view(torch.uint8)
    rows = scale[layout.block_rows(position, spec.block[0])]
    buffer = scale.new_zeros((_max_block_rows(one.p, spec.block[0]), scale.shape[1]))
    buffer[: rows.shape[0]] = rows
    return buffer.view(-1).view(torch.uint8)


def _take(one: SteppingParameter, gathered: Tensor) -> None:
    """Write the scales received from all ranks, uint8 [ranks, bytes]."""
    spec, scale = one.config.weight_format.code_spec, _scale(one)
    assert spec is not None
    if spec.block[0] is None:
        # NaN has the largest bits, so it wins.
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


def _on(p: Tensor, rank: int, ranks: int) -> ShardPosition:
    """Return the position of another rank's rows in a parameter."""
    rows, rows_per_rank = p.shape[0], -(-p.shape[0] // ranks)
    start = min(rows, rows_per_rank * rank)
    return ShardPosition((start, 0), (min(rows, start + rows_per_rank) - start, p.shape[1]), tuple(p.shape))


def _max_block_rows(p: Tensor, height: int) -> int:
    """Return the largest number of block rows that any rank has."""
    ranks = dist.get_world_size(layout.groups(p)[0])
    every = [layout.block_rows(_on(p, rank, ranks), height) for rank in range(ranks)]
    return max(blocks.stop - blocks.start for blocks in every)
