"""Statistics of quantized operands and of GEMM results, pooled over calls and ranks."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized, spread
from quaver.torch.numerics.rounding import rotate

#: Index of a row or column that no call had.
NONE = -1


@dataclass
class ErrorStatistics:
    """Error of values against exact ones of the same shape; values that are not finite in either are left out."""

    elements: int = 0
    #: Infinities and NaN.
    nonfinite: int = 0
    #: Sums of squares of the exact values, and of the differences from them.
    signal: float = 0.0
    noise: float = 0.0
    #: Sum over rows of noise / signal of that row, at most 1 each; and number of rows with a signal or noise.
    row_error: float = 0.0
    rows: int = 0
    #: The same over columns.
    column_error: float = 0.0
    columns: int = 0

    def add(self, other: "ErrorStatistics") -> None:
        """Pool with the statistics of another call, rank or group."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, POOLED.get(field.name, _sum)(mine, theirs))

    @property
    def snr(self) -> float:
        """Signal-to-noise ratio in dB; infinite without noise, NaN without finite values."""
        if self.noise == 0:
            return math.inf if self.signal > 0 else math.nan
        return 10 * math.log10(self.signal / self.noise) if self.signal > 0 and self.noise < math.inf else -math.inf

    @property
    def error(self) -> float:
        """Mean relative squared error of rows or of columns, whichever is larger: 0 if exact, 1 if all is lost.

        A huge row or column does not hide what became of the others.
        """
        return max(self.row_error / max(self.rows, 1), self.column_error / max(self.columns, 1))


@dataclass
class OperandStatistics(ErrorStatistics):
    """Statistics of one operand of one layer."""

    spec: QuantSpec | None = None
    #: Values larger than the largest magnitude, stored as that; and nonzero values stored as zero.
    saturated: int = 0
    flushed: int = 0
    nonzero: int = 0
    #: Largest and smallest nonzero magnitude.
    amax: float = 0.0
    amin: float = math.inf
    #: Largest and smallest scale of a block other than zero.
    largest_scale: float = 0.0
    smallest_scale: float = math.inf
    #: (amax over the median amax of all rows, index) of the row with the largest amax; the same for columns.
    outlier_row: tuple[float, int] = (0.0, NONE)
    outlier_column: tuple[float, int] = (0.0, NONE)

    @property
    def dynamic_range(self) -> float:
        """log2(amax / amin); 0 without a nonzero value."""
        return math.log2(self.amax / self.amin) if 0 < self.amin <= self.amax < math.inf else 0.0

    @property
    def scale_spread(self) -> float:
        """log2 of the largest block scale over the smallest; 0 with a single scale."""
        low, high = self.smallest_scale, self.largest_scale
        return math.log2(high / low) if 0 < low <= high < math.inf else 0.0


def _sum(one: float, other: float) -> float:
    return one + other


def _first(one: Any, other: Any) -> Any:
    return other if one is None else one


#: How fields are pooled that are not sums.
POOLED: dict[str, Callable[[Any, Any], Any]] = {
    "amax": max,
    "amin": min,
    "largest_scale": max,
    "smallest_scale": min,
    "outlier_row": max,
    "outlier_column": max,
    "spec": _first,
}


def error_statistics(exact: Tensor, actual: Tensor) -> ErrorStatistics:
    """Return the statistics of a result [rows, columns], both float32."""
    if exact.numel() == 0:
        return ErrorStatistics()
    top = float(exact.abs().amax())
    statistics = ErrorStatistics(elements=exact.numel())
    statistics.nonfinite = _count_nonfinite(actual)
    _add_errors(statistics, exact, actual, top)
    return statistics


def operand_statistics(x: Tensor, q: Quantized) -> OperandStatistics:
    """Return the statistics of an operand x [rows, k] and its codes; x is before any Hadamard rotation."""
    original = x.detach().to(torch.float32)
    exact = rotate(original) if q.spec.hadamard else original
    statistics = OperandStatistics(elements=original.numel(), spec=q.spec)
    if exact.numel() == 0:
        return statistics
    magnitude = exact.abs()
    row_tops, column_tops = magnitude.amax(1), magnitude.amax(0)
    top = float(row_tops.amax())
    if not math.isfinite(top):
        statistics.nonfinite = _count_nonfinite(original)
        magnitude = magnitude.where(magnitude.isfinite(), 0.0)
        row_tops, column_tops = magnitude.amax(1), magnitude.amax(0)
    values, scales = q.values(), q.scales()
    element_scales = spread(scales, q.spec.block, q.shape)
    # With a rounded scale, the largest value may exceed the representable range by its last bits.
    tolerance = 1.0 if q.spec.power_of_two else 1.0 + 2.0**-22
    limits = q.spec.format.max * tolerance * element_scales
    usable = scales.isfinite() & (scales > 0)
    # The code of a value other than zero is a NaN if its scale is.
    flushed = (magnitude > 0) & (values == 0)
    counts = [magnitude > limits, flushed, magnitude]
    statistics.saturated, statistics.flushed, statistics.nonzero = (int(torch.count_nonzero(each)) for each in counts)
    extremes = torch.stack(
        [
            row_tops.amax(),
            magnitude.masked_fill_(magnitude == 0, torch.inf).amin(),
            scales.where(usable, 0.0).amax(),
            scales.where(usable, torch.inf).amin(),
        ]
    )
    statistics.amax, statistics.amin, statistics.largest_scale, statistics.smallest_scale = extremes.tolist()
    statistics.outlier_row, statistics.outlier_column = _outlier(row_tops), _outlier(column_tops)
    _add_errors(statistics, exact, values * element_scales, top)
    return statistics


def _count_nonfinite(x: Tensor) -> int:
    return x.numel() - int(torch.count_nonzero(x.isfinite()))


def _add_errors(statistics: ErrorStatistics, exact: Tensor, actual: Tensor, top: float) -> None:
    """Set the sums of squares.

    Args:
        statistics: is changed.
        exact, actual: float32 [rows, columns].
        top: amax of exact.
    """
    difference = actual - exact
    if not math.isfinite(top) or not math.isfinite(float(difference.sum())):
        both = exact.isfinite() & difference.isfinite()
        exact, difference = exact.where(both, 0.0), difference.where(both, 0.0)
        top = float(exact.abs().amax())
    # Scaled so that no square overflows.
    shift = 2.0 ** -math.frexp(top)[1]
    signal, noise = (exact * shift).square_(), difference.mul_(shift).square_()
    row_signal, row_noise = signal.sum(1), noise.sum(1)
    row_error, rows = _lost(row_signal, row_noise)
    column_error, columns = _lost(signal.sum(0), noise.sum(0))
    totals = row_signal.double().sum(), row_noise.double().sum()
    sums = torch.stack([*totals, row_error, rows, column_error, columns]).tolist()
    statistics.signal, statistics.noise = (value / shift**2 for value in sums[:2])
    statistics.row_error, statistics.column_error = sums[2], sums[4]
    statistics.rows, statistics.columns = int(sums[3]), int(sums[5])


def _lost(signal: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of noise / signal, at most 1 each, and the number of lines that are not all zero."""
    signal, noise = signal.double(), noise.double()
    used = (signal > 0) | (noise > 0)
    ratio = (noise / signal.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
    return ratio.where(used, 0.0).sum(), used.sum().double()


def _outlier(tops: Tensor) -> tuple[float, int]:
    """Return the largest amax of rows or columns over their median, and its index."""
    top, index = tops.max(0)
    median = tops.median()
    ratio = top / median if median > 0 else torch.where(top > 0, torch.inf, 0.0)
    return float(ratio), int(index)
