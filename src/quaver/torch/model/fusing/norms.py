"""Norms of any family, computed by our normalization: over the last axis, by whatever names their parameters go."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.blocks.prologues.norm import NORMALIZATIONS, Normalization
from quaver.torch.model.fusing.comparing import differs, drawn, rows, twin, why_not
from quaver.torch.model.fusing.fused import Fused, Named, casts, changed, patched, stands_aside, untold
from quaver.torch.model.reach.exchanging import bare_class, original

#: Features of a twin whose norm has no parameters.
WIDTH = 16
#: What is added to a variance where no attribute says it; the last is torch's where eps is None.
EPS = (1e-5, 1e-6, 1e-12, torch.finfo(torch.float32).eps)


@dataclass(frozen=True)
class NormFormula:
    """A normalization of the last axis, and the names of gamma and beta among the module's parameters."""

    normalization: Normalization
    weight: str | None
    bias: str | None
    #: Attributes as they were compared.
    attributes: Named = ()

    def __str__(self) -> str:
        n = self.normalization
        return f"{n.normalization}, eps={n.eps:g}" + ", zero-centred" * n.zero_centered

    def of(self, module: Any, x: Tensor) -> Tensor:
        """The norm of x by a module's parameters."""
        weight = None if self.weight is None else getattr(module, self.weight)
        return self.normalization(x, weight, None if self.bias is None else getattr(module, self.bias))


class FusedNorm(Fused):
    """Stands above a class of norms."""

    _formula: NormFormula

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        formula = self._formula
        if len(args) != 1 or kwargs or patched(self) or changed(self.__dict__, formula.attributes):
            return super().forward(*args, **kwargs)
        if stands_aside(self, args[0]) or casts(args[0]) or not _fits(self, args[0]):
            return super().forward(*args, **kwargs)
        return formula.of(self, args[0])


def _fits(module: FusedNorm, x: Tensor) -> bool:
    """Whether gamma is of x's dtype and size: else theirs promotes or broadcasts."""
    name = module._formula.weight
    if name is None:
        return x.dim() > 0
    weight = getattr(module, name)
    if weight is None:
        return False
    return x.dim() > 0 and weight.dtype is x.dtype and weight.dim() == 1 and weight.shape[0] == x.shape[-1]


def is_norm(module: nn.Module) -> bool:
    """True for what may be one: no parts, no buffers, vectors for parameters at most, and a norm by name or by eps."""
    if module._modules or module._buffers or len(module._parameters) > 2:
        return False
    if any(p is not None and p.dim() != 1 for p in module._parameters.values()):
        return False
    forward: Any = type(module).forward
    if "gate" in getattr(inspect.unwrap(forward), "__code__", is_norm.__code__).co_varnames:
        # It takes a second tensor, and a mixer hands it one.
        return False
    return "norm" in bare_class(module).__name__.lower() or any("eps" in name for name in module.__dict__)


def formula_of(module: nn.Module) -> tuple[NormFormula | None, str]:
    """What a norm computes, or None and why it is left alone."""
    kind = original(bare_class(module)) or bare_class(module)
    names = [name for name, p in module._parameters.items() if p is not None]
    width = next((p.shape[0] for p in module._parameters.values() if p is not None), _width(module))
    if any(p is not None and p.shape[0] != width for p in module._parameters.values()):
        return None, "its parameters have several sizes"
    if why := untold(module.__dict__):
        return None, why

    def of_dtype(dtype: torch.dtype) -> nn.Module:
        values = {name: drawn((width,), dtype, i, 0.5, 0.2) for i, name in enumerate(names)}
        return twin(module, kind, {}, values)

    def inputs(dtype: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
        return ((x,) for x in rows(width, dtype))

    why = "no normalization of ours gives its outputs"
    try:
        probe = next(rows(width, torch.float32))
        copied = of_dtype(torch.float32).eval()
        with torch.no_grad():
            expected = copied(probe)
    except Exception as error:
        return None, why_not(error)
    for formula in _candidates(module, names):
        with torch.no_grad():
            y = formula.of(copied, probe)
        if isinstance(expected, Tensor) and expected.shape == y.shape and torch.allclose(y, expected, 1e-4, 1e-6):
            why = differs(of_dtype, formula.of, inputs)
            if not why:
                return formula, ""
    return None, why


def _width(module: nn.Module) -> int:
    """Features of a norm without parameters, where an attribute says them."""
    shape = module.__dict__.get("normalized_shape")
    return int(shape[0]) if isinstance(shape, tuple | list) and len(shape) == 1 else WIDTH


def _candidates(module: nn.Module, names: list[str]) -> Iterator[NormFormula]:
    """Every normalization with as many parameters, gamma first."""
    own = [value for value in module.__dict__.values() if isinstance(value, float) and 0 < value < 0.1]
    weight, bias = (*names, None, None)[:2]
    for normalization, (centred, _) in NORMALIZATIONS.items():
        if (bias is not None and not centred) or (normalization == "L2") is not (weight is None and not centred):
            continue
        for eps in dict.fromkeys((*own, *EPS)):
            for zero_centered in (False, True) if weight is not None else (False,):
                yield NormFormula(Normalization(normalization, eps, zero_centered), weight, bias)
