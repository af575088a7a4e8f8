"""Attention with every product quantized: `fp8_kernels` or `fp8_passes`, tied to autograd and to torch.compile.

For backward it keeps the codes of q, k and v, a logarithm a query, the mask and the bias; never a matrix of scores.
Each pass is one opaque operator of a compiled graph, so that its bits are eager's.
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
from quaver.torch.operations.selecting import unseen
from quaver.torch.state.context import active_context

# ---- fp8 passes ------------------------------------------------------------------------------------------
# The two passes of attention with quantized products: `quaver.reference.attention`, many heads at once.
#
# As there, what stands between two quantizations is float64 and becomes float32 where it is quantized. Scores and
# probabilities are not kept: backward makes them again, bit for bit, from the codes of q and k and the logarithms of
# the softmax's sums. Heads are worked on a few at a time, so that no more than some million scores exist at once.

HeadsOrNone = TypeVar("HeadsOrNone", QuantizedHeads, QuantizedHeads | None)

#: Scores that exist at once, if a single group of heads does not have more.
SCORES = 1 << 21


class Fp8AttentionOptions(NamedTuple):
    """What the passes take beside the tensors that have gradients."""

    #: bool, [1 or B, 1 or H, 1 or Sq, 1 or Sk], True where a query may not see a key.
    hidden: Tensor | None
    #: int64 [1], the number of dropout's mask; None without dropout.
    draw: Tensor | None
    scale: float
    soft_cap: float | None
    dropout: float
    spec: AttentionSpec


class SavedOperands(NamedTuple):
    """The operands that backward needs, in eight bits."""

    q: QuantizedHeads
    k: QuantizedHeads
    v: QuantizedHeads
    #: q.T quantized along Sq and k.T along Sk; None where they are the transposes of q and k.
    qt: QuantizedHeads | None
    kt: QuantizedHeads | None


class BatchHeadSlice(NamedTuple):
    """Some batches, and some groups with the query heads they serve."""

    number: int
    batch: slice
    groups: slice
    heads: slice

    @property
    def number_of_groups(self) -> int:
        return self.groups.stop - self.groups.start

    def of(self, x: Tensor) -> Tensor:
        """The part of what broadcasts to [B, H, Sq, Sk]."""
        everything = slice(None)
        return x[self.batch if x.shape[0] > 1 else everything, self.heads if x.shape[1] > 1 else everything]


def parts(batch: int, heads: int, groups: int, queries: int, keys: int) -> Iterator[BatchHeadSlice]:
    """All heads of all batches, in parts of at most `SCORES` scores or of one group."""
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
    """Attention of q [B, H, Sq, D] on k [B, G, Sk, D] and v [B, G, Sk, Dv].

    Returns:
        The output [B, H, Sq, Dv]; the logarithms of the softmax's sums, float64 [B, H, Sq], -inf where nothing is
        seen; what backward needs, if training.
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
        p = _codes(_softmax(scores, total), kept_by_dropout(options, part, scores.shape))
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
    kept: SavedOperands,
    bias: Tensor | None,
    sinks: Tensor | None,
    options: Fp8AttentionOptions,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of q, k, v, bias and sinks, each where it is needed, for grad [B, H, Sq, Dv]."""
    need_q, need_k, need_v, need_bias, need_sinks = needs
    spec = options.spec.grad_output
    do = quantize_heads(grad, spec)
    dot = quantize_along_rows(grad, spec, do) if need_v else None
    delta = torch.empty_like(logsumexp)
    q, k, v = (x.data for x in (kept.q, kept.k, kept.v))
    dq, dk, dv = (
        empty_tokens(grad, x.shape[1], *x.shape[2:]) if need else None
        for x, need in ((q, need_q), (k, need_k), (v, need_v))
    )
    dbias = bias.new_zeros(bias.shape, dtype=torch.float64) if bias is not None and need_bias else None
    for part in _parts(kept.q, kept.k):
        scores, slope = _scores(kept.q, kept.k, bias, options, part)
        p = _softmax(scores, logsumexp[part.batch, part.heads])
        mask = kept_by_dropout(options, part, p.shape)
        if dv is not None:
            g = along_rows(_heads(do, part), _heads(dot, part))
            of_heads = (_codes(p, mask).mT @ g).mul_(1 / PROBABILITY_FACTOR).div_(1 - options.dropout)
            dv[part.batch, part.groups] = _sum_shared(of_heads, part.number_of_groups).float().to(grad.dtype)
        if need_q or need_k or need_sinks or dbias is not None:
            values = _groups(kept.v, part).decode()
            dp = _grouped(_heads(do, part).decode(), values.shape[1]) @ values.mT
            dp = dp.view(p.shape).div_(1 - options.dropout)
            if mask is not None:
                dp.masked_fill_(~mask, 0)
            delta[part.batch, part.heads] = own = (dp * p).sum(-1)
            ds = dp.sub_(own.unsqueeze(-1)).mul_(p)
            if dbias is not None:
                _add_to_bias(dbias, ds, part)
            if need_q or need_k:
                _scores_backward(ds if slope is None else ds.mul_(slope), kept, options, part, dq, dk)
    dsinks = None
    if sinks is not None and need_sinks:
        dsinks = -((sinks.double()[:, None] - logsumexp).exp() * delta).sum((0, 2)).float().to(sinks.dtype)
    of_bias = None if dbias is None or bias is None else dbias.float().to(bias.dtype)
    return [dq, dk, dv, of_bias, dsinks]


def kept_by_dropout(options: Fp8AttentionOptions, part: BatchHeadSlice, shape: Sequence[int]) -> Tensor | None:
    """True for the probabilities [b, h, Sq, Sk] of a part that dropout keeps; the same whenever it is asked."""
    if options.draw is None:
        return None
    batch, heads, queries, keys = shape
    rows = batch * heads * queries
    u = uniform(rows, keys, 0, part.number, options.draw, options.draw.device)
    return (u >= options.dropout).view(batch, heads, queries, keys)


def empty_tokens(like: Tensor, heads: int, tokens: int, features: int) -> Tensor:
    """[B, heads, tokens, features] that lies in memory as [B, tokens, heads, features], where projections want it."""
    return like.new_empty((like.shape[0], tokens, heads, features)).transpose(1, 2)


def _parts(q: QuantizedHeads, k: QuantizedHeads) -> Iterator[BatchHeadSlice]:
    batch, heads, queries, _ = q.data.shape
    return parts(batch, heads, k.data.shape[1], queries, k.data.shape[2])


def _heads(x: HeadsOrNone, part: BatchHeadSlice) -> HeadsOrNone:
    """The part of an operand of every query head."""
    return None if x is None else x.part(part.batch, part.heads)


def _groups(x: HeadsOrNone, part: BatchHeadSlice) -> HeadsOrNone:
    """The part of an operand of every group."""
    return None if x is None else x.part(part.batch, part.groups)


def _scores(
    q: QuantizedHeads, k: QuantizedHeads, bias: Tensor | None, options: Fp8AttentionOptions, part: BatchHeadSlice
) -> tuple[Tensor, Tensor | None]:
    """The scores of a part, float64 [b, h, Sq, Sk], -inf where hidden; and soft_cap's derivative."""
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
    """float32 probabilities, 0 in rows that see nothing; the scores are overwritten."""
    # -inf less -inf would be NaN.
    shift = torch.where(logsumexp == -torch.inf, 0.0, logsumexp)
    return scores.sub_(shift.unsqueeze(-1)).exp_().float()


def _codes(p: Tensor, mask: Tensor | None) -> Tensor:
    """E4M3 probabilities as float64, times `PROBABILITY_FACTOR`, 0 where dropped."""
    if mask is not None:
        p = p.masked_fill(~mask, 0)
    return (p * PROBABILITY_FACTOR).to(torch.float8_e4m3fn).float().double()


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[b, h, rows, k] of heads as [b, g, rows of the heads that share a group, k]."""
    batch, heads, rows, k = x.shape
    return x.reshape(batch, groups, heads // groups * rows, k)


def _ungrouped(x: Tensor, like: Tensor) -> Tensor:
    """The inverse: [b, h, rows, k], the first three as those of `like`."""
    return x.view(*like.shape[:3], x.shape[3])


def _sum_shared(x: Tensor, groups: int) -> Tensor:
    """The sums [b, g, rows, k] over the heads that share a group."""
    return x.unflatten(1, (groups, x.shape[1] // groups)).sum(2)


def _scores_backward(
    ds: Tensor,
    kept: SavedOperands,
    options: Fp8AttentionOptions,
    part: BatchHeadSlice,
    dq: Tensor | None,
    dk: Tensor | None,
) -> None:
    """Fill the part of dq = dS k scale and of dk = dS.T q scale, for the scores' gradient before scaling."""
    spec, ds = options.spec.grad_output, ds.float()
    codes = quantize_heads(ds, spec)
    if dq is not None:
        keys = along_rows(_groups(kept.k, part), _groups(kept.kt, part))
        of_groups = (_grouped(codes.decode(), keys.shape[1]) @ keys).mul_(options.scale)
        dq[part.batch, part.heads] = _ungrouped(of_groups, ds).float().to(dq.dtype)
    if dk is not None:
        queries = along_rows(_heads(kept.q, part), _heads(kept.qt, part))
        transposed = along_rows(codes, quantize_along_rows(ds, spec, codes)).mT
        summed = _sum_shared(transposed @ queries, part.number_of_groups).mul_(options.scale)
        dk[part.batch, part.groups] = summed.float().to(dk.dtype)


def _add_to_bias(dbias: Tensor, ds: Tensor, part: BatchHeadSlice) -> None:
    """Sum the scores' gradient to the shape that the bias had before it was broadcast."""
    narrow = [dim for dim in range(4) if dbias.shape[dim] == 1]
    part.of(dbias).add_(ds.sum(narrow, keepdim=True) if narrow else ds)


# ---- fp8 -------------------------------------------------------------------------------------------------

#: Dropout's masks are told apart by this many bits.
_DRAWS = 1 << 31


def attention_fp8(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec) -> Tensor:
    """softmax(cap(q kᵀ scale) + bias) v with the operands of all products quantized, each head on its own.

    Args:
        q: [B, H, Sq, D] in float32, bfloat16 or float16.
        k: [B, G, Sk, D]; each of G heads serves H / G heads of q and is quantized once.
        v: [B, G, Sk, Dv].
        call: the options. Hidden keys draw in the amax of their blocks all the same.
        spec: how; `Recipe.attention`.
    Returns:
        [B, H, Sq, Dv] in q's dtype; a query that sees nothing gets 0. A block of an operand that holds an infinity or
        NaN has the scale NaN. Differentiable in q, k, v, bias and sinks, once.
    Raises:
        ValueError: another dtype.
    Exact: the codes, those of `quaver.reference.attention`, eager and compiled; by the kernels those of q, k, v
        and the output's gradient. Bounded: the output and gradients, relative RMS 1e-6 of that reference in float32, by
        the kernels 1e-3. Statistical: dropout.
    """
    if q.dtype not in ops.DTYPES:
        raise ValueError(
            f"quantized attention takes float32, bfloat16 or float16, not {q.dtype}: convert q, k and v, or use a "
            "recipe without attention=True"
        )
    # Kernels go by positions; what runs on a CPU has a mask that layers share.
    by_runs = call.mask is None and (not q.is_cpu or bool(device.asked))
    hidden, runs = (None, call.runs(q, k)) if by_runs else (call.hidden(q, k), None)
    bias, sinks, soft_cap = call.whole_bias(q, k), call.sinks, call.soft_cap
    refuse_transforms(q, k, v, bias, sinks)
    draw = torch.randint(_DRAWS, (1,), dtype=torch.int64, device=q.device) if call.dropout else None
    numbers = float(call.scale), None if soft_cap is None else float(soft_cap), float(call.dropout)
    texts = spec.input.text, spec.grad_output.text
    apply: Any = _Fp8AttentionFunction.apply
    if not is_tracing() and active_context.split is not None:
        apply = active_context.split(_Fp8AttentionFunction, apply)
    out: Tensor = apply(q, k, v, bias, sinks, hidden, runs, draw, numbers, texts, torch.is_grad_enabled())
    return out


def explain(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: Tensor | None, soft_cap: float | None, dropout: float
) -> list[tuple[str, str]]:
    """(implementation, "" or why not) in order of preference, of a call with such tensors and numbers."""
    texts = spec.input.text, spec.grad_output.text
    rows = FORWARD.explain(q, k, v, bias, None, None, None, None, 1.0, soft_cap, dropout, *texts, True)
    return [("fp8" if name == "reference" else f"fp8 {name}", why) for name, why in rows]


class _Fp8AttentionFunction(torch.autograd.Function):
    """Saves plain tensors only."""

    @staticmethod
    @unseen
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
        out, *kept = FORWARD(q, k, v, bias, sinks, hidden, runs, draw, *numbers, *texts, training)
        ctx.save_for_backward(bias, sinks, hidden, runs, draw, *kept)
        ctx.constants = numbers, texts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return first_derivative(_gradients, ctx, NO_DOUBLE_BACKWARD, grad)


def _gradients(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Any, ...]:
    bias, sinks, hidden, runs, draw, *kept = saved
    numbers, texts = ctx.constants
    needs = [bool(need) for need in ctx.needs_input_grad[:5]]
    gradients = iter(BACKWARD(grad, kept, bias, sinks, hidden, runs, draw, *numbers, *texts, needs))
    return (*(next(gradients) if need else None for need in needs), None, None, None, None, None, None)


# The operators: q, k, v and what is made of them as lists of plain tensors.


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
    out, logsumexp, kept = forward(q, k, v, bias, sinks, _options(k.shape[2], *options), training)
    return [out] if kept is None else [out, logsumexp, *_flat(kept)]


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
    kept: Sequence[Tensor],
    bias: Tensor | None,
    sinks: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    *options, needs = rest
    logsumexp, *codes = kept
    ready = _options(codes[2].shape[2], *options)
    gradients = backward(grad, logsumexp, _restore(codes, ready.spec.input), bias, sinks, ready, needs)
    return [x for x in gradients if x is not None]


def _backward_fake(
    grad: Tensor, kept: Sequence[Tensor], bias: Tensor | None, sinks: Tensor | None, *rest: Any
) -> list[Tensor]:
    needs = rest[-1]
    of_qkv = [empty_tokens(grad, x.shape[1], x.shape[2], x.shape[3]) for x in kept[1:7:2]]
    gradients = [*of_qkv, *(None if x is None else torch.empty_like(x) for x in (bias, sinks))]
    return [x for x, need in zip(gradients, needs, strict=True) if need and x is not None]


def _flat(kept: SavedOperands) -> list[Tensor]:
    return [x for heads in kept if heads is not None for x in (heads.data, heads.scale)]


def _restore(codes: Sequence[Tensor], spec: QuantSpec) -> SavedOperands:
    heads = [QuantizedHeads(data, scale, spec) for data, scale in zip(codes[::2], codes[1::2], strict=True)]
    return SavedOperands(heads[0], heads[1], heads[2], *(heads[3:] or (None, None)))


def _flops(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """q kᵀ and P v, of all pairs, as torch counts attention."""
    return 2 * q.shape[:3].numel() * k.shape[2] * (k.shape[3] + v.shape[3])


def _flops_backward(grad: Tensor, kept: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """q kᵀ once more, and two products for the gradients of scores and of values each, as torch counts them."""
    q, k, v = kept[1:7:2]
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
