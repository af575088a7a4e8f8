"""A decided step: the three GEMMs of a layer by what was chosen for it, as one autograd function on any machine.

What quantizes an operand and what multiplies two is a row, `Rows`: `on_cpu` and `on_gpu` fill it. The step calls them,
saves what backward reads, and moves on the state that a layer keeps.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.core.spec import Recipe
from quaver.torch.backends.gpu.launching import capture, device
from quaver.torch.internals import any_autocast_enabled, graph_task_id
from quaver.torch.operations import ops
from quaver.torch.operations.derivatives import first_derivative
from quaver.torch.state import counters, kept_weights
from quaver.torch.state.history import amax, steps
from quaver.torch.state.layer import state_of

#: A scale as a GEMM takes it: a number of the host's or a tensor on a GPU.
Scale = Any
#: What a matrix [rows, columns] became: an operand and its scale, the transpose's and its scale, of the right side of a
#: GEMM where they are kept (None and None where no GEMM takes them), and float32 sums of blocks of rows or None.
Operands = tuple[Tensor, Scale, Tensor | None, Scale, Tensor | None]


class Factors(Protocol):
    """What delayed scaling gives one step of a layer."""

    @property
    def factors(self) -> Any:
        """Encode factors of input, weight and grad_output, as the forward saw them."""

    @property
    def version(self) -> float:
        """By which it is seen that the weight's factor is another."""

    def in_backward(self, layer: nn.Module, g: Tensor) -> "Factors":
        """The same for a backward: the layer's buffers may be others by now."""


class Weight:
    """Both operands of a kept weight, as the right sides of GEMMs, and their scales."""

    __slots__ = ("dgrad", "dgrad_scale", "fprop", "fprop_scale", "noted", "recipe")

    def __init__(
        self, fprop: Tensor, fprop_scale: Scale, dgrad: Tensor, dgrad_scale: Scale, noted: object, recipe: Recipe
    ) -> None:
        self.fprop, self.fprop_scale, self.dgrad, self.dgrad_scale = fprop, fprop_scale, dgrad, dgrad_scale
        #: The step in whose history its amax is noted: a kept weight's counts in each.
        self.noted = noted
        #: Whose GEMMs read them; another may share the quantized weight.
        self.recipe = recipe


#: a, its scale, b, its scale, bias.
Multiply = Callable[[Tensor, Scale, Tensor, Scale, Tensor | None], Tensor]


class Rows(NamedTuple):
    """What was chosen for a layer's operands and GEMMs."""

    #: A matrix [..., features] and the factors to its operands.
    input: Callable[[Tensor, Any], Operands]
    grad_output: Callable[[Tensor, Any], Operands]
    #: (weight, layer, factors, whether it is a forward) to what is kept of the weight and its operands.
    weight: Callable[[Tensor, nn.Module, Any, bool], tuple[kept_weights.Entry, Weight]]
    #: (input, weight, layer, factors) to the input's operands and what `weight` gives in a forward, for a weight that
    #: is not kept: by launches that both share; None where they share none.
    shared: Callable[[Tensor, Tensor, nn.Module, Any], tuple[Operands, kept_weights.Entry, Weight]] | None
    #: (layer, x) to the factors of delayed scaling; None where the general way must read them.
    factors: Callable[[nn.Module, Tensor], Any]
    fprop: Multiply
    dgrad: Multiply
    #: None where it is not quantized: then the input is kept as it is.
    wgrad: Multiply | None
    #: Whether kernels read addresses that are multiples of 16.
    aligned: bool


class Step:
    """How one layer runs on inputs of one shape."""

    __slots__ = ("delayed", "device", "recipe", "rows", "shape")

    def __init__(self, recipe: Recipe, x: Tensor, rows: Rows) -> None:
        self.recipe, self.shape, self.device, self.rows = recipe, x.shape, x.device, rows
        self.delayed = recipe.delayed is not None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor | None:
        """y [..., n], or None where this x, weight or state is for the general way."""
        rows = self.rows
        if not weight.is_contiguous() or (rows.aligned and x.data_ptr() & 15) or capture.as_captured(self.device):
            return None
        factors = None
        if self.delayed:
            factors = rows.factors(layer, x) if state_of(layer).prepared is self.recipe else None
            if factors is None:
                return None
        try:
            y: Tensor = _apply(x, weight, bias, (layer, self, factors))
        except torch.OutOfMemoryError as error:
            raise device.out_of_memory(x, 2) from error
        return y

    def operands(
        self, x: Tensor, weight: Tensor, layer: nn.Module, factors: Any
    ) -> tuple[Operands, kept_weights.Entry, Weight]:
        """The operands of an input [..., k] and of the weight."""
        rows, kept = self.rows, self._kept(weight, layer, factors)
        if kept is not None:
            return rows.input(x, factors), *kept
        if rows.shared is not None and not weight.data_ptr() & 15:
            return rows.shared(x, weight, layer, factors)
        kept = rows.weight(weight, layer, factors, True)
        return rows.input(x, factors), *kept

    def weight(self, weight: Tensor, layer: nn.Module, factors: Any) -> tuple[kept_weights.Entry, Weight]:
        """The weight's operands, kept until it, or its factor, changes."""
        return self._kept(weight, layer, factors) or self.rows.weight(weight, layer, factors, True)

    def _kept(self, weight: Tensor, layer: nn.Module, factors: Any) -> tuple[kept_weights.Entry, Weight] | None:
        recipe = self.recipe
        version = 0.0 if factors is None else factors.version
        entry = kept_weights.lookup(layer, "fprop", weight, recipe.fprop.b, version)  # type: ignore[arg-type]
        ready: Weight | None = None if entry is None else entry.ready
        if entry is None or ready is None or ready.recipe is not recipe:
            return None
        if ready.noted is not factors:
            assert entry.quantized is not None
            amax.record(layer, amax.WEIGHT, entry.quantized.amax)
            ready.noted = factors
        return entry, ready


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, constants: Any) -> Tensor:
        layer, step, factors = constants
        rows = step.rows
        (q, scale, xt, of_xt, _), entry, w = step.operands(x, weight, layer, factors)
        on_host = of_xt.__class__ is float
        # The weight itself, so that autograd sees a change of it before backward.
        ctx.save_for_backward(weight, x if xt is None else xt, None if on_host else of_xt)
        owed = None if factors is None else steps.owed(layer)
        ctx.constants = layer, step, factors, owed, entry, of_xt if on_host else None, bias is not None and bias.dtype
        y = rows.fprop(q, scale, w.fprop, w.fprop_scale, bias)
        # A view could not be written to: see `linear.layer.shaped`.
        return y if x.dim() == 2 else y.resize_(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if any_autocast_enabled():
            with ops.without_autocast(ops.autocast_device(g)):
                return first_derivative(_backward, ctx, g)
        return first_derivative(_backward, ctx, g)


#: `Function.apply` without its checks for torch.func, which the layer has made itself.
_apply: Any = super(torch.autograd.Function, _Step).apply


def _backward(ctx: Any, g: Tensor) -> Any:
    layer, step, factors, owed, entry, of_xt, bias = ctx.constants
    if owed is not None:
        owed.settle()
    weight, xt, saved_scale = ctx.saved_tensors
    of_xt = saved_scale if of_xt is None else of_xt
    return *gradients(g, weight, xt, of_xt, layer, step, entry, ctx.needs_input_grad, bias, factors), None


def gradients(
    g: Tensor,
    weight: Tensor | None,
    xt: Tensor | None,
    of_xt: Scale,
    layer: nn.Module,
    step: Step,
    entry: kept_weights.Entry,
    needs: Sequence[bool],
    bias: torch.dtype | None,
    factors: Any = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, weight and bias, as needed, of grad_output [..., n] and what the forward left.

    Args:
        xt, of_xt: the input's transpose and its scale; or the input itself where wgrad is not quantized.
        bias: the dtype of its gradient.
    """
    rows, given = step.rows, g
    if not g.is_contiguous() or (rows.aligned and g.data_ptr() & 15):
        g = g.clone(memory_format=torch.contiguous_format)
    if factors is not None:
        factors = factors.in_backward(layer, g)
    q, scale, qt, of_qt, sums = rows.grad_output(g, factors)
    if counters.active.counters is not None:
        _count(layer, step.recipe, g.view(-1, g.shape[-1]), factors)
    of_input = of_weight = of_bias = None
    if needs[2]:
        assert bias is not None
        of_bias = ops.bias_gradient(given.reshape(-1, given.shape[-1]), bias, sums)
    if needs[0]:
        w = entry.ready
        if w is None or w.recipe is not step.recipe:
            assert weight is not None
            w = rows.weight(weight, layer, factors, False)[1]
        of_input = rows.dgrad(q, scale, w.dgrad, w.dgrad_scale, None)
        if len(step.shape) != 2:
            of_input = of_input.view(step.shape)
    if needs[1]:
        assert xt is not None
        entry.window.used = graph_task_id()
        if rows.wgrad is None:
            of_weight = F.linear(g.view(-1, g.shape[-1]).t(), xt.view(-1, xt.shape[-1]).t())
        else:
            assert qt is not None
            of_weight = rows.wgrad(qt, of_qt, xt, of_xt, None)
    return of_input, of_weight, of_bias


def _count(layer: nn.Module, recipe: Recipe, g: Tensor, factors: Any) -> None:
    """Note the operands of a grad_output for counters that were opened after its forward."""
    note, a, c = counters.active.counters.note, recipe.dgrad.a, recipe.wgrad.a  # type: ignore[union-attr]
    assert a is not None
    factor = None if factors is None else factors.factors[amax.GRAD_OUTPUT]
    note(layer, "grad_output", g, ops.QUANTIZE(g, a, None, factor))
    if c is not None and not a.per_tensor:
        note(layer, "grad_output.T", g.t(), ops.QUANTIZE(g.t(), c))
