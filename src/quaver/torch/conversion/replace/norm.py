"""Replace norms of any family by Quaver's normalization over the last axis.

The formula of a norm is known from the code of its forward (`_rms_norm`), or else it is the first candidate that
`probe` finds to compute the same.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.conversion.matchers.swap_class import original_class, unconverted_class
from quaver.torch.conversion.probe import bare_copy, first_equal, random_tensor, rows
from quaver.torch.conversion.replace.fused_module import FusedModule, Named, needs_original, reason_mutable, same_code
from quaver.torch.nn.norm import NORMALIZATIONS, Normalization
from quaver.torch.operations import ops

#: Features of the small copy of a norm without parameters.
WIDTH = 16
#: Values of eps to try if no attribute gives it; the last is torch's for eps=None.
EPS = (1e-5, 1e-6, 1e-12, torch.finfo(torch.float32).eps)


@dataclass(frozen=True)
class NormFormula:
    """A normalization of the last axis, and the names of the parameters that are gamma and beta."""

    normalization: Normalization
    weight: str | None
    bias: str | None
    #: Attributes of the norm as they were compared.
    attributes: Named = ()

    def __str__(self) -> str:
        n = self.normalization
        return f"{n.normalization}, eps={n.eps:g}" + ", zero-centred" * n.zero_centered

    def of(self, module: Any, x: Tensor) -> Tensor:
        """Compute the norm of x with a module's parameters."""
        weight = None if self.weight is None else getattr(module, self.weight)
        return self.normalization(x, weight, None if self.bias is None else getattr(module, self.bias))


class FusedNorm(FusedModule):
    """Mixin before a norm class: runs Quaver's normalization where it gives the same result, else the original's."""

    _formula: NormFormula

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or needs_original(self, args[0]) or not _fits(self, args[0]):
            return super().forward(*args, **kwargs)
        return self._formula.of(self, args[0])


def _fits(module: FusedNorm, x: Tensor) -> bool:
    """Return True if the norm's operations keep x's dtype, and gamma has x's dtype and size; otherwise the original
    promotes or broadcasts.
    """
    if x.dtype is not torch.float32 and torch.is_autocast_enabled(ops.autocast_device(x)):
        return False
    name = module._formula.weight
    if name is None:
        return x.dim() > 0
    weight = getattr(module, name)
    if weight is None:
        return False
    return x.dim() > 0 and weight.dtype is x.dtype and weight.dim() == 1 and weight.shape[0] == x.shape[-1]


def is_norm(module: nn.Module) -> bool:
    """Return True if the module may be a norm: no children or buffers, at most two vectors, and a norm by name or
    eps.
    """
    if module._modules or module._buffers or len(module._parameters) > 2:
        return False
    if any(p is not None and p.dim() != 1 for p in module._parameters.values()):
        return False
    forward: Any = type(module).forward
    if "gate" in getattr(inspect.unwrap(forward), "__code__", is_norm.__code__).co_varnames:
        # A gated norm takes a second tensor from its mixer.
        return False
    return "norm" in unconverted_class(module).__name__.lower() or any("eps" in name for name in module.__dict__)


def _rms_norm(self: Any, x: Any) -> Any:
    # The forward of LlamaRMSNorm and of the norms of some 130 other families.
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * x.to(dtype)


def formula_of(module: Any) -> tuple[NormFormula | None, str]:
    """Return what a norm computes, or None and the reason why it is not replaced.

    A norm with a gamma [heads, features] is compared with one gamma for all heads.
    """
    if same_code(original_class(module).forward, _rms_norm) and type(module.variance_epsilon) is float:
        return NormFormula(Normalization("RMSNorm", module.variance_epsilon, False), "weight", None), ""
    names = [name for name, p in module._parameters.items() if p is not None]
    widths = {p.shape[-1] for p in module._parameters.values() if p is not None} or {_width(module)}
    if len(widths) > 1:
        return None, "its parameters have several sizes"
    if why := reason_mutable(module.__dict__):
        return None, why
    (width,) = widths

    def build_copy(dtype: torch.dtype) -> nn.Module:
        values = {name: random_tensor((width,), dtype, i, 0.5, 0.2) for i, name in enumerate(names)}
        return bare_copy(module, {}, values)

    def inputs(dtype: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
        return ((x,) for x in rows(width, dtype))

    otherwise = "no normalization of Quaver reproduces its outputs"
    return first_equal(_candidates(module, names), build_copy, inputs, otherwise)


def _width(module: nn.Module) -> int:
    """Return the features of a norm without parameters, from its attribute normalized_shape if there is one."""
    shape = module.__dict__.get("normalized_shape")
    return int(shape[0]) if isinstance(shape, tuple | list) and len(shape) == 1 else WIDTH


def _candidates(module: nn.Module, names: list[str]) -> Iterator[NormFormula]:
    """Yield every normalization with as many parameters; gamma comes first."""
    own = [value for value in module.__dict__.values() if isinstance(value, float) and 0 < value < 0.1]
    weight, bias = (*names, None, None)[:2]
    for normalization, (centred, _) in NORMALIZATIONS.items():
        if (bias is not None and not centred) or (normalization == "L2") is not (weight is None and not centred):
            continue
        for eps in dict.fromkeys((*own, *EPS)):
            for zero_centered in (False, True) if weight is not None else (False,):
                yield NormFormula(Normalization(normalization, eps, zero_centered), weight, bias)
