"""Activations on a GPU: forward, with what the next linear layer reads of the result from the same pass, and backward.

The numbers are those of `quaver.torch.blocks.activation` within its bounds; what is quantized is exactly the result
quantized.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.kernels.fused import formulas
from quaver.kernels.fused.activation import activate, activate_backward, activate_blocks
from quaver.torch.backends.gpu.fused.norm import mode, room
from quaver.torch.backends.gpu.launching.launch import Launches, launcher, workspace
from quaver.torch.backends.gpu.quantizing.codes import DTYPES, empty_codes, format_constants, in_words
from quaver.torch.numerics.quantized import Quantized


class Kind(NamedTuple):
    """How the kernels compute a row of `quaver.torch.blocks.activation.ACTIVATIONS`."""

    forward: Any
    backward: Any
    gated: bool = False
    #: True if gate and value are held within a limit, as gpt-oss holds them.
    clamped: bool = False


_KINDS = {
    "linear": (formulas.linear, formulas.linear_backward),
    "gelu": (formulas.gelu, formulas.gelu_backward),
    "gelu_exact": (formulas.gelu_exact, formulas.gelu_exact_backward),
    "quick_gelu": (formulas.quick_gelu, formulas.quick_gelu_backward),
    "relu": (formulas.relu, formulas.relu_backward),
    "squared_relu": (formulas.squared_relu, formulas.squared_relu_backward),
    "silu": (formulas.silu, formulas.silu_backward),
}
_SIGMOID = formulas.sigmoid, formulas.sigmoid_backward
_CLAMPED = formulas.clamped_silu, formulas.clamped_silu_backward
#: The kinds by the name of the activation.
KINDS = {
    **{name: Kind(*pair) for name, pair in _KINDS.items()},
    "glu": Kind(*_SIGMOID, gated=True),
    "geglu": Kind(*_KINDS["gelu"], gated=True),
    "geglu_exact": Kind(*_KINDS["gelu_exact"], gated=True),
    "quick_geglu": Kind(*_KINDS["quick_gelu"], gated=True),
    "reglu": Kind(*_KINDS["relu"], gated=True),
    "squared_reglu": Kind(*_KINDS["squared_relu"], gated=True),
    "swiglu": Kind(*_KINDS["silu"], gated=True),
    "clamped_swiglu": Kind(*_CLAMPED, gated=True, clamped=True),
}
#: Rows, columns and warps of a program.
TILE, BLOCK_TILE, BACKWARD_TILE = (128, 64, 4), (16, 128, 4), (32, 128, 4)


class Activated(NamedTuple):
    """The results of one pass over the inputs."""

    #: In the inputs' dtype, or None where it was not wanted.
    y: Tensor | None
    quantized: Quantized | None
    #: float32 [1, 1], the amax of y where a spec has one scale for the tensor, or None.
    amax: Tensor | None


def forward(name: str, options: Sequence[float], x: Sequence[Tensor]) -> Tensor:
    """As `quaver.torch.blocks.activation.ACTIVATE`.

    Bounded: relative RMS 1e-6 of float64 before the rounding to x's dtype.
    """
    y = activated(name, options, x).y
    assert y is not None
    return y


def activated(
    name: str,
    options: Sequence[float],
    x: Sequence[Tensor],
    spec: QuantSpec | None = None,
    factor: Tensor | None = None,
    want_output: bool = True,
    rows_wanted: bool = True,
    turned_wanted: bool = False,
) -> Activated:
    """The activation of x, one tensor or two, and its result quantized or measured for a spec as in `gpu.fused.norm`.

    Args:
        spec: of the result as an operand [tokens, d], or None.
        factor: encode factor of the tensor, float32 of one element, not 0: one pass quantizes; None measures.
        want_output: whether y is written too; it is where only its amax is found.
        rows_wanted, turned_wanted: with a factor, whether the codes are written as they lie and transposed; a transpose
            alone is the `T` of what is given back.
    Exact: what is quantized, and the amax, given y.
    """
    kind = "none" if spec is None else mode(spec, factor is not None, _width(name, x))
    assert kind, f"no kernel activates and quantizes by {spec}"
    gate, value = _halves(name, x)
    rows, columns = gate.shape
    y = torch.empty((rows, columns), dtype=gate.dtype, device=gate.device) if want_output or kind == "amax" else None
    q = qt = scale = top = None
    if kind in ("amax", "tensor"):
        top = torch.empty((1, 1), dtype=torch.float32, device=gate.device)
    if kind == "tensor":
        assert spec is not None
        scale = torch.empty((1, 1), dtype=torch.float32, device=gate.device)
        q = empty_codes(rows, columns, spec, gate.device) if rows_wanted else None
        qt = empty_codes(columns, rows, spec, gate.device) if turned_wanted else None
    elif kind not in ("none", "amax"):
        assert spec is not None
        q, scale = room(kind, spec, rows, columns, gate.device)
    tensors: tuple[Any, ...] = (gate, value, y, q)
    if kind in ("none", "amax", "tensor"):
        tensors = (*tensors, in_words(qt), scale, top, factor, workspace(gate.device))
        _tiles(tensors, (gate, value), name, tuple(options), kind, spec)
    else:
        _blocks((*tensors, scale), (gate, value), name, tuple(options), kind, spec)
    output = None if y is None else y.view(*x[0].shape[:-1], columns)
    return Activated(output, _operand(q, qt, scale, top, spec, rows, columns, kind), top)


def _operand(
    q: Tensor | None,
    qt: Tensor | None,
    scale: Tensor | None,
    top: Tensor | None,
    spec: QuantSpec | None,
    rows: int,
    columns: int,
    kind: str,
) -> Quantized | None:
    if spec is None or scale is None:
        return None
    shape = (rows, columns)
    if q is None:
        assert qt is not None
        return Quantized(qt[:, :rows], scale, spec, shape, True, amax=top)
    operand = Quantized(q[:, :columns], scale, spec, shape, amax=top, swizzled=kind == "e8m0")
    if qt is not None:
        operand.twin = Quantized(qt[:, :rows], scale, spec, shape[::-1], amax=top)
        operand.twin.twin = operand
    return operand


def _tile_launch(tensors: tuple[Any, ...], name: str, options: Sequence[float], kind: str, spec: Any) -> Any:
    gate, value, _, q, qt = tensors[:5]
    rows, columns = gate.shape
    bm, bn, warps = TILE
    # Blocks reach over the zeros that end the rows of both results.
    across, down = (columns if q is None else q.shape[1]), (rows if qt is None else qt.shape[1] * 4)
    grid = -(-down // bm), -(-across // bn)
    strides = gate.stride(0), 0 if value is None else value.stride(0), across, 0 if qt is None else qt.shape[1] // 4
    numbers = (rows, columns, *strides, grid[0] * grid[1], *_limits(options))
    constants = {"BM": bm, "BN": bn, "EVEN": rows % bm == 0 and columns % bn == 0, "MODE": kind}
    constants |= _formula(name, False) | _codes(spec, gate.device, ("POWER_OF_TWO", "INTEGERS"))
    return launcher(activate, grid, tensors, numbers, constants, warps)


_tiles = Launches(_tile_launch)


def _block_launch(tensors: tuple[Any, ...], name: str, options: Sequence[float], kind: str, spec: Any) -> Any:
    gate, value, _, q, _ = tensors
    rows, columns = gate.shape
    bm, bn, warps = BLOCK_TILE
    if kind == "row":
        bn = max(256, 1 << (columns - 1).bit_length())
        bm, warps = max(1, 2048 // bn), min(max(bn // 512, 4), 32)
    grid = -(-rows // bm), -(-q.shape[1] // bn)
    scale_stride = -(-columns // 128) * 4 if kind == "e8m0" else rows
    numbers = (rows, columns, gate.stride(0), 0 if value is None else value.stride(0), q.shape[1], scale_stride)
    even = rows % bm == 0 and columns % bn == 0
    constants = {"BM": bm, "BN": bn, "EVEN": even, "MODE": kind, "BLOCK": 32 if kind == "e8m0" else 128}
    form = ("POWER_OF_TWO", "EMAX", "TOP_MANTISSA", "MAX", "INTEGERS")
    constants |= _formula(name, False) | _codes(spec, gate.device, form)
    return launcher(activate_blocks, grid, tensors, (*numbers, *_limits(options)), constants, warps)


_blocks = Launches(_block_launch)


def _formula(name: str, backward: bool) -> dict[str, Any]:
    kind = KINDS[name]
    functions = {"F": kind.forward, "GATED": kind.gated, "CLAMPED": kind.clamped}
    return {**functions, "B": kind.backward} if backward else functions


def _codes(spec: QuantSpec | None, device: torch.device, names: Sequence[str]) -> dict[str, Any]:
    if spec is None:
        return {"POWER_OF_TWO": True, "INTEGERS": False, "CODES": None}
    known = format_constants(spec, device)
    return {**{name: known[name] for name in names}, "CODES": DTYPES[spec.format.name]}


def _limits(options: Sequence[float]) -> tuple[float, float]:
    limit, alpha = tuple(map(float, options)) or (0.0, 0.0)
    return limit, alpha


def backward(name: str, options: Sequence[float], g: Tensor, x: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the inputs, contiguous, as `quaver.torch.blocks.activation.backward`.

    Bounded: relative RMS 1e-6 of float64 before the rounding to x's dtype.
    """
    gate, value = _halves(name, x)
    along = _rows(g)
    of_inputs = [torch.empty(a.shape, dtype=a.dtype, device=a.device) for a in x]
    of_gate, of_value = _halves(name, of_inputs)
    _backwards((along, gate, value, of_gate, of_value), (along, gate, value, of_gate), name, tuple(options))
    return of_inputs


def _backward_launch(tensors: tuple[Any, ...], name: str, options: Sequence[float]) -> Any:
    g, gate, value, of_gate, of_value = tensors
    rows, columns = gate.shape
    bm, bn, warps = BACKWARD_TILE
    grid = -(-rows // bm), -(-columns // bn)
    strides = [0 if x is None else x.stride(0) for x in (g, gate, value, of_gate, of_value)]
    numbers = (rows, columns, *strides, *_limits(options))
    constants = {"BM": bm, "BN": bn, "EVEN": rows % bm == 0 and columns % bn == 0, **_formula(name, True)}
    return launcher(activate_backward, grid, tensors, numbers, constants, warps)


_backwards = Launches(_backward_launch)


def _width(name: str, x: Sequence[Tensor]) -> int:
    return x[0].shape[-1] // (2 if KINDS[name].gated and len(x) == 1 else 1)


def _halves(name: str, x: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Gate (or the one input) and value as matrices whose last axis is contiguous."""
    first = _rows(x[0])
    if not KINDS[name].gated:
        return first, None
    if len(x) == 2:
        return first, _rows(x[1])
    width = first.shape[1] // 2
    return first[:, :width], first[:, width:]


def _rows(x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()
