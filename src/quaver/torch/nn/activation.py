"""Table of the activations that an MLP applies between its two matrices; add a row for a new one.

A gated activation takes two tensors: the gate, which passes through the nonlinearity, and the value that it multiplies.
A fused projection concatenates them in one tensor, gate first. All are computed in float32 and rounded once. Backward
recomputes from the inputs; nothing else is saved.
Source of the gated ones: Shazeer 2020, arXiv:2002.05202.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.recipes.formats import E4M3
from quaver.recipes.spec import QuantSpec
from quaver.recipes.text import check_name, suggest
from quaver.torch.backends.gpu import fused_quantize
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import first_derivative, transforms_active
from quaver.torch.operations.operation import Implementation, Operation, row_by_row
from quaver.torch.state.context import active_context
from quaver.torch.state.selective_checkpoint import hide_from_policies

# ---- ops with a hand-written backward, run without linear layers behind them ----


class DifferentiatedOp(Protocol):
    """A function of tensors with a hand-written backward, both outside autograd."""

    def forward(self, *x: Tensor | None) -> tuple[Any, Sequence[Any]]:
        """Return the output, or a tuple of outputs, and the tensors that backward needs."""

    def backward(self, *gs_and_saved: Any) -> Sequence[Any]:
        """Return the gradients of forward's inputs, from the gradient of each output and the saved tensors."""


def run_standalone(function: DifferentiatedOp, sentence: str, *x: Tensor | None) -> Any:
    """Run an op under autograd with its own backward.

    Args:
        function: the op.
        sentence: error message for a second derivative or a torch.func transform, which are unsupported.
        x: inputs of its forward.
    """
    if transforms_active():
        raise NotImplementedError(sentence)
    apply: Any = _StandaloneFunction.apply
    if not is_tracing():
        apply = (
            _apply
            if active_context.apply_override is None
            else active_context.apply_override(_StandaloneFunction, _apply)
        )
    return apply(function, sentence, *x)


class _StandaloneFunction(torch.autograd.Function):
    @staticmethod
    @hide_from_policies
    def forward(ctx: Any, function: DifferentiatedOp, sentence: str, *x: Tensor | None) -> Any:
        y, saved = function.forward(*x)
        ctx.save_for_backward(*saved)
        ctx.constants = function, sentence
        return y

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return first_derivative(_backward, ctx, ctx.constants[1], *gs)


def _backward(ctx: Any, saved: Sequence[Any], *gs: Tensor) -> tuple[Any, ...]:
    return None, None, *ctx.constants[0].backward(*gs, saved)


#: `Function.apply` without its checks for torch.func, which `run_standalone` has already made.
_apply: Any = super(torch.autograd.Function, _StandaloneFunction).apply


# ---- activations ----

_aten = torch.ops.aten
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Activation:
    """A function of one float32 tensor, or of gate and value, and its derivative."""

    #: Function of (x, *options) or (gate, value, *options) that returns the result.
    forward: Function
    #: Function of (gradient of the result, x or gate and value, *options) that returns the gradients of the inputs.
    backward: Callable[..., tuple[Tensor, ...]]
    gated: bool = False
    #: Function of (gradient of the result, gate, value) that returns the gradients of both, and the result, sharing
    #: work; or None.
    again: Callable[..., tuple[Tensor, ...]] | None = None
    #: True for a torch operation that computes in float32 internally for any dtype: the same bits without casts.
    native: bool = False
    #: Options and their defaults, in the order in which the functions take them.
    options: Mapping[str, float] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        """Number of input tensors, each as wide as the result."""
        return 2 if self.gated else 1


def _plain(forward: Function, backward: Function, native: bool = False) -> Activation:
    return Activation(forward, lambda g, x: (backward(g, x),), native=native)


def _gated(forward: Function, backward: Function) -> Activation:
    """Return the gated activation forward(gate) · value."""

    def again(g: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        passed = forward(gate)
        return backward(g * value, gate), passed * g, passed.mul_(value)

    return Activation(
        lambda gate, value: forward(gate).mul_(value),
        lambda g, gate, value: (backward(g * value, gate), forward(gate).mul_(g)),
        gated=True,
        again=again,
    )


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    return _aten.gelu_backward(g, x, approximate="tanh")


def _relu_backward(g: Tensor, x: Tensor) -> Tensor:
    return _aten.threshold_backward(g, x, 0)


def _sigmoid_backward(g: Tensor, x: Tensor) -> Tensor:
    return _aten.sigmoid_backward(g, torch.sigmoid(x))


#: Factor of CLIP's approximation of gelu: x sigmoid(1.702 x).
QUICK = 1.702


def _quick_gelu(x: Tensor) -> Tensor:
    return torch.sigmoid(x * QUICK).mul_(x)


def _quick_gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    return _aten.silu_backward(g, x * QUICK)


def _squared_relu(x: Tensor) -> Tensor:
    """Compute max(x, 0)², of Primer (arXiv:2109.08668)."""
    return torch.relu(x).square_()


def _squared_relu_backward(g: Tensor, x: Tensor) -> Tensor:
    return torch.relu(x).mul_(2).mul_(g)


def _clamped_swiglu(gate: Tensor, value: Tensor, limit: float, alpha: float) -> Tensor:
    """Compute gpt-oss's activation: gate sigmoid(alpha gate) (value + 1), gate clamped to ≤ limit, value to ±limit."""
    gate = gate.clamp(max=limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(value.clamp(-limit, limit).add_(1))


def _clamped_swiglu_backward(
    g: Tensor, gate: Tensor, value: Tensor, limit: float, alpha: float
) -> tuple[Tensor, Tensor]:
    clamped = gate.clamp(max=limit)
    shifted = value.clamp(-limit, limit).add_(1)
    grad_gate = _aten.silu_backward(g * shifted, clamped * alpha)
    grad_value = torch.sigmoid(clamped * alpha).mul_(clamped).mul_(g)
    # The gradient of clamp at its bounds is 1. A comparison with NaN is false, so NaN passes through the other factor.
    return grad_gate.mul_(~(gate > limit)), grad_value.mul_(~(value.abs() > limit))


#: "gelu" is the tanh approximation, as in JAX and Flax; "gelu_exact" uses the error function, torch's default.
ACTIVATIONS: dict[str, Activation] = {
    "linear": _plain(lambda x: x.clone(), lambda g, x: g.clone()),
    "gelu": _plain(_gelu, _gelu_backward, native=True),
    "gelu_exact": _plain(F.gelu, _aten.gelu_backward, native=True),
    "quick_gelu": _plain(_quick_gelu, _quick_gelu_backward),
    "relu": _plain(torch.relu, _relu_backward, native=True),
    "squared_relu": _plain(_squared_relu, _squared_relu_backward),
    "silu": _plain(F.silu, _aten.silu_backward, native=True),
    "glu": _gated(torch.sigmoid, _sigmoid_backward),
    "geglu": _gated(_gelu, _gelu_backward),
    "geglu_exact": _gated(F.gelu, _aten.gelu_backward),
    "quick_geglu": _gated(_quick_gelu, _quick_gelu_backward),
    "reglu": _gated(torch.relu, _relu_backward),
    "squared_reglu": _gated(_squared_relu, _squared_relu_backward),
    "swiglu": _gated(F.silu, _aten.silu_backward),
    "clamped_swiglu": Activation(
        _clamped_swiglu, _clamped_swiglu_backward, gated=True, options={"limit": 7.0, "alpha": 1.702}
    ),
}


def get_activation(name: str) -> Activation:
    """Return the activation of this name.

    Raises:
        ValueError: unknown name; the message names the closest match.
    """
    check_name("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def option_values(name: str, options: Mapping[str, float]) -> tuple[float, ...]:
    """Return an activation's options in its own order, with defaults for missing ones."""
    known = get_activation(name).options
    for option in options:
        if option not in known:
            hint = suggest(option, known) if known else "it takes none"
            raise ValueError(f"activation {name!r} has no option {option!r}; {hint}")
    return tuple({**known, **options}.values())


def activate(name: str, *x: Tensor, **options: float) -> Tensor:
    """Apply an activation in float32, differentiably; only x is saved for backward (for relu its result).

    Args:
        name: a name in `ACTIVATIONS`.
        x: one tensor. For a gated activation gate and value of the same shape, or one tensor [..., 2 d] with the gate
            first.
        options: options of the activation, such as clamped_swiglu's `limit`.
    Returns:
        [..., d] in x's dtype, rounded once.
    Raises:
        ValueError: unknown name or option, or tensors that do not fit.
    Bounded: in float32, relative RMS 1e-6 of float64 for normally distributed inputs. NaN gives NaN.
    """
    row = get_activation(name)
    if len(x) not in (1, row.inputs) or any(a.shape != x[0].shape or a.dtype != x[0].dtype for a in x):
        shapes = ", ".join(f"{tuple(a.shape)} {a.dtype}" for a in x)
        raise ValueError(
            f"activation {name!r} takes {'gate and value of one shape' if row.gated else 'one tensor'}, got {shapes}"
        )
    if row.gated and len(x) == 1 and x[0].shape[-1] % 2:
        raise ValueError(
            f"activation {name!r} takes gate and value concatenated, which needs an even width; got {x[0].shape[-1]}"
        )
    return ActivationInputOp(name, option_values(name, options))(*x)


NO_SECOND_DERIVATIVE = (
    "this activation supports first derivatives only (no second derivative, no torch.func), because its backward "
    "is written by hand: use torch's own operations there"
)


#: Format in which `eight_bit_activations` saves the activation's input: 1.03 bytes per element, 28 dB SNR.
SAVED_SPEC = QuantSpec(E4M3, (1, 32), "e8m0")


@dataclass(frozen=True)
class ActivationInputOp:
    """Input op of a linear layer that applies an activation to one tensor, or to gate and value."""

    name: str
    options: tuple[float, ...]
    #: Save the inputs in eight bits, only for backward, together with wgrad's operand.
    eight_bits: bool = False

    @property
    def recomputes_input(self) -> bool:
        return not self.eight_bits

    def __call__(self, *x: Tensor | None) -> Tensor:
        row = ACTIVATIONS[self.name]
        if row.native and not is_tracing():
            return row.forward(*x)
        return run_standalone(replace(self, eight_bits=False) if self.eight_bits else self, NO_SECOND_DERIVATIVE, *x)

    def forward(
        self, *x: Tensor | None, implementation: int | None = None
    ) -> tuple[Tensor, tuple[Tensor | Quantized | None, ...]]:
        assert x[0] is not None
        run = ops.chosen(ACTIVATE, x[0], implementation)
        y = run(self.name, self.options, x)
        if not self.eight_bits or x[0].dtype not in ops.DTYPES:
            return y, x
        return y, tuple(ops.QUANTIZE(a.reshape(-1, a.shape[-1]), SAVED_SPEC) for a in x if a is not None)

    def quantized(
        self, x: Sequence[Any], spec: QuantSpec, factor: Tensor | None, want_output: bool, transposed: bool
    ) -> fused_quantize.FusedQuantizeResult | None:
        from quaver.torch.backends.gpu import activation as kernels

        if self.eight_bits:
            return None
        return kernels.activated(self.name, self.options, x, spec, factor, want_output, not transposed, transposed)

    def recompute_input(
        self, saved: Sequence[Any], g: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        if g is None or ACTIVATIONS[self.name].again is None or not ops.on_host(g):
            return ACTIVATE(self.name, self.options, saved), None
        *gradients, y = _plain_backward(self.name, self.options, g, saved, again=True)
        return y, tuple(gradients)

    def backward(self, g: Tensor, saved: Sequence[Any], implementation: int | None = None) -> tuple[Tensor, ...]:
        run = ops.chosen(ACTIVATE_BACKWARD, g, implementation)
        if not isinstance(saved[0], Quantized):
            return tuple(run(self.name, self.options, g, saved))
        if not ops.on_host(g) or not _in_blocks(g):
            return tuple(run(self.name, self.options, g, [_decoded(q, g) for q in saved]))
        # Dequantize block by block: all values at once in float32 would be the step's peak of memory.
        gradients, start = tuple(g.new_empty((*g.shape[:-1], q.shape[1])) for q in saved), 0
        for grad_y, *outs in _blocks(g, *gradients):
            end = start + grad_y.shape[0]
            part = [_decoded(_rows(q, start, end), grad_y) for q in saved]
            for out, grad in zip(outs, run(self.name, self.options, grad_y, part), strict=True):
                out.copy_(grad)
            start = end
        return gradients


def _decoded(q: Quantized, g: Tensor) -> Tensor:
    """Dequantize a saved activation input to the dtype and shape of the gradient g."""
    return ops.DEQUANTIZE(q, g.dtype).view(*g.shape[:-1], q.shape[1])


def _rows(q: Quantized, start: int, end: int) -> Quantized:
    """Return a range of rows of an operand quantized with `SAVED_SPEC`."""
    assert isinstance(q.scale, Tensor)
    return Quantized(q.data[start:end], q.scale[start:end], q.spec, (end - start, q.shape[1]))


#: Elements that a CPU processes at a time, so that their float32 copies stay in the last-level cache.
BLOCK = 1 << 18


def _plain_forward(name: str, options: Sequence[float], x: Sequence[Tensor]) -> Tensor:
    row, dtype = ACTIVATIONS[name], x[0].dtype
    if row.native:
        return row.forward(*x)
    if not _in_blocks(x[0]):
        return row.forward(*_wide(row, x), *options).to(dtype)
    y = x[0].new_empty((*x[0].shape[:-1], _width(row, x)))
    for out, *part in _blocks(y, *x):
        out.copy_(row.forward(*_wide(row, part), *options))
    return y


def _plain_backward(
    name: str, options: Sequence[float], g: Tensor, x: Sequence[Tensor], again: bool = False
) -> list[Tensor]:
    """Return the gradients of x; with again=True also the result, from `Activation.again`."""
    row, dtype = ACTIVATIONS[name], x[0].dtype
    if row.native:
        return list(row.backward(g, *x))
    formula: Any = row.again if again else row.backward
    together = row.gated and len(x) == 1
    if not together and not _in_blocks(g):
        return [result.to(dtype) for result in formula(_float32(g), *_wide(row, x), *options)]
    results = [torch.empty_like(a, memory_format=torch.contiguous_format) for a in (*x, *((g,) if again else ()))]
    for grad_y, *rest in _blocks(g, *x, *results) if _in_blocks(g) else [(g, *x, *results)]:
        part, outs = rest[: len(x)], rest[len(x) :]
        if together:
            outs = [*outs[0].chunk(2, -1), *outs[1:]]
        for out, result in zip(outs, formula(_float32(grad_y), *_wide(row, part), *options), strict=True):
            out.copy_(result)
    return results


def _in_blocks(x: Tensor) -> bool:
    return x.is_cpu and x.numel() > 2 * BLOCK and x.dtype is not torch.float32


def _blocks(first: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Yield the same few rows of each tensor; for contiguous tensors these are views."""
    rows = max(1, BLOCK // first.shape[-1])
    return zip(*(a.reshape(-1, a.shape[-1]).split(rows) for a in (first, *others)), strict=True)


def _width(row: Activation, x: Sequence[Tensor]) -> int:
    """Return the width of the result."""
    return x[0].shape[-1] // (2 if row.gated and len(x) == 1 else 1)


def _wide(row: Activation, x: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return each input in float32; a fused input is split into gate and value."""
    if row.gated and len(x) == 1:
        x = x[0].chunk(2, -1)
    return [_float32(a) for a in x]


def _float32(x: Tensor) -> Tensor:
    """Convert to float32, but leave float64 as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _fake_forward(name: str, options: Sequence[float], x: Sequence[Tensor]) -> Tensor:
    return x[0].new_empty((*x[0].shape[:-1], _width(ACTIVATIONS[name], x)))


def _fake_backward(name: str, options: Sequence[float], g: Tensor, x: Sequence[Tensor]) -> list[Tensor]:
    return [a.new_empty(a.shape) for a in x]


def _no_kernel(*args: Any) -> str:
    return fused_quantize.reason_unsupported(args[-1][0])


#: Activation (name, options, inputs) as an operator: `activate` without its checks, outside autograd.
ACTIVATE: Operation[Tensor] = Operation(
    "activate(str name, float[] options, Tensor[] x) -> Tensor",
    [
        Implementation("triton", f"{ops.GPU}.activation:forward", place=_no_kernel),
        Implementation("reference", _plain_forward),
    ],
    fake=_fake_forward,
    kernel=lambda *args: row_by_row(ACTIVATE.eager(*args)),
)
#: Gradients of the inputs from (name, options, grad_output, inputs), in the form of the inputs: one tensor or two.
ACTIVATE_BACKWARD: Operation[list[Tensor]] = Operation(
    "activate_backward(str name, float[] options, Tensor g, Tensor[] x) -> Tensor[]",
    [
        Implementation("triton", f"{ops.GPU}.activation:backward", place=_no_kernel),
        Implementation("reference", _plain_backward),
    ],
    fake=_fake_backward,
    kernel=lambda *args: row_by_row(ACTIVATE_BACKWARD.eager(*args)),
)
