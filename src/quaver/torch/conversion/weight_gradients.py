"""What becomes of weights' gradients: added to a float32 tensor beside each weight, or computed when it is asked for.

A layer that runs in `weight_gradients` keeps the gradients of its weights from autograd: backward gives that of the
input, and the GEMM of a weight's gradient writes float32, which is added to `weight.main_grad` unrounded, or waits.
Megatron-LM's names; Source of the waiting: zero bubble, Qi et al. 2023, arXiv:2401.10241.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.linear.gemms import LATER
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import NO_DOUBLE_BACKWARD, first_derivative
from quaver.torch.state.context import active_context
from quaver.torch.state.history.roll import active_wrapper


class weight_gradients:
    """Layers that run forward in here keep the gradients of their weights from autograd, quantized or not.

        for p in model.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        with quaver.torch.autocast("mxfp8"), quaver.torch.weight_gradients(main_grad=True):
            loss = model(x)
        loss.backward()  # adds to weight.main_grad; weight.grad stays None

    Weights are the matrices of quaver.torch's linear layers, as they are parameters; gradients of biases, norms and
    other layers go to `.grad` as ever. A weight that is another in each forward, such as one that is made of several
    parameters, leaves its gradient to autograd too.

    Args:
        main_grad: add the gradient of each weight that has an attribute `main_grad` to that, in float32 where the GEMM
            has it so. `weight.overwrite_main_grad`, where it is True, writes in its place; where a weight has
            `grad_added_to_main_grad` that becomes True, and `.grad` zeros, so that hooks run.
        later: let gradients wait until `compute()` is called: backward computes those of inputs alone.
    Raises:
        ValueError: neither is asked for. On entry: in a pipeline's stage whose backward is split, or within
            DistributedDataParallel, which reduces gradients that autograd gives. On exit: a compiled layer has run,
            whose gradient autograd takes.
        NotImplementedError: to a compiler.
    The quantized weight is quantized once a micro-batch: nothing that the library sees tells when `main_grad` is used.
    Exact: gradients that wait, and all others. Bounded: those in `main_grad`, which are not rounded to the weight's
    dtype.
    """

    def __init__(self, *, main_grad: bool = False, later: bool = False) -> None:
        if not (main_grad or later):
            raise ValueError(
                "weight_gradients() changes nothing: give main_grad=True to add them to weight.main_grad, later=True "
                "to compute them by compute(), or both"
            )
        self.main_grad, self.later = main_grad, later
        #: Weights, and what gives their gradients.
        self._waiting: list[tuple[Tensor, Callable[..., Tensor]]] = []
        self._before: list[tuple[Any, bool, bool]] = []

    def __enter__(self) -> "weight_gradients":
        if is_tracing():
            # Without fullgraph the compiler leaves what calls this to eager mode.
            raise NotImplementedError("weight_gradients is not compiled: leave it out, or run what is in it uncompiled")
        if active_context.split is not None and not active_context.takes_weights:
            raise ValueError(
                "weight_gradients is for layers whose backward is whole, and a pipeline's schedule splits it here: "
                "leave one of the two out"
            )
        if active_wrapper() is not None:
            raise ValueError(
                "DistributedDataParallel reduces gradients that autograd gives, and weight_gradients keeps weights' "
                "own: run the module itself, and all-reduce weight.main_grad"
            )
        self._before.append((active_context.split, active_context.takes_weights, active_context.compiled))
        active_context.split, active_context.takes_weights, active_context.compiled = self._instead_of, True, False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        compiled = active_context.compiled
        active_context.split, active_context.takes_weights, before = self._before.pop()
        active_context.compiled = before or compiled
        if compiled and kind is None:
            raise ValueError(
                "a compiled layer ran in weight_gradients, and compiled backwards give gradients to autograd: run it "
                "uncompiled, or leave weight_gradients out"
            )

    def compute(self) -> None:
        """Compute the gradients that wait, in the order of the backward: to `main_grad`, or to `.grad` with its hooks.

        Raises:
            ValueError: a weight whose memory is free by now, as fully_shard frees it.
        """
        while self._waiting:
            weight, gives = self._waiting.pop(0)
            if not weight.untyped_storage().nbytes() and weight.numel() and not weight.is_meta:
                raise ValueError(
                    "the gradient of a weight was to be computed later, and fully_shard has freed the weight: leave "
                    "later=True out there"
                )
            with torch.no_grad(), ops.without_autocast(ops.autocast_device(weight)):
                g = None if self._adds(weight) else gives()
                if g is None:
                    _add(weight, gives(dtype=torch.float32))
            if g is not None:
                torch.autograd.backward(weight, g)

    def _instead_of(
        self, function: type[torch.autograd.Function], apply: Callable[..., Any]
    ) -> Callable[..., tuple[Any, ...]]:
        return lambda *arguments: self._run(function, apply, arguments)

    def _run(
        self, function: type[torch.autograd.Function], apply: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        needs = [
            False if not (isinstance(a, Tensor) and a.requires_grad) else LATER if self._takes(a) else True
            for a in arguments
        ]
        if not torch.is_grad_enabled() or LATER not in needs:
            return apply(*arguments)
        # A weight that autograd knew of would have its hooks run without a gradient.
        tied = [need is True or (need is LATER and self._answers(a)) for a, need in zip(arguments, needs, strict=True)]
        given = [a for a, each in zip(arguments, tied, strict=True) if each]
        gate = [] if given else [torch.empty(0, device="cpu", dtype=torch.float32, requires_grad=True)]
        return _enter(Context(needs), function, self, tied, arguments, *given, *gate)

    def _takes(self, argument: Tensor) -> bool:
        matrix = isinstance(argument, nn.Parameter) and argument.dim() > 1
        return matrix and (self.later or self._adds(argument))

    def _adds(self, weight: Tensor) -> bool:
        return self.main_grad and getattr(weight, "main_grad", None) is not None

    def _answers(self, weight: Tensor) -> bool:
        """Whether autograd is given zeros in the place of a weight's gradient."""
        return not self.later and hasattr(weight, "grad_added_to_main_grad")

    def _take(self, weight: Any, gives: Any) -> Tensor | None:
        """A weight's gradient in backward; returns what autograd is given."""
        if self.later:
            self._waiting.append((weight, gives))
            return None
        _add(weight, gives(dtype=torch.float32))
        if not self._answers(weight):
            return None
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight)


def _add(weight: Any, g: Tensor) -> None:
    if getattr(weight, "overwrite_main_grad", False):
        weight.main_grad.copy_(g)
    else:
        weight.main_grad.add_(g)


class Context:
    """What an autograd function's own forward and backward take for torch's context."""

    def __init__(self, needs: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: Sequence[Any] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


class _Taken(torch.autograd.Function):
    """(a context, an autograd function, who takes gradients, which arguments autograd knows of, the arguments, those
    that it knows of) to what the function gives."""

    @staticmethod
    def forward(
        ctx: Any, own: Context, function: Any, taker: Any, tied: Sequence[bool], arguments: Sequence[Any], *_: Tensor
    ) -> Any:
        outputs = function.forward(own, *arguments)
        ctx.save_for_backward(*own.saved_tensors)
        own.saved_tensors = ()
        weights = [a if need is LATER else None for a, need in zip(arguments, own.needs_input_grad, strict=True)]
        ctx.constants = own, function, taker, tied, weights
        return outputs

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, *gs)


def _backward(ctx: Any, saved: Sequence[Any], *gs: Tensor) -> tuple[Any, ...]:
    own, function, taker, tied, weights = ctx.constants
    own.saved_tensors = saved
    try:
        gradients: Any = function.backward(own, *gs)
    finally:
        own.saved_tensors = ()
    results = [g if weight is None else taker._take(weight, g) for weight, g in zip(weights, gradients, strict=True)]
    of_tied = [g for g, each in zip(results, tied, strict=True) if each]
    return *(None,) * 5, *(of_tied or [None])


#: `Function.apply` without its checks for torch.func, which layers have made.
_enter: Any = super(torch.autograd.Function, _Taken).apply
