"""The input that several linear layers share: made, quantized on the way or after it, made again for backward."""

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
    """How the layers' input is made. Its methods are called with as many tensors as it takes, None among them."""

    @property
    def recomputes_input(self) -> bool:
        """True if backward makes the input again, so that nothing of it is kept."""

    def __call__(self, *x: Tensor | None) -> Tensor:
        """Differentiably, for layers that are not quantized."""

    def forward(
        self, *x: Tensor | None, decided: int | None = None
    ) -> tuple[Tensor, tuple[Tensor | Quantized | None, ...]]:
        """Outside autograd: the input, and what backward needs.

        Args:
            decided: where layers decided beforehand follow, which of an operation's implementations runs on tensors
                like x, by its place among them.
        """

    def recompute_input(self, saved: Sequence[Any], g: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...] | None]:
        """The input once more, bit for bit; and, if both share work, what `backward` gives of its gradient g."""

    def backward(
        self, g: Tensor, saved: Sequence[Any], decided: int | None = None, needs: Sequence[Any] = ()
    ) -> tuple[Any, ...]:
        """The gradients of what it took; decided as in `forward`.

        Args:
            needs: for a prologue that has matrices, whether each gradient is needed; perhaps `LATER`.
        """


@dataclass(frozen=True)
class IdentityInput:
    """The prologue of an input that is there already: nothing is made, and nothing kept but what wgrad consumes."""

    recomputes_input: bool = False

    def __call__(self, *x: Tensor | None) -> Tensor:
        (value,) = x
        assert value is not None
        return value

    def forward(self, *x: Tensor | None, decided: int | None = None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return self(*x), ()

    def quantized(self, *_: Any) -> None:
        return None

    def recompute_input(self, saved: Sequence[Any], g: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...] | None]:
        raise AssertionError("what is given is kept")

    def backward(self, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return (g,)


GIVEN = IdentityInput()


class LinearSetup(NamedTuple):
    """Everything in one call that is no tensor."""

    prologue: InputOp
    layers: tuple[nn.Linear, ...]
    recipe: Recipe
    #: The dtype of the GEMMs' inputs and outputs.
    dtype: torch.dtype
    training: bool
    #: Tensors that the prologue takes.
    taken: int = 1
    return_input: bool = False
    #: The decided step of each layer in this call, where all have one.
    runs: Sequence[PlannedContext] = ()
    #: What was given, where that was cast before it came here.
    source: "weakref.ref[Tensor] | None" = None


class QuantizedInput(NamedTuple):
    """The layers' input, in the forms that GEMMs and backward read."""

    #: One for each layer.
    runs: Sequence[LinearContext]
    #: As the prologue made it, or None where it wrote nothing but codes.
    output: Tensor | None
    #: That as a matrix in the dtype of the GEMMs.
    matrix: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: What fprop reads.
    operand: Any
    #: What wgrad will, where the kernel that quantized the input has written that too.
    transposed: Quantized | None
    #: What the prologue's backward needs.
    saved: Sequence[Any]
    #: Where other layers will look for both; None where none may.
    recorded_amax: functional.Quantization | None = None


def enter(setup: LinearSetup, x: Sequence[Tensor | None], keeps: bool) -> QuantizedInput:
    """Make the layers' input and quantize it: by one kernel where there is one, or after it.

    Args:
        keeps: whether backward will read the input as it is made here.
    """
    calls: list[LinearContext] = []
    if setup.prologue is not GIVEN and may_fuse(setup.dtype, x[0]):  # type: ignore[arg-type]
        calls = _begun(setup, x[0])  # type: ignore[arg-type]
        entrance = _fused(setup, x, keeps, calls)
        if entrance is not None:
            return entrance
    output, saved = setup.prologue.forward(*x)
    shape, dtype = output.shape, output.dtype
    y = matrix(output if dtype is setup.dtype else output.to(setup.dtype))
    calls = calls or _begun(setup, y)
    call, a, c = calls[0], setup.recipe.fprop.a, setup.recipe.wgrad.b
    q: Tensor | Quantized
    transposed: Quantized | None
    source = _source(setup, call, x[0], y)
    facts = () if source is None else facts_of(source, call, y)
    recorded_amax = (
        functional.lookup(source, facts, setup.recipe, functional.alike) if source is not None and facts else None
    )
    if recorded_amax is not None and recorded_amax.operands is not None:
        q, transposed = recorded_amax.operands
        note(calls, q)
        return QuantizedInput(calls, output, y, shape, dtype, q, transposed if keeps else None, saved, recorded_amax)
    q, transposed = y, None
    if a is not None and keeps and c is not None and call.both is not None and both_at_once(call, a, c):
        q, transposed = quantize_both(call, amax.INPUT, "input", y, a, c)
    elif a is not None:
        q = quantize(call, amax.INPUT, "input", y, a)
    note(calls[1:], q)
    if source is not None and facts:
        recorded_amax = functional.remember(source, facts, setup.recipe, (q, transposed))
    return QuantizedInput(calls, output, y, shape, dtype, q, transposed, saved, recorded_amax)


def _source(setup: LinearSetup, call: LinearContext, given: Tensor | None, y: Tensor) -> Tensor | None:
    """The tensor by which other layers may know the quantization of y; None where each layer quantizes for itself."""
    if setup.prologue is not GIVEN:
        return None
    source = given if setup.source is None else setup.source()
    return source if source is not None and may_share(call, source, y) else None


def may_share(call: LinearContext, source: Tensor, y: Tensor) -> bool:
    """Whether other layers may take the quantization of y, a matrix of source, in place of their own.

    They may not where quantizations are counted or chosen by `only`, or a CUDA graph is captured.
    """
    a, c = call.recipe.fprop.a, call.recipe.wgrad.b
    if call.traced or not call.record or a is None or source.is_leaf or source.__class__ is not Tensor:
        return False
    if a.rounding != "nearest" or (c is not None and c.rounding != "nearest"):
        return False
    if counters.active.counters is not None or ops.QUANTIZE.active is not ops.QUANTIZE.impls or device.asked:
        return False
    return not capturing(y)


def facts_of(source: Tensor, call: LinearContext, y: Tensor) -> tuple[Any, ...]:
    """What else the quantization depends on; nothing where the host does not know it."""
    factor = 0.0
    if call.factors is not None:
        if isinstance(call.factors, Tensor):
            return ()
        factor = call.factors[amax.INPUT]
    stream = capture.stream_of(source.device) if source.is_cuda else 0
    return source._version, source.data_ptr(), factor, stream, source.shape, source.stride(), y.dtype


def note(calls: Sequence[LinearContext], q: Tensor | Quantized) -> None:
    """The amax of an input that another layer's call has measured is theirs too."""
    for call in calls:
        if call.record and call.factors is not None:
            assert isinstance(q, Quantized)
            amax.record(call.layer, amax.INPUT, q.amax)


def may_fuse(dtype: torch.dtype, x: Tensor) -> bool:
    """True if kernels that quantize what they make may run: on operands of this dtype, made of x."""
    if ops.on_host(x) or x.dtype is not dtype or is_tracing():
        return False
    allowed = any(impl.name == "triton" for impl in ops.QUANTIZE.active)
    return allowed and counters.active.counters is None and not fused_quantize.reason_unsupported(x)


def _fused(
    setup: LinearSetup, x: Sequence[Tensor | None], keeps: bool, calls: list[LinearContext]
) -> QuantizedInput | None:
    first, call, a = setup.layers[0], calls[0], setup.recipe.fprop.a
    assert a is not None and x[0] is not None
    factor, is_set = _known(call)
    want_output = setup.return_input or (keeps and not call.plan.input)
    turn = keeps and call.plan.input
    fused = fused_quantize.operand(setup.prologue, x, first.in_features, a, factor, is_set, want_output, turn)
    if fused is None:
        return None
    result, q, transposed = fused
    if call.record and call.factors is not None:
        amax.record(first, amax.INPUT, q.amax)
        note(calls[1:], q)
    shape = (*x[0].shape[:-1], q.shape[1])
    of_gemms = None if result.y is None else matrix(result.y)
    return QuantizedInput(calls, result.y, of_gemms, shape, x[0].dtype, q, transposed, result.saved)


def _known(call: LinearContext) -> tuple[Tensor | float | None, bool]:
    """The encode factor of a layer's input, and whether it is known not to be 0."""
    if call.factors is None:
        return None, False
    return call.factors[amax.INPUT], amax.is_set(amax.INPUT, call.factors)


def _begun(setup: LinearSetup, y: Tensor) -> list[LinearContext]:
    return [begin(layer, setup.recipe, y, setup.dtype, setup.training) for layer in setup.layers]


def recomputed(
    setup: LinearSetup, saved: Sequence[Any], run: LinearContext, g: Tensor | None = None
) -> tuple[Any, Any]:
    """The input that wgrad consumes, from what the prologue kept; and as `Prologue.recompute_input` the gradients of
    what that
    took, of the gradient g of the input."""
    c = setup.recipe.wgrad.b
    if c is not None and run.plan.input and may_fuse(setup.dtype, saved[0]):
        q = fused_quantize.recomputed(setup.prologue, saved, c, *_known(run))
        if q is not None:
            return (q, None), None
    y, gradients = setup.prologue.recompute_input(saved, g)
    return run.recomputed(matrix(y.to(setup.dtype))), gradients
