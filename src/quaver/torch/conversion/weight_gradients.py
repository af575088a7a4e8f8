"""Weight gradients outside of autograd: accumulated in float32 in `weight.main_grad`, or deferred.

Inside `weight_gradients`, backward computes the input gradient as usual. The wgrad GEMM either writes float32 that is
added to `weight.main_grad` unrounded, or is deferred until `compute()`. The attribute names are Megatron-LM's.
Source of deferred weight gradients: zero bubble pipeline parallelism, Qi et al. 2023, arXiv:2401.10241.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.linear.general import LATER
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import NO_DOUBLE_BACKWARD, first_derivative
from quaver.torch.quantized_tensor import memory_of
from quaver.torch.state.context import active_context
from quaver.torch.state.history.roll import active_wrapper


class weight_gradients:
    """Context in which layers add weight gradients to `weight.main_grad` or defer them, instead of using autograd.

        for p in model.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        with quaver.torch.autocast("mxfp8"), quaver.torch.weight_gradients(main_grad=True):
            loss = model(x)
        loss.backward()  # adds to weight.main_grad; weight.grad stays None

    It applies to layers whose forward runs inside the context, quantized or not. It covers the matrices of
    quaver.torch's linear layers that are parameters. Gradients of biases, norms and other layers go to `.grad` as
    usual. So does the gradient of a weight that is computed in each forward, such as one made of several parameters.

    Args:
        main_grad: add the gradient of each weight that has an attribute `main_grad` to it, in float32 where the GEMM
            can write float32. If `weight.overwrite_main_grad` is True, overwrite it instead. If the weight has an
            attribute `grad_added_to_main_grad`, set that to True and write zeros to `.grad`, so that hooks run.
        later: defer weight gradients until `compute()` is called; backward computes input gradients only.
    Raises:
        ValueError: neither argument is True. On entry: inside a pipeline stage whose backward is split, or inside
            DistributedDataParallel, which reduces the gradients of autograd. On exit: a compiled layer has run, whose
            gradient goes to autograd.
        NotImplementedError: the context is entered while compiling. The weight is quantized again in each micro-batch,
            because the library cannot see when `main_grad` is used.
    Exact: deferred gradients, and all others. Bounded: gradients in `main_grad`, which are not rounded to the weight's
    dtype.
    """

    def __init__(self, *, main_grad: bool = False, later: bool = False) -> None:
        if not (main_grad or later):
            raise ValueError(
                "weight_gradients() changes nothing: give main_grad=True to add them to weight.main_grad, later=True "
                "to compute them by compute(), or both"
            )
        self.main_grad, self.later = main_grad, later
        #: Pairs of a weight and the function that computes its deferred gradient.
        self._waiting: list[tuple[Tensor, Callable[..., Tensor]]] = []
        self._before: list[tuple[Any, bool, bool]] = []

    def __enter__(self) -> "weight_gradients":
        if is_tracing():
            # Without fullgraph, the error makes torch.compile run the calling function in eager mode.
            raise NotImplementedError(
                "weight_gradients cannot be compiled: leave it out, or do not compile the code inside"
            )
        if active_context.apply_override is not None and not active_context.captures_wgrad:
            raise ValueError(
                "weight_gradients cannot be combined with a pipeline schedule that splits the backward: leave one "
                "of them out"
            )
        if active_wrapper() is not None:
            raise ValueError(
                "DistributedDataParallel reduces the gradients of autograd, but weight_gradients bypasses "
                "autograd: run the module without it, and all-reduce weight.main_grad"
            )
        self._before.append((active_context.apply_override, active_context.captures_wgrad, active_context.compiled))
        active_context.apply_override, active_context.captures_wgrad = self._divert, True
        active_context.compiled = False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        compiled = active_context.compiled
        active_context.apply_override, active_context.captures_wgrad, before = self._before.pop()
        active_context.compiled = before or compiled
        if compiled and kind is None:
            raise ValueError(
                "a compiled layer ran in weight_gradients, but compiled backwards return gradients to autograd: "
                "do not compile it, or leave weight_gradients out"
            )

    def compute(self) -> None:
        """Compute the deferred gradients in backward order, into `main_grad`, or into `.grad` with its hooks.

        Raises:
            ValueError: the memory of a weight was freed, as fully_shard does.
        """
        while self._waiting:
            weight, compute_gradient = self._waiting.pop(0)
            if not memory_of(weight).untyped_storage().nbytes() and weight.numel() and not weight.is_meta:
                raise ValueError(
                    "the gradient of a weight was deferred, but fully_shard has freed the weight: leave out "
                    "later=True there"
                )
            with torch.no_grad(), ops.without_autocast(ops.autocast_device(weight)):
                g = None if self._adds_to_main_grad(weight) else compute_gradient()
                if g is None:
                    _add(weight, compute_gradient(dtype=torch.float32))
            if g is not None:
                torch.autograd.backward(weight, g)

    def _divert(
        self, function: type[torch.autograd.Function], apply: Callable[..., Any]
    ) -> Callable[..., tuple[Any, ...]]:
        return lambda *arguments: self._run(function, apply, arguments)

    def _run(
        self, function: type[torch.autograd.Function], apply: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        needs = [
            False if not (isinstance(a, Tensor) and a.requires_grad) else LATER if self._is_diverted(a) else True
            for a in arguments
        ]
        if not torch.is_grad_enabled() or LATER not in needs:
            return apply(*arguments)
        # Autograd must not see this weight: it would run the weight's hooks without a gradient.
        tracked = [
            need is True or (need is LATER and self._needs_zero_gradient(a))
            for a, need in zip(arguments, needs, strict=True)
        ]
        tracked_tensors = [a for a, each in zip(arguments, tracked, strict=True) if each]
        gate = [] if tracked_tensors else [torch.empty(0, device="cpu", dtype=torch.float32, requires_grad=True)]
        return _enter(Context(needs), function, self, tracked, arguments, *tracked_tensors, *gate)

    def _is_diverted(self, argument: Tensor) -> bool:
        matrix = isinstance(argument, nn.Parameter) and argument.dim() > 1
        return matrix and (self.later or self._adds_to_main_grad(argument))

    def _adds_to_main_grad(self, weight: Tensor) -> bool:
        return self.main_grad and getattr(weight, "main_grad", None) is not None

    def _needs_zero_gradient(self, weight: Tensor) -> bool:
        """Return True if autograd receives zeros as the weight's gradient so that its hooks run."""
        return not self.later and hasattr(weight, "grad_added_to_main_grad")

    def _receive_gradient(self, weight: Any, compute_gradient: Any) -> Tensor | None:
        """Handle a weight's gradient in backward: defer it or add it to `main_grad`. Return the gradient for
        autograd.
        """
        if self.later:
            self._waiting.append((weight, compute_gradient))
            return None
        _add(weight, compute_gradient(dtype=torch.float32))
        if not self._needs_zero_gradient(weight):
            return None
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight)


def _add(weight: Any, g: Tensor) -> None:
    if getattr(weight, "overwrite_main_grad", False):
        weight.main_grad.copy_(g)
    else:
        weight.main_grad.add_(g)


class Context:
    """Minimal replacement for torch's autograd context, passed to a function's own forward and backward."""

    def __init__(self, needs: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: Sequence[Any] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, _: bool) -> None:
        """Do nothing: the function around this one gets zeros for undefined gradients."""


class _DivertedFunction(torch.autograd.Function):
    """Autograd function that runs another one and routes the gradients of its weights to `weight_gradients`.

    Its arguments are a `Context`, the wrapped autograd function, the `weight_gradients` that receives gradients, a flag
    per argument that says if autograd tracks it, all arguments, and then the tracked tensors. It returns the outputs of
    the wrapped function.
    """

    @staticmethod
    def forward(
        ctx: Any,
        own: Context,
        function: Any,
        receiver: Any,
        tracked: Sequence[bool],
        arguments: Sequence[Any],
        *_: Tensor,
    ) -> Any:
        outputs = function.forward(own, *arguments)
        ctx.save_for_backward(*own.saved_tensors)
        own.saved_tensors = ()
        weights = [a if need is LATER else None for a, need in zip(arguments, own.needs_input_grad, strict=True)]
        ctx.constants = own, function, receiver, tracked, weights
        return outputs

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, *gs)


def _backward(ctx: Any, saved: Sequence[Any], *gs: Tensor) -> tuple[Any, ...]:
    own, function, receiver, tracked, weights = ctx.constants
    own.saved_tensors = saved
    try:
        gradients: Any = function.backward(own, *gs)
    finally:
        own.saved_tensors = ()
    results = [
        g if weight is None else receiver._receive_gradient(weight, g)
        for weight, g in zip(weights, gradients, strict=True)
    ]
    tracked_gradients = [g for g, each in zip(results, tracked, strict=True) if each]
    return *(None,) * 5, *(tracked_gradients or [None])


#: `Function.apply` without its checks for torch.func, which the layers have already made.
_enter: Any = super(torch.autograd.Function, _DivertedFunction).apply
