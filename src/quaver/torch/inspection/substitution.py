"""Runs of a model in which chosen GEMMs and operands have another precision than the layers' recipes say.

The model is converted as usual. While it runs, `GemmSubstitution` overwrites the result of each GEMM with one computed
from other operands, so that everything after it, forward and backward, sees that result.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.inspection.rows import ATTENTION, OPERANDS
from quaver.recipes.conversion import Rules
from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.inspection.inspector import eager_steps, observed_modules
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing, rotate
from quaver.torch.operations import ops
from quaver.torch.state import observer

#: Function of the model and the batch that returns the loss.
LossFunction = Callable[[nn.Module, Any], Tensor]
#: A recipe for all layers, or rules, as `convert` takes them.
RecipeOrRules = str | Recipe | Rules | Mapping[str, Recipe | str | None]


class GemmOperand(NamedTuple):
    """One operand of one GEMM of one layer."""

    layer: str
    gemm: str
    #: "input", "weight" or "grad_output"; "" for the GEMMs of attention, which are not taken apart.
    operand: str


class GemmSubstitution(observer.Observer):
    """Overwrites GEMM results: operands in `unchanged` are used as the layer quantized them, others are replaced.

    Args:
        replacement: recipe of each layer for the operands that are replaced, or the name of the implementation that
            computes them; None is high precision.
        unchanged: operands to use as they are; None is all, so that nothing is overwritten.
    """

    measures_gemms = sees_recomputation = True

    def __init__(
        self,
        replacement: Callable[[str], Recipe | str | None] = lambda layer: None,
        unchanged: frozenset[GemmOperand] | None = frozenset(),
    ) -> None:
        self.replacement, self._unchanged = replacement, unchanged
        #: Names of the layers and attention modules that are observed, by id; set by `run`.
        self.names: dict[int, str] = {}
        #: Operands that GEMMs have read, in the order of their first use.
        self.operands: dict[GemmOperand, None] = {}

    def observe_gemm(self, gemm: observer.ObservedGemm) -> None:
        """Overwrite one result; see `quaver.torch.state.observer.Observer`."""
        name = self.names.get(id(gemm.layer))
        if name is None or is_tracing() or gemm.quantized == (None, None):
            return
        operands = [GemmOperand(name, gemm.name, operand) for operand in OPERANDS[gemm.name]]
        self.operands |= dict.fromkeys(operands)
        unchanged = [self._unchanged is None or each in self._unchanged for each in operands]
        if all(unchanged):
            return
        used = [q if same else None for same, q in zip(unchanged, gemm.quantized, strict=True)]
        with torch.no_grad(), torch.autocast(gemm.a.device.type, enabled=False):
            gemm.y.copy_(self.product(gemm, used, self.replacement(name)))

    def attention_recipe(self, core: nn.Module, recipe: Recipe | None) -> Recipe | None:
        """Return the recipe of an attention module; see `quaver.torch.state.observer.Observer`."""
        name = self.names.get(id(core))
        if name is None:
            return recipe
        operand = GemmOperand(name, ATTENTION, "")
        self.operands[operand] = None
        if self._unchanged is None or operand in self._unchanged:
            return recipe
        replacement = self.replacement(name)
        return recipe if isinstance(replacement, str) else replacement

    def product(
        self, gemm: observer.ObservedGemm, used: list[Quantized | None], replacement: Recipe | str | None
    ) -> Tensor:
        """Return a @ b.T + bias in float32, from the operands in `used` and replacements for the others."""
        values, bias = (gemm.a, gemm.b), gemm.bias
        with ops.only(replacement) if isinstance(replacement, str) else nullcontext():
            if isinstance(replacement, str):
                used = _quantized(values, used, [None if q is None else q.spec for q in gemm.quantized])
            elif replacement is not None:
                spec = replacement.gemms[gemm.name]
                used = _quantized(values, used, [spec.a, spec.b])
            qa, qb = used
            if isinstance(replacement, str) and qa is not None and qb is not None:
                product = ops.MATMUL(qa, qb, torch.float32)
            else:
                a, b = decoded_operands(values, used)
                product = a @ b.t()
        return product if bias is None else product.add_(bias)


def _quantized(
    values: tuple[Tensor, Tensor], used: list[Quantized | None], specs: Sequence[QuantSpec | None]
) -> list[Quantized | None]:
    """Quantize each operand that is not in `used` and has a spec."""
    return [
        ops.QUANTIZE(x.detach(), spec) if q is None and spec is not None else q
        for x, q, spec in zip(values, used, specs, strict=True)
    ]


def decoded_operands(values: tuple[Tensor, Tensor], used: Sequence[Quantized | None]) -> tuple[Tensor, Tensor]:
    """Return both operands in float32: the values where one is not quantized, decoded codes where it is.

    If one of them is rotated by a Hadamard transform, the other is too, which leaves their product unchanged.
    """
    rotated = [q is not None and q.spec.hadamard for q in used]
    a, b = (x.detach().float() if q is None else q.dequantize() for x, q in zip(values, used, strict=True))
    if rotated[0] and not rotated[1]:
        b = rotate(b)
    if rotated[1] and not rotated[0]:
        a = rotate(a)
    return a, b


# ---- runs ----


class Run(NamedTuple):
    """Loss and gradients of one forward and backward."""

    loss: float
    gradients: dict[str, Tensor]

    @property
    def finite(self) -> bool:
        # A sum is not finite if a value is not.
        return math.isfinite(self.loss) and all(math.isfinite(g.double().sum()) for g in self.gradients.values())


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        got += " without gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        raise ValueError(
            f"loss_fn(model, batch) returned {got}; it must return a scalar loss on which backward() was not called "
            "and that depends on the parameters of the model that it is given"
        )


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model. Raises: ValueError if it cannot be copied, as under FSDP."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"the model cannot be copied ({type(error).__name__}: {error}); give the plain model, before FSDP or "
            "another wrapper is applied"
        ) from error


def run(model: nn.Module, batch: Any, loss_fn: LossFunction, substitution: GemmSubstitution | None = None) -> Run:
    """Run one forward and backward of a copy of the model; the model, its states and the random state do not change.

    Args:
        substitution: overwrites GEMM results of the copy; None runs it as it is.
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad(), eager_steps():
        model = copied(model)
        for parameter in model.parameters():
            parameter.grad = None
        with ExitStack() as observing:
            if substitution is not None:
                substitution.names = {id(module): name for name, module in observed_modules(model)}
                observing.enter_context(observer.observing(substitution))
            loss = loss_fn(model, batch)
            _check_loss(loss)
            if any(p.grad is not None for p in model.parameters()):
                raise ValueError("loss_fn(model, batch) called backward(); it must only return the loss")
            loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Run(float(loss.detach()), gradients)
