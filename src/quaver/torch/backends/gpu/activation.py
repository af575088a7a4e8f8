"""Activations on a GPU: launches for forward and backward.

The forward can quantize its result for the next linear layer in the same pass. Results equal those of
`quaver.torch.nn.activation` within its bounds, and the codes are exactly those of the result quantized separately.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.kernels import activation
from quaver.kernels.activation import activate, activate_backward, activate_blocks
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu.buffers import whole
from quaver.torch.backends.gpu.fused_quantize import FusedQuantizeResult, mode
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec, workspace
from quaver.torch.backends.gpu.norm import SYNCHRONIZING, buffers_for, extent
from quaver.torch.backends.gpu.tensorwise import DTYPES, codes_in_words, format_constants
from quaver.torch.numerics.quantized import Quantized


class ActivationKernel(NamedTuple):
    """Kernel functions of one entry of `quaver.torch.nn.activation.ACTIVATIONS`."""

    forward: Any
    backward: Any
    gated: bool = False
    #: True if gate and value are clamped to a limit, as in gpt-oss.
    clamped: bool = False


_KINDS = {
    "linear": (activation.linear, activation.linear_backward),
    "gelu": (activation.gelu, activation.gelu_backward),
    "gelu_exact": (activation.gelu_exact, activation.gelu_exact_backward),
    "quick_gelu": (activation.quick_gelu, activation.quick_gelu_backward),
    "relu": (activation.relu, activation.relu_backward),
    "squared_relu": (activation.squared_relu, activation.squared_relu_backward),
    "silu": (activation.silu, activation.silu_backward),
}
_SIGMOID = activation.sigmoid, activation.sigmoid_backward
_CLAMPED = activation.clamped_silu, activation.clamped_silu_backward
#: Kernel functions by the name of the activation.
KINDS = {
    **{name: ActivationKernel(*pair) for name, pair in _KINDS.items()},
    "glu": ActivationKernel(*_SIGMOID, gated=True),
    "geglu": ActivationKernel(*_KINDS["gelu"], gated=True),
    "geglu_exact": ActivationKernel(*_KINDS["gelu_exact"], gated=True),
    "quick_geglu": ActivationKernel(*_KINDS["quick_gelu"], gated=True),
    "reglu": ActivationKernel(*_KINDS["relu"], gated=True),
    "squared_reglu": ActivationKernel(*_KINDS["squared_relu"], gated=True),
    "swiglu": ActivationKernel(*_KINDS["silu"], gated=True),
    "clamped_swiglu": ActivationKernel(*_CLAMPED, gated=True, clamped=True),
}
#: Rows, columns and warps of a program.
TILE, BLOCK_TILE, BACKWARD_TILE = (128, 64, 4), (16, 128, 4), (32, 128, 4)


def forward(name: str, options: Sequence[float], x: Sequence[Tensor]) -> Tensor:
    """Apply an activation; same arguments and result as `quaver.torch.nn.activation.ACTIVATE`.

    For normally distributed inputs the relative RMS error is at most 1e-6 against float64, before rounding to x's
    dtype.
    """
    read = _halves(name, x)
    y: Tensor = _forwards(read, name, tuple(options), "none", None, (True, True, False))[0]
    return y if y.dim() == x[0].dim() else y.view(*x[0].shape[:-1], y.shape[-1])


def activated(
    name: str,
    options: Sequence[float],
    x: Sequence[Tensor],
    spec: QuantSpec | None = None,
    factor: Tensor | None = None,
    want_output: bool = True,
    rows_wanted: bool = True,
    transposed_wanted: bool = False,
) -> FusedQuantizeResult:
    """Apply an activation to one or two tensors, and quantize or measure the result by a spec as in `gpu.norm`.

    Given y, codes and amax are exact.

    Args:
        spec: spec of the result as an operand [tokens, d], or None.
        factor: nonzero encode factor of the tensor, float32 of one element, to quantize in one pass; None measures the
            amax.
        want_output: True to write y too; it is always written if only its amax is measured.
        rows_wanted, transposed_wanted: with a factor, whether to write codes row-major and transposed. If only the
            transpose is written, it is the `T` of the returned operand.
    """
    kind = "none" if spec is None else mode(spec, factor is not None, _width(name, x))
    assert kind, f"no kernel activates and quantizes by {spec}"
    gate, value = _halves(name, x)
    rows, columns, _ = extent(gate)
    own = factor, workspace(gate.device) if kind in SYNCHRONIZING else None
    wanted = want_output or kind == "amax", rows_wanted, transposed_wanted
    y, q, qt, scale, top = _forwards((gate, value), name, tuple(options), kind, spec, wanted, own=own)
    if y is not None and y.shape[:-1] != x[0].shape[:-1]:
        y = y.view(*x[0].shape[:-1], columns)
    operand, shape = None, (rows, columns)
    if spec is not None and scale is not None and q is None:
        operand = Quantized(qt[:, :rows], scale, spec, shape, True, amax=top)
    elif spec is not None and scale is not None:
        operand = Quantized(q[:, :columns], scale, spec, shape, amax=top, swizzled=kind == "e8m0")
        if qt is not None:
            operand.cached_transpose = Quantized(qt[:, :rows], scale, spec, shape[::-1], amax=top)
            operand.cached_transpose.cached_transpose = operand
    return FusedQuantizeResult(y, operand, top, tuple(x))


@LaunchPlanCache
def _forwards(
    tensors_in: Sequence[Any],
    name: str,
    options: Sequence[float],
    kind: str,
    spec: Any,
    wanted: tuple[bool, bool, bool],
) -> LaunchPlan:
    gate, value, *others = tensors_in
    factor, work = others or (None, None)
    rows, columns, stride = extent(gate)
    strides = stride, 0 if value is None else extent(value)[2]
    y = whole(gate.shape, gate.dtype) if wanted[0] else None
    q, scale = buffers_for(kind, spec, rows, columns)
    if kind not in ("none", *SYNCHRONIZING):
        launch = _in_blocks((gate, value, y, q, scale), (rows, columns), strides, name, options, kind, spec)
        return LaunchPlan(tensors_in, (y, q, None, scale, None), [launch])
    top = whole((1, 1), torch.float32) if kind in SYNCHRONIZING else None
    q = q if wanted[1] else None
    transposed = None
    if kind == "tensor" and wanted[2]:
        transposed = codes_in_words(columns, rows, spec)
    bm, bn, warps = TILE
    # Blocks cover the zero padding of both results.
    across, down = (columns if q is None else q.shape[1]), (rows if transposed is None else transposed.shape[1])
    grid = -(-down // bm), -(-across // bn)
    lines = 0 if transposed is None else transposed.shape[1] // 16
    numbers = (rows, columns, *strides, across, lines, grid[0] * grid[1], *_limits(options))
    constants = {"BM": bm, "BN": bn, "EVEN": rows % bm == 0 and columns % bn == 0, "MODE": kind}
    constants |= _formula(name, False) | _codes(spec, gate.device, ("POWER_OF_TWO", "INTEGERS"))
    tensors = (gate, value, y, q, transposed, scale, top, factor, work)
    return LaunchPlan(
        tensors_in, (y, q, transposed, scale, top), [LaunchSpec(activate, grid, tensors, numbers, constants, warps)]
    )


def _in_blocks(
    tensors: tuple[Any, ...],
    shape: tuple[int, int],
    strides: tuple[int, int],
    name: str,
    options: Sequence[float],
    kind: str,
    spec: QuantSpec,
) -> LaunchSpec:
    gate, _, _, q, _ = tensors
    rows, columns = shape
    bm, bn, warps = BLOCK_TILE
    if kind == "row":
        bn = max(256, 1 << (columns - 1).bit_length())
        bm, warps = max(1, 2048 // bn), min(max(bn // 512, 4), 32)
    grid = -(-rows // bm), -(-q.shape[1] // bn)
    scale_stride = -(-columns // 128) * 4 if kind == "e8m0" else rows
    even = rows % bm == 0 and columns % bn == 0
    constants = {"BM": bm, "BN": bn, "EVEN": even, "MODE": kind, "BLOCK": 32 if kind == "e8m0" else 128}
    form = ("POWER_OF_TWO", "EMAX", "TOP_MANTISSA", "MAX", "INTEGERS")
    constants |= _formula(name, False) | _codes(spec, gate.device, form)
    numbers = (rows, columns, *strides, q.shape[1], scale_stride, *_limits(options))
    return LaunchSpec(activate_blocks, grid, tensors, numbers, constants, warps)


def _formula(name: str, backward: bool) -> dict[str, Any]:
    kind = KINDS[name]
    functions = {"F": kind.forward, "GATED": kind.gated, "CLAMPED": kind.clamped}
    return {**functions, "B": kind.backward} if backward else functions


def _codes(spec: QuantSpec | None, device: torch.device, names: Sequence[str]) -> dict[str, Any]:
    if spec is None:
        return {"POWER_OF_TWO": True, "INTEGERS": 0, "CODES": None}
    known = format_constants(spec, device)
    return {**{name: known[name] for name in names}, "CODES": DTYPES[spec.format.name]}


def _limits(options: Sequence[float]) -> tuple[float, float]:
    limit, alpha = tuple(map(float, options)) or (0.0, 0.0)
    return limit, alpha


def backward(name: str, options: Sequence[float], g: Tensor, x: Sequence[Tensor]) -> list[Tensor]:
    """Return the contiguous gradients of the inputs, as `quaver.torch.nn.activation.backward`.

    For normally distributed inputs the relative RMS error is at most 1e-6 against float64, before rounding to x's
    dtype.
    """
    read = (_rows(g), *_halves(name, x))
    # Without memory_format it takes four fifths of the time.
    grad_inputs = [
        torch.empty_like(a) if a.is_contiguous() else torch.empty_like(a, memory_format=torch.contiguous_format)
        for a in x
    ]
    # If gate and value are halves of one input, so are their gradients.
    own = _halves(name, grad_inputs) if KINDS[name].gated else grad_inputs
    _backwards(read, name, tuple(options), len(x), own=own)
    return grad_inputs


@LaunchPlanCache
def _backwards(tensors_in: Sequence[Any], name: str, options: Sequence[float], inputs: int) -> LaunchPlan:
    tensors = (*tensors_in, None)[:5]
    rows, columns, _ = extent(tensors_in[0])
    bm, bn, warps = BACKWARD_TILE
    grid = -(-rows // bm), -(-columns // bn)
    numbers = (rows, columns, *(0 if x is None else extent(x)[2] for x in tensors), *_limits(options))
    constants = {"BM": bm, "BN": bn, "EVEN": rows % bm == 0 and columns % bn == 0, **_formula(name, True)}
    return LaunchPlan(tensors_in, (), [LaunchSpec(activate_backward, grid, tensors, numbers, constants, warps)])


def _width(name: str, x: Sequence[Tensor]) -> int:
    return x[0].shape[-1] // (2 if KINDS[name].gated and len(x) == 1 else 1)


def _halves(name: str, x: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return gate (or the single input) and value (or None) as matrices with contiguous last axis."""
    first = _rows(x[0])
    if not KINDS[name].gated:
        return first, None
    if len(x) == 2:
        return first, _rows(x[1])
    first = first.view(-1, first.shape[-1])
    width = first.shape[1] // 2
    return first[:, :width], first[:, width:]


def _rows(x: Tensor) -> Tensor:
    """Return [..., d] unchanged, or as a matrix with contiguous last axis."""
    if x.is_contiguous():
        return x
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()
