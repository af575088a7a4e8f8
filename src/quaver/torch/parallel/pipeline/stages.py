"""Stages of torch's pipelines: torch's own `PipelineStage`, and what quantized layers in it must be told.

A module is made a stage by `stage`, and any schedule of torch.distributed.pipelining runs it. A step of delayed scaling
is one `schedule.step(...)` within one `quaver.torch.autocast`.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from quaver.torch.parallel.pipeline.splitting import split_backwards
from quaver.torch.parallel.traffic import active, count, waiting
from quaver.torch.state.context import autocast
from quaver.torch.state.layer import LayerState


def stage(
    module: nn.Module,
    index: int,
    count: int,
    example: Tensor | tuple[Tensor, ...],
    *,
    device: torch.device | None = None,
    group: Any = None,
) -> PipelineStage:
    """A stage of a pipeline whose shapes are known beforehand, and whose layers know that they are this stage's.

    Without shapes torch rehearses a forward and a backward within the first step, on memory that holds anything: amaxes
    of that enter histories, and noise is drawn for it. Here the module runs once, unquantized and without gradients, on
    zeros. Ranks that hold this stage reduce delayed scaling's maxima over one another, and over no other stage's.

    Args:
        module: the stage's layers, converted before; wrapped, as by `fully_shard`, before or after, and prepared by
            `gather_quantized` after.
        index: which stage it is.
        count: stages of the pipeline.
        example: what it takes of a micro-batch: shapes and dtypes, no values. May be on meta.
        device: where it runs; None is where its first parameter is.
        group: the pipeline's process group; None is the default one.
    Returns:
        torch's stage, for any of torch's schedules.
    Raises:
        ValueError: an index that is not one of `count` stages, or a module without parameters and no device.
    """
    if not 0 <= index < count:
        raise ValueError(f"stage {index} of {count} stages does not exist: give an index from 0 to {count - 1}")
    first = next(module.parameters(), None)
    if device is None:
        if first is None:
            raise ValueError(f"stage {index} has no parameters that tell where it runs: give device=")
        device = first.device
    for layer in module.modules():
        state = layer.__dict__.get("_state")
        if isinstance(state, LayerState):
            state.stage = index
    given = (example,) if isinstance(example, Tensor) else tuple(example)
    floating = index > 0
    inputs = tuple(
        torch.zeros_like(each, device=device).requires_grad_(floating and each.is_floating_point()) for each in given
    )
    outputs = _outputs(module, inputs)
    return _Stage(module, index, count, device, input_args=inputs, output_args=outputs, group=group)


class _Stage(PipelineStage):
    """torch's stage: schedules may cut the backwards of its layers in two, and a `Traffic` counts what it sends."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with split_backwards(args):
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: Any, *args: Any, **kwargs: Any) -> Any:
        if backward_type != "full":
            # torch looks for the gradients of the parameters that it sees here: of parts that fully_shard has put in
            # their place after a forward there are none, and none would be computed.
            for module in self.submod.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
        return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_index: int) -> list[Any]:
        return _timed(super().get_fwd_recv_ops(fwd_chunk_index))

    def get_bwd_recv_ops(self, bwd_chunk_index: int) -> list[Any]:
        return _timed(super().get_bwd_recv_ops(bwd_chunk_index))

    def get_fwd_send_ops(self, fwd_chunk_index: int) -> list[Any]:
        return _sent(super().get_fwd_send_ops(fwd_chunk_index))

    def get_bwd_send_ops(self, bwd_chunk_index: int) -> list[Any]:
        return _sent(super().get_bwd_send_ops(bwd_chunk_index))


def _sent(operations: list[Any]) -> list[Any]:
    for each in operations if active.all else ():
        count("activations", "send", each.tensor, each.group, active.all)
    return _timed(operations)


def _timed(operations: list[Any]) -> list[Any]:
    """The same, of which a schedule is given works that count how long it waits for them."""
    for each in operations if active.all else ():
        # On a GPU the host waits for none, and torch has several go as one.
        if not each.tensor.is_cuda:
            each.op = partial(_begun, each.op)
    return operations


def _begun(
    operation: Any, tensor: Tensor, *, group: Any, tag: int = 0, group_src: Any = None, group_dst: Any = None
) -> "_Work":
    """Begin an operation as a schedule asks, which takes what is no `isend` for a receipt."""
    peer = group_src if group_dst is None else group_dst
    place = {"group_dst" if operation is dist.isend else "group_src": peer}
    return _Work(operation(tensor, group=group, tag=tag, **place), tensor)


class _Work:
    """torch's work, whose wait is counted."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self.work, self.tensor = work, tensor

    def wait(self, *args: Any) -> Any:
        with waiting("activations", self.tensor):
            return self.work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def _outputs(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the module gives, as tensors without values."""
    on = inputs[0].device
    # Running statistics, caches and counts are none of zeros.
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng([on] if on.type == "cuda" else []), torch.no_grad(), autocast(enabled=False):
        y = module(*inputs)
        for buffer, values in before:
            buffer.copy_(values)
    outputs = (y,) if isinstance(y, Tensor) else tuple(y)
    return tuple(torch.empty_like(each).requires_grad_(each.is_floating_point()) for each in outputs)
