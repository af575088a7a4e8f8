"""RMSNorm with a gate, applied to the output of a scan before the output projection.

    y = rms(x silu(gate)) gamma,        or, normalized first,        y = rms(x) gamma silu(gate)

rms(v) = v / sqrt(mean(v²) + eps), with the mean over each group of neighbouring features. Computed in float32, rounded
once; backward saves x, the gate and one number per row and group. Source: Dao and Gu 2024, arXiv:2405.21060 §8.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.options import checks
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu.fused_quantize import FusedQuantizeResult
from quaver.torch.linear.fused_projections import is_bare, project
from quaver.torch.linear.linear import Linear
from quaver.torch.nn.norm import NormalizationOp
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Implementation, Operation


@dataclass(frozen=True)
class GatedNormalization(NormalizationOp):
    """Gated normalization as a function of x, gate and gamma."""

    groups: int
    eps: float
    norm_before_gate: bool

    def forward(self, *x: Tensor | None, implementation: int | None = None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        value, gate, gamma = x
        assert value is not None
        run = ops.chosen(GATED_NORMALIZE, value, implementation)
        y, factor = run(value, gate, gamma, self.groups, self.traceable_eps, self.norm_before_gate)
        return y, (value, gate, gamma, factor)

    def quantized(
        self, x: Sequence[Any], spec: QuantSpec, factor: Tensor | None, want_output: bool, transposed: bool
    ) -> FusedQuantizeResult | None:
        return None

    def backward(self, g: Tensor, saved: Sequence[Any], implementation: int | None = None) -> tuple[Tensor | None, ...]:
        run = ops.chosen(GATED_NORMALIZE_BACKWARD, g, implementation)
        return tuple(run(g, *saved, self.groups, self.norm_before_gate))


class GatedRMSNorm(nn.Module):
    """Gated RMSNorm: rms(x silu(gate)) gamma, or rms(x) gamma silu(gate), with each group of features normalized on its
    own.

    Args:
        dim: number of features, the last axis of x and gate.
        groups: number of groups of neighbouring features; 1 normalizes all together.
        eps: added to the mean of the squares.
        norm_before_gate: True normalizes before gating.
        device, dtype: of the parameter. Parameter: `weight` [dim], gamma. Inputs x and gate [..., dim] share a dtype,
            which the output has too, for any dtype of the parameter.
    Raises:
        ValueError: groups that do not divide dim, or inputs that do not fit.
    Bounded: in float32, relative RMS 1e-6 of float64. NaN and infinities make their group NaN or 0.
    """

    weight: nn.Parameter

    @checks
    def __init__(
        self,
        dim: int,
        groups: int = 1,
        eps: float = 1e-5,
        *,
        norm_before_gate: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if groups < 1 or dim % groups:
            raise ValueError(f"{dim} features do not divide into {groups} groups; give a number that divides")
        self.dim = dim
        self.formula = GatedNormalization(groups, eps, bool(norm_before_gate))
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set gamma to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        self.check_input(x, gate)
        return self.formula(x, gate, self.weight)

    def check_input(self, x: Tensor, gate: Tensor) -> None:
        """Raise ValueError unless x and gate are [..., dim] of one dtype."""
        if x.shape != gate.shape or x.dtype is not gate.dtype or not x.dim() or x.shape[-1] != self.dim:
            raise ValueError(
                f"GatedRMSNorm({self.dim}) got x {tuple(x.shape)} {x.dtype} and a gate {tuple(gate.shape)} "
                f"{gate.dtype}; give both one dtype and shape, whose last axis is {self.dim}"
            )

    def extra_repr(self) -> str:
        formula = self.formula
        first = ", norm_before_gate=True" * formula.norm_before_gate
        return f"{self.dim}, groups={formula.groups}, eps={formula.eps}{first}"


def gated_projection(norm: GatedRMSNorm, x: Tensor, gate: Tensor, layer: Linear) -> Tensor:
    """Return layer(norm(x, gate)), saving for backward only the operand of the GEMM, not the normalized input."""
    if norm.__class__.forward is not GatedRMSNorm.forward or not is_bare(norm):
        projected: Tensor = layer(norm(x, gate))
        return projected
    norm.check_input(x, gate)
    return project(norm.formula, (x, gate, norm.weight), (layer,))[0]


def _plain_forward(
    x: Tensor, gate: Tensor, gamma: Tensor, groups: int, eps: float, norm_before_gate: bool
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    # Make them contiguous: the order of the sum and the vectorization must not depend on strides.
    value, z = (t.to(wide).contiguous() for t in (x, gate))
    passed = F.silu(z)
    v = value if norm_before_gate else value * passed
    parts = v.unflatten(-1, (groups, -1))
    factor = parts.square().mean(-1, True).add_(eps).rsqrt_()
    y = (parts * factor).flatten(-2).mul_(gamma.to(wide))
    if norm_before_gate:
        y.mul_(passed)
    return y if y.dtype is x.dtype else y.to(x.dtype), factor


def _plain_backward(
    g: Tensor, x: Tensor, gate: Tensor, gamma: Tensor, factor: Tensor, groups: int, norm_before_gate: bool
) -> list[Tensor]:
    # y = v f gamma [silu(gate)] with f = (mean(v²) + eps)^-½: dv = f (h - v̂ mean(h v̂)) where v̂ = v f and h is the
    # gradient of v̂.
    wide = torch.promote_types(x.dtype, torch.float32)
    z, value, along = (t.to(wide).contiguous() for t in (gate, x, g))
    share = torch.sigmoid(z)
    passed = z * share
    slope = share * (1 + z * (1 - share))
    v = value if norm_before_gate else value * passed
    v = (v.unflatten(-1, (groups, -1)) * factor).flatten(-2)
    if norm_before_gate:
        grad_gate = along * v * gamma.to(wide) * slope
        along = along * passed
    product = along * v
    grad_gamma = product.flatten(0, -2).sum(0) if product.dim() > 1 else product.clone()
    along = along * gamma.to(wide)
    product = product.mul_(gamma.to(wide)).unflatten(-1, (groups, -1))
    # f times the gradient minus its component along v̂.
    inner = (v.unflatten(-1, (groups, -1)) * product.mean(-1, True)).flatten(-2)
    grad_v = ((along - inner).unflatten(-1, (groups, -1)) * factor).flatten(-2)
    if not norm_before_gate:
        grad_gate = grad_v * value * slope
        grad_v = grad_v * passed
    return [grad_v.to(x.dtype), grad_gate.to(gate.dtype), grad_gamma.to(gamma.dtype)]


def _fake_forward(
    x: Tensor, gate: Tensor, gamma: Tensor, groups: int, eps: float, norm_before_gate: bool
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], groups, 1), dtype=wide)


def _fake_backward(g: Tensor, *arguments: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in arguments[:3]]


#: Normalize (x and gate [..., d], gamma [d], groups, eps, True if the norm comes first). Returns the output in x's
#: dtype and the factors 1 / sqrt(...), float32 [..., groups, 1].
GATED_NORMALIZE: Operation[tuple[Tensor, Tensor]] = Operation(
    "gated_normalize(Tensor x, Tensor gate, Tensor gamma, int groups, float eps, bool norm_before_gate)"
    " -> (Tensor, Tensor)",
    [Implementation("reference", _plain_forward)],
    fake=_fake_forward,
)
#: Backward of (grad_output, x, gate, gamma, factors, groups, True if the norm comes first): gradients of x, gate and
#: gamma.
GATED_NORMALIZE_BACKWARD: Operation[list[Tensor]] = Operation(
    "gated_normalize_backward(Tensor g, Tensor x, Tensor gate, Tensor gamma, Tensor factor, int groups,"
    " bool norm_before_gate) -> Tensor[]",
    [Implementation("reference", _plain_backward)],
    fake=_fake_backward,
)
