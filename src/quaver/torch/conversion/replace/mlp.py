"""Replace MLPs of any family by Quaver's fused projections and activations.

    down(activation(up(x)))      down(f(gate(x)) · up(x))      gate and up may be one matrix

The formula of an MLP is known from the code of its forward (`_gated`) and of its activation's (`_silu`). Else the role
of each child is found by running a small copy: the order of calls, and the first activation that `probe` finds to
reproduce its outputs.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.conversion.matchers.swap_class import original_class
from quaver.torch.conversion.probe import first_equal, neutral, random_tensor, reason_failed, rows, stand_in
from quaver.torch.conversion.replace.fused_module import (
    FusedModule,
    Named,
    bypassed_child,
    fixed,
    needs_original,
    reason_mutable,
    same_code,
    sizes,
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
        if len(args) != 1 + formula.residual or kwargs or needs_original(self, *args) or blocking_child(self, formula):
            return super().forward(*args, **kwargs)
        return formula.of(self, *args)


def blocking_child(module: nn.Module, formula: MLPFormula) -> str:
    """Return the name of a child that the block would bypass but must not, or "": a new one, or see
    `bypassed_child`.
    """
    parts: Any = module._modules
    if tuple(parts) != formula.parts:
        return "the parts"
    hooked = () if module.training else (name for name in formula.inner if not is_bare(parts[name]))
    return bypassed_child(module, formula.skipped) or next(iter(hooked), "")


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


@neutral()
def extra_saved_bytes(module: nn.Module, formula: MLPFormula) -> int:
    """Return how many more bytes per token the module's own forward saves for backward, without a recipe.

    Measured on a small copy and scaled to the module's widths.
    """
    wide: dict[int, int] = {}
    for name, features in layout(module).items():
        wide.update(zip(features, (sizes(module._modules[name]) or ())[:2], strict=True))
    # Packed weights of other libraries may be buffers, so there may be no matrix.
    matrix = next((p for p in module.parameters() if p.dim() > 1), None)
    wide_enough = matrix is not None and matrix.dtype.is_floating_point and matrix.element_size() > 1
    dtype = matrix.dtype if matrix is not None and wide_enough else torch.bfloat16
    copied = stand_in(module, dtype, layout(module))
    own = {p.data_ptr() for p in copied.parameters()}
    totals = []
    for compute in (formula.of, nn.Module.__call__):
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[tensor.data_ptr()] = tensor.detach()
            return tensor

        x = next(_inputs(dtype, formula.residual))
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            compute(copied, *(a.requires_grad_() for a in x))
        tokens = x[0].numel() // SMALL[0]
        activations = [t for address, t in saved.items() if address not in own and t.dim()]
        totals.append(sum(t.nbytes // t.shape[-1] * wide.get(t.shape[-1], 0) // tokens for t in activations))
    return totals[1] - totals[0]


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
    return bool(layout(module)) and not any(part._modules or part._parameters for part in others)


#: Input features and hidden features of the small copy.
SMALL = 8, 12


def layout(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the (input, output) features of each matrix in the small copy by name; empty if it is not an MLP."""
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
    return {}


def _gated(self: Any, x: Any) -> Any:
    # The forward of LlamaMLP and of the MLPs of some 120 other families.
    y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return y


def _silu(self: Any, x: Any) -> Any:
    # The forward of SiLUActivation.
    return nn.functional.silu(x)


def formula_of(module: Any, eight_bits: bool) -> tuple[MLPFormula | None, str]:
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
    if same_code(original_class(module).forward, _gated) and same_code(type(module.act_fn).forward, _silu):
        activated = ActivationInputOp("swiglu", (), eight_bits)
        return formula_with(module._modules, activated, ("gate_proj", "up_proj"), "down_proj", ()), ""
    called, residual, why = _traced(module)
    if why:
        return None, why
    formula, why = first_equal(
        _candidates(module, called, residual),
        lambda dtype: stand_in(module, dtype, layout(module)),
        lambda dtype: _inputs(dtype, residual),
        "no activation of Quaver reproduces its outputs",
    )
    if formula is not None and ACTIVATIONS[formula.activated.name].gated:
        formula = replace(formula, activated=replace(formula.activated, eight_bits=eight_bits))
    return formula, why


NARROW = (torch.bfloat16, torch.float16)


def _inputs(dtype: torch.dtype, residual: bool) -> Iterator[tuple[Tensor, ...]]:
    for x in rows(SMALL[0], dtype):
        yield (x, random_tensor(x.shape, dtype, 99)) if residual else (x,)


@neutral()
def _traced(module: nn.Module) -> tuple[list[str], bool, str]:
    """Record in which order a small copy calls its children, in training mode: evaluation may skip dropout.

    Returns:
        The names in call order, True if the forward takes a second tensor, and the reason why it is no MLP, or "".
    """
    why = ""
    for residual in (False, True):
        copied = stand_in(module, torch.float32, layout(module)).train()
        called: list[str] = []
        for name, part in copied._modules.items():
            part.register_forward_hook(lambda *_, name=name: called.append(name))  # type: ignore[union-attr]  # noqa: B023
        try:
            with torch.no_grad():
                copied(*next(_inputs(torch.float32, residual)))
        except Exception as error:
            why = why or reason_failed(error)
            continue
        once = all(called.count(name) == 1 for name in layout(module))
        return called, residual, "" if once else "it does not call each of its matrices once"
    return [], False, why


def _candidates(module: nn.Module, called: list[str], residual: bool) -> Iterator[MLPFormula]:
    parts, features = module._modules, layout(module)
    *first_projections, down = [name for name in called if name in features]
    gated = len(first_projections) == 2 or features[first_projections[0]][1] > features[down][0]
    for name, row in ACTIVATIONS.items():
        if row.gated is gated:
            activated = ActivationInputOp(name, option_values(name, {}))
            for order in itertools.permutations(first_projections):
                yield formula_with(parts, activated, order, down, called, residual)


def formula_with(
    parts: Mapping[str, nn.Module | None],
    activated: ActivationInputOp,
    first_projections: tuple[str, ...],
    down: str,
    called: Sequence[str],
    residual: bool = False,
) -> MLPFormula:
    """Return the formula of an MLP with these children, called in this order."""
    dropout = [name for name in called if isinstance(parts[name], nn.Dropout)]
    inner = tuple(name for name in dropout if called.index(name) < called.index(down))
    after = tuple(name for name in dropout if name not in inner)
    bypassed = [n for n in parts if n not in (*first_projections, down, *dropout)]
    skipped = tuple((n, type(parts[n]), fixed(vars(parts[n]))) for n in bypassed)
    return MLPFormula(activated, first_projections, down, tuple(parts), skipped, inner, after, residual)
