"""Replace norms of any family by Quaver's normalization over the last axis, and model functions that apply rope."""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.backends.gpu import capture
from quaver.torch.conversion.matchers.swap_class import BOUNDS, close, original, unconverted_class
from quaver.torch.conversion.replace.compare import (
    FusedModule,
    Named,
    bare_copy,
    casts,
    changed,
    differs,
    must_run_original,
    patched,
    random_tensor,
    reason_mutable,
    reason_unsupported,
    rows,
)
from quaver.torch.nn.attention.rope import apply_rotary_to_both
from quaver.torch.nn.norm import NORMALIZATIONS, Normalization
from quaver.torch.numerics.versions import has_reliable_version

# ---- norms ----

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
        formula = self._formula
        if len(args) != 1 or kwargs or patched(self) or changed(self.__dict__, formula.attributes):
            return super().forward(*args, **kwargs)
        if must_run_original(self, args[0]) or casts(args[0]) or not _fits(self, args[0]):
            return super().forward(*args, **kwargs)
        return formula.of(self, args[0])


def _fits(module: FusedNorm, x: Tensor) -> bool:
    """Return True if gamma has x's dtype and size; otherwise the original promotes or broadcasts."""
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


def formula_of(module: nn.Module) -> tuple[NormFormula | None, str]:
    """Return what a norm computes, or None and the reason why it is not replaced."""
    kind = original(unconverted_class(module)) or unconverted_class(module)
    names = [name for name, p in module._parameters.items() if p is not None]
    width = next((p.shape[0] for p in module._parameters.values() if p is not None), _width(module))
    if any(p is not None and p.shape[0] != width for p in module._parameters.values()):
        return None, "its parameters have several sizes"
    if why := reason_mutable(module.__dict__):
        return None, why

    def of_dtype(dtype: torch.dtype) -> nn.Module:
        values = {name: random_tensor((width,), dtype, i, 0.5, 0.2) for i, name in enumerate(names)}
        return bare_copy(module, kind, {}, values)

    def inputs(dtype: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
        return ((x,) for x in rows(width, dtype))

    why = "no normalization of Quaver reproduces its outputs"
    try:
        probe = next(rows(width, torch.float32))
        copied = of_dtype(torch.float32).eval()
        with torch.no_grad():
            expected = copied(probe)
    except Exception as error:
        return None, reason_unsupported(error)
    for formula in _candidates(module, names):
        with torch.no_grad():
            y = formula.of(copied, probe)
        if isinstance(expected, Tensor) and expected.shape == y.shape and torch.allclose(y, expected, 1e-4, 1e-6):
            why = differs(of_dtype, formula.of, inputs)
            if not why:
                return formula, ""
    return None, why


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


# ---- functions of transformers' models that apply rope to queries and keys ----
#
# A model passes cosines and sines that it computes once for all layers. Here they are rearranged for `apply_rotary`,
# with the sine negated at the first element of each pair.

#: Layouts of the tables [..., R]: each angle in both halves, at both neighbours, or once.
HALVES, PAIRS, ONCE = "halves", "pairs", "once"
#: Llama 4's layout, one tensor of complex numbers; its function is not replaced.
COMPLEX = "complex"


class _RopeThreadState(threading.local):
    #: Weak references to the last cosines and sines, their cache key, and the tables; empty once they are freed.
    last: Sequence[Any] = ()


_thread = _RopeThreadState()


@dataclass(frozen=True)
class Rope:
    """Rope function (q [B, H, S, D], k [B, G, S, D], cos, sin [B, S, R]) that returns q and k rotated.

    With unsqueeze_dim=2, as in transformers, q and k are [B, S, H, D].
    """

    #: Layout of the tables; and True if neighbouring features form a pair, False if the two halves do.
    table_layout: str
    interleaved: bool

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        tables = self._remembered(cos, sin)
        if unsqueeze_dim == 2:
            return apply_rotary_to_both(q, k, *tables, self.interleaved)
        q, k = apply_rotary_to_both(q.transpose(1, 2), k.transpose(1, 2), *tables, self.interleaved)
        return q.transpose(1, 2), k.transpose(1, 2)

    def _remembered(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tables for these tensors, cached because all layers of a model receive the same ones."""
        if not (has_reliable_version(cos) and has_reliable_version(sin)) or cos.requires_grad or sin.requires_grad:
            return self._tables(cos, sin)
        # Memory allocated in a CUDA graph is only filled during replays.
        if capture.is_captured_or_rehearsed(cos.device):
            return self._tables(cos, sin)
        stream = capture.stream_of(cos.device) if cos.is_cuda else 0
        facts = self, cos._version, sin._version, stream, torch.is_inference_mode_enabled()
        # Copy first: another thread may clear the entry.
        last = tuple(_thread.last)
        if last and last[0]() is cos and last[1]() is sin and last[2] == facts:
            cached: tuple[Tensor, Tensor] = last[3]
            return cached
        entry: list[Any] = []
        fresh = self._tables(cos, sin)
        entry += [weakref.ref(cos, lambda _: entry.clear()), weakref.ref(sin), facts, fresh]
        _thread.last = entry
        return fresh

    def _tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
        if self.table_layout == PAIRS:
            cos, sin = cos[..., ::2], sin[..., ::2]
        elif self.table_layout == HALVES:
            cos, sin = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
        if self.interleaved:
            return torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def tables(table_layout: str, width: int, tokens: int, dtype: torch.dtype) -> Any:
    """Return random cosines and sines [1, S, R] for R features, or complex numbers [1, S, R / 2]."""
    angle = random_tensor((1, tokens, width // 2), torch.float32, 7, scale=2.0)
    if table_layout == COMPLEX:
        return torch.polar(torch.ones_like(angle), angle)
    if table_layout == PAIRS:
        angle = angle.repeat_interleave(2, -1)
    elif table_layout == HALVES:
        angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rope_of(function: Callable[..., Any]) -> Rope | None:
    """Return the `Rope` that computes the same as a model's function, or None."""
    with torch.inference_mode(False), torch.enable_grad():
        for rope in (Rope(HALVES, False), Rope(PAIRS, True), Rope(HALVES, True), Rope(ONCE, False)):
            if all(_agrees(function, rope, HEAD, dtype) for dtype in BOUNDS):
                # Some functions reject tables with fewer features than a head; those that accept them must agree.
                return rope if _agrees(function, rope, HEAD // 2, torch.float32, refusing=True) else None
    return None


#: Features of a head in the comparison.
HEAD = 16


def _agrees(function: Callable[..., Any], rope: Rope, width: int, dtype: torch.dtype, refusing: bool = False) -> bool:
    """Return True if the function and the rope agree when `width` features of each head rotate.

    Args:
        function: the model's function.
        rope: Quaver's candidate.
        width: number of rotated features.
        dtype: dtype of the inputs.
        refusing: result if the function raises.
    """
    q, k = (random_tensor((2, heads, 5, HEAD), dtype, heads).requires_grad_() for heads in (4, 2))
    cos, sin = tables(rope.table_layout, width, 5, dtype)
    try:
        theirs = function(q, k, cos, sin)
    except Exception:
        # The function takes other arguments or tables.
        return refusing
    results = []
    for transposed in (theirs, rope(q, k, cos, sin)):
        if (
            not isinstance(transposed, tuple)
            or len(transposed) != 2
            or any(y.shape != x.shape for x, y in zip((q, k), transposed, strict=True))
        ):
            return False
        g = [random_tensor(y.shape, dtype, 9) for y in transposed]
        results.append([*(y.detach() for y in transposed), *torch.autograd.grad(transposed, (q, k), g)])
    return all(map(close, results[1], results[0]))
