"""LayerNorm and RMSNorm over the last axis, computed in float32 whatever the operands are.

Backward starts from the input and its statistics, a float32 number or two a row; the output is not kept, so that what
a quantized layer keeps of it in eight bits is all there is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quaver.options import checks
from quaver.recipes.spec import QuantSpec
from quaver.recipes.text import check_name
from quaver.torch.backends.gpu import fused_quantize
from quaver.torch.linear.fused_projections import is_bare, project
from quaver.torch.linear.linear import Linear
from quaver.torch.linear.quantized_input import GIVEN, InputOp
from quaver.torch.nn.activation import alone
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Implementation, Operation, row_by_row

#: The kinds by name: whether the mean is subtracted, and whether there is a gamma.
NORMALIZATIONS = {"LayerNorm": (True, True), "RMSNorm": (False, True), "L2": (False, False)}
#: What the norms of queries and keys normalize: each head's features, by one gamma for all heads; the same, by a gamma
#: of each head (Cohere); the features of all heads together (OLMo 2).
QK_NORM_SCOPES = ("head", "each_head", "all_heads")


@dataclass(frozen=True)
class Normalization:
    """The function of x, weight and bias that a `Norm` computes, as a prologue of
    `quaver.torch.linear.quantized_input`.

    Backward keeps x and the rows' statistics.
    """

    normalization: str
    eps: float
    zero_centered: bool
    recomputes_input: bool = False
    #: eps for a compiler: of dynamic shapes a number is a symbol, which two autograd functions cannot share.
    written: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "written", repr(float(self.eps)))

    def __call__(self, *x: Tensor | None) -> Tensor:
        return alone(self, SENTENCE, *x)

    def forward(self, *x: Tensor | None, decided: int | None = None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        value, gamma, beta = x
        assert value is not None
        gamma, beta = gamma_and_beta(value, gamma, beta, self.zero_centered)
        run = ops.chosen(NORMALIZE, value) if decided is None else NORMALIZE.impls[decided].run
        eps = float(self.written) if is_tracing() else self.eps
        y, mean, factor = run(value, gamma, beta, self.normalization, eps)
        return y, (value, gamma, beta, mean, factor)

    def quantized(
        self, x: Sequence[Any], spec: QuantSpec, factor: Tensor | None, want_output: bool, transposed: bool
    ) -> fused_quantize.FusedQuantizeResult | None:
        from quaver.torch.backends.gpu import norm as kernels

        value, weight, bias = x
        gamma, beta = gamma_and_beta(value, weight, bias, self.zero_centered)
        return kernels.normalized(value, gamma, beta, self.normalization, self.eps, spec, factor, want_output)

    def recompute_input(self, saved: Sequence[Any], g: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...] | None]:
        raise AssertionError("what a norm made is kept")

    def backward(
        self, g: Tensor, saved: Sequence[Any], decided: int | None = None, needs: Sequence[Any] = ()
    ) -> tuple[Tensor | None, ...]:
        x, gamma, beta, mean, factor = saved
        run = ops.chosen(NORMALIZE_BACKWARD, x) if decided is None else NORMALIZE_BACKWARD.impls[decided].run
        of_x, of_gamma, of_beta = run(g, x, gamma, beta, mean, factor, self.normalization)
        return of_x, None if gamma is None else of_gamma, None if beta is None else of_beta


class NormKind(nn.Module):
    """A normalization by name; `LayerNorm` and `RMSNorm` say what it computes.

    Args:
        normalization: "LayerNorm"; "RMSNorm"; or "L2", x / sqrt(mean(x²) + eps), which has no parameters. Llama 4 calls
            it so, though it divides by the root of the mean and not by the length.
        dim: features, the last axis of the input.
        eps: added to the variance, or to the mean of the squares.
        zero_centered: the parameter is gamma - 1 and begins at 0, so that weight decay pulls gamma to 1.
        bias: whether LayerNorm adds one.
    Input [..., dim] in float32, bfloat16 or float16, whatever the parameters are; output of the input's dtype.
    Bounded: relative RMS 1e-6 of float64 in float32. NaN makes its row NaN, and so does an infinity in LayerNorm;
        in the others the infinity becomes NaN and the rest of its row 0.
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
        """gamma 1 and bias 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.formula.zero_centered else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        return self.formula(x, *self.affine())

    def affine(self) -> tuple[Tensor | None, Tensor | None]:
        """weight and bias, None where there is none."""
        # Parametrizations, pruning and FSDP make attributes of them, which take longer to look up.
        parameters = self._parameters
        weight = parameters["weight"] if "weight" in parameters else self.weight  # noqa: SIM401
        return weight, parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401

    def check_input(self, x: Tensor) -> None:
        """Raise a ValueError unless x is [..., dim]."""
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
    """(x - mean) / sqrt(variance + eps) * gamma + bias; arguments as those of `Norm`.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(self, dim: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__("LayerNorm", dim, eps, **options)


class RMSNorm(NormKind):
    """x / sqrt(mean(x²) + eps) * gamma; arguments as those of `Norm`.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467; the zero-centred gamma is Gemma's.
    """

    def __init__(self, dim: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__("RMSNorm", dim, eps, **options)


def named(normalization: str, dim: int, eps: float, **options: Any) -> NormKind:
    """The norm of this name, of the class that is called so; a `Norm` for "L2". Arguments as those of `Norm`."""
    classes: dict[str, type[LayerNorm | RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if normalization in classes:
        return classes[normalization](dim, eps, **options)
    return NormKind(normalization, dim, eps, **options)


@dataclass(frozen=True, kw_only=True)
class NormOptions:
    """Of the normalization at a layer's entrance, and of what holds parameters."""

    # "LayerNorm", "RMSNorm", "L2", or None for no normalization.
    normalization: str | None = None
    eps: float = 1e-5
    # The norm's parameter is gamma - 1.
    zero_centered: bool = False
    # Whether LayerNorm adds one.
    norm_bias: bool = True
    # Where all parameters are made, and of which dtype.
    device: Any = None
    dtype: torch.dtype | None = None

    @property
    def like(self) -> dict[str, Any]:
        """What makes a parameter where the others are."""
        return {"device": self.device, "dtype": self.dtype}

    def norm(self, dim: int) -> "NormKind | None":
        """The normalization over dim features."""
        if self.normalization is None:
            return None
        options = {"zero_centered": self.zero_centered, "bias": self.norm_bias}
        return named(self.normalization, dim, self.eps, **options, **self.like)


class NormOfEachHead(nn.Module):
    """A normalization of each head's features by parameters of its own: norm(x) gamma + bias, in float32, rounded once.

    Args:
        options: of the norm.
        heads, dim: x is [..., heads, dim].
    Parameters: `weight` [heads, dim], gamma, or gamma - 1 if the options say zero_centered; and of a LayerNorm `bias`
        [heads, dim], unless the options say norm_bias=False.
    Source: Cohere's, in transformers' CohereLayerNorm, which has no bias.
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
        """gamma 1 and bias 0."""
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
    """The normalization of [..., heads, dim] for a row of `QK_NORM_SCOPES`; None if the options have none."""
    if options.normalization is None:
        return None
    if scope == "each_head":
        return NormOfEachHead(options, heads, dim)
    return options.norm(heads * dim if scope == "all_heads" else dim)


def check_normalization(name: str) -> None:
    """Raise a ValueError that names the nearest if there is no such normalization."""
    check_name("normalization", name, NORMALIZATIONS)


def normalized_projections(
    norm: nn.Module | None,
    x: Tensor,
    layers: Sequence[Linear],
    return_input: bool = False,
    then: tuple[InputOp, Sequence[Linear]] | None = None,
) -> tuple[Tensor, ...]:
    """norm(x), or x, through several layers that share its quantization.

    Args:
        norm: a `Norm`; any other module is called as it is; None leaves x alone.
        x: [..., dim].
        layers: each of dim features in.
        return_input: give the layers' input too, first.
        then: as `project` takes it.
    """
    over_ranks = getattr(type(layers[0]), "normed_over_ranks", None)
    if over_ranks is not None and norm is not None and not return_input:
        # Layers in parts, whose ranks have some tokens each.
        outputs: tuple[Tensor, ...] | None = over_ranks(norm, x, layers)
        if outputs is not None:
            return outputs if then is None else project(then[0], outputs, then[1])
    if norm is None or norm.__class__.forward is not NormKind.forward or not is_bare(norm):
        y = x if norm is None else norm(x)
        if len(layers) == 1 and not return_input and then is None:
            return (layers[0](y),)
        return project(GIVEN, (y,), layers, return_input, then)
    assert isinstance(norm, NormKind)
    norm.check_input(x)
    return project(norm.formula, (x, *norm.affine()), layers, return_input, then)


SENTENCE = (
    "this normalization has no derivative beyond its own backward, which is written by hand (no second derivative, no "
    "torch.func): use torch.nn.LayerNorm or RMSNorm there"
)


#: What a CPU's LayerNorm takes beside float32 parameters.
NARROW = (torch.bfloat16, torch.float16)


def gamma_and_beta(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, zero_centered: bool
) -> tuple[Tensor | None, Tensor | None]:
    """gamma and beta as `NORMALIZE` takes them: as they are, but in float32 or float64 for a compiler and before 1 is
    added."""
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
        # A CPU takes float32 parameters beside a narrower x, works in float32 and rounds once.
        mixed = x if x.is_cpu and gamma is not None and x.dtype in NARROW else x.to(dtype)
        y, mean, factor = torch.native_layer_norm(mixed, x.shape[-1:], gamma, beta, eps)
        return y if y.dtype is x.dtype else y.to(x.dtype), mean, factor
    wide = x.to(dtype)
    # The order of a sum, and so its bits, must not depend on how x lies.
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
        # In float32: of bf16 the CPU's kernel sums the parameters' gradients in bf16, 5 to 10 % off over 4096 rows.
        wanted = [True, gamma is not None, beta is not None]
        of_x, of_gamma, of_beta = torch.ops.aten.native_layer_norm_backward(
            g.to(dtype), x.to(dtype), x.shape[-1:], mean, factor, gamma, beta, wanted
        )
        return of_x.to(x.dtype), nothing(0) if gamma is None else of_gamma, nothing(0) if beta is None else of_beta
    # y = x f gamma with f = (mean(x²) + eps)^-½, so dx = f (g gamma - x̂ mean(g gamma x̂)) where x̂ = x f.
    wide, along = x.to(dtype), g.to(dtype)
    wide = wide * factor if wide is x else wide.mul_(factor)
    # The order of its sums must not depend on how x and g lie.
    product = (along * wide).contiguous()
    of_gamma = nothing(0)
    if gamma is not None:
        of_gamma = product.flatten(0, -2).sum(0) if product.dim() > 1 else product.clone()
        product.mul_(gamma)
        along = along * gamma if along is g else along.mul_(gamma)
    of_x = torch.addcmul(along, wide, product.mean(-1, True), value=-1).mul_(factor)
    return of_x if of_x.dtype is x.dtype else of_x.to(x.dtype), of_gamma, nothing(0)


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
    of_parameters = [factor.new_empty(0 if p is None else p.shape) for p in (gamma, beta)]
    return x.new_empty(x.shape), of_parameters[0], of_parameters[1]


#: (x [..., d], gamma and beta [d] or None, the name, eps) to the output in x's dtype, and the statistics: the
#: rows' means (empty unless they are subtracted) and the factors that normalize, float32 [..., 1].
NORMALIZE: Operation[tuple[Tensor, Tensor, Tensor]] = Operation(
    "normalize(Tensor x, Tensor? gamma, Tensor? beta, str normalization, float eps) -> (Tensor, Tensor, Tensor)",
    [
        Implementation("triton", f"{ops.GPU}.norm:forward", place=fused_quantize.reason_unsupported),
        Implementation("reference", _plain_forward),
    ],
    fake=_fake_forward,
    kernel=lambda *args: row_by_row(NORMALIZE.eager(*args)),
)
#: (grad_output, x, gamma, beta, mean, factor, the name) to the gradients of x, gamma and beta, empty where there is no
#: such parameter.
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
