"""Normalizations on a GPU: forward, with what a quantized layer reads of the output from the same pass, and backward.

The numbers are those of `quaver.torch.blocks.norm` within its bounds; what is quantized is exactly the output
quantized.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.kernels.fused.norm import norm, norm_backward
from quaver.kernels.fused.wide_norm import wide_norm, wide_norm_backward
from quaver.torch.backends.gpu.fused.column_sums import sum_rows as sum_rows
from quaver.torch.backends.gpu.launching.launch import Launches, aligned, launcher, multiprocessors, workspace
from quaver.torch.backends.gpu.quantizing.codes import empty_codes, format_constants
from quaver.torch.numerics.quantized import FLOAT8, Quantized

#: The widest row that lies in registers, forward and backward, and the block of wider ones.
WIDEST, WIDEST_BACKWARD, WIDE_BLOCK = 16384, 8192, 4096
#: The narrowest, which leaves a warp eight elements a thread.
NARROWEST = 256
#: Programs of a multiprocessor: forward, and backward, where each has sums of its own.
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 8, 2
#: Most neighbours that a thread holds.
MOST = 8
#: Whether the mean is subtracted.
CENTRED = {"LayerNorm": True, "RMSNorm": False, "L2": False}
#: A kernel's constants where nothing is quantized.
_NO_FORMAT = {"POWER_OF_TWO": True, "EMAX": 0, "TOP_MANTISSA": 0, "MAX": 1.0, "INTEGERS": False}


class Normalized(NamedTuple):
    """The results of one pass over x."""

    #: In x's dtype, or None where it was not wanted.
    y: Tensor | None
    #: float32 [..., 1]; empty unless means are subtracted.
    mean: Tensor
    inverse: Tensor
    #: y quantized, or None.
    quantized: Quantized | None
    #: float32 [1, 1], the amax of y where a spec has one scale for the tensor, or None.
    amax: Tensor | None


def mode(spec: QuantSpec, one_pass: bool, columns: int) -> str:
    """The name of what the kernel writes for a spec, or "" where one pass saves nothing.

    Args:
        one_pass: whether the encode factor of the tensor is known.
    """
    if spec.format.name not in FLOAT8 or spec.rounding != "nearest" or spec.hadamard:
        return ""
    if spec.per_tensor and spec.scale in ("fp32", "power_of_two"):
        return "tensor" if one_pass else "amax"
    if columns > WIDEST:
        return ""
    if spec.block == (1, None) and spec.scale in ("fp32", "power_of_two"):
        return "row"
    if spec.block == (1, 128) and spec.scale in ("fp32", "power_of_two"):
        return "blocks"
    return "e8m0" if spec.block == (1, 32) and spec.scale == "e8m0" else ""


def forward(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, normalization: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `quaver.torch.blocks.norm.NORMALIZE`.

    Bounded: relative RMS 1e-6 of float64 before the rounding to x's dtype.
    """
    result = normalized(x, gamma, beta, normalization, eps)
    assert result.y is not None
    return result.y, result.mean, result.inverse


def normalized(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    spec: QuantSpec | None = None,
    factor: Tensor | None = None,
    want_output: bool = True,
) -> Normalized:
    """The normalization of x [..., d], and its output quantized or measured for a spec that `mode` has a name for.

    Args:
        gamma, beta: [d], each in a dtype of its own, or None.
        spec: of the output as an operand [tokens, d], or None.
        factor: encode factor of the tensor, float32 of one element, not 0: one pass quantizes; None measures.
        want_output: whether y is written too; it is where only its amax is found.
    Exact: what is quantized, and the amax, given y.
    """
    columns = x.shape[-1]
    flat = _rows(x)
    rows = flat.shape[0]
    gamma, beta = None if gamma is None else gamma.contiguous(), None if beta is None else beta.contiguous()
    kind = "none" if spec is None else mode(spec, factor is not None, columns)
    assert kind, f"no kernel normalizes and quantizes by {spec}"
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device) if want_output or kind == "amax" else None
    centred = CENTRED[normalization]
    mean = torch.empty((rows if centred else 0,), dtype=torch.float32, device=x.device)
    inverse = torch.empty((rows,), dtype=torch.float32, device=x.device)
    top = torch.empty((1, 1), dtype=torch.float32, device=x.device) if kind in ("amax", "tensor") else None
    q, scale = (None, None) if spec is None or kind == "amax" else room(kind, spec, rows, columns, x.device)
    tensors = (flat, gamma, beta, y, q, mean, inverse, scale, top, factor, workspace(x.device))
    _forwards(tensors, (flat, gamma, beta), normalization, eps, kind, spec)
    shape = (*x.shape[:-1], 1)
    operand = None
    if q is not None:
        assert spec is not None and scale is not None
        operand = Quantized(q[:, :columns], scale, spec, (rows, columns), amax=top, swizzled=kind == "e8m0")
    return Normalized(
        None if y is None else y.view(x.shape), mean.view(shape) if centred else mean, inverse.view(shape), operand, top
    )


def room(kind: str, spec: QuantSpec, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    q = empty_codes(rows, columns, spec, device)
    if kind == "e8m0":
        blocks = -(-columns // 128) * 4
        whole = rows % 128 == 0 and columns % 128 == 0
        scale = torch.empty((-(-rows // 128) * 128 * blocks,), dtype=torch.uint8, device=device)
        # What no block has is zero.
        return q, scale if whole else scale.zero_()
    if kind == "blocks":
        return q, torch.empty((-(-columns // 128), rows), dtype=torch.float32, device=device).t()
    return q, torch.empty((rows if kind == "row" else 1, 1), dtype=torch.float32, device=device)


def _forward_launch(tensors: tuple[Any, ...], normalization: str, eps: float, kind: str, spec: QuantSpec | None) -> Any:
    x, q = tensors[0], tensors[4]
    rows, columns = x.shape
    q_stride = columns if q is None else q.shape[1]
    programs = min(rows, FORWARD_PROGRAMS * multiprocessors(x.device))
    form = _NO_FORMAT if spec is None else format_constants(spec, x.device)
    constants = {"CENTRED": CENTRED[normalization], "MODE": kind, "VECTOR": vector(x)}
    share = 1.0 / columns
    if columns > WIDEST:
        constants |= {"POWER_OF_TWO": form["POWER_OF_TWO"], "INTEGERS": form["INTEGERS"]}
        constants |= {"BN": WIDE_BLOCK, "EVEN": q_stride == columns and columns % WIDE_BLOCK == 0}
        wide = (rows, columns, x.stride(0), q_stride, programs, float(eps), share)
        return launcher(wide_norm, (programs,), tensors, wide, constants, 16)
    bn, warps = row_block(columns)
    constants |= {"BN": bn, "EVEN": bn == columns, "HELD": bn <= 8192, "BLOCK": 32 if kind == "e8m0" else 128, **form}
    scale_stride = -(-columns // 128) * 4 if kind == "e8m0" else rows
    numbers = (rows, columns, x.stride(0), q_stride, scale_stride, programs, float(eps), share)
    return launcher(norm, (programs,), tensors, numbers, constants, warps)


_forwards = Launches(_forward_launch)


def row_block(columns: int) -> tuple[int, int]:
    """Columns of a program that holds a whole row, and its warps."""
    bn = max(NARROWEST, 1 << (columns - 1).bit_length())
    return bn, min(max(bn // 512, 1), 32)


def backward(
    g: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    normalization: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `quaver.torch.blocks.norm.backward`; gradients of parameters that are not there are empty.

    Bounded: relative RMS 1e-6 of float64 in float32. Deterministic.
    """
    flat, along = _rows(x), _rows(g)
    rows, columns = flat.shape
    dx = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    gamma = None if gamma is None else gamma.contiguous()
    programs = min(rows, BACKWARD_PROGRAMS * multiprocessors(x.device))
    partial = None
    if gamma is not None:
        width = columns if beta is None else 2 * columns
        partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
        if columns > WIDEST_BACKWARD:
            # Rows in registers are summed there; wider ones add to memory.
            partial.zero_()
    tensors = (along, flat, gamma, mean, inverse, dx, partial)
    _backwards(tensors, (along, flat, gamma), normalization, beta is not None, programs)
    nothing = inverse.new_empty(0)
    if partial is None:
        return dx.view(x.shape), nothing, nothing
    assert gamma is not None
    # Rounded once, to what they are the gradients of.
    sums = sum_rows(partial, gamma.dtype if beta is None or beta.dtype is gamma.dtype else torch.float32)
    return dx.view(x.shape), sums[:columns], nothing if beta is None else sums[columns:]


def _backward_launch(tensors: tuple[Any, ...], normalization: str, has_beta: bool, programs: int) -> Any:
    g, x, partial = tensors[0], tensors[1], tensors[6]
    rows, columns = x.shape
    share = 1.0 / columns
    width = 0 if partial is None else partial.shape[1]
    numbers = (rows, columns, g.stride(0), x.stride(0), width, programs, share)
    constants: dict[str, Any] = {"CENTRED": CENTRED[normalization], "BETA": has_beta, "VECTOR": vector(x, g)}
    if columns > WIDEST_BACKWARD:
        constants |= {"BN": WIDE_BLOCK, "EVEN": columns % WIDE_BLOCK == 0}
        return launcher(wide_norm_backward, (programs,), tensors, numbers, constants, 16)
    bn, warps = row_block(columns)
    constants |= {"BN": bn, "EVEN": bn == columns}
    return launcher(norm_backward, (programs,), tensors, numbers, constants, warps)


_backwards = Launches(_backward_launch)


def _rows(x: Tensor) -> Tensor:
    """[..., d] as a matrix whose last axis is contiguous."""
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(1) != 1:
        return flat.contiguous()
    # The order of a sum, and so its bits, must not depend on an address, nor on how far rows lie apart.
    columns = flat.shape[1]
    as_alone = math.gcd(MOST, columns, flat.stride(0)) == math.gcd(MOST, columns)
    return flat if aligned(flat) and as_alone else flat.clone(memory_format=torch.contiguous_format)


def vector(*matrices: Tensor) -> int:
    """Neighbours in a thread: 16 bytes of the first, or what rows and their distances are multiples of."""
    most = 16 // matrices[0].element_size()
    return math.gcd(most, *(n for x in matrices for n in (x.shape[1], x.stride(0))))
