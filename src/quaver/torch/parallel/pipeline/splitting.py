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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from quaver.torch.linear.gemms import LATER
from quaver.torch.model.weights.gradients import Context
from quaver.torch.operations import ops
from quaver.torch.operations.derivatives import NO_DOUBLE_BACKWARD, first_derivative
from quaver.torch.operations.selecting import unseen
from quaver.torch.state.context import ambient
from quaver.torch.state.history.steps import graph_is_retained


@contextmanager
def split_backwards(inputs: Sequence[Any]) -> Iterator[None]:
    """Layers that run here in this thread have backwards in two parts, wherever their input depends on one of these.

    Args:
        inputs: what a stage's forward is given. Without one that requires a gradient nothing is split: torch computes
            all gradients at once.
    """
    differentiable = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    before = ambient.split
    ambient.split = _Forward(differentiable).instead_of if differentiable and torch.is_grad_enabled() else None
    try:
        yield
    finally:
        ambient.split = before


class _Forward:
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
        parts = _Parts(function, path, later)
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


class _Parts:
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
    def forward(ctx: Any, own: Context, parts: _Parts, arguments: Sequence[Any], gate: Tensor, *path: Tensor) -> Any:
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
    def forward(ctx: Any, parts: _Parts, *weights: Tensor) -> Tensor:
        ctx.parts = parts
        return _nothing(weights[0].device)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with ops.without_autocast(ops.autocast_device(g)):
            return first_derivative(_of_weights, ctx, NO_DOUBLE_BACKWARD, g)


def _of_weights(ctx: Any, _: Sequence[Any], g: Tensor) -> tuple[Any, ...]:
    parts: _Parts = ctx.parts
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
