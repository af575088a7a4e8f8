"""The causal convolution before a scan on a GPU: which tensors its kernels take, and over which grids they run.

The numbers are those of `quaver.torch.blocks.state_space.convolution` within its bounds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.kernels.state_space.convolution import (
    causal_conv1d,
    causal_conv1d_backward,
    causal_conv1d_backward_input,
)
from quaver.torch.backends.gpu.fused.activation import KINDS
from quaver.torch.backends.gpu.fused.column_sums import sum_launch
from quaver.torch.backends.gpu.fused.producers import DTYPES
from quaver.torch.backends.gpu.launching.launch import aligned, power_above
from quaver.torch.backends.gpu.launching.passes import Launch, Pass, Passes
from quaver.torch.backends.gpu.launching.rooms import whole
from quaver.torch.backends.gpu.mixing.chunks import chunks_of

#: The most taps, of which each is a read of a tile and code of its own.
TAPS = 16
#: Tokens, channels and warps of a program.
TILE = 64, 64, 4


def reason(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, activation: str
) -> str:
    """Why no kernel convolves x [B, T, channels], or ""; the device has been asked before."""
    odd = {t.dtype for t in (x, weight, bias, initial) if t is not None} - set(DTYPES)
    if odd:
        return f"its kernels read float32, bfloat16 and float16, not {odd.pop()}"
    if weight.shape[1] > TAPS:
        return f"its kernels take {TAPS} taps at most, not {weight.shape[1]}"
    if activation not in KINDS or KINDS[activation].gated:
        return f"its kernels know no {activation!r} of one tensor"
    if not x.numel():
        return "there is nothing to convolve"
    return "there are more tokens than kernels count" if x.shape[0] * x.shape[1] >= 2**31 else ""


def reason_backward(g: Tensor, *given: Any) -> str:
    """The same of the way back."""
    return reason(*given)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, activation: str
) -> Tensor:
    """As `quaver.torch.blocks.state_space.convolution.FORWARD`.

    Bounded: relative RMS 1e-6 of float64 before the rounding to x's dtype.
    """
    y: Tensor = _run(_forwards, (), x, weight, bias, initial, cu_seqlens, activation)[0]
    return y.view(x.shape)


def backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
) -> list[Tensor]:
    """As `quaver.torch.blocks.state_space.convolution.BACKWARD`.

    Bounded, as forward.
    """
    *_, sums, dx, d_initial = _run(_backwards, (_rows(g),), x, weight, bias, initial, cu_seqlens, activation)
    taps, nothing = weight.shape[1], x.new_empty(0)
    of_taps, of_bias = sums.view(taps + 1, weight.shape[0]).split(taps)
    if d_initial is None and initial is not None:
        d_initial = torch.empty_like(initial)
    return [
        dx.view(x.shape),
        of_taps.t().to(weight.dtype).contiguous(),
        nothing if bias is None else (of_bias[0] if aligned(of_bias) else of_bias[0].clone()).to(bias.dtype),
        nothing if d_initial is None else d_initial,
    ]


def _run(
    passes: Passes,
    first: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
) -> Any:
    chunks = chunks_of(x, cu_seqlens, TILE[0])
    # Of a single tap nothing comes before.
    initial = None if initial is None or weight.shape[1] == 1 else initial.contiguous()
    own = (weight.contiguous(), None if bias is None else bias.contiguous(), initial, chunks.table)
    return passes((*first, _rows(x), *own), activation, *chunks[:5], chunks.even)


def _rows(x: Tensor) -> Tensor:
    """[B, T, channels] as [tokens, channels] whose channels lie side by side, as it is or as a copy."""
    rows = x.flatten(0, 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


class _Plan:
    """What the launches of a convolution share.

    Args:
        given: x [tokens, channels], weight, bias, initial and the table of chunks.
        chunks: as the first five of `quaver.torch.backends.gpu.mixing.chunks.Chunks`, and whether all are full.
    """

    def __init__(self, given: Sequence[Any], activation: str, *chunks: int) -> None:
        self.x, self.weight, self.bias, self.initial, self.table = given
        size, self.count, self.sequences, *self.extent, even = chunks
        self.channels, self.taps = self.weight.shape
        columns = TILE[1]
        self.grid = self.count, -(-self.channels // columns)
        self.constants = {"BL": size, "BC": columns, "K": self.taps, "EVEN": bool(even) and not self.channels % columns}
        self.kind = KINDS[activation]
        self.read = self.x, self.weight, self.bias, self.initial

    def launch(self, kernel: Any, tensors: Sequence[Any], strides: Sequence[int], **constants: Any) -> Launch:
        numbers = (self.channels, *strides, *self.extent)
        return Launch(kernel, self.grid, (*tensors, self.table), numbers, self.constants | constants, TILE[2])


def _forward_pass(given: Sequence[Any], activation: str, *chunks: int) -> Pass:
    plan = _Plan(given, activation, *chunks)
    y = whole(tuple(plan.x.shape), plan.x.dtype)
    strides = (plan.x.stride(0),)
    launch = plan.launch(causal_conv1d, (*plan.read, y), strides, F=plan.kind.forward)
    return Pass(given, (y, None), [launch])


_forwards = Passes(_forward_pass)


def _backward_pass(given: Sequence[Any], activation: str, *chunks: int) -> Pass:
    g, *rest = given
    plan = _Plan(rest, activation, *chunks)
    wide, shape, wanted = torch.float32, tuple(plan.x.shape), (plan.taps + 1) * plan.channels
    dz, dx = whole(shape, wide), whole(shape, plan.x.dtype)
    partial, sums = whole((plan.count, wanted), wide), whole((wanted,), wide)
    d_initial = None
    if plan.initial is not None:
        # Of a sequence without tokens no program knows.
        early = (plan.sequences, plan.taps - 1, plan.channels)
        d_initial = whole(early, plan.initial.dtype)._replace(zeros=plan.table is not None)
    of_z = (g, *plan.read, dz, partial)
    strides = g.stride(0), plan.x.stride(0)
    launches = [
        plan.launch(causal_conv1d_backward, of_z, strides, F=plan.kind.forward, B=plan.kind.backward),
        plan.launch(
            causal_conv1d_backward_input,
            (dz, plan.weight, dx, d_initial),
            (),
            BK=power_above(plan.taps - 1),
        ),
        sum_launch(partial, sums, plan.count, wanted),
    ]
    return Pass(given, (dz, partial, sums, dx, d_initial), launches)


_backwards = Passes(_backward_pass)
