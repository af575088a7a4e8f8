"""Causal depthwise convolution before a scan, with its activation.

    z_t = bias + Σ_k weight[:, k] x_(t-K+1+k),    y = activation(z)

Backward saves x and recomputes z. Source: Gu and Dao 2023, arXiv:2312.00752 §3.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.options import checks
from quaver.torch.nn.activation import ACTIVATIONS, get_activation, run_standalone
from quaver.torch.nn.attention.inputs import lengths_of
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Implementation, Operation

NO_SECOND_DERIVATIVE = (
    "this convolution supports first derivatives only (no second derivative, no torch.func), because its backward "
    "is written by hand: use torch.nn.functional.conv1d there"
)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    initial: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Causal depthwise convolution followed by an activation, in float32, rounded once.

    Args:
        x: [B, T, channels]; with cu_seqlens [T, channels].
        weight: [channels, K]; the last tap is for the token itself.
        bias: [channels].
        activation: a name in `ACTIVATIONS` that takes one tensor; "linear" is none.
        initial: [B or sequences, K - 1, channels], the tokens before the first one; None is zeros.
        cu_seqlens: int [sequences + 1], boundaries of concatenated sequences.
    Returns:
        x's shape and dtype.
    Raises:
        ValueError: shapes that do not fit, or an activation that is gated or unknown.
    Bounded: in float32, relative RMS 1e-6 of float64 for outputs and gradients. NaN only affects the K tokens that read
    it.
    """
    if get_activation(activation).gated:
        raise ValueError(
            f"activation {activation!r} takes two tensors; give one that takes a single tensor, such as 'silu'"
        )
    dims = 3 if cu_seqlens is None else 2
    if x.dim() != dims or weight.dim() != 2 or weight.shape[0] != x.shape[-1] or not weight.shape[1]:
        raise ValueError(
            f"x is {list(x.shape)} and weight {list(weight.shape)}; give [B, T, channels], or with cu_seqlens "
            "[T, channels], and [channels, K]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {list(bias.shape)}; give [channels] = {list(weight.shape[:1])}")
    if cu_seqlens is not None:
        lengths_of(cu_seqlens, x.shape[0])
        x = x.unsqueeze(0)
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    before = sequences, weight.shape[1] - 1, x.shape[2]
    if initial is not None and initial.shape != before:
        raise ValueError(f"initial is {list(initial.shape)}; give [sequences, K - 1, channels] = {list(before)}")
    y: Tensor = run_standalone(Convolution(activation), NO_SECOND_DERIVATIVE, x, weight, bias, initial, cu_seqlens)
    return y if cu_seqlens is None else y.squeeze(0)


def last_tokens(x: Tensor, taps: int, initial: Tensor | None = None) -> Tensor:
    """Return the tokens that a convolution of this many taps needs to continue x [B, T, channels]: [B, taps - 1,
    channels].
    """
    before = taps - 1
    if x.shape[1] >= before:
        return x[:, x.shape[1] - before :]
    if initial is None:
        return F.pad(x, (0, 0, before - x.shape[1], 0))
    return torch.cat((initial[:, x.shape[1] :].to(x.dtype), x), 1)


@dataclass(frozen=True)
class Convolution:
    """Convolution of x [B, T, channels], weight, bias, initial and cu_seqlens as an op with its own backward; the
    last three may be None.
    """

    activation: str

    def forward(self, *tensors: Tensor | None) -> tuple[Tensor, Sequence[Tensor | None]]:
        return FORWARD(*tensors, self.activation), tensors

    def backward(self, g: Tensor, saved: Sequence[Any]) -> Sequence[Tensor | None]:
        grads = BACKWARD(g, *saved, self.activation)
        return *(grad if t is not None else None for grad, t in zip(grads, saved[:4], strict=True)), None


class CausalConv1d(nn.Module):
    """Module of `causal_conv1d`, with torch's parameter names and shapes.

    Args:
        channels, taps: sizes of the weight.
        bias: True for a bias.
        activation: a name in `ACTIVATIONS` that takes one tensor.
        device, dtype: of the parameters. Parameters: `weight` [channels, 1, taps], `bias` [channels].
    Bounded: as the function.
    """

    @checks
    def __init__(
        self,
        channels: int,
        taps: int,
        bias: bool = True,
        *,
        activation: str = "silu",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if channels < 1 or taps < 1:
            raise ValueError(f"CausalConv1d of {channels} channels and {taps} taps computes nothing; give both above 0")
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(channels, 1, taps, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters as torch.nn.Conv1d does."""
        bound = self.weight.shape[2] ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, initial: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Convolve x [B, T, channels], or with cu_seqlens [T, channels]; returns the same shape. As `causal_conv1d`."""
        options = {"activation": self.activation, "initial": initial, "cu_seqlens": cu_seqlens}
        return causal_conv1d(x, self.weight.squeeze(1), self.bias, **options)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        channels, _, taps = self.weight.shape
        return f"{channels}, {taps}, bias={self.bias is not None}, activation={self.activation!r}"


class _PaddedRows:
    """Input in float32 with the tokens before each sequence prepended: what the taps read, [B or 1, rows, channels]."""

    def __init__(self, x: Tensor, weight: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None) -> None:
        self.wide = torch.promote_types(x.dtype, torch.float32)
        self.taps = weight.to(self.wide).t().contiguous()
        self.before = before = weight.shape[1] - 1
        #: Output row of each token of concatenated sequences [tokens], and rows of the tokens before each sequence
        #: [sequences, before]; None for a regular batch.
        self.tokens: Tensor | None = None
        self.earlier: Tensor | None = None
        if cu_seqlens is None:
            self.rows = F.pad(x.to(self.wide), (0, 0, before, 0))
            if initial is not None:
                self.rows[:, :before] = initial
            return
        lengths_of(cu_seqlens, x.shape[1])  # A traced call has not validated them.
        # Each sequence follows the tokens before it, so that token t of sequence n has output row t + n * before.
        starts = cu_seqlens.to(torch.int64)
        offsets = torch.arange(cu_seqlens.shape[0] - 1, dtype=torch.int64, device=x.device) * before
        every = torch.arange(x.shape[1], dtype=torch.int64, device=x.device)
        self.tokens = every + torch.bucketize(every, starts[1:], right=True) * before
        self.earlier = (starts[:-1] + offsets)[:, None] + torch.arange(before, dtype=torch.int64, device=x.device)
        self.rows = x.new_zeros(1, x.shape[1] + self.earlier.numel(), x.shape[2], dtype=self.wide)
        if initial is not None:
            self.rows[0, self.earlier] = initial.to(self.wide)
        self.rows[0, self.tokens + before] = x[0].to(self.wide)

    @property
    def outputs(self) -> int:
        """Number of rows that have all their taps."""
        return max(0, self.rows.shape[1] - self.before)

    def convolved(self, bias: Tensor | None) -> Tensor:
        """Return z of the tokens."""
        n = self.outputs
        z = self.rows[:, :n] * self.taps[0]
        for k in range(1, self.before + 1):
            z.addcmul_(self.rows[:, k : k + n], self.taps[k])
        z = z if bias is None else z.add_(bias.to(self.wide))
        return z if self.tokens is None else z[:, self.tokens]

    def spread(self, g: Tensor) -> Tensor:
        """Write a gradient of tokens to their output rows, zeros elsewhere."""
        if self.tokens is None:
            return g
        return g.new_zeros(1, self.outputs, g.shape[2]).index_copy_(1, self.tokens, g)

    def parted(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Split a gradient of the rows into that of x and that of the tokens before."""
        before = self.before
        if self.tokens is None or self.earlier is None:
            return g[:, before:], g[:, :before]
        return g[:, self.tokens + before], g[0, self.earlier]


def _plain_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, activation: str
) -> Tensor:
    rows = _PaddedRows(x, weight, initial, cu_seqlens)
    z = rows.convolved(bias)
    return ACTIVATIONS[activation].forward(z).to(x.dtype)


def _plain_backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
) -> list[Tensor]:
    rows = _PaddedRows(x, weight, initial, cu_seqlens)
    z = rows.convolved(bias)
    (dz,) = ACTIVATIONS[activation].backward(g.to(rows.wide), z)
    dz, n = rows.spread(dz), rows.outputs
    grad_rows, grad_taps = torch.zeros_like(rows.rows), torch.empty_like(rows.taps)
    for k in range(rows.before + 1):
        grad_rows[:, k : k + n].addcmul_(dz, rows.taps[k])
        grad_taps[k] = (dz * rows.rows[:, k : k + n]).sum((0, 1))
    dx, before = rows.parted(grad_rows)
    nothing = x.new_empty(0)
    return [
        dx.to(x.dtype).contiguous(),
        grad_taps.t().to(weight.dtype).contiguous(),
        nothing if bias is None else dz.sum((0, 1)).to(bias.dtype),
        nothing if initial is None else before.to(initial.dtype).contiguous(),
    ]


def _fake_backward(g: Tensor, *arguments: Any) -> list[Tensor]:
    return [g.new_empty(0) if t is None else t.new_empty(t.shape) for t in arguments[:4]]


_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial, Tensor? cu_seqlens, str activation"
_KERNELS = f"{ops.GPU}.ssm"
#: Takes x [B, T, channels]; with cu_seqlens B is 1.
FORWARD: Operation[Tensor] = Operation(
    f"causal_conv1d({_TENSORS}) -> Tensor",
    [
        Implementation("triton", f"{_KERNELS}:forward", f"{_KERNELS}:reason", ops.no_kernels),
        Implementation("reference", _plain_forward),
    ],
    fake=lambda x, *_: x.new_empty(x.shape),
)
#: (gradient, forward's arguments) to the gradients of x, weight, bias and initial, empty for absent ones.
BACKWARD: Operation[list[Tensor]] = Operation(
    f"causal_conv1d_backward(Tensor g, {_TENSORS}) -> Tensor[]",
    [
        Implementation("triton", f"{_KERNELS}:backward", f"{_KERNELS}:reason_backward", ops.no_kernels),
        Implementation("reference", _plain_backward),
    ],
    fake=_fake_backward,
)
