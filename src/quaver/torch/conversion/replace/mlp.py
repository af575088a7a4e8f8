"""Replace MLPs of any family by Quaver's fused projections and activations.

    down(activation(up(x)))      down(f(gate(x)) · up(x))      gate and up may be one matrix

The role of each child is found by running a small copy: the order of calls, and which activation reproduces its
    outputs.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.conversion.matchers.swap_class import original, unconverted_class
from quaver.torch.conversion.replace.compare import (
    FusedModule,
    Named,
    bare_copy,
    changed,
    differs,
    fixed,
    linear,
    must_run_original,
    patched,
    random_tensor,
    reason_mutable,
    reason_unsupported,
    rows,
)
from quaver.torch.linear.autograd import IDENTITY_INPUT
from quaver.torch.linear.fused_projections import is_bare, project
from quaver.torch.nn.activation import ACTIVATIONS, ActivationInputOp, option_values


@dataclass(frozen=True)
class MLPFormula:
    """Formula of an MLP: its activation, and the roles of its children by name."""

    activated: ActivationInputOp
    #: Names of the first matrices: gate and up, one that is both, or up alone.
    first_projections: tuple[str, ...]
    down: str
    #: Names of all children.
    parts: tuple[str, ...]
    #: Name, class and attributes of the activation children that the block bypasses, as they were compared.
    skipped: tuple[tuple[str, type, Named], ...]
    #: Names of the dropouts before the down projection, and of those after it.
    inner: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    #: True if the forward takes a second tensor that it adds.
    residual: bool = False
    #: Attributes of the MLP as they were compared.
    attributes: Named = ()

    def __str__(self) -> str:
        return f"MLP, {self.activated.name}" + ", eight_bit_activations" * self.activated.eight_bits

    def of(self, module: nn.Module, x: Tensor, *residual: Tensor) -> Tensor:
        """Compute the MLP of x with a module's children."""
        parts: Any = module._modules
        first_projections, down = [parts[name] for name in self.first_projections], parts[self.down]
        if module.training and any(parts[name].p > 0 for name in self.inner):
            y = self.activated(*project(IDENTITY_INPUT, (x,), first_projections))
            for name in self.inner:
                y = parts[name](y)
            y = down(y)
        else:
            (y,) = project(self.activated, project(IDENTITY_INPUT, (x,), first_projections), (down,))
        for name in self.after:
            y = parts[name](y)
        return y + residual[0] if residual else y


class FusedMLP(FusedModule):
    """Mixin above an MLP class that runs Quaver's fused block."""

    _formula: MLPFormula

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        formula = self._formula
        if len(args) != 1 + formula.residual or kwargs or patched(self) or changed(self.__dict__, formula.attributes):
            return super().forward(*args, **kwargs)
        if any(must_run_original(self, x) for x in args):
            return super().forward(*args, **kwargs)
        if blocking_child(self, formula):
            return super().forward(*args, **kwargs)
        return formula.of(self, *args)


def blocking_child(module: nn.Module, formula: MLPFormula) -> str:
    """Return the name of a child that the block would bypass but must not, or "".

    That is a new child, or one that has a hook or whose class or attributes have changed.
    """
    parts: Any = module._modules
    if tuple(parts) != formula.parts:
        return "the parts"
    for name, kind, attributes in formula.skipped:
        part = parts[name]
        if type(part) is not kind or not is_bare(parts[name]) or changed(part.__dict__, attributes):
            return name
    if not module.training:
        for name in formula.inner:
            if not is_bare(parts[name]):
                return name
    return ""


def hook_note(module: nn.Module, formula: MLPFormula) -> str:
    """Return a note on the memory that a hook on a child costs, or ""."""
    part = blocking_child(module, formula)
    if part:
        more = extra_saved_bytes(module, formula)
        return (
            f"a hook on {part}: while it is registered, the module's own forward runs and saves {more:,} more bytes "
            "per token"
        )
    if not is_bare(module._modules[formula.down]):  # type: ignore[arg-type]
        return f"a hook on {formula.down}: while it is registered, that layer's input is saved instead of recomputed"
    return ""


def extra_saved_bytes(module: nn.Module, formula: MLPFormula) -> int:
    """Return how many more bytes per token the module's own forward saves for backward, without a recipe.

    Measured on a small copy and scaled to the module's widths.
    """
    features = layout(module)
    assert features is not None
    wide = {
        small: real
        for name, pair in features.items()
        for small, real in zip(pair, _features(module, name), strict=True)
    }
    # Packed weights of other libraries may be buffers, so there may be no matrix.
    matrix = next((p for p in module.parameters() if p.dim() > 1), None)
    wide_enough = matrix is not None and matrix.dtype.is_floating_point and matrix.element_size() > 1
    dtype = matrix.dtype if matrix is not None and wide_enough else torch.bfloat16
    copied = small(module, dtype)
    own = {p.data_ptr() for p in copied.parameters()}
    totals = []
    for compute in (formula.of, nn.Module.__call__):
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[tensor.data_ptr()] = tensor.detach()
            return tensor

        x = next(_inputs(module, dtype, formula.residual))
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            compute(copied, *(a.requires_grad_() for a in x))
        tokens = x[0].numel() // SMALL[0]
        activations = [t for address, t in saved.items() if address not in own and t.dim()]
        totals.append(sum(t.nbytes // t.shape[-1] * wide.get(t.shape[-1], 0) // tokens for t in activations))
    return totals[1] - totals[0]


def _features(module: nn.Module, name: str) -> tuple[int, int]:
    size = sizes(module._modules[name])
    assert size is not None
    return size[:2]


def is_mlp(module: nn.Module) -> bool:
    """Return True if the module may be an MLP.

    It needs two or three matrices that lead back to the input's features, and otherwise only dropout and activations
    without parameters.
    """
    if any(p is not None for p in module._parameters.values()) or module._buffers:
        return False
    if any(part is None for part in module._modules.values()) or "attention" in type(module).__name__.lower():
        return False
    others: Any = [part for part in module._modules.values() if sizes(part) is None]
    return layout(module) is not None and not any(part._modules or part._parameters for part in others)


#: Input features and hidden features of the small copy.
SMALL = 8, 12


def layout(module: nn.Module) -> dict[str, tuple[int, int]] | None:
    """Return the (input, output) features of each matrix in the small copy by name, or None if it is not an MLP."""
    shapes = {name: size[:2] for name, part in module._modules.items() if (size := sizes(part)) is not None}
    if len(shapes) == 2:
        (up, (k, n)), (down, (between, out)) = shapes.items()
        if out == k and n in (between, 2 * between):
            return {up: (SMALL[0], SMALL[1] * n // between), down: SMALL[::-1]}
    if len(shapes) == 3:
        for down in reversed(shapes):
            others = [shape for name, shape in shapes.items() if name != down]
            if others[0] == others[1] == shapes[down][::-1]:
                return {name: SMALL[::-1] if name == down else SMALL for name in shapes}
    return None


def sizes(part: nn.Module | None) -> tuple[int, int, bool] | None:
    """Return (input features, output features, has bias) of a linear layer, or None for other modules."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        features = [getattr(part, name, None) for name in names]
        if isinstance(features[0], int) and isinstance(features[1], int):
            return features[0], features[1], getattr(part, "bias", None) is not None
    return None


def formula_of(module: nn.Module, eight_bits: bool) -> tuple[MLPFormula | None, str]:
    """Return what an MLP computes, or None and the reason why it is not replaced.

    Args:
        module: the MLP.
        eight_bits: True saves the input of a gated activation in eight bits.
    """
    dtypes = {p.dtype for p in module.parameters() if p.dim() > 1 and p.dtype in (torch.float32, *NARROW)}
    if len(dtypes) > 1:
        return None, "its matrices have several dtypes"
    for part in (module, *(p for p in module._modules.values() if p is not None and sizes(p) is None)):
        if why := reason_mutable(part.__dict__):
            return None, why
    traced, why = _traced(module)
    if traced is None:
        return None, why
    why = "no activation of Quaver reproduces its outputs"
    for formula in _candidates(module, traced):
        copied = small(module, torch.float32).eval()
        x = _inputs(module, torch.float32, formula.residual)
        with torch.no_grad():
            probe = next(x)
            if not torch.allclose(formula.of(copied, *probe), copied(*probe), 1e-4, 1e-5):
                continue
        why = differs(
            lambda dtype: small(module, dtype),
            formula.of,
            lambda dtype: _inputs(module, dtype, formula.residual),  # noqa: B023
        )
        if not why:
            gated = ACTIVATIONS[formula.activated.name].gated
            return replace(formula, activated=replace(formula.activated, eight_bits=eight_bits and gated)), ""
    return None, why


NARROW = (torch.bfloat16, torch.float16)


def small(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a small copy with few features: nn.Linear for each matrix, and the other children without hooks."""
    parts: dict[str, nn.Module] = {}
    features = layout(module)
    assert features is not None
    for i, (name, part) in enumerate(module._modules.items()):
        size = sizes(part)
        if part is None or size is None:
            assert part is not None
            parts[name] = bare_copy(part, unconverted_class(part), {}, {})
            continue
        k, n = features[name]
        parts[name] = linear(
            random_tensor((n, k), dtype, 2 * i, scale=0.5), random_tensor((n,), dtype, 2 * i + 1) if size[2] else None
        )
    kind = unconverted_class(module)
    return bare_copy(module, original(kind) or kind, parts, {})


def _inputs(module: nn.Module, dtype: torch.dtype, residual: bool) -> Iterator[tuple[Tensor, ...]]:
    for x in rows(SMALL[0], dtype):
        yield (x, random_tensor(x.shape, dtype, 99)) if residual else (x,)


@dataclass(frozen=True)
class _CallTrace:
    """Names of the children in call order, and if the forward takes a second tensor."""

    called: Sequence[str]
    residual: bool


def _note(called: list[str], name: str, *_: Any) -> None:
    called.append(name)


def _traced(module: nn.Module) -> tuple[_CallTrace | None, str]:
    """Record in which order a small copy calls its children, in training mode: evaluation may skip dropout."""
    why = ""
    for residual in (False, True):
        copied = small(module, torch.float32).train()
        called: list[str] = []
        for name, part in copied._modules.items():
            assert part is not None
            part.register_forward_hook(functools.partial(_note, called, name))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                copied(*next(_inputs(module, torch.float32, residual)))
        except Exception as error:
            why = why or reason_unsupported(error)
            continue
        matrices = [name for name in called if isinstance(copied._modules[name], nn.Linear)]
        if len(matrices) != len(set(matrices)) or set(matrices) != {
            name for name, part in copied._modules.items() if isinstance(part, nn.Linear)
        }:
            return None, "it does not call each of its matrices once"
        return _CallTrace(called, residual), ""
    return None, why


def _candidates(module: nn.Module, trace: _CallTrace) -> Iterator[MLPFormula]:
    parts: Any = module._modules
    *first_projections, down = [name for name in trace.called if sizes(parts[name]) is not None]
    last = trace.called.index(down)
    dropout = [name for name in trace.called if isinstance(parts[name], nn.Dropout)]
    inner = tuple(name for name in dropout if trace.called.index(name) < last)
    after = tuple(name for name in dropout if name not in inner)
    others = {n: p for n, p in parts.items() if sizes(p) is None and n not in dropout}
    skipped = tuple((n, p.__class__, fixed(p.__dict__)) for n, p in others.items())
    features = layout(module)
    gated = features is not None and (
        len(first_projections) == 2 or features[first_projections[0]][1] > features[down][0]
    )
    for name, row in ACTIVATIONS.items():
        if row.gated is not gated:
            continue
        activated = ActivationInputOp(name, option_values(name, {}))
        for order in itertools.permutations(first_projections):
            yield MLPFormula(activated, order, down, tuple(parts), skipped, inner, after, trace.residual)
