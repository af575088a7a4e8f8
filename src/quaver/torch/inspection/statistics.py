"""Statistics of quantized operands and of GEMM results, pooled over calls and ranks."""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized, spread
from quaver.torch.numerics.rounding import rotate

#: Fields that are pooled by their maximum or minimum; all other numbers are summed.
MAXIMA = ("amax", "largest_scale", "outlier_row", "outlier_column")
MINIMA = ("amin", "smallest_scale")


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
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, QuantSpec):
                continue
            if field.name in MAXIMA:
                value: Any = max(mine, theirs)
            else:
                value = min(mine, theirs) if field.name in MINIMA else mine + theirs
            setattr(self, field.name, value)

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

    def measure(self, exact: Tensor, actual: Tensor) -> None:
        """Set the sums over elements, rows and columns from float32 values [rows, columns]."""
        difference, amax = actual - exact, float(exact.abs().amax())
        if not (math.isfinite(amax) and math.isfinite(float(difference.abs().amax()))):
            finite = exact.isfinite() & difference.isfinite()
            exact, difference = exact.where(finite, 0.0), difference.where(finite, 0.0)
            amax = float(exact.abs().amax())
        # Scaled so that no square of an exact value overflows; 2**126 is a float32.
        scale = 2.0 ** min(-math.frexp(amax)[1], 126)
        signal, noise = (exact * scale).square_(), difference.mul_(scale).square_()
        row_signal, row_noise = signal.sum(1), noise.sum(1)
        row_error, rows = _relative_errors(row_signal, row_noise)
        column_error, columns = _relative_errors(signal.sum(0), noise.sum(0))
        totals = row_signal.double().sum(), row_noise.double().sum()
        sums = torch.stack([*totals, row_error, rows, column_error, columns]).tolist()
        self.signal, self.noise = (value / scale**2 for value in sums[:2])
        self.row_error, self.column_error = sums[2], sums[4]
        self.rows, self.columns = int(sums[3]), int(sums[5])


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


def result_statistics(exact: Tensor, actual: Tensor) -> ErrorStatistics:
    """Compare the result of a GEMM with the exact one, both float32 [rows, columns]."""
    statistics = ErrorStatistics(elements=exact.numel(), nonfinite=_count_nonfinite(actual))
    if exact.numel():
        statistics.measure(exact, actual)
    return statistics


def operand_statistics(x: Tensor, q: Quantized) -> OperandStatistics:
    """Compare an operand x [rows, k], before quantization and any Hadamard rotation, with its codes.

    Errors, saturation and flushing are those of the rotated values; outliers are rows and columns of x.
    """
    original = x.detach().to(torch.float32)
    statistics = OperandStatistics(elements=original.numel(), spec=q.spec, nonfinite=_count_nonfinite(original))
    exact = rotate(original) if q.spec.hadamard else original
    if exact.numel() == 0:
        return statistics
    whole = _finite_magnitude(original)
    row_amaxes, column_amaxes = whole.amax(1), whole.amax(0)
    statistics.amax = float(row_amaxes.amax())
    statistics.outlier_row, statistics.outlier_column = _outlier(row_amaxes), _outlier(column_amaxes)
    magnitude = _finite_magnitude(exact) if q.spec.hadamard else whole
    values, scales = q.values(), q.scales()
    element_scales = spread(scales, q.spec.block, q.shape)
    # With a rounded scale, the largest value may exceed the representable range by its last bits.
    tolerance = 1.0 if q.spec.power_of_two else 1.0 + 2.0**-22
    statistics.saturated = _count(magnitude > q.spec.format.max * tolerance * element_scales)
    # A NaN scale gives NaN codes, which are not flushed.
    statistics.flushed = _count((magnitude > 0) & (values == 0))
    statistics.nonzero = _count(magnitude)
    usable = scales.isfinite() & (scales > 0)
    extremes = [
        whole.masked_fill(whole == 0, torch.inf).amin(),
        scales.where(usable, 0.0).amax(),
        scales.where(usable, torch.inf).amin(),
    ]
    statistics.amin, statistics.largest_scale, statistics.smallest_scale = torch.stack(extremes).tolist()
    statistics.measure(exact, values * element_scales)
    return statistics


def _finite_magnitude(x: Tensor) -> Tensor:
    """Return the magnitudes, 0 for infinities and NaN."""
    magnitude = x.abs()
    return magnitude if math.isfinite(float(magnitude.amax())) else magnitude.where(magnitude.isfinite(), 0.0)


def _count(x: Tensor) -> int:
    return int(torch.count_nonzero(x))


def _count_nonfinite(x: Tensor) -> int:
    return x.numel() - _count(x.isfinite())


def _relative_errors(signal: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of noise / signal over rows or columns, at most 1 each, and how many are not all zero."""
    signal, noise = signal.double(), noise.double()
    used = (signal > 0) | (noise > 0)
    ratio = (noise / signal.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
    return ratio.where(used, 0.0).sum(), used.sum().double()


def _outlier(amaxes: Tensor) -> tuple[float, int]:
    """Return the largest amax of rows or columns over their median, and its index."""
    amax, index = amaxes.max(0)
    median = amaxes.median()
    ratio = amax / median if median > 0 else torch.where(amax > 0, torch.inf, 0.0)
    return float(ratio), int(index)
