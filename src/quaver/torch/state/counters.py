"""Counters of quantization errors: values per operand that saturated, were flushed to zero, or were not finite.

Off by default and then free: quantization only checks `active.counters`. That attribute is process-wide instead of
thread-local, because on a GPU backward runs in another thread than forward.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quaver.recipes.text import check_instance, html_lines, html_table
from quaver.torch.numerics.quantized import Quantized, spread
from quaver.torch.numerics.rounding import is_tracing, rotate
from quaver.torch.state.weight_cache import refresh


@dataclass
class OperandCounts:
    """Counts of one operand of one layer, over all quantizations while counting."""

    elements: int = 0
    #: Values larger than the largest magnitude, stored as that.
    saturated: int = 0
    #: Nonzero values stored as zero.
    flushed: int = 0
    #: Infinities and NaN.
    nonfinite: int = 0


HEADER = ("layer", "operand", "elements", "saturated", "flushed", "non-finite")
NOTHING = "nothing was quantized while counting (compiled layers are not counted)"


class Counters:
    """Counts by layer and operand: "input", "weight", "grad_output", and with ".T" their transposes for other GEMMs.

    `table[layer][operand]` is an `OperandCounts`. An operand that two GEMMs share is counted once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self.table: dict[str, dict[str, OperandCounts]] = defaultdict(lambda: defaultdict(OperandCounts))

    def count(self, layer: nn.Module, operand: str, x: Tensor, q: Quantized, parameter: str = "weight") -> None:
        """Count one operand of the product with a parameter; x is the input of the quantization, before any Hadamard
        rotation.
        """
        name = self._names.get(id(layer))
        if name is None or is_tracing():
            return
        counts = self.table[name][operand]
        exact_values = x.detach().to(torch.float32)
        exact = (rotate(exact_values) if q.spec.hadamard else exact_values).abs()
        finite = exact.isfinite()
        # With a rounded scale, the largest value may exceed the representable range by its last bits.
        tolerance = 1.0 if q.spec.power_of_two else 1.0 + 2.0**-22
        largest = q.spec.format.max * spread(q.scales(), q.spec.block, q.shape) * tolerance
        counts.elements += exact_values.numel()
        counts.saturated += int((finite & (exact > largest)).sum())
        counts.flushed += int((finite & (exact > 0) & (q.values() == 0)).sum())
        counts.nonfinite += int((~exact_values.isfinite()).sum())

    def _rows(self) -> list[tuple[str, str, int, int, int, int]]:
        return [
            (layer or "(root)", operand, c.elements, c.saturated, c.flushed, c.nonfinite)
            for layer, operands in self.table.items()
            for operand, c in operands.items()
        ]

    def __str__(self) -> str:
        lines = [_line(row) for row in (HEADER, *self._rows())]
        return "\n".join(lines) if self.table else NOTHING

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(HEADER, self._rows()) if self.table else html_lines([NOTHING])


def _line(row: Sequence[object]) -> str:
    layer, operand, *numbers = row
    return f"{layer:<40}{operand:<16}" + "".join(f"{n:>12}" for n in numbers)


class _ActiveCounts:
    counters: Counters | None = None


active = _ActiveCounts()


@contextmanager
def count(model: nn.Module) -> Iterator[Counters]:
    """Count while the context is open, in eager mode: `with count(model) as counters: step()`, then `print(counters)`.

    A weight is counted each time it is quantized; cached weights are dropped at the start.
    """
    check_instance("count", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    before = active.counters
    refresh(model)
    active.counters = Counters(model)
    try:
        yield active.counters
    finally:
        active.counters = before
