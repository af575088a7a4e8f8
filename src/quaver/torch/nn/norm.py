"""LayerNorm, RMSNorm and L2 normalization over the last axis, computed in float32 for every dtype.

Backward uses the input and one or two float32 statistics per row. The output is not saved, so that a quantized layer's
8-bit copy of it is the only one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quaver.options import checks
from quaver.recipes.spec import QuantSpec
from quaver.recipes.text import check_name
from quaver.torch.backends.gpu import fused_quantize
from quaver.torch.linear.autograd import IDENTITY_INPUT
from quaver.torch.linear.fused_projections import is_bare, project
from quaver.torch.linear.linear import Linear
from quaver.torch.nn.activation import run_standalone
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Implementation, Operation, row_by_row

#: Kinds by name: (True if the mean is subtracted, True if there is a gamma).
NORMALIZATIONS = {"LayerNorm": (True, True), "RMSNorm": (False, True), "L2": (False, False)}
#: Scopes of query and key norms: "head", each head's features with one gamma for all heads; "each_head", the same with
#: a gamma per head (Cohere); "all_heads", the features of all heads together (OLMo 2).
QK_NORM_SCOPES = ("head", "each_head", "all_heads")


class NormalizationOp:
    """Base of normalizations that are input ops of `quaver.torch.linear.autograd`.

    Backward saves the inputs and the statistics of the rows.
    """

    recomputes_input = False
    eps: float
    #: eps as text for torch.compile: with dynamic shapes a float becomes a symbol, which two autograd functions cannot
    #: share.
    eps_text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps_text", repr(float(self.eps)))

    def __call__(self, *x: Tensor | None) -> Tensor:
        y: Tensor = run_standalone(self, NO_SECOND_DERIVATIVE, *x)  # type: ignore[arg-type]
        return y

    @property
    def traceable_eps(self) -> float:
        """eps as a constant for a compiler."""
        return float(self.eps_text) if is_tracing() else self.eps

    def recompute_input(self, saved: Sequence[Any], g: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...] | None]:
        raise AssertionError("what a norm made is kept")


@dataclass(frozen=True)
class Normalization(NormalizationOp):
    """Normalization as a function of x, weight and bias."""

    normalization: str
    eps: float
    zero_centered: bool

    def forward(self, *x: Tensor | None, implementation: int | None = None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        value, gamma, beta = x
        assert value is not None
        gamma, beta = gamma_and_beta(value, gamma, beta, self.zero_centered)
        run = ops.chosen(NORMALIZE, value, implementation)
        y, mean, factor = run(value, gamma, beta, self.normalization, self.traceable_eps)
        return y, (value, gamma, beta, mean, factor)

    def quantized(
        self, x: Sequence[Any], spec: QuantSpec, factor: Tensor | None, want_output: bool, transposed: bool
    ) -> fused_quantize.FusedQuantizeResult | None:
        from quaver.torch.backends.gpu import norm as kernels

        value, weight, bias = x
        gamma, beta = gamma_and_beta(value, weight, bias, self.zero_centered)
        return kernels.normalized(value, gamma, beta, self.normalization, self.eps, spec, factor, want_output)

    def backward(self, g: Tensor, saved: Sequence[Any], implementation: int | None = None) -> tuple[Tensor | None, ...]:
        x, gamma, beta, mean, factor = saved
        run = ops.chosen(NORMALIZE_BACKWARD, x, implementation)
        grad_x, grad_gamma, grad_beta = run(g, x, gamma, beta, mean, factor, self.normalization)
        return grad_x, None if gamma is None else grad_gamma, None if beta is None else grad_beta


class NormKind(nn.Module):
    """Base class of `LayerNorm` and `RMSNorm`: a normalization over the last axis, selected by name.

    Args:
        normalization: "LayerNorm"; "RMSNorm"; or "L2", x / sqrt(mean(x²) + eps), which has no parameters. The name "L2"
            is Llama 4's, although it divides by the root of the mean, not by the length.
        dim: number of features, the last axis of the input.
        eps: added to the variance, or to the mean of the squares.
        zero_centered: the parameter is gamma - 1 and starts at 0, so that weight decay pulls gamma to 1.
        bias: True for a bias in LayerNorm.
        device, dtype: of the parameters. Input [..., dim] in float32, bfloat16 or float16, for any dtype of the
            parameters; the output has the input's dtype.
    Bounded: in float32, relative RMS 1e-6 of float64. NaN makes its row NaN, and so does an infinity in LayerNorm. In
        the others an infinity becomes NaN and the rest of its row 0.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @checks
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
        self.dim = dim
        self.formula = Normalization(normalization, eps, zero_centered)
        centred, weighted = NORMALIZATIONS[normalization]
        for name, present in (("weight", weighted), ("bias", centred and bias)):
            values = nn.Parameter(torch.empty(dim, dtype=dtype, device=device)) if present else None
            self.register_parameter(name, values)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set gamma to 1 and bias to 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.formula.zero_centered else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        return self.formula(x, *self.affine())

    def affine(self) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias, each None if absent."""
        # With parametrizations, pruning and FSDP these are plain attributes, whose lookup is slower.
        parameters = self._parameters
        weight = parameters["weight"] if "weight" in parameters else self.weight  # noqa: SIM401
        return weight, parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401

    def check_input(self, x: Tensor) -> None:
        """Raise ValueError unless x is [..., dim]."""
        if not x.dim() or x.shape[-1] != self.dim:
            raise ValueError(
                f"{self.formula.normalization}({self.dim}) got an input of shape {tuple(x.shape)}; "
                f"its last axis must be {self.dim}"
            )

    def extra_repr(self) -> str:
        return (
            f"{self.formula.normalization}, {self.dim}, eps={self.formula.eps}"
            + ", zero_centered=True" * self.formula.zero_centered
        )


class LayerNorm(NormKind):
    """Layer normalization: (x - mean) / sqrt(variance + eps) * gamma + bias. Arguments as for `NormKind`.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(self, dim: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__("LayerNorm", dim, eps, **options)


class RMSNorm(NormKind):
    """RMS normalization: x / sqrt(mean(x²) + eps) * gamma. Arguments as for `NormKind`.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467; the zero-centred gamma is Gemma's.
    """

    def __init__(self, dim: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__("RMSNorm", dim, eps, **options)


def named(normalization: str, dim: int, eps: float, **options: Any) -> NormKind:
    """Return a `LayerNorm`, an `RMSNorm`, or for "L2" a `NormKind`. Arguments as for `NormKind`."""
    classes: dict[str, type[LayerNorm | RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if normalization in classes:
        return classes[normalization](dim, eps, **options)
    return NormKind(normalization, dim, eps, **options)


@dataclass(frozen=True, kw_only=True)
class NormOptions:
    """Options of the normalization in front of a layer, and device and dtype of all parameters."""

    # "LayerNorm", "RMSNorm", "L2", or None for no normalization.
    normalization: str | None = None
    eps: float = 1e-5
    # The norm's parameter is gamma - 1.
    zero_centered: bool = False
    # True for a bias in LayerNorm.
    norm_bias: bool = True
    # Device and dtype of all parameters.
    device: Any = None
    dtype: torch.dtype | None = None

    @property
    def like(self) -> dict[str, Any]:
        """Device and dtype as keyword arguments."""
        return {"device": self.device, "dtype": self.dtype}

    def norm(self, dim: int) -> "NormKind | None":
        """Return the normalization over dim features, or None."""
        if self.normalization is None:
            return None
        options = {"zero_centered": self.zero_centered, "bias": self.norm_bias}
        return named(self.normalization, dim, self.eps, **options, **self.like)


class NormOfEachHead(nn.Module):
    """Normalization of each head's features with parameters per head: norm(x) gamma + bias, in float32, rounded once.

    Args:
        options: options of the norm.
        heads, dim: x is [..., heads, dim]. Parameters: `weight` [heads, dim] is gamma, or gamma - 1 with zero_centered.
            A LayerNorm also has `bias` [heads, dim], unless norm_bias is False.
    Source: transformers' CohereLayerNorm, which has no bias.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, options: NormOptions, heads: int, dim: int) -> None:
        super().__init__()
        plain = replace(options, zero_centered=False, norm_bias=False).norm(dim)
        assert plain is not None
        self.formula, self.zero_centered = plain.formula, options.zero_centered
        self.weight = nn.Parameter(torch.empty(heads, dim, device=options.device, dtype=options.dtype))
        centred, _ = NORMALIZATIONS[plain.formula.normalization]
        biased = centred and options.norm_bias
        self.register_parameter("bias", nn.Parameter(torch.empty_like(self.weight)) if biased else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set gamma to 1 and bias to 0."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        gamma = self.weight.to(wide)
        y = self.formula(x.to(wide), None, None) * (gamma + 1 if self.zero_centered else gamma)
        return (y if self.bias is None else y + self.bias.to(wide)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.formula.normalization}, {tuple(self.weight.shape)}, eps={self.formula.eps}"


def norm_of_heads(options: NormOptions, scope: str, heads: int, dim: int) -> nn.Module | None:
    """Return the normalization of [..., heads, dim] for a scope in `QK_NORM_SCOPES`, or None if the options have
    none.
    """
    if options.normalization is None:
        return None
    if scope == "each_head":
        return NormOfEachHead(options, heads, dim)
    return options.norm(heads * dim if scope == "all_heads" else dim)


def check_normalization(name: str) -> None:
    """Raise ValueError, naming the closest match, if there is no such normalization."""
    check_name("normalization", name, NORMALIZATIONS)


def normalized_projections(
    norm: nn.Module | None,
    x: Tensor,
    layers: Sequence[Linear],
    return_input: bool = False,
) -> tuple[Tensor, ...]:
    """Apply several linear layers to norm(x), which is quantized once for all of them.

    Args:
        norm: a norm of this module, which is fused; any other module is called; None for no norm.
        x: [..., dim].
        layers: linear layers with dim input features.
        return_input: also return norm(x), as the first output.
    """
    over_ranks = getattr(type(layers[0]), "normed_over_ranks", None)
    if over_ranks is not None and norm is not None and not return_input:
        # Tensor-parallel layers whose ranks hold different tokens: the norm runs before the all-gather.
        outputs: tuple[Tensor, ...] | None = over_ranks(norm, x, layers)
        if outputs is not None:
            return outputs
    if norm is None or norm.__class__.forward is not NormKind.forward or not is_bare(norm):
        y = x if norm is None else norm(x)
        if len(layers) == 1 and not return_input:
            return (layers[0](y),)
        return project(IDENTITY_INPUT, (y,), layers, return_input)
    assert isinstance(norm, NormKind)
    norm.check_input(x)
    return project(norm.formula, (x, *norm.affine()), layers, return_input)


NO_SECOND_DERIVATIVE = (
    "this normalization supports first derivatives only (no second derivative, no torch.func), because its "
    "backward is written by hand: use torch's own operations there"
)


#: Dtypes of x for which the CPU's LayerNorm accepts float32 parameters.
NARROW = (torch.bfloat16, torch.float16)


def gamma_and_beta(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, zero_centered: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return gamma and beta for `NORMALIZE`.

    They are the parameters themselves, except under a compiler or with zero_centered, where they are converted to
    float32 or float64 and 1 is added to gamma.
    """
    if not (zero_centered or is_tracing()):
        return weight, bias
    dtype = torch.promote_types(x.dtype, torch.float32)
    gamma = None if weight is None else weight.to(dtype)
    return gamma + 1 if gamma is not None and zero_centered else gamma, None if bias is None else bias.to(dtype)


def _plain_forward(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, normalization: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    gamma, beta = (None if p is None else p.to(dtype) for p in (gamma, beta))
    if NORMALIZATIONS[normalization][0]:
        # The CPU kernel accepts float32 parameters with a 16-bit x, computes in float32 and rounds once.
        mixed = x if x.is_cpu and gamma is not None and x.dtype in NARROW else x.to(dtype)
        y, mean, factor = torch.native_layer_norm(mixed, x.shape[-1:], gamma, beta, eps)
        return y if y.dtype is x.dtype else y.to(x.dtype), mean, factor
    wide = x.to(dtype)
    # Make it contiguous: the order of the sum, and so its bits, must not depend on x's strides.
    factor = wide.square().contiguous().mean(-1, True).add_(eps).rsqrt_()
    y = wide * factor if wide is x else wide.mul_(factor)
    if gamma is not None:
        y.mul_(gamma)
    return y if y.dtype is x.dtype else y.to(x.dtype), factor.new_empty(0), factor


def _plain_backward(
    g: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    factor: Tensor,
    normalization: str,
) -> tuple[Tensor, Tensor, Tensor]:
    nothing, dtype = factor.new_empty, torch.promote_types(x.dtype, torch.float32)
    gamma, beta = (None if p is None else p.to(dtype) for p in (gamma, beta))
    if NORMALIZATIONS[normalization][0]:
        # Convert to float32: for bf16 the CPU kernel sums parameter gradients in bf16, 5 to 10 % off over 4096 rows.
        wanted = [True, gamma is not None, beta is not None]
        grad_x, grad_gamma, grad_beta = torch.ops.aten.native_layer_norm_backward(
            g.to(dtype), x.to(dtype), x.shape[-1:], mean, factor, gamma, beta, wanted
        )
        return (
            grad_x.to(x.dtype),
            nothing(0) if gamma is None else grad_gamma,
            nothing(0) if beta is None else grad_beta,
        )
    # y = x f gamma with f = (mean(x²) + eps)^-½, so dx = f (g gamma - x̂ mean(g gamma x̂)) where x̂ = x f.
    wide, along = x.to(dtype), g.to(dtype)
    wide = wide * factor if wide is x else wide.mul_(factor)
    # Make it contiguous: the order of its sums must not depend on the strides of x and g.
    product = (along * wide).contiguous()
    grad_gamma = nothing(0)
    if gamma is not None:
        grad_gamma = product.flatten(0, -2).sum(0) if product.dim() > 1 else product.clone()
        product.mul_(gamma)
        along = along * gamma if along is g else along.mul_(gamma)
    grad_x = torch.addcmul(along, wide, product.mean(-1, True), value=-1).mul_(factor)
    return grad_x if grad_x.dtype is x.dtype else grad_x.to(x.dtype), grad_gamma, nothing(0)


def _fake_forward(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, normalization: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    factor = x.new_empty((*x.shape[:-1], 1), dtype=torch.float64 if x.dtype is torch.float64 else torch.float32)
    mean = torch.empty_like(factor) if NORMALIZATIONS[normalization][0] else factor.new_empty(0)
    return x.new_empty(x.shape), mean, factor


def _fake_backward(
    g: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    factor: Tensor,
    normalization: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [factor.new_empty(0 if p is None else p.shape) for p in (gamma, beta)]
    return x.new_empty(x.shape), grads[0], grads[1]


#: Normalize (x [..., d], gamma and beta [d] or None, name, eps). Returns the output in x's dtype, the rows' means
#: (empty unless they are subtracted) and the rows' factors 1 / sqrt(...), both float32 [..., 1].
NORMALIZE: Operation[tuple[Tensor, Tensor, Tensor]] = Operation(
    "normalize(Tensor x, Tensor? gamma, Tensor? beta, str normalization, float eps) -> (Tensor, Tensor, Tensor)",
    [
        Implementation("triton", f"{ops.GPU}.norm:forward", place=fused_quantize.reason_unsupported),
        Implementation("reference", _plain_forward),
    ],
    fake=_fake_forward,
    kernel=lambda *args: row_by_row(NORMALIZE.eager(*args)),
)
#: Backward of (grad_output, x, gamma, beta, mean, factor, name). Returns the gradients of x, gamma and beta, empty for
#: a parameter that is absent.
NORMALIZE_BACKWARD: Operation[tuple[Tensor, Tensor, Tensor]] = Operation(
    "normalize_backward(Tensor g, Tensor x, Tensor? gamma, Tensor? beta, Tensor mean, Tensor factor, str normalization)"
    " -> (Tensor, Tensor, Tensor)",
    [
        Implementation(
            "triton", f"{ops.GPU}.norm:backward", place=lambda g, x, *_: fused_quantize.reason_unsupported(x)
        ),
        Implementation("reference", _plain_backward),
    ],
    fake=_fake_backward,
    kernel=lambda *args: row_by_row(NORMALIZE_BACKWARD.eager(*args)),
)
