"""`bisect`: find the layer, GEMM and operand that make a quantized model differ from a good one."""

import math
import statistics
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.recipes.text import check_instance, html_lines
from quaver.torch.conversion.convert import convert, revert
from quaver.torch.conversion.report import Report
from quaver.torch.inspection.inspector import unwrapped
from quaver.torch.inspection.statistics import result_statistics
from quaver.torch.inspection.substitution import (
    GemmOperand,
    GemmSubstitution,
    LossFunction,
    RecipeOrRules,
    Run,
    copied,
    run,
)
from quaver.torch.operations import ops
from quaver.torch.operations.operation import OPERATIONS
from quaver.torch.state import observer

#: Largest number of contributions that the text of a result lists.
LISTED = 10
#: Squared relative error of loss and gradients below which two runs differ by rounding only.
ROUNDING = 1e-7
#: A layer is a cause only if the difference of one of its GEMMs is more than this many times the median.
UNUSUAL = 2.0


class Cause(NamedTuple):
    """A layer that carries more than half of the error, and the GEMM and operand that cause most of it."""

    layer: str
    #: "fprop", "dgrad", "wgrad" or "attention"; None if no single GEMM of the layer is the cause.
    gemm: str | None
    #: "input", "weight" or "grad_output"; None if no single operand is the cause, but the GEMM itself or both together.
    operand: str | None
    #: Its share of the squared error; near 1 if it alone is the cause.
    share: float
    #: The share of the whole layer.
    layer_share: float

    def __str__(self) -> str:
        name = ", ".join(part for part in (self.layer or "(root)", self.gemm, self.operand) if part)
        whole = f", the whole layer {self.layer_share:.0%}" if self.gemm else ""
        return f"{name}: {self.share:.0%} of the error{whole}"


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """Result of `bisect`."""

    #: Parts that carry more than half of the error each, in the order of the model; empty if there is no single cause.
    causes: tuple[Cause, ...]
    #: Share of each layer alone, the largest first; measured only if there is no single cause.
    contributions: dict[str, float]
    #: Number of passes, each a forward and a backward.
    runs: int

    def __str__(self) -> str:
        if self.causes:
            return "\n".join(map(str, self.causes))
        largest = [f"  {layer or '(root)'}: {share:.0%}" for layer, share in [*self.contributions.items()][:LISTED]]
        return "\n".join(["no single cause; the largest contributions, each layer alone:", *largest])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_lines(str(self).split("\n"))


def bisect(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    good: RecipeOrRules = "bf16",
    bad: RecipeOrRules | None = None,
    *,
    is_bad: Callable[[float, dict[str, Tensor]], bool] | None = None,
) -> Bisection:
    """Find the layer, GEMM and operand whose precision makes the difference between two recipes.

        found = qt.bisect(model, batch, lambda model, batch: model(batch).square().mean())
        print(found)  # layers.1.down_proj, fprop, input: 99% of the error

    Halves the layers, then the GEMMs of a layer, then the operands of a GEMM. One half is computed as in `bad`, all
    else as in `good`:

    - Half of the layers is bad if it has more than half of the squared error of loss and gradients.
    - Half of a layer or GEMM is bad if it has more than two thirds of the error of that layer or GEMM.
    - A layer is named only if one of its GEMMs differs from `good` by more than twice the median of all GEMMs.

    The error of a gradient is relative to that gradient. Works on copies: the model and the random state do not change.

    Args:
        model: a model; if `bad` is None, one that `convert` has converted.
        batch: passed to `loss_fn`.
        loss_fn: function of model and batch that returns the loss.
        good: recipe, rules, or the name of an implementation as for `qt.only`.
        bad: the same; None is the model as it is, with its scaling state. If `good` is the name of an implementation,
            `bad` is one too, or None for the default implementations.
        is_bad: function of loss and gradients (by parameter name) that replaces the comparison of errors, such as
            `lambda loss, gradients: not math.isfinite(loss)`.
    Raises:
        ValueError: the model has no quantized layer, the loss or a gradient is not finite under `good`, or both give
            the same loss and gradients.
    """
    check_instance("bisect", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    search = _Search(unwrapped(model), batch, loss_fn, good, bad, is_bad)
    causes = search.causes([*search.operands], 1.0)
    contributions = {} if causes else search.contributions()
    return Bisection(causes=tuple(causes), contributions=contributions, runs=search.runs)


class _Search:
    """State of one bisection."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: LossFunction,
        good: RecipeOrRules,
        bad: RecipeOrRules | None,
        is_bad: Callable[[float, dict[str, Tensor]], bool] | None,
    ) -> None:
        self._batch, self._loss_fn, self._is_bad = batch, loss_fn, is_bad
        self.runs = 0
        known = {each.name for operation in OPERATIONS for each in operation.implementations}
        self._implementation: str | None = None
        self._replacement: Callable[[str], Recipe | str | None]
        if isinstance(good, str) and good in known:
            if not (bad is None or (isinstance(bad, str) and bad in known)):
                raise ValueError(f"bisect: good is the implementation {good!r}, so bad must be one too, not {bad!r}")
            self._model, self._implementation, self._replacement = model, bad, lambda layer: good
        else:
            self._model = model if bad is None else _converted(model, bad)[0]
            report = _converted(model, good)[1]
            self._replacement = (report.converted | report.attention).get
        measured = _MeasuredGemms(self._replacement)
        everything = self._run(measured)
        #: Errors of each GEMM's calls in the bad run.
        self._errors = measured.errors
        self.operands = [*measured.operands]
        if not self.operands:
            raise ValueError(
                "bisect: no quantized layer ran; give bad=, or call qt.convert(model, recipe) first, and let loss_fn "
                "call the model that it is given"
            )
        self._good = self._with_bad(())
        if not self._good.finite:
            raise ValueError("bisect: loss or gradients are not finite under good: quantization is not the cause")
        if self._error(self._with_bad(())) > ROUNDING:
            raise ValueError("bisect: loss_fn returns another loss for the same model and batch; make it deterministic")
        self._total = self._error(everything) if everything.finite else math.inf
        if is_bad is not None:
            verdicts = [bool(is_bad(each.loss, each.gradients)) for each in (everything, self._good)]
            if verdicts != [True, False]:
                raise ValueError(
                    f"bisect: is_bad returned {verdicts[0]} under bad and {verdicts[1]} under good; it must return "
                    "True and False"
                )
        elif self._total < ROUNDING:
            raise ValueError("bisect: loss and gradients are the same under good and bad, but for rounding")

    def causes(self, operands: list[GemmOperand], share: float, layer_share: float = 0.0) -> list[Cause]:
        """Return the causes within operands that carry a share of the error.

        Args:
            layer_share: share of the layer, if the operands are only a part of one.
        """
        found: list[Cause] = []
        least = 0.5
        if len({each.layer for each in operands}) == 1:
            layer_share = layer_share or share
            # One of two equal halves always has a little more than the other. A share above 1 is possible, because
            # errors do not add up.
            least = 2 / 3 * min(1.0, share)
        for half in _halves(operands):
            half_share = self.share(half)
            if half_share > least:
                found += self.causes(half, half_share, layer_share)
        if found:
            return found
        layer, gemms = operands[0].layer, {each.gemm for each in operands}
        if any(each.layer != layer for each in operands):
            return []
        if self._is_bad is None and not self._is_unusual(layer, gemms):
            return []
        gemm = operands[0].gemm if len(gemms) == 1 else None
        # Attention has no operands.
        operand = operands[0].operand or None if len(operands) == 1 else None
        return [Cause(layer, gemm, operand, share, layer_share)]

    def _is_unusual(self, layer: str, gemms: Iterable[str]) -> bool:
        """Return True if one of a layer's GEMMs differs from `good` more than most.

        Otherwise nothing is wrong with the layer: the model is only more sensitive to its error than to that of others.
        """
        means = {gemm: statistics.fmean(errors) for gemm, errors in self._errors.items()}
        # Attention is not measured.
        return any(means.get((layer, gemm), math.inf) > UNUSUAL * statistics.median(means.values()) for gemm in gemms)

    def share(self, operands: list[GemmOperand]) -> float:
        """Return the share of the error that operands carry, 0 or 1 if `is_bad` decides."""
        result = self._with_bad(operands)
        if self._is_bad is not None:
            return float(bool(self._is_bad(result.loss, result.gradients)))
        if not result.finite:
            return 1.0
        return self._error(result) / self._total if self._total < math.inf else 0.0

    def contributions(self) -> dict[str, float]:
        by_layer: dict[str, list[GemmOperand]] = {}
        for operand in self.operands:
            by_layer.setdefault(operand.layer, []).append(operand)
        shares = {layer: self.share(operands) for layer, operands in by_layer.items()}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def _with_bad(self, operands: Iterable[GemmOperand]) -> Run:
        """Run with these operands as in `bad` and all others as in `good`."""
        return self._run(GemmSubstitution(self._replacement, frozenset(operands)))

    def _run(self, substitution: GemmSubstitution) -> Run:
        self.runs += 1
        with nullcontext() if self._implementation is None else ops.only(self._implementation):
            return run(self._model, self._batch, self._loss_fn, substitution)

    def _error(self, result: Run) -> float:
        """Return the squared relative error of the loss, plus that of the gradients weighted by their elements."""
        good = self._good
        error = ((result.loss - good.loss) / good.loss) ** 2 if good.loss else result.loss**2
        elements = sum(g.numel() for g in good.gradients.values())
        for name, g in good.gradients.items():
            noise = float((result.gradients[name].double() - g.double()).square().sum())
            signal = float(g.double().square().sum())
            error += g.numel() / elements * (min(1.0, noise / signal) if signal else float(noise > 0))
        return error


class _MeasuredGemms(GemmSubstitution):
    """Measures how far each GEMM of a model that runs as it is differs from its replacement."""

    def __init__(self, replacement: Callable[[str], Recipe | str | None]) -> None:
        super().__init__(replacement, unchanged=None)
        self.errors: dict[tuple[str, str], list[float]] = {}

    def observe_gemm(self, gemm: observer.ObservedGemm) -> None:
        super().observe_gemm(gemm)
        name = self.names.get(id(gemm.layer))
        if name is None or gemm.quantized == (None, None):
            return
        with torch.no_grad(), torch.autocast(gemm.a.device.type, enabled=False):
            good, y = self.product(gemm, [None, None], self.replacement(name)), gemm.y.detach().float()
            # An infinity or NaN that comes from this GEMM.
            broken = bool((good.isfinite() & ~y.isfinite()).any())
            error = math.inf if broken else result_statistics(good, y).error
        self.errors.setdefault((name, gemm.name), []).append(error)


def _converted(model: nn.Module, recipe: RecipeOrRules) -> tuple[nn.Module, Report]:
    """Return a copy of the model, converted, and the report of `convert`."""
    model = copied(model)
    revert(model)
    return model, convert(model, recipe)


def _halves(operands: list[GemmOperand]) -> list[list[GemmOperand]]:
    """Split operands by layer if they have several, else by GEMM, else by operand; one operand is not split."""
    for field in range(len(GemmOperand._fields)):
        values = list(dict.fromkeys(each[field] for each in operands))
        if len(values) > 1:
            first = {*values[: len(values) // 2]}
            return [[u for u in operands if u[field] in first], [u for u in operands if u[field] not in first]]
    return []
