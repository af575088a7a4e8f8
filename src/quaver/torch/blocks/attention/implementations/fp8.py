"""Attention with every product quantized: `fp8_passes`, tied to autograd and to torch.compile.

For backward it keeps the codes of q, k and v, a logarithm a query, the mask and the bias; never a matrix of scores.
Each pass is one opaque operator of a compiled graph, so that its bits are eager's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.core.spec import AttentionSpec, QuantSpec
from quaver.torch.blocks.attention.implementations import fp8_passes
from quaver.torch.blocks.attention.implementations.fp8_passes import Kept, Options, empty_tokens
from quaver.torch.blocks.attention.implementations.operands import Heads, empty_heads
from quaver.torch.blocks.attention.inputs.call import Call
from quaver.torch.operations import ops
from quaver.torch.operations.derivatives import NO_DOUBLE_BACKWARD, first_derivative, refuse_transforms
from quaver.torch.operations.operation import Operation

#: Dropout's masks are told apart by this many bits.
_DRAWS = 1 << 31


def attention_fp8(q: Tensor, k: Tensor, v: Tensor, call: Call, spec: AttentionSpec) -> Tensor:
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
    Exact: the codes, those of `quaver.core.reference.dot_product`, eager and compiled. Bounded: the output and
        gradients,
        relative RMS 1e-6 of that reference in float32. Statistical: dropout.
    """
    if q.dtype not in ops.DTYPES:
        raise ValueError(
            f"quantized attention takes float32, bfloat16 or float16, not {q.dtype}: convert q, k and v, or use a "
            "recipe without attention=True"
        )
    hidden, bias, sinks, soft_cap = call.hidden(q, k), call.whole_bias(q, k), call.sinks, call.soft_cap
    refuse_transforms(q, k, v, bias, sinks)
    draw = torch.randint(_DRAWS, (1,), dtype=torch.int64, device=q.device) if call.dropout else None
    numbers = float(call.scale), None if soft_cap is None else float(soft_cap), float(call.dropout)
    texts = spec.input.text, spec.grad_output.text
    out: Tensor = _Attention.apply(q, k, v, bias, sinks, hidden, draw, numbers, texts, torch.is_grad_enabled())
    return out


class _Attention(torch.autograd.Function):
    """Saves plain tensors only."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        hidden: Tensor | None,
        draw: Tensor | None,
        numbers: tuple[float, float | None, float],
        texts: tuple[str, str],
        grad_enabled: bool,
    ) -> Tensor:
        training = grad_enabled and any(ctx.needs_input_grad)
        out, *kept = FORWARD(q, k, v, bias, sinks, hidden, draw, *numbers, *texts, training)
        ctx.save_for_backward(bias, sinks, hidden, draw, *kept)
        ctx.constants = numbers, texts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return first_derivative(_gradients, ctx, NO_DOUBLE_BACKWARD, grad)


def _gradients(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Any, ...]:
    bias, sinks, hidden, draw, *kept = saved
    numbers, texts = ctx.constants
    needs = list(ctx.needs_input_grad[:5])
    gradients = iter(BACKWARD(grad, kept, bias, sinks, hidden, draw, *numbers, *texts, needs))
    return (*(next(gradients) if need else None for need in needs), None, None, None, None, None)


# The operators: q, k, v and what is made of them as lists of plain tensors.


def _options(
    hidden: Tensor | None, draw: Tensor | None, scale: float, cap: float | None, dropout: float, *texts: str
) -> Options:
    return Options(hidden, draw, scale, cap, dropout, AttentionSpec(*map(QuantSpec.parse, texts)))


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, *rest: Any) -> list[Tensor]:
    *options, training = rest
    out, logsumexp, kept = fp8_passes.forward(q, k, v, bias, sinks, _options(*options), training)
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
    turned = (None, None) if spec.transposable else (empty_heads(x, tuple(x.mT.shape), spec) for x in (q, k))
    return [out, q.new_empty(q.shape[:3], dtype=torch.float64), *_flat(Kept(q0, k0, v0, *turned))]


def _backward(
    grad: Tensor,
    kept: Sequence[Tensor],
    bias: Tensor | None,
    sinks: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    *options, needs = rest
    ready = _options(*options)
    logsumexp, *codes = kept
    gradients = fp8_passes.backward(grad, logsumexp, _restore(codes, ready.spec.input), bias, sinks, ready, needs)
    return [x for x in gradients if x is not None]


def _backward_fake(
    grad: Tensor, kept: Sequence[Tensor], bias: Tensor | None, sinks: Tensor | None, *rest: Any
) -> list[Tensor]:
    needs = rest[-1]
    of_qkv = [empty_tokens(grad, x.shape[1], x.shape[2], x.shape[3]) for x in kept[1:7:2]]
    gradients = [*of_qkv, *(None if x is None else torch.empty_like(x) for x in (bias, sinks))]
    return [x for x, need in zip(gradients, needs, strict=True) if need and x is not None]


def _flat(kept: Kept) -> list[Tensor]:
    return [x for heads in kept if heads is not None for x in (heads.data, heads.scale)]


def _restore(codes: Sequence[Tensor], spec: QuantSpec) -> Kept:
    heads = [Heads(data, scale, spec) for data, scale in zip(codes[::2], codes[1::2], strict=True)]
    return Kept(heads[0], heads[1], heads[2], *(heads[3:] or (None, None)))


_OPTIONS = "Tensor? hidden, Tensor? draw, float scale, float? soft_cap, float dropout, str input, str grad_output"


FORWARD: Operation[list[Tensor]] = Operation(
    f"attention_fp8(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, {_OPTIONS}, bool training) -> Tensor[]",
    _forward,
    fake=_forward_fake,
)
BACKWARD: Operation[list[Tensor]] = Operation(
    "attention_fp8_backward(Tensor grad, Tensor[] kept, Tensor? bias, Tensor? sinks,"
    f" {_OPTIONS}, bool[] needs) -> Tensor[]",
    _backward,
    fake=_backward_fake,
)
