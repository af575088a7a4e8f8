"""Pipeline stages of quantized layers, whose backward can be split for zero-bubble schedules.

Zero-bubble schedules compute weight gradients at times when a rank would otherwise wait. To split a backward,
torch.distributed.pipelining cuts a stage's autograd graph at nodes whose gradient flows both to the stage's input and
to a parameter, and runs such a node in both parts. For a layer that is one autograd function, that would be its entire
backward. Here a layer has three nodes, and the node that runs twice computes nothing:

    y ──► _Inputs ──► x        gradient of the input; stores what weight gradients need
             │
             └─► _Joint ──► the stage's input      carries no gradient; it makes torch cut here
                    └─► _Weights ──► weights       weight gradients, from the stored data

An uncut graph runs the three one after the other. Nodes stored for the second part hold only what weight gradients
need. Source of zero bubble: Qi et al. 2023, arXiv:2401.10241.
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
from quaver.torch.linear.general import LATER
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import NO_DOUBLE_BACKWARD, first_derivative
from quaver.torch.parallel.comm_counter import active, count, waiting
from quaver.torch.state.context import active_context, autocast
from quaver.torch.state.history.scaling_step import graph_is_retained
from quaver.torch.state.layer_state import LayerState
from quaver.torch.state.selective_checkpoint import hide_from_policies

# ---- split backward ----


@contextmanager
def split_backwards(inputs: Sequence[Any]) -> Iterator[None]:
    """Split the backward of layers that run in this thread within the block and whose input depends on a stage input.

    Args:
        inputs: arguments of the stage's forward. If none requires a gradient, nothing is split, because torch then
            computes all gradients at once.
    """
    differentiable = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    before = active_context.apply_override
    active_context.apply_override = (
        _SplitForward(differentiable).instead_of if differentiable and torch.is_grad_enabled() else None
    )
    try:
        yield
    finally:
        active_context.apply_override = before


class _SplitForward:
    """Forward of one stage whose layers get a split backward."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.inputs = inputs
        #: Autograd nodes known to lead to a stage input.
        self.leading: set[Node] = {get_gradient_edge(x).node for x in inputs}

    def instead_of(
        self, function: type[torch.autograd.Function], apply: Callable[..., Any]
    ) -> Callable[..., tuple[Any, ...]]:
        """Return the replacement for an autograd function's `apply`."""
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
        """Return True if an argument's gradient leads to the stage input, LATER if only to parameters, False if none is
        needed.
        """
        if not (isinstance(argument, Tensor) and argument.requires_grad):
            return False
        return True if self._leads(argument) else LATER

    def _leads(self, argument: Tensor) -> bool:
        """Return True if the autograd graph leads from a tensor to a stage input."""
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
    """State shared by the three nodes of one layer."""

    __slots__ = ("delayed_gradients", "function", "later", "path")

    def __init__(self, function: type[torch.autograd.Function], path: list[int], later: list[int]) -> None:
        self.function = function
        #: Indices of the function's arguments whose gradients the first and the second part compute.
        self.path, self.later = path, later
        #: Gradients of the second part, or functions that compute them; None outside the two parts.
        self.delayed_gradients: Sequence[Any] | None = None


class _StageInputs(torch.autograd.Function):
    """Node that runs the layer's forward, and in backward the gradients of the inputs.

    Args: a context, the shared state, the function's arguments, the output of `_Joint`, and the arguments that lead to
        the stage input.
    """

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
        return first_derivative(_input_gradients, ctx, NO_DOUBLE_BACKWARD, *gs)


def _input_gradients(ctx: Any, saved: Sequence[Any], *gs: Tensor) -> tuple[Any, ...]:
    own, parts = ctx.own, ctx.parts
    own.saved_tensors = saved
    try:
        gradients: Any = parts.function.backward(own, *gs)
    finally:
        own.saved_tensors = ()
    parts.delayed_gradients = [gradients[i] for i in parts.later]
    return None, None, None, _nothing(gs[0].device), *(gradients[i] for i in parts.path)


class _Joint(torch.autograd.Function):
    """Node without computation that links `_Weights` and the stage's input to the layer's node."""

    @staticmethod
    @hide_from_policies
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        return _nothing(gate.device)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, g


class _Weights(torch.autograd.Function):
    """Node whose backward returns the weight gradients; its forward returns an empty tensor."""

    @staticmethod
    @hide_from_policies
    def forward(ctx: Any, parts: _LayerNodes, *weights: Tensor) -> Tensor:
        ctx.parts = parts
        return _nothing(weights[0].device)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with ops.without_autocast(ops.autocast_device(g)):
            return first_derivative(_weight_gradients, ctx, NO_DOUBLE_BACKWARD, g)


def _weight_gradients(ctx: Any, _: Sequence[Any], g: Tensor) -> tuple[Any, ...]:
    parts: _LayerNodes = ctx.parts
    if parts.delayed_gradients is None:
        raise RuntimeError(
            "the gradient of a quantized layer's weight was requested alone, or twice; that of the layer's "
            "input comes first: let a schedule run both parts of a backward, or call backward() without "
            "splitting the graph"
        )
    delayed_gradients = parts.delayed_gradients
    if not graph_is_retained():
        parts.delayed_gradients = None
    return None, *(each() if callable(each) else each for each in delayed_gradients)


def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=device)


#: `Function.apply` without its torch.func checks, which the layers have already made.
_enter: Any = super(torch.autograd.Function, _StageInputs).apply
_join: Any = super(torch.autograd.Function, _Joint).apply
_weigh: Any = super(torch.autograd.Function, _Weights).apply


# ---- stages ----
# torch's `PipelineStage` with the adjustments that quantized layers need.
#
# `pipeline_stage` wraps a module as a stage for any schedule of torch.distributed.pipelining. One step of delayed
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
    """Make a pipeline stage with known shapes, and mark its layers as belonging to this stage.

    Without known shapes, torch infers them in the first step by a forward and backward on uninitialized memory. Amaxes
    of that data would enter histories, and noise counters would advance. This function instead runs the module once on
    zeros, unquantized and without gradients. Ranks that hold the same stage reduce the amaxes of delayed scaling among
    themselves only.

    Args:
        module: the stage's converted layers. Wrap it, for instance by `fully_shard`, before or after; call
            `gather_quantized` after.
        index: index of this stage.
        count: number of stages of the pipeline.
        example: one micro-batch of inputs; only its shapes and dtypes are used, and it may be on meta.
        device: device of the stage; None means that of its first parameter.
        group: process group of the pipeline; None is the default one.
    Returns:
        A `PipelineStage` for any of torch's schedules.
    Raises:
        ValueError: an index outside 0 … count - 1, or a module without parameters and no device.
    """
    if not 0 <= index < count:
        raise ValueError(f"stage {index} of {count} stages does not exist: give an index from 0 to {count - 1}")
    first = next(module.parameters(), None)
    if device is None:
        if first is None:
            raise ValueError(f"stage {index} has no parameters, so its device is unknown: give device=")
        device = first.device
    for layer in module.modules():
        state = layer.__dict__.get("_state")
        if isinstance(state, LayerState):
            state.stage = index
    examples = (example,) if isinstance(example, Tensor) else tuple(example)
    floating = index > 0
    inputs = tuple(
        torch.zeros_like(each, device=device).requires_grad_(floating and each.is_floating_point()) for each in examples
    )
    outputs = _outputs(module, inputs)
    return _Stage(module, index, count, device, input_args=inputs, output_args=outputs, group=group)


class _Stage(PipelineStage):
    """torch's stage with a split backward, whose sends and waits a `CommCounter` counts."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with split_backwards(args):
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: Any, *args: Any, **kwargs: Any) -> Any:
        if backward_type != "full":
            # torch computes gradients for the parameters that it finds here. After fully_shard has resharded the
            # module, it would find shards that have no gradient, and compute none.
            for module in self.submod.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
        return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_index: int) -> list[Any]:
        return _counted(super().get_fwd_recv_ops(fwd_chunk_index))

    def get_bwd_recv_ops(self, bwd_chunk_index: int) -> list[Any]:
        return _counted(super().get_bwd_recv_ops(bwd_chunk_index))

    def get_fwd_send_ops(self, fwd_chunk_index: int) -> list[Any]:
        return _counted(super().get_fwd_send_ops(fwd_chunk_index), sends=True)

    def get_bwd_send_ops(self, bwd_chunk_index: int) -> list[Any]:
        return _counted(super().get_bwd_send_ops(bwd_chunk_index), sends=True)


def _counted(operations: list[Any], sends: bool = False) -> list[Any]:
    """Count what is sent, and make operations return work objects that count the time a schedule waits."""
    for each in operations if active.all else ():
        if sends:
            count("activations", "send", each.tensor, each.group, active.all)
        # On a GPU the host does not wait, and torch batches several operations.
        if not each.tensor.is_cuda:
            each.op = partial(_begun, each.op)
    return operations


def _begun(
    operation: Any, tensor: Tensor, *, group: Any, tag: int = 0, group_src: Any = None, group_dst: Any = None
) -> "_CountedWork":
    """Start a send or receive with the arguments of a schedule. A wrapper is needed since schedules take any operation
    other than `isend` for a receive.
    """
    peer = group_src if group_dst is None else group_dst
    place = {"group_dst" if operation is dist.isend else "group_src": peer}
    return _CountedWork(operation(tensor, group=group, tag=tag, **place), tensor)


class _CountedWork:
    """torch's work object with a timed wait."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self.work, self.tensor = work, tensor

    def wait(self, *args: Any) -> Any:
        with waiting(self.tensor):
            return self.work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def _outputs(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run the module on zeros and return its outputs as tensors on meta."""
    on = inputs[0].device
    # Restore buffers afterwards: statistics, caches and counters must not include the zeros.
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng([on] if on.type == "cuda" else []), torch.no_grad(), autocast(enabled=False):
        y = module(*inputs)
        for buffer, values in before:
            buffer.copy_(values)
    outputs = (y,) if isinstance(y, Tensor) else tuple(y)
    return tuple(torch.empty_like(each).requires_grad_(each.is_floating_point()) for each in outputs)
