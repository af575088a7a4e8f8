"""Quantized attention on a GPU: which calls the kernels support, and their tiles and launches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.kernels.attention import UNBOUNDED, attention_columns, attention_rows
from quaver.kernels.attention import attention as forward_kernel
from quaver.recipes.spec import AttentionSpec, QuantSpec
from quaver.torch.backends.gpu.buffers import BufferSpec, whole
from quaver.torch.backends.gpu.device import architecture, traits
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec
from quaver.torch.backends.gpu.tensorwise import DTYPES, SECOND_AXIS, format_constants, integers

#: Head dimensions that the tiles support.
FEATURES = 32, 64, 128
#: Supported block widths, besides one scale per row or matrix.
WIDTHS = 32, 64, 128
#: Query or key tokens of a program, tokens per step, and warps: forward, dQ, and dK with dV.
FORWARD, ROWS, COLUMNS = (128, 64, 8), (64, 64, 8), (64, 32, 8)
#: The same for Δ and dQ with one scale per matrix where tensor cores multiply for warp groups: eight warps sharing 64
#: queries would compute half of each product twice. Then for Δ alone on other GPUs, with codes made from bits, and with
#: casts.
OF_GROUPS, SUMS_ON_BITS, SUMS = (64, 64, 4), (64, 32, 4), (64, 64, 4)
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
    tensors = (*operands.q, *operands.k, *(operands.vt or operands.v), runs, _bytes(hidden), sinks)
    out, logsumexp = _forward(tensors, spec, scale, dtype, operands.vt is not None)
    return out, logsumexp


def backward(
    operands: AttentionOperands, runs: Tensor | None, hidden: Tensor | None, logsumexp: Tensor,
    spec: AttentionSpec, scale: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v in dtype, and Δ = rowsum(P∘dP), float32 [B, H, Sq]."""
    seen_by = None if runs is None else _seen_by(runs, operands.k[0].shape[2])
    pairs = [operands.q, operands.k, operands.v, operands.do, operands.qt, operands.kt, operands.dot]
    tensors = [x for pair in pairs for x in pair or (None, None)]
    delta, _, _, dq, dk, dv = _backward((*tensors, runs, seen_by, _bytes(hidden), logsumexp), spec, scale, dtype)
    return dq, dk, dv, delta


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


def _rows(device: torch.device, half: bool, sums: bool, spans: bool) -> tuple[tuple[int, int, int], int]:
    """Return tiles and warps of `attention_rows`, and its stages.

    Args:
        half: True if tiles are float16.
        sums: True if only Δ is computed.
        spans: True if the amax of dS is measured in the same sweep as dQ.
    """
    groups = traits(device).groups
    if half and groups:
        return OF_GROUPS, _stages(device)
    if half and sums:
        return (SUMS_ON_BITS if integers(device) == 2 else SUMS), _stages(device, crowded=True)
    if half or groups:
        return ROWS, _stages(device, crowded=spans and architecture(device) < TENSOR_MEMORY)
    # One stage spills 8 and 16 bytes where codes are made from bits; two stages need 46 KiB.
    return OF_SCALES, 2


@LaunchPlanCache
def _forward(
    tensors_in: Sequence[Any], spec: AttentionSpec, scale: float, dtype: torch.dtype, transposed: bool
) -> LaunchPlan:
    q, q_scale, k, k_scale, v, v_scale, _, hidden, _ = tensors_in
    batch, heads, queries, dim = q.shape
    groups, keys = k.shape[1:3]
    features = v.shape[2] if transposed else v.shape[3]
    out, logsumexp = _tokens_first(q, features, dtype), whole((batch, heads, queries), torch.float64)
    bm, bn, warps = FORWARD
    blocks = [_blocks(spec.input, x) for x in (q_scale, k_scale, v_scale)]
    numbers = (heads, heads // groups, queries, keys, *blocks, *_mask_strides(hidden), *out.strides[:3], scale * LOG2_E)
    constants = {
        **_shape_constants(spec, dim, features, q.device),
        "TRANSPOSED": transposed,
        "HALF": spec.input.per_tensor,
        "BM": bm,
        "BN": bn,
        "STAGES": _stages(q.device),
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
    constants = {
        **_shape_constants(spec, dim, features, q.device),
        **grad,
        "GRAD_WIDTH": width,
        "STAGES": _stages(q.device),
    }
    sizes = (heads, heads // groups, queries, keys)
    blocks = [_blocks(spec.input, x) for x in (q_scale, k_scale, v_scale)]
    mask_strides, numbers = _mask_strides(hidden), (scale * LOG2_E, scale)
    half = spec.input.per_tensor and by_head
    row_constants = {**constants, "TRANSPOSED": kt is not None, "HALF": half}
    kt_operand = (k, k_scale) if kt is None else (kt, kt_scale)
    saved, written = (do, do_scale, runs, hidden, logsumexp), (delta, shift, amax_values)
    tensors = (*tensors_in[:6], *kt_operand, *saved, *written, dq)
    do_blocks = _blocks(spec.grad_output, do_scale)
    row_numbers = (
        *sizes,
        *blocks,
        _blocks(spec.input, kt_operand[1]),
        do_blocks,
        *mask_strides,
        *dq.strides[:3],
        *numbers,
    )
    launches = []
    # The amax of a head is known only after all its programs have finished.
    for sums, gradient in [(True, False), (False, True)] if by_head else [(True, True)]:
        spans = sums and gradient and width > ROWS[1]
        (bm, bn, warps), stages = _rows(q.device, half, sums and not gradient, spans)
        own = {**row_constants, "BM": bm, "BN": bn, "STAGES": stages, "SUMS": sums, "GRADIENT": gradient}
        grid = -(-queries // bm), batch * heads
        launches.append(LaunchSpec(attention_rows, grid, tensors, row_numbers, own, warps))
    bn, bm, warps = COLUMNS
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
    column_numbers = (*sizes, *blocks, *transposed, *mask_strides, *dk.strides[:3], *dv.strides[:3], *numbers)
    grid = -(-keys // bn), batch * groups
    launches.append(LaunchSpec(attention_columns, grid, column_tensors, column_numbers, column_constants, warps))
    return LaunchPlan(tensors_in, (delta, shift, amax_values, dq, dk, dv), launches)
