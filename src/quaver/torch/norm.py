"""LayerNorm and RMSNorm over the last axis, computed in float32 whatever the operands are.

Backward starts from the input and its statistics, a float32 number or two a row; the output is not kept, so that what
a quantized layer keeps of it in eight bits is all there is.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quaver.core.suggest import suggest

#: The kinds by name: whether the mean is subtracted, and whether squares are averaged rather than summed.
NORMALIZATIONS = {"LayerNorm": (True, True), "RMSNorm": (False, True), "L2": (False, False)}

#: Statistics of the rows: the mean (empty unless it is subtracted) and the factor that normalizes, float32 [rows, 1].
Statistics = tuple[Tensor, Tensor]


class Norm(nn.Module):
    """A normalization by name; `LayerNorm` and `RMSNorm` say what it computes.

    Args:
        normalization: "LayerNorm"; "RMSNorm"; or "L2", x / sqrt(sum(x²) + eps), which has no parameters.
        dim: features, the last axis of the input.
        eps: added to the variance, or to the sum.
        zero_centered: the parameter is gamma - 1 and begins at 0, so that weight decay pulls gamma to 1.
        bias: whether LayerNorm adds one.
    Input [..., dim] in float32, bfloat16 or float16, whatever the parameters are; output of the input's dtype.
    Bounded: relative RMS 1e-6 of float64 in float32. NaN and infinities make their row NaN.
    """

    def __init__(
        self,
        normalization: str,
        dim: int,
        eps: float = 1e-5,
        *,
        zero_centered: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_normalization(normalization)
        self.normalization, self.dim, self.eps, self.zero_centered = normalization, dim, eps, zero_centered
        centred, averaged = NORMALIZATIONS[normalization]
        made = {"device": device, "dtype": dtype}
        self.register_parameter("weight", nn.Parameter(torch.empty(dim, **made)) if averaged else None)
        self.register_parameter("bias", nn.Parameter(torch.empty(dim, **made)) if centred and bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """gamma 1 and bias 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        parameters = self._parameters
        return normalize(x, parameters["weight"], parameters["bias"], self.normalization, self.eps, self.zero_centered)

    def check_input(self, x: Tensor) -> None:
        """Raise a ValueError unless x is [..., dim]."""
        if x.shape[-1:] != (self.dim,):
            raise ValueError(
                f"{self.normalization}({self.dim}) got an input of shape {tuple(x.shape)}; "
                f"its last axis must be {self.dim}"
            )

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}" + ", zero_centered=True" * self.zero_centered


class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + eps) * gamma + bias; arguments as those of `Norm`.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(self, dim: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__("LayerNorm", dim, eps, **options)


class RMSNorm(Norm):
    """x / sqrt(mean(x²) + eps) * gamma; arguments as those of `Norm`.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467; the zero-centred gamma is Gemma's.
    """

    def __init__(self, dim: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__("RMSNorm", dim, eps, **options)


def check_normalization(name: str) -> None:
    """Raise a ValueError that names the nearest if there is no such normalization."""
    if name not in NORMALIZATIONS:
        raise ValueError(f"no normalization {name!r}; {suggest(str(name), NORMALIZATIONS)}")


def normalize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    normalization: str = "LayerNorm",
    eps: float = 1e-5,
    zero_centered: bool = False,
) -> Tensor:
    """The normalization of this name over x [..., d], differentiably; weight and bias are [d] or None. See `Norm`."""
    y: Tensor = _Normalize.apply(x, weight, bias, normalization, eps, zero_centered)
    return y


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any) -> Tensor:
        y, mean, factor = forward(x, weight, bias, *options)
        ctx.save_for_backward(x, weight, bias, mean, factor)
        ctx.options = options
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        normalization, _, zero_centered = ctx.options
        x, weight, bias, mean, factor = ctx.saved_tensors
        return *backward(g, x, weight, bias, (mean, factor), normalization, zero_centered), None, None, None


# What layers compose. Compilers see opaque operators, which give eager's bits.


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, normalization: str, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The output in x's dtype, and its `Statistics`."""
    run = torch.ops.quaver.normalize if torch.compiler.is_compiling() else _forward
    y, mean, factor = run(x, weight, bias, normalization, eps, zero_centered)
    return y, mean, factor


def backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Statistics,
    normalization: str,
    zero_centered: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias in their dtypes, those of parameters None where there is none."""
    run = torch.ops.quaver.normalize_backward if torch.compiler.is_compiling() else _backward
    of_x, of_weight, of_bias = run(g, x, weight, bias, *statistics, normalization, zero_centered)
    return of_x, None if weight is None else of_weight, None if bias is None else of_bias


def _gamma(weight: Tensor | None, zero_centered: bool) -> Tensor | None:
    if weight is None:
        return None
    return weight.float() + 1 if zero_centered else weight.float()


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, normalization: str, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    centred, averaged = NORMALIZATIONS[normalization]
    wide, gamma = x.float(), _gamma(weight, zero_centered)
    if centred:
        beta = None if bias is None else bias.float()
        y, mean, factor = torch.native_layer_norm(wide, x.shape[-1:], gamma, beta, eps)
        return y.to(x.dtype), mean, factor
    squares = wide.square()
    factor = torch.rsqrt((squares.mean(-1, True) if averaged else squares.sum(-1, True)).add_(eps))
    y = wide * factor
    if gamma is not None:
        y.mul_(gamma)
    return y.to(x.dtype), factor.new_empty(0), factor


def _backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    factor: Tensor,
    normalization: str,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    centred, averaged = NORMALIZATIONS[normalization]
    gamma = _gamma(weight, zero_centered)
    of_weight = of_bias = None
    if centred:
        beta = None if bias is None else bias.float()
        wanted = [True, weight is not None, bias is not None]
        of_x, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            g.float(), x.float(), x.shape[-1:], mean, factor, gamma, beta, wanted
        )
        of_x = of_x.to(x.dtype)
    else:
        # y = x f gamma with f = (mean(x²) + eps)^-½, so dx = f (g gamma - x̂ mean(g gamma x̂)) where x̂ = x f.
        wide, along = x.float() * factor, g.float()
        if gamma is not None:
            product = along * wide
            of_weight = product.flatten(0, -2).sum(0)
            inner, along = product.mul_(gamma), along * gamma
        else:
            inner = along * wide
        inner = inner.mean(-1, True) if averaged else inner.sum(-1, True)
        of_x = torch.addcmul(along, wide, inner, value=-1).mul_(factor).to(x.dtype)
    return of_x, _of(weight, of_weight, factor), _of(bias, of_bias, factor)


def _of(parameter: Tensor | None, gradient: Any, like: Tensor) -> Tensor:
    """A parameter's gradient in its dtype; an operator has no optional results, so what does not exist is empty."""
    return like.new_empty(0) if parameter is None else gradient.to(parameter.dtype)


def _fake_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, normalization: str, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    factor = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    mean = torch.empty_like(factor) if NORMALIZATIONS[normalization][0] else factor.new_empty(0)
    return x.new_empty(x.shape), mean, factor


def _fake_backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    factor: Tensor,
    normalization: str,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    made = [factor.new_empty(0) if p is None else p.new_empty(p.shape) for p in (weight, bias)]
    return x.new_empty(x.shape), made[0], made[1]


_library = torch.library.Library("quaver", "FRAGMENT")
_library.define(
    "normalize(Tensor x, Tensor? weight, Tensor? bias, str normalization, float eps, bool zero_centered)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "normalize_backward(Tensor g, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor factor,"
    " str normalization, bool zero_centered) -> (Tensor, Tensor, Tensor)"
)
for _name, _impl, _fake in (
    ("normalize", _forward, _fake_forward),
    ("normalize_backward", _backward, _fake_backward),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"quaver::{_name}", _fake, lib=_library)
