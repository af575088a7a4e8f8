"""A layer's backward in two parts, for schedules that compute the gradients of weights where a rank would wait.

torch.distributed.pipelining cuts a stage's graph where a gradient goes on both to the stage's input and to a parameter,
and runs the node there in both parts. Of a layer that is one autograd function this is all of its backward. Here it is
three nodes, and what runs twice is one that computes nothing:

    y ──► _Inputs ──► x        its gradient; keeps what those of weights need
             │
             └─► _Joint ──► the stage's input      nothing goes there: it is why torch cuts here
                    └─► _Weights ──► weights       their gradients, from what was kept

A graph that is not cut runs the three one after the other. Nodes that are kept for the second part hold nothing of the
stage but what gradients of weights need. Source of zero bubble: Qi et al. 2023, arXiv:2401.10241.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from quaver.torch.conversion.weight_gradients import Context
from quaver.torch.linear.gemms import LATER
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import NO_DOUBLE_BACKWARD, first_derivative
from quaver.torch.operations.selecting import unseen
from quaver.torch.parallel.comm import active, count, waiting
from quaver.torch.state.context import active_context, autocast
from quaver.torch.state.history.scaling_step import graph_is_retained
from quaver.torch.state.layer_state import LayerState

# ---- splitting -------------------------------------------------------------------------------------------


@contextmanager
def split_backwards(inputs: Sequence[Any]) -> Iterator[None]:
    """Layers that run here in this thread have backwards in two parts, wherever their input depends on one of these.

    Args:
        inputs: what a stage's forward is given. Without one that requires a gradient nothing is split: torch computes
            all gradients at once.
    """
    differentiable = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    before = active_context.split
    active_context.split = (
        _SplitForward(differentiable).instead_of if differentiable and torch.is_grad_enabled() else None
    )
    try:
        yield
    finally:
        active_context.split = before


class _SplitForward:
    """A forward of a stage whose backwards are split."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.inputs = inputs
        #: Nodes from which gradients are known to reach an input.
        self.leading: set[Node] = {get_gradient_edge(x).node for x in inputs}

    def instead_of(
        self, function: type[torch.autograd.Function], apply: Callable[..., Any]
    ) -> Callable[..., tuple[Any, ...]]:
        """What is called in the place of an autograd function's apply."""
        return lambda *arguments: self._run(function, apply, arguments)

    def _run(
        self, function: type[torch.autograd.Function], apply: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        if not torch.is_grad_enabled():
            return apply(*arguments)
        needs = [self._need(argument) for argument in arguments]
        path = [i for i, need in enumerate(needs) if need is True]
        later = [i for i, need in enumerate(needs) if need is LATER]
        if not path or not later:
            return apply(*arguments)
        parts = _LayerNodes(function, path, later)
        gate = _join(self.inputs[0], _weigh(parts, *(arguments[i] for i in later)))
        outputs = _enter(Context(needs), parts, arguments, gate, *(arguments[i] for i in path))
        node = (outputs[0] if isinstance(outputs, tuple) else outputs).grad_fn
        if node is not None:
            self.leading.add(node)
        return outputs

    def _need(self, argument: Any) -> Any:
        """Whether a gradient is needed: for the stage's input, or for parameters alone, and so later."""
        if not (isinstance(argument, Tensor) and argument.requires_grad):
            return False
        return True if self._leads(argument) else LATER

    def _leads(self, argument: Tensor) -> bool:
        """Whether gradients go from a tensor to an input of the stage."""
        node = argument.grad_fn
        if node is None:
            return any(argument is x for x in self.inputs)
        if node in self.leading:
            return True
        seen, waiting = {node}, [node]
        while waiting:
            for other, _ in waiting.pop().next_functions:
                if other in self.leading:
                    self.leading.add(node)
                    return True
                if other is not None and other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return False


class _LayerNodes:
    """What the nodes of one layer share."""

    __slots__ = ("function", "kept", "later", "path")

    def __init__(self, function: type[torch.autograd.Function], path: list[int], later: list[int]) -> None:
        self.function = function
        #: Places of its arguments whose gradients the first part gives, and the second.
        self.path, self.later = path, later
        #: Between the parts the gradients of the second one, or what gives them.
        self.kept: Sequence[Any] | None = None


class _Inputs(torch.autograd.Function):
    """(a context, parts, a function's arguments, the joint's output, those on the path) to what the function gives."""

    @staticmethod
    def forward(
        ctx: Any, own: Context, parts: _LayerNodes, arguments: Sequence[Any], gate: Tensor, *path: Tensor
    ) -> Any:
        outputs = parts.function.forward(own, *arguments)
        ctx.save_for_backward(*own.saved_tensors)
        own.saved_tensors = ()
        ctx.own, ctx.parts = own, parts
        return outputs

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return first_derivative(_of_inputs, ctx, NO_DOUBLE_BACKWARD, *gs)


def _of_inputs(ctx: Any, saved: Sequence[Any], *gs: Tensor) -> tuple[Any, ...]:
    own, parts = ctx.own, ctx.parts
    own.saved_tensors = saved
    try:
        gradients: Any = parts.function.backward(own, *gs)
    finally:
        own.saved_tensors = ()
    parts.kept = [gradients[i] for i in parts.later]
    return None, None, None, _nothing(gs[0].device), *(gradients[i] for i in parts.path)


class _Joint(torch.autograd.Function):
    """(the stage's input, the output of the weights' node) to what a layer's node takes."""

    @staticmethod
    @unseen
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        return _nothing(gate.device)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, g


class _Weights(torch.autograd.Function):
    """(parts, weights and what else has a gradient later) to a tensor without elements."""

    @staticmethod
    @unseen
    def forward(ctx: Any, parts: _LayerNodes, *weights: Tensor) -> Tensor:
        ctx.parts = parts
        return _nothing(weights[0].device)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with ops.without_autocast(ops.autocast_device(g)):
            return first_derivative(_of_weights, ctx, NO_DOUBLE_BACKWARD, g)


def _of_weights(ctx: Any, _: Sequence[Any], g: Tensor) -> tuple[Any, ...]:
    parts: _LayerNodes = ctx.parts
    if parts.kept is None:
        raise RuntimeError(
            "the gradient of a quantized layer's weight was asked for by itself, or twice; that of the layer's input "
            "comes first: let a schedule run both parts of a backward, or call backward() without cutting the graph"
        )
    kept = parts.kept
    if not graph_is_retained():
        parts.kept = None
    return None, *(each() if callable(each) else each for each in kept)


def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=device)


#: `Function.apply` without its checks for torch.func, which layers have made.
_enter: Any = super(torch.autograd.Function, _Inputs).apply
_join: Any = super(torch.autograd.Function, _Joint).apply
_weigh: Any = super(torch.autograd.Function, _Weights).apply


# ---- stages ----------------------------------------------------------------------------------------------
# Stages of torch's pipelines: torch's own `PipelineStage`, and what quantized layers in it must be told.
#
# A module is made a stage by `stage`, and any schedule of torch.distributed.pipelining runs it. A step of delayed
# scaling is one `schedule.step(...)` within one `quaver.torch.autocast`.


def pipeline_stage(
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
    """torch's stage: schedules may cut the backwards of its layers in two, and a `CommCounter` counts what it sends."""

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
) -> "_CountedWork":
    """Begin an operation as a schedule asks, which takes what is no `isend` for a receipt."""
    peer = group_src if group_dst is None else group_dst
    place = {"group_dst" if operation is dist.isend else "group_src": peer}
    return _CountedWork(operation(tensor, group=group, tag=tag, **place), tensor)


class _CountedWork:
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
