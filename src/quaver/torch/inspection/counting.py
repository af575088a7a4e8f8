"""`count`: values per operand that saturated, were flushed to zero, or were not finite, in the steps of a block."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.recipes.text import check_instance, html_lines, html_table
from quaver.torch.inspection.statistics import operand_statistics
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.state.observer import Observer, observing
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


class Counters(Observer):
    """Counts by layer and operand: "input", "weight", "grad_output", and with ".T" their transposes for other GEMMs.

    `table[layer][operand]` is an `OperandCounts`. An operand that two GEMMs share is counted once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self.table: dict[str, dict[str, OperandCounts]] = defaultdict(lambda: defaultdict(OperandCounts))

    def observe_operand(
        self, layer: nn.Module, recipe: Recipe, operand: str, x: Tensor, q: Quantized, parameter: str = "weight"
    ) -> None:
        """Count one operand; see `quaver.torch.state.observer.Observer`."""
        name = self._names.get(id(layer))
        if name is None or is_tracing():
            return
        if parameter != "weight":
            name = f"{name}.{parameter}".lstrip(".")
        counts, statistics = self.table[name][operand], operand_statistics(x, q)
        counts.elements += statistics.elements
        counts.saturated += statistics.saturated
        counts.flushed += statistics.flushed
        counts.nonfinite += statistics.nonfinite

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


@contextmanager
def count(model: nn.Module) -> Iterator[Counters]:
    """Count while the context is open, in eager mode: `with count(model) as counters: step()`, then `print(counters)`.

    A weight is counted each time it is quantized; cached weights are dropped at the start.
    """
    check_instance("count", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    refresh(model)
    counters = Counters(model)
    with observing(counters):
        yield counters
