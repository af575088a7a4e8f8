"""The input that several linear layers share: made, quantized on the way or after it, made again for backward."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu.fused import producers
from quaver.torch.linear.gemms import Call, both_at_once, quantize, quantize_both
from quaver.torch.linear.layer import Linear, matrix
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops
from quaver.torch.state import counters
from quaver.torch.state.history import amax, steps


class Prologue(Protocol):
    """How the layers' input is made. Its methods are called with as many tensors as it takes, None among them."""

    @property
    def remakes(self) -> bool:
        """True if backward makes the input again, so that nothing of it is kept."""

    def __call__(self, *x: Tensor | None) -> Tensor:
        """Differentiably, for layers that are not quantized."""

    def forward(self, *x: Tensor | None) -> tuple[Tensor, tuple[Tensor | Quantized | None, ...]]:
        """Outside autograd: the input, and what backward needs."""

    def quantized(
        self, x: Sequence[Any], spec: QuantSpec, factor: Tensor | None, want_output: bool, turned: bool
    ) -> producers.Made | None:
        """On a GPU: the input quantized by the kernel that makes it, or with its amax; see
        `quaver.torch.backends.gpu.fused.norm`.

        Args:
            spec: with one scale for the tensor, or blocks along a row.
            factor: known, so that one pass quantizes; or None.
            want_output: whether the input itself is needed too.
            turned: write the codes of the transpose alone.
        Returns:
            None where the prologue has no such kernel.
        """

    def remake(self, saved: Sequence[Any]) -> Tensor:
        """The input once more, bit for bit."""

    def backward(self, g: Tensor, saved: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The gradients of what it took."""


class Setup(NamedTuple):
    """Everything in one call that is no tensor."""

    prologue: Prologue
    layers: tuple[Linear, ...]
    recipe: Recipe
    #: The dtype of the GEMMs' inputs and outputs.
    dtype: torch.dtype
    training: bool
    return_input: bool
    #: Tensors that the prologue takes.
    taken: int


class Entrance(NamedTuple):
    """The layers' input, in the forms that GEMMs and backward read."""

    calls: list[Call]
    #: As the prologue made it, or None where it wrote nothing but codes.
    output: Tensor | None
    #: That as a matrix in the dtype of the GEMMs.
    matrix: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    quantized: Quantized
    #: What wgrad consumes of it, where that was written too.
    turned: Quantized | None
    #: What the prologue's backward needs.
    saved: Sequence[Any]


def enter(setup: Setup, x: Sequence[Tensor | None], keeps: bool, given: Any = None) -> Entrance:
    """Make the layers' input, unless it is given, and quantize it, by one kernel where there is one."""
    first, recipe = setup.layers[0], setup.recipe
    a, c = recipe.fprop.a, recipe.wgrad.b
    assert a is not None and x[0] is not None
    calls: list[Call] = []
    if given is None and may_fuse(setup.dtype, x[0]):
        calls = [_call(setup, layer, x[0]) for layer in setup.layers]
        entrance = _fused(setup, x, keeps, calls)
        if entrance is not None:
            return entrance
    output, saved = given or setup.prologue.forward(*x)
    y = matrix(output.to(setup.dtype))
    calls = calls or [_call(setup, layer, y) for layer in setup.layers]
    turned = None
    if keeps and c is not None and calls[0].both is not None and both_at_once(a, c, calls[0]):
        yq, turned = quantize_both(first, amax.INPUT, "input", y, a, c, recipe, calls[0])
    else:
        yq = quantize(first, amax.INPUT, "input", y, a, recipe, calls[0])
    return Entrance(calls, output, y, output.shape, output.dtype, yq, turned, saved)


def may_fuse(dtype: torch.dtype, x: Tensor) -> bool:
    """True if kernels that quantize what they make may run: on operands of this dtype, made of x."""
    if not producers.wanted(x) or x.dtype is not dtype or torch.compiler.is_compiling():
        return False
    allowed = any(impl.name == "triton" for impl in ops.QUANTIZE.active)
    return allowed and counters.active.counters is None and not producers.why_not(x)


def _fused(setup: Setup, x: Sequence[Tensor | None], keeps: bool, calls: list[Call]) -> Entrance | None:
    first, call, a = setup.layers[0], calls[0], setup.recipe.fprop.a
    assert a is not None and x[0] is not None
    factor, is_set = _known(first, call)
    want_output = setup.return_input or (keeps and not call.plan.input)
    turn = keeps and call.plan.input
    operand = producers.operand(setup.prologue, x, first.in_features, a, factor, is_set, want_output, turn)
    if operand is None:
        return None
    if call.record and call.factors is not None:
        amax.record(first, amax.INPUT, operand.quantized.amax)
    shape = (*x[0].shape[:-1], operand.quantized.shape[1])
    y = None if operand.y is None else matrix(operand.y)
    return Entrance(calls, operand.y, y, shape, x[0].dtype, operand.quantized, operand.turned, operand.saved)


def _known(layer: Linear, call: Call) -> tuple[Tensor | float | None, bool]:
    """The encode factor of a layer's input, and whether it is known not to be 0."""
    if call.factors is None:
        return None, False
    return call.factors[amax.INPUT], amax.is_set(layer, amax.INPUT, call.factors)


def _call(setup: Setup, layer: Linear, y: Tensor) -> Call:
    factors = None if setup.recipe.delayed is None else steps.factors(layer, setup.training)
    call = Call(setup.recipe, y, setup.dtype, False, setup.training, factors)
    call.owe(layer)
    return call


def remade(setup: Setup, saved: Sequence[Any], call: Call) -> Tensor | Quantized:
    """The input that wgrad consumes, from what the prologue kept; no history and no counter sees codes twice."""
    recipe, first = setup.recipe, setup.layers[0]
    c, (factor, is_set) = recipe.wgrad.b, _known(first, call)
    if c is not None and call.plan.input and may_fuse(setup.dtype, saved[0]):
        q = producers.remade(setup.prologue, saved, c, factor, is_set)
        if q is not None:
            return q
    y = matrix(setup.prologue.remake(saved).to(setup.dtype))
    if c is None:
        return y
    if call.plan.input:
        assert recipe.fprop.a is not None
        return call.quantize(y, recipe.fprop.a, None, factor).T
    return quantize(first, amax.INPUT, "input.T", y.t(), c, recipe, call)
