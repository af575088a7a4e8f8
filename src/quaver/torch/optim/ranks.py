"""Communication around a step for weights stored as codes whose rows are sharded.

A per-tensor scale follows from the amax of the whole weight, and the scale of a block that crosses shards from all its
rows. Before anything is rounded, ranks agree on these amaxes in **one** integer all-reduce for all weights. After the
step they exchange the scales of their rows in one all-gather, because a layer stores the scales of its whole weight.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.torch.linear import stored_weight
from quaver.torch.linear.stored_weight import scales_of
from quaver.torch.numerics.rounding import magnitude_bits
from quaver.torch.optim import layout, master_weights
from quaver.torch.optim.step import ParameterTensors, ShardPosition, StepConfig, apply_rule, largest

#: torch 2.13 renamed this function and warns about the earlier name.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: Key of the amaxes of gradient and moments, which are stored with those of block rows.
OF_RULE = -1


class SteppingParameter(NamedTuple):
    """A parameter whose step has been prepared."""

    p: Tensor
    #: Its number in the optimizer.
    number: int
    group: Mapping[str, Any]
    config: StepConfig
    #: Tensors of a sharded weight stored as codes, else None: others are looked up when the parameter is stepped,
    #: since some are copies.
    parts: ParameterTensors | None
    #: Scalars of its step; empty if a kernel steps it.
    scalars: tuple[Tensor, ...]
    factor: Tensor | None
    #: Amaxes of its blocks, if scales are predicted.
    amax: Tensor | None


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


def agree_on_amaxes(stepping: Sequence[SteppingParameter], local_only: set[Tensor]) -> dict[Tensor, dict[int, Tensor]]:
    """All-reduce the amaxes that the scales of sharded weights depend on. All ranks must call it.

    Args:
        stepping: the parameters that step.
        local_only: parameters whose `amax` covers only this rank's rows; emptied.
    Returns:
        By parameter and block row, the amaxes after the step, float32; under `OF_RULE` those of gradient and moments.
        For parameters in `local_only`, the result is written to their `amax`.
    Raises:
        RuntimeError: the collective failed, for instance because another rank did not step.
    """
    agreed: dict[Tensor, dict[int, Tensor]] = {}
    by_group: dict[Any, list[tuple[Tensor, Callable[[Tensor], object]]]] = {}
    for one in stepping:
        for group in layout.groups(one.p) if one.config.weight_format.code_spec is not None else ():
            by_group.setdefault(group, []).extend(
                _contributions(one, one.p in local_only, agreed.setdefault(one.p, {}))
            )
    local_only.difference_update(one.p for one in stepping)
    # A process group may only communicate on the device of the weights, not on that of the step.
    device = layout.local(stepping[0].p).device
    for group, entries in by_group.items():
        if not entries:
            continue
        flat = torch.cat([amaxes.reshape(-1).to(device) for amaxes, _ in entries])
        try:
            dist.all_reduce(flat, dist.ReduceOp.MAX, group)
        except RuntimeError as error:
            raise RuntimeError(
                "the all-reduce of amaxes of weights stored as codes, which each step does, failed on this "
                f"rank ({error}); step on all ranks or on none, for instance by nonfinite='skip' or an "
                "all-reduce of the condition"
            ) from error
        for (amaxes, take), bits in zip(entries, flat.split([each.numel() for each, _ in entries]), strict=True):
            take(bits.view(torch.float32).view(amaxes.shape).to(amaxes.device))
    return agreed


def _contributions(
    one: SteppingParameter, local_only: bool, agreed: dict[int, Tensor]
) -> list[tuple[Tensor, Callable[[Tensor], object]]]:
    """Return this rank's amaxes for one weight as magnitude bits, int32 of the same sizes on all ranks, and what takes
    each result: the weight's `amax`, or an entry of `agreed`.
    """
    config, spec, parts = one.config, one.config.weight_format.code_spec, one.parts
    assert spec is not None and parts is not None
    entries: list[tuple[Tensor, Callable[[Tensor], object]]] = []
    if config.predicts_scale:
        if local_only and spec.block[0] is None:
            assert one.amax is not None
            entries.append((magnitude_bits(one.amax), one.amax.copy_))
        if config.rule.bound_needs_amaxes:
            bits = magnitude_bits(torch.stack(largest(config, parts, one.factor)))
            entries.append((bits, partial(agreed.__setitem__, OF_RULE)))
    own = {segment.crosses_shards: segment for segment in layout.segments(one.p, config)}
    columns = 1 if spec.block[1] is None else -(-one.p.shape[1] // spec.block[1])
    for row in crossing_blocks(one.p, config):
        bits = torch.zeros((1, columns), dtype=torch.int32, device=parts.weight[0].device)
        if row in own and parts.weight[0].numel():
            after = apply_rule(config, layout.slice_segment(parts, own[row]), one.scalars, one.factor)
            bits = magnitude_bits(master_weights.block_amax(spec, after.weight))
        entries.append((bits, partial(agreed.__setitem__, row)))
    return entries


def gather_scales(stepping: Sequence[SteppingParameter]) -> None:
    """All-gather the scales of all rows of sharded weights, and the amaxes of per-tensor scales."""
    by_group: dict[Any, list[SteppingParameter]] = {}
    for one in stepping:
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
        bits += [] if one.amax is None else [magnitude_bits(one.amax).to(scale.device)]
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
        scale_bits = bits[: scale.numel()].view(scale.shape)
        scale.copy_(scale_bits if scale.dtype is torch.uint8 else scale_bits.view(torch.float32))
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


def all_finite(finite: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    """All-reduce a flag for each parameter, bool []: True if its gradient is finite on all ranks."""
    if not parameters:
        return finite
    bits = torch.stack([ok.to(parameters[0].device) for ok in finite]).logical_not().int()
    for group in {group: None for p in parameters for group in layout.groups(p)}:
        dist.all_reduce(bits, dist.ReduceOp.MAX, group)
    return [*(bits == 0).unbind()]
