"""Table of `count`: values per operand that saturated, were flushed to zero, or were not finite."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from quaver.inspection.statistics import OperandStatistics
from quaver.recipes.text import html_lines, html_table


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

    def add(self, statistics: OperandStatistics) -> None:
        """Add the counts of one quantization."""
        self.elements += statistics.elements
        self.saturated += statistics.saturated
        self.flushed += statistics.flushed
        self.nonfinite += statistics.nonfinite


HEADER = ("layer", "operand", "elements", "saturated", "flushed", "non-finite")
NOTHING = "nothing was quantized while counting"


class CountTable:
    """Counts by layer and operand, printed as a table.

    `table[layer][operand]` is an `OperandCounts`.
    """

    def __init__(self) -> None:
        self.table: dict[str, dict[str, OperandCounts]] = defaultdict(lambda: defaultdict(OperandCounts))

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
    return f"{layer:<40}{operand:<20}" + "".join(f"{n:>12}" for n in numbers)
