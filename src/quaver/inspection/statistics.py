"""Statistics of quantized operands and of GEMM results, pooled over calls and ranks."""

import math
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from quaver.recipes.spec import QuantSpec

#: Fields that are pooled by their maximum or minimum; all other numbers are summed.
MAXIMA = ("amax", "largest_scale", "outlier_row", "outlier_column")
MINIMA = ("amin", "smallest_scale")
#: Powers of two beyond the format's range, on both sides, that a histogram tells apart.
MARGIN = 12


@dataclass(kw_only=True)
class ErrorStatistics:
    """Error of a quantized operand against its original values, or of a result against the high-precision product.

    Elements that are not finite in either are left out of the sums.
    """

    elements: int = 0
    #: Infinities and NaN, of an operand before quantization.
    nonfinite: int = 0
    #: Sums of squares of the exact values, and of the differences from them.
    signal: float = 0.0
    noise: float = 0.0
    #: Sum over rows of noise / signal of that row, at most 1 each; and number of rows that are not all zero.
    row_error: float = 0.0
    rows: int = 0
    #: The same over columns.
    column_error: float = 0.0
    columns: int = 0

    def add(self, other: "ErrorStatistics") -> None:
        """Pool with the statistics of the same tensor in another call or on another rank."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, QuantSpec):
                continue
            if each.name in MAXIMA:
                value: Any = max(mine, theirs)
            else:
                value = min(mine, theirs) if each.name in MINIMA else mine + theirs
            setattr(self, each.name, value)

    @property
    def snr(self) -> float:
        """Signal-to-noise ratio in dB: infinite if exact, -inf if nothing is left, NaN if all values are zero."""
        if self.noise == 0:
            return math.inf if self.signal > 0 else math.nan
        ratio = self.signal / self.noise
        return 10 * math.log10(ratio) if ratio > 0 else -math.inf

    @property
    def error(self) -> float:
        """Mean relative squared error of rows or of columns, whichever is larger: 0 if exact, 1 if all is lost.

        A huge row or column does not hide what became of the others.
        """
        return max(self.row_error / max(self.rows, 1), self.column_error / max(self.columns, 1))


def exponent_range(spec: QuantSpec) -> range:
    """Return the exponents that a histogram of an operand tells apart; values beyond are counted at the ends."""
    return range(spec.format.emin - spec.format.mantissa_bits - MARGIN, spec.format.emax + MARGIN + 1)


@dataclass(kw_only=True)
class OperandStatistics(ErrorStatistics):
    """Statistics of one operand of one layer."""

    spec: QuantSpec
    #: Number of values that were clipped to the largest representable one, and of nonzero values stored as zero.
    saturated: int = 0
    flushed: int = 0
    nonzero: int = 0
    #: Largest and smallest nonzero magnitude.
    amax: float = 0.0
    amin: float = math.inf
    #: Largest and smallest scale of a block other than zero.
    largest_scale: float = 0.0
    smallest_scale: float = math.inf
    #: (amax over the median amax of all rows, index) of the row with the largest amax; the same for columns. The index
    #: is -1 if there are no values.
    outlier_row: tuple[float, int] = (0.0, -1)
    outlier_column: tuple[float, int] = (0.0, -1)
    #: Number of nonzero values by the exponent of |x| / scale, in `exponent_range`.
    exponents: Counter[int] = field(default_factory=Counter)

    def transpose(self) -> None:
        """Swap rows and columns."""
        self.row_error, self.column_error = self.column_error, self.row_error
        self.rows, self.columns = self.columns, self.rows
        self.outlier_row, self.outlier_column = self.outlier_column, self.outlier_row

    @property
    def dynamic_range(self) -> float:
        """log2(amax / amin); 0 without a nonzero value."""
        return math.log2(self.amax / self.amin) if 0 < self.amin <= self.amax else 0.0

    @property
    def scale_spread(self) -> float:
        """log2 of the largest block scale over the smallest; 0 with a single scale."""
        low, high = self.smallest_scale, self.largest_scale
        return math.log2(high / low) if 0 < low <= high else 0.0
