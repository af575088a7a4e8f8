"""Quantized attention by Triton kernels: computes what `fp8` does in plain torch, in float32 and without storing
scores.
"""

from collections.abc import Sequence

from torch import Tensor

from quaver.recipes.spec import AttentionSpec, QuantSpec
from quaver.torch.backends.gpu import attention as gpu
from quaver.torch.nn.attention.backends import QuantizedHeads, quantize_along_rows, quantize_heads


def reason(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, hidden: Tensor | None,
    runs: Tensor | None, draw: Tensor | None, scale: float, soft_cap: float | None, dropout: float, *texts: str | bool,
) -> str:  # fmt: skip
    """Return why the kernels do not support a forward call, or ""; the device was checked before."""
    return _why_not(bias, soft_cap, dropout) or gpu.reason(q, k, v, _spec(*texts[:2]))


def reason_backward(
    grad: Tensor, residuals: Sequence[Tensor], bias: Tensor | None, sinks: Tensor | None, hidden: Tensor | None,
    runs: Tensor | None, draw: Tensor | None, scale: float, soft_cap: float | None, dropout: float, *texts: str,
) -> str:  # fmt: skip
    """Return why the kernels do not support a backward call, or ""."""
    return _why_not(bias, soft_cap, dropout) or gpu.reason(residuals[1], residuals[3], residuals[5], _spec(*texts[:2]))


def _why_not(bias: Tensor | None, soft_cap: float | None, dropout: float) -> str:
    if bias is not None:
        return "its tiles add no bias and no ALiBi to scores"
    if soft_cap is not None:
        return "its tiles cap no scores"
    return "its tiles drop no probabilities" if dropout else ""


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: None, sinks: Tensor | None, hidden: Tensor | None, runs: Tensor | None,
    draw: None, scale: float, soft_cap: None, dropout: float, input: str, grad_output: str, training: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the output, and for training the tensors that `fp8.FORWARD` saves."""
    spec = _spec(input, grad_output)
    q0, k0 = quantize_heads(q, spec.input), quantize_heads(k, spec.input)
    v0 = quantize_heads(v, spec.input) if training or spec.input.transposable else None
    vt = None if spec.input.transposable else quantize_heads(v.mT, spec.input)
    values = v0 or vt
    assert values is not None
    operands = gpu.AttentionOperands(_pair(q0), _pair(k0), _pair(values), vt=None if vt is None else _pair(vt))
    wide = None if sinks is None else sinks.float()
    out, logsumexp = gpu.forward(operands, runs, hidden, wide, spec, scale, q.dtype)
    if not training:
        return [out]
    assert v0 is not None
    transposed = (quantize_along_rows(q, spec.input, q0), quantize_along_rows(k, spec.input, k0))
    return [out, logsumexp, *(x for heads in (q0, k0, v0, *transposed) if heads is not None for x in _pair(heads))]


def backward(
    grad: Tensor, residuals: Sequence[Tensor], bias: None, sinks: Tensor | None, hidden: Tensor | None,
    runs: Tensor | None, draw: None, scale: float, soft_cap: None, dropout: float, input: str, grad_output: str,
    needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and sinks that are needed."""
    spec = _spec(input, grad_output)
    logsumexp, *codes = residuals
    q, k, v, *transposed = zip(codes[::2], codes[1::2], strict=True)
    qt, kt = transposed or (None, None)
    do = quantize_heads(grad, spec.grad_output)
    dot = quantize_along_rows(grad, spec.grad_output, do)
    operands = gpu.AttentionOperands(q, k, v, _pair(do), qt, kt, None, None if dot is None else _pair(dot))
    *gradients, delta = gpu.backward(operands, runs, hidden, logsumexp, spec, scale, grad.dtype)
    dsinks = None
    if sinks is not None and needs[4]:
        share = (sinks.double()[:, None] - logsumexp).exp()
        dsinks = -(share * delta.double()).sum((0, 2)).float().to(sinks.dtype)
    every = (*gradients, None, dsinks)
    return [x for x, need in zip(every, needs, strict=True) if need and x is not None]


def _spec(input: str | bool, grad_output: str | bool) -> AttentionSpec:
    return AttentionSpec(QuantSpec.parse(str(input)), QuantSpec.parse(str(grad_output)))


def _pair(heads: QuantizedHeads) -> tuple[Tensor, Tensor]:
    return heads.data.contiguous(), heads.scale.contiguous()
