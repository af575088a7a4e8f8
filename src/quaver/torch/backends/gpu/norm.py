"""Normalizations and rotary positions on a GPU: launches for forward and backward.

The forward can quantize its output in the same pass. Outputs equal those of `quaver.torch.nn.norm` within its bounds,
and the codes are exactly those of the output quantized separately.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.kernels.norm import norm, norm_backward, wide_norm, wide_norm_backward
from quaver.kernels.rope import rope as kernel
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu.buffers import BufferSpec, row_major, whole
from quaver.torch.backends.gpu.cross_entropy import sum_launch
from quaver.torch.backends.gpu.fused_quantize import DTYPES as DTYPES_rope
from quaver.torch.backends.gpu.fused_quantize import WIDEST, FusedQuantizeResult, mode
from quaver.torch.backends.gpu.launch import (
    LaunchPlan,
    LaunchPlanCache,
    LaunchSpec,
    aligned,
    multiprocessors,
    power_above,
    workspace,
)
from quaver.torch.backends.gpu.tensorwise import DTYPES, buffer_for_codes, format_constants
from quaver.torch.numerics.quantized import Quantized

# ---- normalization ----

#: Widest row that a backward kernel keeps in registers (less than in forward), and the block for wider ones.
WIDEST_BACKWARD, WIDE_BLOCK = 8192, 4096
#: Narrowest block, with eight elements for each thread of a warp.
NARROWEST = 256
#: Programs per multiprocessor, in forward, and in backward, where each program keeps sums of its own.
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 8, 2
#: Largest number of adjacent elements per thread.
MOST = 8
#: True if the normalization subtracts the mean.
CENTRED = {"LayerNorm": True, "RMSNorm": False, "L2": False}
#: Kernel constants if nothing is quantized.
_NO_FORMAT = {"POWER_OF_TWO": True, "EMAX": 0, "TOP_MANTISSA": 0, "MAX": 1.0, "INTEGERS": 0}


def forward(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, normalization: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize x; same arguments and results as `quaver.torch.nn.norm.NORMALIZE`.

    The relative RMS error is at most 1e-6 against float64, before rounding to x's dtype.
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
) -> FusedQuantizeResult:
    """Normalize x [..., d], and quantize or measure the output by a spec that `mode` supports.

    Given y, codes and amax are exact.

    Args:
        gamma, beta: [d], each in its own dtype, or None.
        spec: spec of the output as an operand [tokens, d], or None.
        factor: nonzero encode factor of the tensor, float32 of one element, to quantize in one pass; None measures the
            amax.
        want_output: True to write y too; it is always written if only its amax is measured.
    """
    columns = x.shape[-1]
    kind = "none" if spec is None else mode(spec, factor is not None, columns)
    assert kind, f"no kernel normalizes and quantizes by {spec}"
    flat = _rows(x)
    gamma, beta = None if gamma is None else gamma.contiguous(), None if beta is None else beta.contiguous()
    own = gamma, beta, factor, workspace(x.device) if kind in SYNCHRONIZING else None
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
    return FusedQuantizeResult(y, operand, top, (x, gamma, beta, mean, inverse))


#: Modes whose programs synchronize to find the amax of the tensor.
SYNCHRONIZING = ("amax", "tensor")


def buffers_for(
    kind: str, spec: QuantSpec | None, rows: int, columns: int
) -> tuple[BufferSpec | None, BufferSpec | None]:
    """Return the buffer specs of a matrix's codes and scales; None if not written."""
    if spec is None or kind == "amax":
        return None, None
    q = buffer_for_codes(rows, columns, spec)
    if kind == "e8m0":
        # Scales of padding are zero.
        ragged = rows % 128 != 0 or columns % 128 != 0
        tiles = whole((-(-rows // 128) * 128 * (-(-columns // 128) * 4),), torch.uint8)
        return q, tiles._replace(zeros=ragged)
    if kind == "blocks":
        return q, row_major((-(-columns // 128), rows), torch.float32, transposed=True)
    return q, whole((rows if kind == "row" else 1, 1), torch.float32)


@LaunchPlanCache
def _forwards(
    tensors_in: Sequence[Any], normalization: str, eps: float, kind: str, spec: QuantSpec | None, want_output: bool
) -> LaunchPlan:
    x, gamma, beta, *others = tensors_in
    factor, work = others or (None, None)
    rows, columns, stride = extent(x)
    centred, float32 = CENTRED[normalization], torch.float32
    mean = whole((*x.shape[:-1], 1) if centred else (0,), float32)
    inverse, y = whole((*x.shape[:-1], 1), float32), whole(x.shape, x.dtype) if want_output else None
    top = whole((1, 1), float32) if kind in SYNCHRONIZING else None
    q, scale = buffers_for(kind, spec, rows, columns)
    tensors = (x, gamma, beta, y, q, mean, inverse, scale, top, factor, work)
    q_stride = columns if q is None else q.shape[1]
    programs = min(rows, FORWARD_PROGRAMS * multiprocessors(x.device))
    form = _NO_FORMAT if spec is None else format_constants(spec, x.device)
    constants: dict[str, Any] = {"CENTRED": centred, "MODE": kind, "VECTOR": vector(x)}
    constants["CODES"] = None if spec is None else DTYPES[spec.format.name]
    reciprocal = 1.0 / columns
    if columns > WIDEST:
        constants |= {"POWER_OF_TWO": form["POWER_OF_TWO"], "INTEGERS": form["INTEGERS"]}
        constants |= {"BN": WIDE_BLOCK, "STEPS": -(-columns // WIDE_BLOCK)}
        constants["EVEN"] = q_stride == columns and columns % WIDE_BLOCK == 0
        wide = (rows, columns, stride, q_stride, programs, float(eps), reciprocal)
        launch = LaunchSpec(wide_norm, (programs,), tensors, wide, constants, 16)
    else:
        bn, warps = row_block(columns)
        constants |= {
            "BN": bn,
            "EVEN": bn == columns,
            "IN_REGISTERS": bn <= 8192,
            "BLOCK": 32 if kind == "e8m0" else 128,
        }
        scale_stride = -(-columns // 128) * 4 if kind == "e8m0" else rows
        numbers = (rows, columns, stride, q_stride, scale_stride, programs, float(eps), reciprocal)
        launch = LaunchSpec(norm, (programs,), tensors, numbers, {**constants, **form}, warps)
    return LaunchPlan(tensors_in, (y, mean, inverse, q, scale, top), [launch])


def row_block(columns: int) -> tuple[int, int]:
    """Return the columns of a program that keeps a whole row, and its warps."""
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
    """Return the gradients of x, gamma and beta, as `quaver.torch.nn.norm.NORMALIZE_BACKWARD`; empty for absent
    parameters.

    The relative RMS error is at most 1e-6 against float64 in float32. Deterministic.
    """
    flat = _rows(x)
    own = None if gamma is None else gamma.contiguous(), mean, inverse
    dx, _, grad_gamma, grad_beta = _backwards(
        (_rows(g), flat), normalization, None if beta is None else beta.dtype, own=own
    )
    grad_gamma = inverse.new_empty(0) if grad_gamma is None else grad_gamma
    return dx if flat is x else dx.view(x.shape), grad_gamma, inverse.new_empty(0) if grad_beta is None else grad_beta


@LaunchPlanCache
def _backwards(tensors_in: Sequence[Any], normalization: str, beta_dtype: torch.dtype | None) -> LaunchPlan:
    g, x, gamma, mean, inverse = tensors_in
    rows, columns, stride = extent(x)
    programs = min(rows, BACKWARD_PROGRAMS * multiprocessors(x.device))
    dx, width = whole(x.shape, x.dtype), 0
    partial = sums = grad_beta = None
    if gamma is not None:
        width = columns if beta_dtype is None else 2 * columns
        # Rows in registers are summed there; wider ones are accumulated in memory.
        partial = whole((programs, width), torch.float32)._replace(zeros=columns > WIDEST_BACKWARD)
        # Rounded once, to the dtypes of the parameters.
        sums = whole((columns,), gamma.dtype)
        grad_beta = None if beta_dtype is None else whole((columns,), beta_dtype)
    tensors = (g, x, gamma, mean, inverse, dx, partial)
    numbers = (rows, columns, extent(g)[2], stride, width, programs, 1.0 / columns)
    constants: dict[str, Any] = {
        "CENTRED": CENTRED[normalization],
        "BETA": beta_dtype is not None,
        "VECTOR": vector(x, g),
    }
    if columns > WIDEST_BACKWARD:
        constants |= {"BN": WIDE_BLOCK, "EVEN": columns % WIDE_BLOCK == 0}
        launches = [LaunchSpec(wide_norm_backward, (programs,), tensors, numbers, constants, 16)]
    else:
        bn, warps = row_block(columns)
        constants |= {"BN": bn, "EVEN": bn == columns}
        launches = [LaunchSpec(norm_backward, (programs,), tensors, numbers, constants, warps)]
    if partial is not None and sums is not None:
        launches.append(sum_launch(partial, sums, programs, width, grad_beta))
    return LaunchPlan(tensors_in, (dx, partial, sums, grad_beta), launches)


def _rows(x: Tensor) -> Tensor:
    """Return [..., d] unchanged, or as a matrix with contiguous last axis."""
    # The order of a sum, and so its bits, must not depend on the address or on the row stride.
    if x.is_contiguous() and not x.data_ptr() & 15:
        return x
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(1) != 1:
        return flat.contiguous()
    columns = flat.shape[1]
    as_alone = math.gcd(MOST, columns, flat.stride(0)) == math.gcd(MOST, columns)
    return flat if aligned(flat) and as_alone else flat.clone(memory_format=torch.contiguous_format)


def extent(x: Tensor) -> tuple[int, int, int]:
    """Return rows, columns and row stride of a result of `_rows`."""
    columns = x.shape[-1]
    return x.numel() // columns, columns, columns if x.is_contiguous() else x.stride(0)


def vector(*matrices: Tensor) -> int:
    """Return the adjacent elements per thread: 16 bytes of the first matrix, limited by what divides columns and row
    strides.
    """
    most = 16 // matrices[0].element_size()
    return math.gcd(most, *(n for x in matrices for n in extent(x)[1:]))


# ---- rotary positions ----

#: Most elements of a program's block, and its warps.
BLOCK, WARPS = 2048, 4
#: Widest head.
WIDEST_ROPE = 1024


def reason(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *_: bool) -> str:
    """Return why the kernel does not rotate these, or ""; the caller has checked the device."""
    return _reason(q, cos, sin) or ("" if k is None else _reason(k, cos, sin))


def _reason(x: Tensor, cos: Tensor, sin: Tensor) -> str:
    if x.dtype not in DTYPES_rope or cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
        return "it rotates float32, bfloat16 and float16 by float32 tables"
    if x.dim() not in (3, 4) or x.numel() == 0 or x.shape[-1] > WIDEST_ROPE or x.shape[:-2].numel() >= 2**31:
        return f"it supports nonempty [B, S, H, D] and [T, H, D] with D up to {WIDEST_ROPE} and fewer than 2^31 tokens"
    if cos.shape != sin.shape or cos.stride() != sin.stride() or cos.dim() > x.dim() or cos.dim() < 2:
        return "cosines and sines have different shapes or strides"
    if cos.shape[-2] != 1 or cos.shape[-1] % 2 or cos.shape[-1] > x.shape[-1] or cos.stride(-1) != 1:
        return "the tables do not have one angle per pair, the same for all heads"
    shared = zip(reversed(cos.shape[:-2]), reversed(x.shape[:-2]), strict=False)
    if x.stride(-1) != 1 or any(of_table not in (1, of_x) for of_table, of_x in shared):
        return "features are not contiguous, or the tables do not fit the tokens"
    return ""


def turn(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor | None]:
    """Rotate q, and k of the same tokens if given, by the tables, or back if `back`; results are contiguous.

    The bits equal those of the plain formula in `quaver.torch.nn.attention.rope`.
    """
    q_out, k_out, _ = _passes((q, k, None, cos, sin), interleaved, back)
    return q_out, k_out


def turn_parts(x: Sequence[Tensor], heads: int, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Split one tensor with all heads into rotated q (of `heads` heads), rotated k, and copied v.

    With three tensors, which are gradients, rotate back and join them into one. Same bits as `turn`.
    """
    whole = x[0]
    together: tuple[Tensor, ...] = ()
    groups = (whole.shape[-2] - heads) // 2 if len(x) == 1 else x[1].shape[-2]
    sizes = heads, groups, groups
    if len(x) == 1:
        x = whole.split(sizes, -2)
    else:
        whole = whole.new_empty((*whole.shape[:-2], sum(sizes), whole.shape[-1]))
        together = whole.split(sizes, -2)
    parts = _passes((*x, cos, sin), interleaved, bool(together), own=together)
    return (whole,) if together else tuple(parts)


@LaunchPlanCache
def _passes(tensors_in: Sequence[Any], interleaved: bool, back: bool) -> LaunchPlan:
    q, k, v, cos, sin, *outs = tensors_in
    half = cos.shape[-1] // 2
    wide = power_above(half)
    heads, k_heads = q.shape[-2], 0 if k is None else k.shape[-2]
    block = max(1, min(BLOCK // (2 * wide), power_above(max(heads, k_heads))))
    q_blocks, k_blocks = -(-heads // block), -(-k_heads // block)
    outer, inner = (1, *q.shape[:-2])[-2:]
    constants = {
        "HALF": half,
        "REST": q.shape[-1] - 2 * half,
        "BH": block,
        "BD": wide,
        "BR": power_above(q.shape[-1] - 2 * half),
        "INTERLEAVED": interleaved,
        "BACK": back,
        "EVEN_Q": heads % block == 0 and wide == half,
        "EVEN_K": k_heads % block == 0 and wide == half,
        "FAR": max(n * _strides(x)[2] for n, x in ((heads + block, q), (k_heads + block, k), (k_heads + block, v)))
        >= 2**31,
    }
    buffers = () if outs else tuple(None if x is None else whole(x.shape, x.dtype) for x in (q, k, v))
    rows = [outs[0].stride(-3)] * 2 if outs else [n * q.shape[-1] for n in (heads, k_heads)]
    strides = [stride for x in (q, k, v) for stride in _strides(x)]
    numbers = (inner, heads, k_heads, q_blocks, k_blocks, *rows, *strides, *_strides(cos)[:2])
    grid = outer * inner, q_blocks + (k_blocks if v is None else 2 * k_blocks)
    tensors = (q, k, v, *(outs or buffers), cos, sin)
    return LaunchPlan(tensors_in, buffers, [LaunchSpec(kernel, grid, tensors, numbers, constants, WARPS)])


def _strides(x: Tensor | None) -> tuple[int, int, int]:
    """Return the strides of outer tokens, inner tokens and heads; 0 for a missing or broadcast axis."""
    if x is None:
        return 0, 0, 0
    strides = [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    outer, inner, head = (0, 0, *strides[:-1])[-3:]
    return outer, inner, head
