"""Statistics of torch tensors: a quantized operand against its values, a result against the exact one."""

import math
from collections import Counter

import torch
from torch import Tensor

from quaver.inspection.statistics import ErrorStatistics, OperandStatistics, exponent_range
from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized, spread
from quaver.torch.numerics.rounding import rotate


def result_statistics(exact: Tensor, actual: Tensor) -> ErrorStatistics:
    """Compare the result of a GEMM with the exact one, both float32 [rows, columns]."""
    statistics = ErrorStatistics(elements=exact.numel(), nonfinite=_count_nonfinite(actual))
    if exact.numel():
        _measure(statistics, exact, actual)
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
    scaled = magnitude / element_scales
    statistics.saturated = _count(scaled > q.spec.format.max * tolerance)
    statistics.nonzero = _count(magnitude)
    if statistics.nonfinite:
        # A NaN scale gives NaN codes, which are not flushed.
        statistics.flushed = _count((magnitude > 0) & (values == 0))
    else:
        statistics.flushed = statistics.nonzero - _count(values)
    statistics.exponents = _exponents(scaled, statistics.nonzero, q.spec)
    usable = scales.isfinite() & (scales > 0)
    amin = whole.amin()
    extremes = [
        amin if amin > 0 else whole.masked_fill(whole == 0, torch.inf).amin(),
        scales.where(usable, 0.0).amax(),
        scales.where(usable, torch.inf).amin(),
    ]
    statistics.amin, statistics.largest_scale, statistics.smallest_scale = torch.stack(extremes).tolist()
    _measure(statistics, exact, values * element_scales)
    return statistics


def _exponents(scaled: Tensor, nonzero: int, spec: QuantSpec) -> Counter[int]:
    """Count the nonzero values of |x| / scale by exponent, without blocks whose scale is not finite; overwrites it."""
    # The exponent bits of a float32: 0 for zeros and subnormals, 255 for infinities and NaN, which may have a sign.
    bits = scaled.contiguous().view(torch.int32).bitwise_right_shift_(23).bitwise_and_(255)
    counts = torch.bincount(bits.flatten(), minlength=256).tolist()
    counts[0] = max(0, counts[0] - (scaled.numel() - nonzero))
    known, exponents = exponent_range(spec), Counter[int]()
    for exponent, count in enumerate(counts[:255], -127):
        if count:
            exponents[min(max(exponent, known[0]), known[-1])] += count
    return exponents


def _measure(statistics: ErrorStatistics, exact: Tensor, actual: Tensor) -> None:
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
    statistics.signal, statistics.noise = (value / scale**2 for value in sums[:2])
    statistics.row_error, statistics.column_error = sums[2], sums[4]
    statistics.rows, statistics.columns = int(sums[3]), int(sums[5])


def _finite_magnitude(x: Tensor) -> Tensor:
    """Return the magnitudes, 0 for infinities and NaN."""
    magnitude = x.abs()
    return magnitude if math.isfinite(float(magnitude.amax())) else magnitude.where(magnitude.isfinite(), 0.0)


def _count(x: Tensor) -> int:
    return int(torch.count_nonzero(x))


def _count_nonfinite(x: Tensor) -> int:
    # Both extremes are NaN if a value is.
    if x.numel() and math.isfinite(float(x.amax() - x.amin())):
        return 0
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
