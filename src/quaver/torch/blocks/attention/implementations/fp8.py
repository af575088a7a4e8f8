"""Attention with every product quantized: `fp8_kernels` or `fp8_passes`, tied to autograd and to torch.compile.

For backward it keeps the codes of q, k and v, a logarithm a query, the mask and the bias; never a matrix of scores.
Each pass is one opaque operator of a compiled graph, so that its bits are eager's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.core.spec import AttentionSpec, QuantSpec
from quaver.torch.backends.gpu.launching import device
from quaver.torch.blocks.attention.implementations import fp8_passes
from quaver.torch.blocks.attention.implementations.fp8_passes import Kept, Options, empty_tokens
from quaver.torch.blocks.attention.implementations.operands import Heads, empty_heads
from quaver.torch.blocks.attention.inputs.call import Call
from quaver.torch.blocks.attention.inputs.masks import outside_of
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.derivatives import NO_DOUBLE_BACKWARD, first_derivative, refuse_transforms
from quaver.torch.operations.operation import Impl, Operation
from quaver.torch.operations.selecting import unseen
from quaver.torch.state.context import ambient

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
    Exact: the codes, those of `quaver.core.reference.dot_product`, eager and compiled; by the kernels those of q, k, v
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
    apply: Any = _Attention.apply
    if not is_tracing() and ambient.split is not None:
        apply = ambient.split(_Attention, apply)
    out: Tensor = apply(q, k, v, bias, sinks, hidden, runs, draw, numbers, texts, torch.is_grad_enabled())
    return out


def explain(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: Tensor | None, soft_cap: float | None, dropout: float
) -> list[tuple[str, str]]:
    """(implementation, "" or why not) in order of preference, of a call with such tensors and numbers."""
    texts = spec.input.text, spec.grad_output.text
    rows = FORWARD.explain(q, k, v, bias, None, None, None, None, 1.0, soft_cap, dropout, *texts, True)
    return [("fp8" if name == "reference" else f"fp8 {name}", why) for name, why in rows]


class _Attention(torch.autograd.Function):
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
) -> Options:
    if runs is not None:
        hidden = outside_of(runs, keys)
    return Options(hidden, draw, scale, cap, dropout, AttentionSpec(*map(QuantSpec.parse, texts)))


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, *rest: Any) -> list[Tensor]:
    *options, training = rest
    out, logsumexp, kept = fp8_passes.forward(q, k, v, bias, sinks, _options(k.shape[2], *options), training)
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
    logsumexp, *codes = kept
    ready = _options(codes[2].shape[2], *options)
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


def _flops(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """q kᵀ and P v, of all pairs, as torch counts attention."""
    return 2 * q.shape[:3].numel() * k.shape[2] * (k.shape[3] + v.shape[3])


def _flops_backward(grad: Tensor, kept: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """q kᵀ once more, and two products for the gradients of scores and of values each, as torch counts them."""
    q, k, v = kept[1:7:2]
    return 2 * q.shape[:3].numel() * k.shape[2] * (3 * q.shape[3] + 2 * v.shape[3])


_KERNELS = "quaver.torch.blocks.attention.implementations.fp8_kernels"
_OPTIONS = (
    "Tensor? hidden, Tensor? runs, Tensor? draw, float scale, float? soft_cap, float dropout,"
    " str input, str grad_output"
)


FORWARD: Operation[list[Tensor]] = Operation(
    f"attention_fp8(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, {_OPTIONS}, bool training) -> Tensor[]",
    [Impl("triton", f"{_KERNELS}:forward", f"{_KERNELS}:reason", ops.no_kernels), Impl("reference", _forward)],
    fake=_forward_fake,
    flops=_flops,
)
BACKWARD: Operation[list[Tensor]] = Operation(
    "attention_fp8_backward(Tensor grad, Tensor[] kept, Tensor? bias, Tensor? sinks,"
    f" {_OPTIONS}, bool[] needs) -> Tensor[]",
    [
        Impl("triton", f"{_KERNELS}:backward", f"{_KERNELS}:reason_backward", ops.no_kernels),
        Impl("reference", _backward),
    ],
    fake=_backward_fake,
    flops=_flops_backward,
)
