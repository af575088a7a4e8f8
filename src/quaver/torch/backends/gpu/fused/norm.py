"""Normalizations on a GPU: forward, with what a quantized layer reads of the output from the same pass, and backward.

The numbers are those of `quaver.torch.blocks.prologues.norm` within its bounds; what is quantized is exactly the output
quantized.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.kernels.fused.norm import norm, norm_backward
from quaver.kernels.fused.wide_norm import wide_norm, wide_norm_backward
from quaver.torch.backends.gpu.fused.column_sums import sum_launch
from quaver.torch.backends.gpu.fused.results import WIDEST, Made, mode
from quaver.torch.backends.gpu.launching.launch import aligned, multiprocessors, workspace
from quaver.torch.backends.gpu.launching.passes import Launch, Pass, Passes
from quaver.torch.backends.gpu.launching.rooms import Room, row_major, whole
from quaver.torch.backends.gpu.quantizing.codes import DTYPES, format_constants, room_for_codes
from quaver.torch.numerics.quantized import Quantized

#: The widest row that lies in registers backward, where fewer fit than forward, and the block of wider ones.
WIDEST_BACKWARD, WIDE_BLOCK = 8192, 4096
#: The narrowest, which leaves a warp eight elements a thread.
NARROWEST = 256
#: Programs of a multiprocessor: forward, and backward, where each has sums of its own.
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 8, 2
#: Most neighbours that a thread holds.
MOST = 8
#: Whether the mean is subtracted.
CENTRED = {"LayerNorm": True, "RMSNorm": False, "L2": False}
#: A kernel's constants where nothing is quantized.
_NO_FORMAT = {"POWER_OF_TWO": True, "EMAX": 0, "TOP_MANTISSA": 0, "MAX": 1.0, "INTEGERS": 0}


def forward(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, normalization: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `quaver.torch.blocks.prologues.norm.NORMALIZE`.

    Bounded: relative RMS 1e-6 of float64 before the rounding to x's dtype.
    """
    if not x.is_contiguous() or x.data_ptr() & 15:
        result = normalized(x, gamma, beta, normalization, eps)
        return result.y, *result.saved[3:]
    own = None if gamma is None else gamma.contiguous(), None if beta is None else beta.contiguous()
    y, mean, inverse, *_ = _forwards((x,), normalization, eps, "none", None, True, own=own)
    return y, mean, inverse


def normalized(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    spec: QuantSpec | None = None,
    factor: Tensor | None = None,
    want_output: bool = True,
) -> Made:
    """The normalization of x [..., d], and its output quantized or measured for a spec that `mode` has a name for.

    Args:
        gamma, beta: [d], each in a dtype of its own, or None.
        spec: of the output as an operand [tokens, d], or None.
        factor: encode factor of the tensor, float32 of one element, not 0: one pass quantizes; None measures.
        want_output: whether y is written too; it is where only its amax is found.
    Exact: what is quantized, and the amax, given y.
    """
    columns = x.shape[-1]
    kind = "none" if spec is None else mode(spec, factor is not None, columns)
    assert kind, f"no kernel normalizes and quantizes by {spec}"
    flat = _rows(x)
    gamma, beta = None if gamma is None else gamma.contiguous(), None if beta is None else beta.contiguous()
    own = gamma, beta, factor, workspace(x.device) if kind in MEETING else None
    wanted = want_output or kind == "amax"
    y, mean, inverse, q, scale, top = _forwards((flat,), normalization, eps, kind, spec, wanted, own=own)
    if flat is not x:
        shape = (*x.shape[:-1], 1)
        y, inverse = None if y is None else y.view(x.shape), inverse.view(shape)
        mean = mean.view(shape) if mean.numel() else mean
    operand = None
    if q is not None:
        assert spec is not None
        codes = q if q.shape[1] == columns else q[:, :columns]
        operand = Quantized(codes, scale, spec, (q.shape[0], columns), amax=top, swizzled=kind == "e8m0")
    return Made(y, operand, top, (x, gamma, beta, mean, inverse))


#: Where the programs of a launch meet, to find the amax of the tensor.
MEETING = ("amax", "tensor")


def rooms_for(kind: str, spec: QuantSpec | None, rows: int, columns: int) -> tuple[Room | None, Room | None]:
    """Room for the codes and the scales of a matrix."""
    if spec is None or kind == "amax":
        return None, None
    q = room_for_codes(rows, columns, spec)
    if kind == "e8m0":
        # What no block has is zero.
        ragged = rows % 128 != 0 or columns % 128 != 0
        tiles = whole((-(-rows // 128) * 128 * (-(-columns // 128) * 4),), torch.uint8)
        return q, tiles._replace(zeros=ragged)
    if kind == "blocks":
        return q, row_major((-(-columns // 128), rows), torch.float32, turned=True)
    return q, whole((rows if kind == "row" else 1, 1), torch.float32)


def _forward_pass(
    given: Sequence[Any], normalization: str, eps: float, kind: str, spec: QuantSpec | None, want_output: bool
) -> Pass:
    x, gamma, beta, *others = given
    factor, work = others or (None, None)
    rows, columns, stride = extent(x)
    centred, float32 = CENTRED[normalization], torch.float32
    mean = whole((*x.shape[:-1], 1) if centred else (0,), float32)
    inverse, y = whole((*x.shape[:-1], 1), float32), whole(x.shape, x.dtype) if want_output else None
    top = whole((1, 1), float32) if kind in MEETING else None
    q, scale = rooms_for(kind, spec, rows, columns)
    tensors = (x, gamma, beta, y, q, mean, inverse, scale, top, factor, work)
    q_stride = columns if q is None else q.shape[1]
    programs = min(rows, FORWARD_PROGRAMS * multiprocessors(x.device))
    form = _NO_FORMAT if spec is None else format_constants(spec, x.device)
    constants: dict[str, Any] = {"CENTRED": centred, "MODE": kind, "VECTOR": vector(x)}
    constants["CODES"] = None if spec is None else DTYPES[spec.format.name]
    share = 1.0 / columns
    if columns > WIDEST:
        constants |= {"POWER_OF_TWO": form["POWER_OF_TWO"], "INTEGERS": form["INTEGERS"]}
        constants |= {"BN": WIDE_BLOCK, "STEPS": -(-columns // WIDE_BLOCK)}
        constants["EVEN"] = q_stride == columns and columns % WIDE_BLOCK == 0
        wide = (rows, columns, stride, q_stride, programs, float(eps), share)
        launch = Launch(wide_norm, (programs,), tensors, wide, constants, 16)
    else:
        bn, warps = row_block(columns)
        constants |= {"BN": bn, "EVEN": bn == columns, "HELD": bn <= 8192, "BLOCK": 32 if kind == "e8m0" else 128}
        scale_stride = -(-columns // 128) * 4 if kind == "e8m0" else rows
        numbers = (rows, columns, stride, q_stride, scale_stride, programs, float(eps), share)
        launch = Launch(norm, (programs,), tensors, numbers, {**constants, **form}, warps)
    return Pass(given, (y, mean, inverse, q, scale, top), [launch])


_forwards = Passes(_forward_pass)


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
    """As `quaver.torch.blocks.prologues.norm.NORMALIZE_BACKWARD`; gradients of parameters that are not there are empty.

    Bounded: relative RMS 1e-6 of float64 in float32. Deterministic.
    """
    flat = _rows(x)
    own = None if gamma is None else gamma.contiguous(), mean, inverse
    dx, _, of_gamma, of_beta = _backwards(
        (_rows(g), flat), normalization, None if beta is None else beta.dtype, own=own
    )
    of_gamma = inverse.new_empty(0) if of_gamma is None else of_gamma
    return dx if flat is x else dx.view(x.shape), of_gamma, inverse.new_empty(0) if of_beta is None else of_beta


def _backward_pass(given: Sequence[Any], normalization: str, of_beta: torch.dtype | None) -> Pass:
    g, x, gamma, mean, inverse = given
    rows, columns, stride = extent(x)
    programs = min(rows, BACKWARD_PROGRAMS * multiprocessors(x.device))
    dx, width = whole(x.shape, x.dtype), 0
    partial = sums = of_shift = None
    if gamma is not None:
        width = columns if of_beta is None else 2 * columns
        # Rows in registers are summed there; wider ones add to memory.
        partial = whole((programs, width), torch.float32)._replace(zeros=columns > WIDEST_BACKWARD)
        # Rounded once, to what they are the gradients of.
        sums = whole((columns,), gamma.dtype)
        of_shift = None if of_beta is None else whole((columns,), of_beta)
    tensors = (g, x, gamma, mean, inverse, dx, partial)
    numbers = (rows, columns, extent(g)[2], stride, width, programs, 1.0 / columns)
    constants: dict[str, Any] = {"CENTRED": CENTRED[normalization], "BETA": of_beta is not None, "VECTOR": vector(x, g)}
    if columns > WIDEST_BACKWARD:
        constants |= {"BN": WIDE_BLOCK, "EVEN": columns % WIDE_BLOCK == 0}
        launches = [Launch(wide_norm_backward, (programs,), tensors, numbers, constants, 16)]
    else:
        bn, warps = row_block(columns)
        constants |= {"BN": bn, "EVEN": bn == columns}
        launches = [Launch(norm_backward, (programs,), tensors, numbers, constants, warps)]
    if partial is not None and sums is not None:
        launches.append(sum_launch(partial, sums, programs, width, of_shift))
    return Pass(given, (dx, partial, sums, of_shift), launches)


_backwards = Passes(_backward_pass)


def _rows(x: Tensor) -> Tensor:
    """[..., d] as it is, or as a matrix whose last axis is contiguous."""
    # The order of a sum, and so its bits, must not depend on an address, nor on how far rows lie apart.
    if x.is_contiguous() and not x.data_ptr() & 15:
        return x
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(1) != 1:
        return flat.contiguous()
    columns = flat.shape[1]
    as_alone = math.gcd(MOST, columns, flat.stride(0)) == math.gcd(MOST, columns)
    return flat if aligned(flat) and as_alone else flat.clone(memory_format=torch.contiguous_format)


def extent(x: Tensor) -> tuple[int, int, int]:
    """Rows, columns, and how far rows lie apart, of what `_rows` gives."""
    columns = x.shape[-1]
    return x.numel() // columns, columns, columns if x.is_contiguous() else x.stride(0)


def vector(*matrices: Tensor) -> int:
    """Neighbours in a thread: 16 bytes of the first, or what rows and their distances are multiples of."""
    most = 16 // matrices[0].element_size()
    return math.gcd(most, *(n for x in matrices for n in extent(x)[1:]))
