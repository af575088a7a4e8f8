"""Quantized attention on a GPU: which calls the kernels support, and their tiles and launches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.kernels.attention import UNBOUNDED, attention_columns, attention_rows
from quaver.kernels.attention import attention as forward_kernel
from quaver.recipes.spec import AttentionSpec, QuantSpec
from quaver.torch.backends.gpu.buffers import BufferSpec, whole
from quaver.torch.backends.gpu.device import FP8_GEMMS, architecture, traits
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec
from quaver.torch.backends.gpu.tensorwise import DTYPES, SECOND_AXIS, format_constants, integers, transpose

#: Head dimensions that the tiles support.
FEATURES = 32, 64, 128
#: Supported block widths, besides one scale per row or matrix.
WIDTHS = 32, 64, 128
#: Query or key tokens of a program, tokens per step, and warps: forward, dQ, and dK with dV.
FORWARD, ROWS, COLUMNS = (128, 64, 8), (64, 64, 8), (64, 32, 8)
#: The same for FP8 products: dQ; dK and dV, and those with scales of rows, which take registers. Programs of 128 tokens
#: read the tiles of the others half as often.
FP8_ROWS, FP8_COLUMNS, FP8_COLUMNS_BY_ROWS = (128, 64, 8), (128, 64, 8), (64, 32, 4)
#: Forward and Δ take twice as many tokens per step where tensor cores multiply for warp groups: registers suffice.
FP8_GROUPS = 128, 128, 8
#: The same for float16 products: Δ, and dK and dV.
HALF_SUMS, HALF_COLUMNS = (64, 32, 4), (64, 64, 8)
#: The same for dQ if tiles have their own scales and single warps multiply: half as many queries, whose sums need half
#: the registers, and no product is computed twice.
OF_SCALES = 32, 64, 8
#: KiB of shared memory that suffice for two stages of tile loads.
TWO_STAGES = 160
#: Oldest compute capability (times ten) with tensor memory for sums of products; older ones use registers.
TENSOR_MEMORY = 100
LOG2_E = 1.4426950408889634

#: Codes [B, heads, rows, k], contiguous, and their scales.
Operand = tuple[Tensor, Tensor]


class AttentionOperands(NamedTuple):
    """Operands of the attention GEMMs; the last four are None if a matrix's codes serve its transpose too."""

    q: Operand
    k: Operand
    v: Operand
    do: Operand | None = None
    qt: Operand | None = None
    kt: Operand | None = None
    vt: Operand | None = None
    dot: Operand | None = None


def reason(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str:
    """Return why the kernels do not support q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv], or ""."""
    for one in (spec.input, spec.grad_output):
        if not one.power_of_two:
            return f"its tiles support power-of-two scales only, not those of {one}"
        if one.block[1] not in (None, *WIDTHS):
            return f"it supports blocks of {WIDTHS} elements, whole rows and whole heads, not {one.block[1]}"
    if q.shape[3] not in FEATURES or v.shape[3] not in FEATURES:
        return f"it supports heads of {FEATURES} features, not {q.shape[3]} and {v.shape[3]}"
    if not min(q.numel(), k.numel(), v.numel()):
        return "there is nothing to attend"
    if q.shape[:2].numel() > SECOND_AXIS or max(q.shape[2], k.shape[2]) * max(FEATURES) >= 2**31:
        return "there are more than 65535 heads, or 2^24 tokens"
    return ""


def forward(
    operands: AttentionOperands, runs: Tensor | None, hidden: Tensor | None, sinks: Tensor | None,
    spec: AttentionSpec, scale: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output [B, H, Sq, Dv], stored as [B, Sq, H, Dv], and the softmax's float64 logsumexp [B, H, Sq].

    Args:
        operands: q, k, v; vt replaces v if it is not None.
        runs: int32 [2, Sq], the first key that a query attends to, and one past the last; both nondecreasing.
        hidden: bool, broadcastable to [B, H, Sq, Sk], True where a query must not attend to a key.
        sinks: float32 [H].
    """
    scales = _scales(operands.q[0].device, (spec.input,), _features(operands))
    vt = _transposed(operands.v, operands.vt, scales)
    tensors = (*operands.q, *operands.k, *(vt or operands.v), runs, _bytes(hidden), sinks)
    out, logsumexp = _forward(tensors, spec, scale, dtype, vt is not None)
    return out, logsumexp


def backward(
    operands: AttentionOperands, runs: Tensor | None, hidden: Tensor | None, logsumexp: Tensor,
    spec: AttentionSpec, scale: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v in dtype, and Δ = rowsum(P∘dP), float32 [B, H, Sq]."""
    seen_by = None if runs is None else _seen_by(runs, operands.k[0].shape[2])
    q, k, v, do = operands.q, operands.k, operands.v, operands.do
    assert do is not None
    scales = _scales(q[0].device, (spec.input, spec.grad_output), _features(operands))
    sources = (q, operands.qt), (k, operands.kt), (do, operands.dot)
    pairs = [q, k, v, do, *(_transposed(codes, pair, scales) for codes, pair in sources)]
    tensors = [x for pair in pairs for x in pair or (None, None)]
    delta, _, _, dq, dk, dv = _backward((*tensors, runs, seen_by, _bytes(hidden), logsumexp), spec, scale, dtype)
    return dq, dk, dv, delta


def _features(operands: AttentionOperands) -> int:
    """Return the larger of the widths of q's and v's heads."""
    v = operands.v[0] if operands.vt is None else operands.vt[0].mT
    return max(operands.q[0].shape[3], v.shape[3])


def _bytes(hidden: Tensor | None) -> Tensor | None:
    return None if hidden is None else hidden.view(torch.uint8)


def _seen_by(runs: Tensor, keys: int) -> Tensor:
    """Return int32 [2, keys]: the first query that attends to a key, and one past the last."""
    every = torch.arange(keys, dtype=torch.int32, device=runs.device)
    sequences = [
        torch.searchsorted(ends.contiguous(), every, right=True, out_int32=True) for ends in (runs[1], runs[0])
    ]
    return torch.stack(sequences)


def _width(spec: QuantSpec) -> int:
    return spec.block[1] or UNBOUNDED.value


def _blocks(spec: QuantSpec, scale: Tensor | None) -> int:
    """Return the number of scales per row, 0 if one scale serves the matrix."""
    return 0 if scale is None or spec.per_tensor else scale.shape[3]


def _mask_strides(hidden: Tensor | None) -> tuple[int, ...]:
    """Return the strides of [B, H, Sq, Sk], 0 for broadcast axes."""
    if hidden is None:
        return 0, 0, 0, 0
    return tuple(0 if n == 1 else stride for n, stride in zip(hidden.shape, hidden.stride(), strict=True))


def _tokens_first(x: Tensor, features: int, dtype: torch.dtype) -> BufferSpec:
    """Return the buffer spec of [B, heads, tokens, features] stored as [B, tokens, heads, features]."""
    batch, heads, tokens = x.shape[:3]
    return BufferSpec(
        (batch, heads, tokens, features), (tokens * heads * features, features, heads * features, 1), dtype
    )


def _stages(device: torch.device, crowded: bool = False) -> int:
    """Return the pipeline stages of tile loads: one if registers or shared memory do not suffice for two."""
    return 1 if crowded or traits(device).shared < TWO_STAGES else 2


def _has_fp8(device: torch.device) -> bool:
    """Return True if tensor cores multiply FP8."""
    return architecture(device) >= FP8_GEMMS


def _scales(device: torch.device, specs: Sequence[QuantSpec], features: int) -> str:
    """Return the constant SCALES of the kernels, for heads of this width."""
    if all(one.per_tensor for one in specs):
        return "head"
    # Their tokens are in one block too: steps are as wide at most.
    rows = _has_fp8(device) and all(_width(one) >= max(features, ROWS[1]) for one in specs)
    return "row" if rows else "block"


def _forward_tiles(device: torch.device, scales: str, width: int) -> tuple[tuple[int, int, int], int]:
    """Return tiles and warps of `attention`, and its stages, for blocks of this width."""
    wide = scales != "block" and traits(device).groups and width >= FP8_GROUPS[1]
    return FP8_GROUPS if wide else FORWARD, _stages(device)


def _row_tiles(device: torch.device, scales: str, sums: bool, spans: bool) -> tuple[tuple[int, int, int], int]:
    """Return tiles and warps of `attention_rows`, and its stages.

    Args:
        sums: True if only Δ is computed.
        spans: True if the amax of dS is measured in the same sweep as dQ.
    """
    groups = traits(device).groups
    if scales != "block" and _has_fp8(device):
        return FP8_GROUPS if sums and groups else FP8_ROWS, _stages(device)
    if scales != "block" and sums:
        return HALF_SUMS, _stages(device, crowded=True)
    if scales != "block" or groups:
        return ROWS, _stages(device, crowded=spans and architecture(device) < TENSOR_MEMORY)
    # One stage spills 8 and 16 bytes where codes are made from bits; two stages need 46 KiB.
    return OF_SCALES, 2


def _column_tiles(device: torch.device, scales: str) -> tuple[int, int, int]:
    """Return tiles and warps of `attention_columns`."""
    if scales == "block":
        return COLUMNS
    if not _has_fp8(device):
        return HALF_COLUMNS
    return FP8_COLUMNS if scales == "head" else FP8_COLUMNS_BY_ROWS


def _transposed(codes: Operand, pair: Operand | None, scales: str) -> Operand | None:
    """Return the operand for sums over tokens, codes [B, heads, k, tokens] and scales; None if `codes` serve it."""
    if pair is not None or scales == "block" or not _has_fp8(codes[0].device):
        return pair
    data, scale = codes
    batch, heads, tokens, k = data.shape
    # One matrix of all heads, whose transpose has them side by side in each row.
    rows = transpose(data.view(-1, k))
    return rows.unflatten(1, (batch, heads, tokens)).permute(1, 2, 0, 3), scale


@LaunchPlanCache
def _forward(
    tensors_in: Sequence[Any], spec: AttentionSpec, scale: float, dtype: torch.dtype, transposed: bool
) -> LaunchPlan:
    q, q_scale, k, k_scale, v, v_scale, _, hidden, _ = tensors_in
    batch, heads, queries, dim = q.shape
    groups, keys = k.shape[1:3]
    features = v.shape[2] if transposed else v.shape[3]
    out, logsumexp = _tokens_first(q, features, dtype), whole((batch, heads, queries), torch.float64)
    scales = _scales(q.device, (spec.input,), max(dim, features))
    (bm, bn, warps), stages = _forward_tiles(q.device, scales, _width(spec.input))
    blocks = [_blocks(spec.input, x) for x in (q_scale, k_scale, v_scale)]
    numbers = (
        heads,
        heads // groups,
        queries,
        keys,
        *blocks,
        *v.stride()[1:3],
        *_mask_strides(hidden),
        *out.strides[:3],
        scale * LOG2_E,
    )
    constants = {
        **_shape_constants(spec, dim, features, q.device),
        "TRANSPOSED": transposed,
        "SCALES": scales,
        "BM": bm,
        "BN": bn,
        "STAGES": stages,
    }
    tensors = (*tensors_in, out, logsumexp)
    launch = LaunchSpec(forward_kernel, (-(-queries // bm), batch * heads), tensors, numbers, constants, warps)
    return LaunchPlan(tensors_in, (out, logsumexp), [launch])


def _shape_constants(spec: AttentionSpec, dim: int, features: int, device: torch.device) -> dict[str, Any]:
    codes = DTYPES[spec.input.format.name]
    return {"D": dim, "DV": features, "WIDTH": _width(spec.input), "CODES": codes, "INTEGERS": integers(device)}


@LaunchPlanCache
def _backward(tensors_in: Sequence[Any], spec: AttentionSpec, scale: float, dtype: torch.dtype) -> LaunchPlan:
    q, q_scale, k, k_scale, v, v_scale, do, do_scale, qt, qt_scale, kt, kt_scale, dot, dot_scale, *where = tensors_in
    runs, seen_by, hidden, logsumexp = where
    batch, heads, queries, dim = q.shape
    groups, keys, features = v.shape[1:]
    width, by_head = _width(spec.grad_output), spec.grad_output.per_tensor
    delta, shift = (whole((batch, heads, queries), torch.float32) for _ in range(2))
    amax_values = None
    if by_head:
        amax_values = whole((batch, heads), torch.int32)._replace(zeros=True)
    dq, dk, dv = (_tokens_first(x, x.shape[3], dtype) for x in (q, k, v))
    grad = format_constants(spec.grad_output, q.device) | {"dtype": DTYPES[spec.grad_output.format.name]}
    del grad["POWER_OF_TWO"]
    scales = _scales(q.device, (spec.input, spec.grad_output), max(dim, features))
    constants = {
        **_shape_constants(spec, dim, features, q.device),
        **grad,
        "GRAD_WIDTH": width,
        "SCALES": scales,
        "STAGES": _stages(q.device),
    }
    sizes = (heads, heads // groups, queries, keys)
    blocks = [_blocks(spec.input, x) for x in (q_scale, k_scale, v_scale)]
    mask_strides, numbers = _mask_strides(hidden), (scale * LOG2_E, scale)
    row_constants = {**constants, "TRANSPOSED": kt is not None}
    kt_operand = (k, k_scale) if kt is None else (kt, kt_scale)
    saved, written = (do, do_scale, runs, hidden, logsumexp), (delta, shift, amax_values)
    tensors = (*tensors_in[:6], *kt_operand, *saved, *written, dq)
    do_blocks = _blocks(spec.grad_output, do_scale)
    row_numbers = (
        *sizes,
        *blocks,
        _blocks(spec.input, kt_operand[1]),
        do_blocks,
        *kt_operand[0].stride()[1:3],
        *mask_strides,
        *dq.strides[:3],
        *numbers,
    )
    launches = []
    # The amax of a head is known only after all its programs have finished.
    for sums, gradient in [(True, False), (False, True)] if by_head else [(True, True)]:
        spans = sums and gradient and width > ROWS[1]
        (bm, bn, warps), stages = _row_tiles(q.device, scales, sums and not gradient, spans)
        own = {**row_constants, "BM": bm, "BN": bn, "STAGES": stages, "SUMS": sums, "GRADIENT": gradient}
        grid = -(-queries // bm), batch * heads
        launches.append(LaunchSpec(attention_rows, grid, tensors, row_numbers, own, warps))
    bn, bm, warps = _column_tiles(q.device, scales)
    column_constants = {
        **constants,
        "TRANSPOSED": qt is not None,
        "GRAD_TRANSPOSED": dot is not None,
        "BM": bm,
        "BN": bn,
    }
    qt_operand = (q, q_scale) if qt is None else (qt, qt_scale)
    dot_operand = (do, do_scale) if dot is None else (dot, dot_scale)
    token_tensors = (do, do_scale, *dot_operand, runs, seen_by, hidden)
    column_tensors = (*tensors_in[:6], *qt_operand, *token_tensors, *written, dk, dv)
    transposed = _blocks(spec.input, qt_operand[1]), do_blocks, _blocks(spec.grad_output, dot_operand[1])
    strides = *qt_operand[0].stride()[1:3], *dot_operand[0].stride()[1:3]
    column_numbers = (*sizes, *blocks, *transposed, *strides, *mask_strides, *dk.strides[:3], *dv.strides[:3], *numbers)
    grid = -(-keys // bn), batch * groups
    launches.append(LaunchSpec(attention_columns, grid, column_tensors, column_numbers, column_constants, warps))
    return LaunchPlan(tensors_in, (delta, shift, amax_values, dq, dk, dv), launches)
