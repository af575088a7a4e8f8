"""Attention with every GEMM quantized, as an autograd function; Triton kernels or plain torch.

Backward saves the codes of q, k and v, a logarithm per query, the mask and the bias, but no matrix of scores. Forward
and backward are one custom operator each, so that a compiled graph gives the bits of eager mode.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from quaver.recipes.spec import PROBABILITY_FACTOR, AttentionSpec, QuantSpec
from quaver.torch.backends.gpu import device
from quaver.torch.nn.attention.backends import (
    QuantizedHeads,
    along_rows,
    empty_heads,
    quantize_along_rows,
    quantize_heads,
)
from quaver.torch.nn.attention.inputs import AttentionCall, outside_of
from quaver.torch.numerics.rounding import is_tracing, uniform
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import NO_DOUBLE_BACKWARD, first_derivative, refuse_transforms
from quaver.torch.operations.operation import Implementation, Operation
from quaver.torch.state.context import active_context
from quaver.torch.state.selective_checkpoint import hide_from_policies

# ---- forward and backward in plain torch: `quaver.reference.attention`, many heads at once ----
#
# As in the reference, values between two quantizations are float64 and are rounded to float32 before they are
# quantized. Backward recomputes scores and probabilities bit for bit from the codes of q and k and the softmax's
# logarithms. Heads are processed a few at a time, so that at most a few million scores exist at once.

HeadsOrNone = TypeVar("HeadsOrNone", QuantizedHeads, QuantizedHeads | None)

#: Maximum number of scores that exist at once, unless a single group of heads has more.
SCORES = 1 << 21


class Fp8AttentionOptions(NamedTuple):
    """Arguments of forward and backward besides the tensors that have gradients."""

    #: bool, [1 or B, 1 or H, 1 or Sq, 1 or Sk], True where a query may not see a key; or None.
    hidden: Tensor | None
    #: int64 [1], seed of the dropout mask; None without dropout.
    draw: Tensor | None
    scale: float
    soft_cap: float | None
    dropout: float
    spec: AttentionSpec


class SavedOperands(NamedTuple):
    """Quantized operands that are saved for backward."""

    q: QuantizedHeads
    k: QuantizedHeads
    v: QuantizedHeads
    #: q.T quantized along Sq, and k.T along Sk; None if they equal the transposes of q and k.
    qt: QuantizedHeads | None
    kt: QuantizedHeads | None


class BatchHeadSlice(NamedTuple):
    """A range of batches, and a range of groups with the query heads that they serve."""

    number: int
    batch: slice
    groups: slice
    heads: slice

    @property
    def number_of_groups(self) -> int:
        return self.groups.stop - self.groups.start

    def of(self, x: Tensor) -> Tensor:
        """Slice a tensor that broadcasts to [B, H, Sq, Sk]."""
        everything = slice(None)
        return x[self.batch if x.shape[0] > 1 else everything, self.heads if x.shape[1] > 1 else everything]


def parts(batch: int, heads: int, groups: int, queries: int, keys: int) -> Iterator[BatchHeadSlice]:
    """Yield slices of all batches and heads with at most `SCORES` scores, or one group, each."""
    shared = heads // groups
    at_once = max(SCORES // max(shared * queries * keys, 1), 1)
    batches, some = max(at_once // groups, 1), min(at_once, groups)
    number = 0
    for b in range(0, batch, batches):
        for g in range(0, groups, some):
            last = min(g + some, groups)
            yield BatchHeadSlice(number, slice(b, b + batches), slice(g, last), slice(g * shared, last * shared))
            number += 1


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    options: Fp8AttentionOptions,
    training: bool,
) -> tuple[Tensor, Tensor, SavedOperands | None]:
    """Compute attention of q [B, H, Sq, D] on k [B, G, Sk, D] and v [B, G, Sk, Dv] with quantized GEMMs.

    Args:
        q, k, v: float32, bfloat16 or float16.
        bias: added to the scores, or None.
        sinks: logits [H] of an extra softmax column, or None.
        options: further options.
        training: True to return the operands for backward.
    Returns:
        The output [B, H, Sq, Dv]; the logsumexp of the scores, float64 [B, H, Sq], -inf for a query that sees nothing;
        the operands for backward, or None.
    """
    spec = options.spec.input
    codes_q, codes_k = quantize_heads(q, spec), quantize_heads(k, spec)
    codes_v = quantize_heads(v, spec) if training or spec.transposable else None
    codes_vt = None if spec.transposable else quantize_heads(v.mT, spec)
    out = empty_tokens(q, q.shape[1], q.shape[2], v.shape[3])
    logsumexp = q.new_empty(q.shape[:3], dtype=torch.float64)
    for part in _parts(codes_q, codes_k):
        scores, _ = _scores(codes_q, codes_k, bias, options, part)
        total = torch.logsumexp(scores, -1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks[part.heads, None].double())
        logsumexp[part.batch, part.heads] = total
        p = _codes(_softmax(scores, total), dropout_mask(options, part, scores.shape))
        values = along_rows(_groups(codes_v, part), _groups(codes_vt, part))
        y = _grouped(p, values.shape[1]) @ values
        y = y.mul_(1 / PROBABILITY_FACTOR).div_(1 - options.dropout)
        out[part.batch, part.heads] = _ungrouped(y, p).float().to(q.dtype)
    if codes_v is None or not training:
        return out, logsumexp, None
    qt, kt = quantize_along_rows(q, spec, codes_q), quantize_along_rows(k, spec, codes_k)
    return out, logsumexp, SavedOperands(codes_q, codes_k, codes_v, qt, kt)


def backward(
    grad: Tensor,
    logsumexp: Tensor,
    residuals: SavedOperands,
    bias: Tensor | None,
    sinks: Tensor | None,
    options: Fp8AttentionOptions,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of q, k, v, bias and sinks, None where not needed, for grad [B, H, Sq, Dv]."""
    need_q, need_k, need_v, need_bias, need_sinks = needs
    spec = options.spec.grad_output
    do = quantize_heads(grad, spec)
    dot = quantize_along_rows(grad, spec, do) if need_v else None
    delta = torch.empty_like(logsumexp)
    q, k, v = (x.data for x in (residuals.q, residuals.k, residuals.v))
    dq, dk, dv = (
        empty_tokens(grad, x.shape[1], *x.shape[2:]) if need else None
        for x, need in ((q, need_q), (k, need_k), (v, need_v))
    )
    dbias = bias.new_zeros(bias.shape, dtype=torch.float64) if bias is not None and need_bias else None
    for part in _parts(residuals.q, residuals.k):
        scores, slope = _scores(residuals.q, residuals.k, bias, options, part)
        p = _softmax(scores, logsumexp[part.batch, part.heads])
        mask = dropout_mask(options, part, p.shape)
        if dv is not None:
            g = along_rows(_heads(do, part), _heads(dot, part))
            per_head = (_codes(p, mask).mT @ g).mul_(1 / PROBABILITY_FACTOR).div_(1 - options.dropout)
            dv[part.batch, part.groups] = _sum_shared(per_head, part.number_of_groups).float().to(grad.dtype)
        if need_q or need_k or need_sinks or dbias is not None:
            values = _groups(residuals.v, part).decode()
            dp = _grouped(_heads(do, part).decode(), values.shape[1]) @ values.mT
            dp = dp.view(p.shape).div_(1 - options.dropout)
            if mask is not None:
                dp.masked_fill_(~mask, 0)
            delta[part.batch, part.heads] = own = (dp * p).sum(-1)
            ds = dp.sub_(own.unsqueeze(-1)).mul_(p)
            if dbias is not None:
                _add_to_bias(dbias, ds, part)
            if need_q or need_k:
                _scores_backward(ds if slope is None else ds.mul_(slope), residuals, options, part, dq, dk)
    dsinks = None
    if sinks is not None and need_sinks:
        dsinks = -((sinks.double()[:, None] - logsumexp).exp() * delta).sum((0, 2)).float().to(sinks.dtype)
    grad_bias = None if dbias is None or bias is None else dbias.float().to(bias.dtype)
    return [dq, dk, dv, grad_bias, dsinks]


def dropout_mask(options: Fp8AttentionOptions, part: BatchHeadSlice, shape: Sequence[int]) -> Tensor | None:
    """Return the dropout mask [b, h, Sq, Sk] of a slice, True where kept; repeated calls return the same mask."""
    if options.draw is None:
        return None
    batch, heads, queries, keys = shape
    rows = batch * heads * queries
    u = uniform(rows, keys, 0, part.number, options.draw, options.draw.device)
    return (u >= options.dropout).view(batch, heads, queries, keys)


def empty_tokens(like: Tensor, heads: int, tokens: int, features: int) -> Tensor:
    """Return an uninitialized [B, heads, tokens, features] stored as [B, tokens, heads, features], as projections
    need it.
    """
    return like.new_empty((like.shape[0], tokens, heads, features)).transpose(1, 2)


def _parts(q: QuantizedHeads, k: QuantizedHeads) -> Iterator[BatchHeadSlice]:
    batch, heads, queries, _ = q.data.shape
    return parts(batch, heads, k.data.shape[1], queries, k.data.shape[2])


def _heads(x: HeadsOrNone, part: BatchHeadSlice) -> HeadsOrNone:
    """Return the slice of an operand with query heads."""
    return None if x is None else x.part(part.batch, part.heads)


def _groups(x: HeadsOrNone, part: BatchHeadSlice) -> HeadsOrNone:
    """Return the slice of an operand with key/value heads."""
    return None if x is None else x.part(part.batch, part.groups)


def _scores(
    q: QuantizedHeads, k: QuantizedHeads, bias: Tensor | None, options: Fp8AttentionOptions, part: BatchHeadSlice
) -> tuple[Tensor, Tensor | None]:
    """Return the scores of a slice, float64 [b, h, Sq, Sk], -inf where hidden; and the derivative of soft_cap or
    None.
    """
    left, right = _heads(q, part).decode(), _groups(k, part).decode()
    scores = _grouped(left, right.shape[1]) @ right.mT
    scores = scores.view(*left.shape[:3], right.shape[2]).mul_(options.scale)
    slope = None
    if options.soft_cap is not None:
        bent = scores.div_(options.soft_cap).tanh_()
        slope = 1 - bent * bent
        scores = bent.mul_(options.soft_cap)
    if bias is not None:
        scores += part.of(bias)
    if options.hidden is not None:
        scores.masked_fill_(part.of(options.hidden), -torch.inf)
    return scores, slope


def _softmax(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Return float32 probabilities, 0 in rows that see nothing; overwrites the scores."""
    # -inf minus -inf would be NaN.
    shift = torch.where(logsumexp == -torch.inf, 0.0, logsumexp)
    return scores.sub_(shift.unsqueeze(-1)).exp_().float()


def _codes(p: Tensor, mask: Tensor | None) -> Tensor:
    """Return probabilities times `PROBABILITY_FACTOR`, rounded to E4M3, as float64; 0 where dropped."""
    if mask is not None:
        p = p.masked_fill(~mask, 0)
    return (p * PROBABILITY_FACTOR).to(torch.float8_e4m3fn).float().double()


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Reshape [b, h, rows, k] to [b, g, rows of the heads that share a group, k]."""
    batch, heads, rows, k = x.shape
    return x.reshape(batch, groups, heads // groups * rows, k)


def _ungrouped(x: Tensor, like: Tensor) -> Tensor:
    """Undo `_grouped`: reshape to [b, h, rows, k], with the first three sizes of `like`."""
    return x.view(*like.shape[:3], x.shape[3])


def _sum_shared(x: Tensor, groups: int) -> Tensor:
    """Sum over the heads that share a group: [b, h, rows, k] to [b, g, rows, k]."""
    return x.unflatten(1, (groups, x.shape[1] // groups)).sum(2)


def _scores_backward(
    ds: Tensor,
    residuals: SavedOperands,
    options: Fp8AttentionOptions,
    part: BatchHeadSlice,
    dq: Tensor | None,
    dk: Tensor | None,
) -> None:
    """Write the slice of dq = dS k scale and of dk = dS.T q scale, where dS is the gradient before scaling."""
    spec, ds = options.spec.grad_output, ds.float()
    codes = quantize_heads(ds, spec)
    if dq is not None:
        keys = along_rows(_groups(residuals.k, part), _groups(residuals.kt, part))
        per_group = (_grouped(codes.decode(), keys.shape[1]) @ keys).mul_(options.scale)
        dq[part.batch, part.heads] = _ungrouped(per_group, ds).float().to(dq.dtype)
    if dk is not None:
        queries = along_rows(_heads(residuals.q, part), _heads(residuals.qt, part))
        transposed = along_rows(codes, quantize_along_rows(ds, spec, codes)).mT
        summed = _sum_shared(transposed @ queries, part.number_of_groups).mul_(options.scale)
        dk[part.batch, part.groups] = summed.float().to(dk.dtype)


def _add_to_bias(dbias: Tensor, ds: Tensor, part: BatchHeadSlice) -> None:
    """Add the scores' gradient to the bias's, summed over the axes that were broadcast."""
    narrow = [dim for dim in range(4) if dbias.shape[dim] == 1]
    part.of(dbias).add_(ds.sum(narrow, keepdim=True) if narrow else ds)


# ---- autograd function and public entry ----

#: Number of different dropout seeds.
_DRAWS = 1 << 31


def attention_fp8(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec) -> Tensor:
    """Return softmax(cap(q kᵀ scale) + bias) v with the operands of all GEMMs quantized, each head on its own.

    Args:
        q: [B, H, Sq, D] in float32, bfloat16 or float16.
        k: [B, G, Sk, D]; each of G heads serves H / G heads of q and is quantized once.
        v: [B, G, Sk, Dv].
        call: the options. Hidden keys still count in the amax of their blocks.
        spec: how to quantize; `Recipe.attention`.
    Returns:
        [B, H, Sq, Dv] in q's dtype; 0 for a query that sees nothing. A block of an operand with an infinity or NaN has
        scale NaN. Once differentiable in q, k, v, bias and sinks.
    Raises:
        ValueError: another dtype.
    Exact: the codes equal those of `quaver.reference.attention`, eager and compiled; with the kernels those of q, k, v
        and the output's gradient. Bounded: output and gradients, relative RMS 1e-6 of that reference in float32, 1e-3
        with the kernels, 2e-2 where Ada or Hopper multiply FP8. Statistical: dropout.
    """
    if q.dtype not in ops.DTYPES:
        raise ValueError(
            f"quantized attention takes float32, bfloat16 or float16, not {q.dtype}: convert q, k and v, or use a "
            "recipe without attention=True"
        )
    # Kernels take ranges of visible keys; on a CPU the mask is a tensor that layers share.
    by_runs = call.mask is None and (not q.is_cpu or bool(device.forced_implementations))
    hidden, runs = (None, call.runs(q, k)) if by_runs else (call.hidden(q, k), None)
    bias, sinks, soft_cap = call.whole_bias(q, k), call.sinks, call.soft_cap
    refuse_transforms(q, k, v, bias, sinks)
    draw = torch.randint(_DRAWS, (1,), dtype=torch.int64, device=q.device) if call.dropout else None
    numbers = float(call.scale), None if soft_cap is None else float(soft_cap), float(call.dropout)
    texts = spec.input.text, spec.grad_output.text
    apply: Any = _Fp8AttentionFunction.apply
    if not is_tracing() and active_context.apply_override is not None:
        apply = active_context.apply_override(_Fp8AttentionFunction, apply)
    out: Tensor = apply(q, k, v, bias, sinks, hidden, runs, draw, numbers, texts, torch.is_grad_enabled())
    return out


def explain(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: Tensor | None, soft_cap: float | None, dropout: float
) -> list[tuple[str, str]]:
    """Return (implementation, "" or why it does not run) in order of preference, for a call with these arguments."""
    texts = spec.input.text, spec.grad_output.text
    rows = FORWARD.explain(q, k, v, bias, None, None, None, None, 1.0, soft_cap, dropout, *texts, True)
    return [("fp8" if name == "reference" else f"fp8 {name}", why) for name, why in rows]


class _Fp8AttentionFunction(torch.autograd.Function):
    """Autograd function of quantized attention; saves only plain tensors."""

    @staticmethod
    @hide_from_policies
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        hidden: Tensor | None,
        runs: Tensor | None,
        draw: Tensor | None,
        numbers: tuple[float, float | None, float],
        texts: tuple[str, str],
        grad_enabled: bool,
    ) -> Tensor:
        training = grad_enabled and any(ctx.needs_input_grad)
        out, *residuals = FORWARD(q, k, v, bias, sinks, hidden, runs, draw, *numbers, *texts, training)
        ctx.save_for_backward(bias, sinks, hidden, runs, draw, *residuals)
        ctx.constants = numbers, texts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return first_derivative(_gradients, ctx, NO_DOUBLE_BACKWARD, grad)


def _gradients(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Any, ...]:
    bias, sinks, hidden, runs, draw, *residuals = saved
    numbers, texts = ctx.constants
    needs = [bool(need) for need in ctx.needs_input_grad[:5]]
    gradients = iter(BACKWARD(grad, residuals, bias, sinks, hidden, runs, draw, *numbers, *texts, needs))
    return (*(next(gradients) if need else None for need in needs), None, None, None, None, None, None)


# ---- operators, whose arguments are lists of plain tensors ----


def _options(
    keys: int,
    hidden: Tensor | None,
    runs: Tensor | None,
    draw: Tensor | None,
    scale: float,
    cap: float | None,
    dropout: float,
    *texts: str,
) -> Fp8AttentionOptions:
    if runs is not None:
        hidden = outside_of(runs, keys)
    return Fp8AttentionOptions(hidden, draw, scale, cap, dropout, AttentionSpec(*map(QuantSpec.parse, texts)))


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, *rest: Any) -> list[Tensor]:
    *options, training = rest
    out, logsumexp, residuals = forward(q, k, v, bias, sinks, _options(k.shape[2], *options), training)
    return [out] if residuals is None else [out, logsumexp, *_flat(residuals)]


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, *rest: Any
) -> list[Tensor]:
    *_, text, _, training = rest
    out = empty_tokens(q, q.shape[1], q.shape[2], v.shape[3])
    if not training:
        return [out]
    spec = QuantSpec.parse(text)
    q0, k0, v0 = (empty_heads(x, tuple(x.shape), spec) for x in (q, k, v))
    transposed = (None, None) if spec.transposable else (empty_heads(x, tuple(x.mT.shape), spec) for x in (q, k))
    return [out, q.new_empty(q.shape[:3], dtype=torch.float64), *_flat(SavedOperands(q0, k0, v0, *transposed))]


def _backward(
    grad: Tensor,
    residuals: Sequence[Tensor],
    bias: Tensor | None,
    sinks: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    *options, needs = rest
    logsumexp, *codes = residuals
    ready = _options(codes[2].shape[2], *options)
    gradients = backward(grad, logsumexp, _restore(codes, ready.spec.input), bias, sinks, ready, needs)
    return [x for x in gradients if x is not None]


def _backward_fake(
    grad: Tensor, residuals: Sequence[Tensor], bias: Tensor | None, sinks: Tensor | None, *rest: Any
) -> list[Tensor]:
    needs = rest[-1]
    grad_qkv = [empty_tokens(grad, x.shape[1], x.shape[2], x.shape[3]) for x in residuals[1:7:2]]
    gradients = [*grad_qkv, *(None if x is None else torch.empty_like(x) for x in (bias, sinks))]
    return [x for x, need in zip(gradients, needs, strict=True) if need and x is not None]


def _flat(residuals: SavedOperands) -> list[Tensor]:
    return [x for heads in residuals if heads is not None for x in (heads.data, heads.scale)]


def _restore(codes: Sequence[Tensor], spec: QuantSpec) -> SavedOperands:
    heads = [QuantizedHeads(data, scale, spec) for data, scale in zip(codes[::2], codes[1::2], strict=True)]
    return SavedOperands(heads[0], heads[1], heads[2], *(heads[3:] or (None, None)))


def _flops(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of q kᵀ and P v for all pairs, as torch counts attention."""
    return 2 * q.shape[:3].numel() * k.shape[2] * (k.shape[3] + v.shape[3])


def _flops_backward(grad: Tensor, residuals: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Return the FLOPs of q kᵀ again, and of two GEMMs each for the gradients of scores and of values, as torch
    counts.
    """
    q, k, v = residuals[1:7:2]
    return 2 * q.shape[:3].numel() * k.shape[2] * (3 * q.shape[3] + 2 * v.shape[3])


_KERNELS = "quaver.torch.nn.attention.fp8_kernels"
_OPTIONS = (
    "Tensor? hidden, Tensor? runs, Tensor? draw, float scale, float? soft_cap, float dropout,"
    " str input, str grad_output"
)


FORWARD: Operation[list[Tensor]] = Operation(
    f"attention_fp8(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, {_OPTIONS}, bool training) -> Tensor[]",
    [
        Implementation("triton", f"{_KERNELS}:forward", f"{_KERNELS}:reason", ops.no_kernels),
        Implementation("reference", _forward),
    ],
    fake=_forward_fake,
    flops=_flops,
)
BACKWARD: Operation[list[Tensor]] = Operation(
    "attention_fp8_backward(Tensor grad, Tensor[] kept, Tensor? bias, Tensor? sinks,"
    f" {_OPTIONS}, bool[] needs) -> Tensor[]",
    [
        Implementation("triton", f"{_KERNELS}:backward", f"{_KERNELS}:reason_backward", ops.no_kernels),
        Implementation("reference", _backward),
    ],
    fake=_backward_fake,
    flops=_flops_backward,
)
