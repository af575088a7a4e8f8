"""Input of one or more linear layers: computed by a prologue, quantized once, and recomputed for backward if cheaper.

`InputOp` is the interface of a prologue (a norm, an activation or nothing). `prepare_input` runs it and quantizes its
result, in one kernel where one exists. `recomputed` makes the wgrad operand again in backward.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.torch.backends.gpu import capture, device, fused_quantize
from quaver.torch.linear.gemms import LinearContext, begin, both_at_once, capturing, matrix, quantize, quantize_both
from quaver.torch.linear.plan_step import PlannedContext
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import functional, ops
from quaver.torch.state import counters
from quaver.torch.state.history import amax


class InputOp(fused_quantize.QuantizingProducer, Protocol):
    """Interface of a prologue, which computes the layers' input. Methods take as many tensors as the prologue has
    inputs; some may be None.
    """

    @property
    def recomputes_input(self) -> bool:
        """True if backward recomputes the input, so that it is not saved."""

    def __call__(self, *x: Tensor | None) -> Tensor:
        """Compute the input differentiably, for layers that are not quantized."""

    def forward(
        self, *x: Tensor | None, implementation: int | None = None
    ) -> tuple[Tensor, tuple[Tensor | Quantized | None, ...]]:
        """Compute the input outside of autograd; return it and the tensors that backward needs.

        Args:
            implementation: before planned layers, the index of the implementation to run, else None.
        """

    def recompute_input(self, saved: Sequence[Any], g: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...] | None]:
        """Recompute the input bit for bit; also return the result of `backward` for g if both share work."""

    def backward(
        self, g: Tensor, saved: Sequence[Any], implementation: int | None = None, needs: Sequence[Any] = ()
    ) -> tuple[Any, ...]:
        """Return the gradients of the prologue's inputs; `implementation` is as in `forward`.

        Args:
            needs: for a prologue that contains weight matrices, one flag per gradient; a flag may be `LATER`.
        """


@dataclass(frozen=True)
class IdentityInput:
    """Prologue that returns its input unchanged and saves nothing."""

    recomputes_input: bool = False

    def __call__(self, *x: Tensor | None) -> Tensor:
        (value,) = x
        assert value is not None
        return value

    def forward(self, *x: Tensor | None, implementation: int | None = None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return self(*x), ()

    def quantized(self, *_: Any) -> None:
        return None

    def recompute_input(self, saved: Sequence[Any], g: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...] | None]:
        raise AssertionError("what is given is kept")

    def backward(self, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return (g,)


IDENTITY_INPUT = IdentityInput()


class LinearSetup(NamedTuple):
    """Arguments of one `LinearFunction` call that are not tensors."""

    prologue: InputOp
    layers: tuple[nn.Linear, ...]
    recipe: Recipe
    #: dtype of the GEMMs' inputs and outputs.
    dtype: torch.dtype
    training: bool
    #: Number of tensors that the prologue takes.
    input_count: int = 1
    return_input: bool = False
    #: Planned step of each layer for this call; empty if any layer has none.
    contexts: Sequence[PlannedContext] = ()
    #: Weak reference to the caller's input if autocast has cast it, so that layers recognize a shared input.
    source: "weakref.ref[Tensor] | None" = None


class QuantizedInput(NamedTuple):
    """Input of the layers in the forms that the GEMMs and the backward read."""

    #: One context per layer.
    contexts: Sequence[LinearContext]
    #: Input as the prologue computed it, or None if the kernel wrote codes only.
    output: Tensor | None
    #: The input as a matrix [tokens, features] in the dtype of the GEMMs.
    matrix: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: Operand of fprop.
    operand: Any
    #: Operand of wgrad, if the same kernel wrote it.
    transposed: Quantized | None
    #: Tensors that the prologue's backward needs.
    saved: Sequence[Any]
    #: Record through which other layers with the same input reuse both operands; None if they may not.
    shared_quantization: functional.Quantization | None = None


def prepare_input(setup: LinearSetup, x: Sequence[Tensor | None], keeps_input: bool) -> QuantizedInput:
    """Compute the layers' input and quantize it, in one kernel if there is one, else in two.

    Args:
        keeps_input: True if backward will read this input, so that its wgrad operand is needed.
    """
    calls: list[LinearContext] = []
    if setup.prologue is not IDENTITY_INPUT and may_fuse(setup.dtype, x[0]):  # type: ignore[arg-type]
        calls = _begin_all(setup, x[0])  # type: ignore[arg-type]
        prepared_input = _fused(setup, x, keeps_input, calls)
        if prepared_input is not None:
            return prepared_input
    output, saved = setup.prologue.forward(*x)
    shape, dtype = output.shape, output.dtype
    y = matrix(output if dtype is setup.dtype else output.to(setup.dtype))
    calls = calls or _begin_all(setup, y)
    call, a, c = calls[0], setup.recipe.fprop.a, setup.recipe.wgrad.b
    q: Tensor | Quantized
    transposed: Quantized | None
    source = _source(setup, call, x[0], y)
    conditions = () if source is None else cache_conditions(source, call, y)
    shared_quantization = (
        functional.lookup(source, conditions, setup.recipe, functional.same_input_quantization)
        if source is not None and conditions
        else None
    )
    if shared_quantization is not None and shared_quantization.operands is not None:
        q, transposed = shared_quantization.operands
        note(calls, q)
        return QuantizedInput(
            calls, output, y, shape, dtype, q, transposed if keeps_input else None, saved, shared_quantization
        )
    q, transposed = y, None
    if a is not None and keeps_input and c is not None and call.both is not None and both_at_once(call, a, c):
        q, transposed = quantize_both(call, amax.INPUT, "input", y, a, c)
    elif a is not None:
        q = quantize(call, amax.INPUT, "input", y, a)
    note(calls[1:], q)
    if source is not None and conditions:
        shared_quantization = functional.remember(source, conditions, setup.recipe, (q, transposed))
    return QuantizedInput(calls, output, y, shape, dtype, q, transposed, saved, shared_quantization)


def _source(setup: LinearSetup, call: LinearContext, prologue_input: Tensor | None, y: Tensor) -> Tensor | None:
    """Return the tensor by which other layers can find the quantized y, or None if each layer quantizes for itself."""
    if setup.prologue is not IDENTITY_INPUT:
        return None
    source = prologue_input if setup.source is None else setup.source()
    return source if source is not None and can_share_input(call, source, y) else None


def can_share_input(call: LinearContext, source: Tensor, y: Tensor) -> bool:
    """Return True if other layers may reuse the quantization of y, a matrix of `source`.

    False while `count` or `only` is active, during a CUDA-graph capture, for inputs that autograd did not compute, and
    with stochastic rounding.
    """
    a, c = call.recipe.fprop.a, call.recipe.wgrad.b
    if call.traced or not call.record or a is None or source.is_leaf or source.__class__ is not Tensor:
        return False
    if a.rounding != "nearest" or (c is not None and c.rounding != "nearest"):
        return False
    if (
        counters.active.counters is not None
        or ops.QUANTIZE.enabled is not ops.QUANTIZE.implementations
        or device.forced_implementations
    ):
        return False
    return not capturing(y)


def cache_conditions(source: Tensor, call: LinearContext, y: Tensor) -> tuple[Any, ...]:
    """Return the other values that the quantization depends on, or () if they are not known on the host."""
    factor = 0.0
    if call.factors is not None:
        if isinstance(call.factors, Tensor):
            return ()
        factor = call.factors[amax.INPUT]
    stream = capture.stream_of(source.device) if source.is_cuda else 0
    return source._version, source.data_ptr(), factor, stream, source.shape, source.stride(), y.dtype


def note(calls: Sequence[LinearContext], q: Tensor | Quantized) -> None:
    """Record the amax of a shared input in the histories of the other layers too."""
    for call in calls:
        if call.record and call.factors is not None:
            assert isinstance(q, Quantized)
            amax.record(call.layer, amax.INPUT, q.amax)


def may_fuse(dtype: torch.dtype, x: Tensor) -> bool:
    """Return True if kernels that compute and quantize in one launch may run for x and this operand dtype."""
    if ops.on_host(x) or x.dtype is not dtype or is_tracing():
        return False
    allowed = any(impl.name == "triton" for impl in ops.QUANTIZE.enabled)
    return allowed and counters.active.counters is None and not fused_quantize.reason_unsupported(x)


def _fused(
    setup: LinearSetup, x: Sequence[Tensor | None], keeps_input: bool, calls: list[LinearContext]
) -> QuantizedInput | None:
    first, call, a = setup.layers[0], calls[0], setup.recipe.fprop.a
    assert a is not None and x[0] is not None
    factor, is_set = _known_factor(call)
    want_output = setup.return_input or (keeps_input and not call.plan.input)
    want_transpose = keeps_input and call.plan.input
    fused = fused_quantize.operand(setup.prologue, x, first.in_features, a, factor, is_set, want_output, want_transpose)
    if fused is None:
        return None
    result, q, transposed = fused
    if call.record and call.factors is not None:
        amax.record(first, amax.INPUT, q.amax)
        note(calls[1:], q)
    shape = (*x[0].shape[:-1], q.shape[1])
    of_gemms = None if result.y is None else matrix(result.y)
    return QuantizedInput(calls, result.y, of_gemms, shape, x[0].dtype, q, transposed, result.saved)


def _known_factor(call: LinearContext) -> tuple[Tensor | float | None, bool]:
    """Return the encode factor of the layer's input, and whether it is known to be nonzero."""
    if call.factors is None:
        return None, False
    return call.factors[amax.INPUT], amax.is_set(amax.INPUT, call.factors)


def _begin_all(setup: LinearSetup, y: Tensor) -> list[LinearContext]:
    return [begin(layer, setup.recipe, y, setup.dtype, setup.training) for layer in setup.layers]


def recomputed(
    setup: LinearSetup, saved: Sequence[Any], layer_context: LinearContext, g: Tensor | None = None
) -> tuple[Any, Any]:
    """Recompute the wgrad operand from the tensors that the prologue saved.

    If the gradient g of the input is passed, the second result may hold the gradients of the prologue's inputs, as
    `InputOp.recompute_input` returns them.
    """
    c = setup.recipe.wgrad.b
    if c is not None and layer_context.plan.input and may_fuse(setup.dtype, saved[0]):
        q = fused_quantize.recomputed(setup.prologue, saved, c, *_known_factor(layer_context))
        if q is not None:
            return (q, None), None
    y, gradients = setup.prologue.recompute_input(saved, g)
    return layer_context.recomputed(matrix(y.to(setup.dtype))), gradients
