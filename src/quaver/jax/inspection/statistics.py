"""Statistics of a JAX array as one small vector, computed in the step's own program and read on the host."""

from collections import Counter
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from quaver.inspection.statistics import ErrorStatistics, OperandStatistics, exponent_range
from quaver.jax.numerics.quantized import Quantized, scale_blocks
from quaver.jax.numerics.rounding import rotate, two_to_the
from quaver.recipes.spec import QuantSpec

#: The numbers of any tensor, in the vector's order. `height` is the number of all rows, `rows` of those that are not
#: all zero. Signal and noise are multiplied by 4**exponent, so that they do not overflow.
ERRORS = ("height", "nonfinite", "signal", "noise", "exponent", "row_error", "rows", "column_error", "columns")
#: Further numbers of an operand.
RANGES = ("amax", "amin", "largest_scale", "smallest_scale")
COUNTS = ("saturated", "flushed", "nonzero")
OUTLIERS = ("row_ratio", "row_index", "column_ratio", "column_index")


def result_figures(exact: Array, actual: Array, height: Array | int) -> Array:
    """Compare the result of a GEMM with the exact one, both [rows, columns], and return float32 [numbers].

    Args:
        height: number of rows that belong to the result; the others are zero.
    """
    actual = actual.astype(jnp.float32)
    if actual.size == 0:
        return jnp.zeros(length(None), jnp.float32)
    figures = _errors(exact, actual)
    return _vector({**figures, "height": height, "nonfinite": _count(~jnp.isfinite(actual))}, None)


def operand_figures(x: Array, q: Quantized, rows_and_columns: Array | None = None) -> Array:
    """Compare an operand x [rows, k], before quantization and any Hadamard rotation, with its codes.

    Errors, saturation and flushing are those of the rotated values; outliers are rows and columns of x.

    Args:
        rows_and_columns: the operand whose rows and columns are named, if x has these in other places and zeros between
            them; None for x.
    Returns:
        float32 [numbers].
    """
    spec, x = q.spec, x.astype(jnp.float32)
    original = x if rows_and_columns is None else rows_and_columns.astype(jnp.float32)
    if original.size == 0:
        return jnp.zeros(length(spec), jnp.float32)
    exact = rotate(x) if spec.hadamard else x
    whole, magnitude = _finite_magnitude(original), _finite_magnitude(exact)
    values, scales = q.values().astype(jnp.float32), q.scales()
    element_scales = scale_blocks(jnp.ones(q.shape, jnp.float32), scales, spec.block)
    # With a rounded scale, the largest value may exceed the representable range by its last bits.
    largest = spec.format.max * (1.0 if spec.power_of_two else 1.0 + 2.0**-22)
    usable = jnp.isfinite(scales) & (scales > 0)
    row_amaxes, column_amaxes = whole.max(1), whole.max(0)
    row_ratio, row = _outlier(row_amaxes)
    column_ratio, column = _outlier(column_amaxes)
    # A NaN scale gives NaN codes, which are not flushed.
    masks = magnitude > jnp.float32(largest) * element_scales, (magnitude > 0) & (values == 0), magnitude > 0
    figures = {
        "height": original.shape[0],
        "nonfinite": _count(~jnp.isfinite(original)),
        "amax": row_amaxes.max(),
        "amin": jnp.where(whole == 0, jnp.inf, whole).min(),
        "largest_scale": jnp.where(usable, scales, 0.0).max(),
        "smallest_scale": jnp.where(usable, scales, jnp.inf).min(),
        **dict(zip(COUNTS, _count(jnp.stack(masks)), strict=True)),
        "row_ratio": row_ratio,
        "row_index": row,
        "column_ratio": column_ratio,
        "column_index": column,
        **_exponents(magnitude, magnitude / element_scales, spec),
    }
    return _vector({**figures, **_errors(exact, values * element_scales)}, spec)


def length(spec: QuantSpec | None) -> int:
    """Return the length of an operand's vector, or of a result's (None)."""
    return len(_names(spec))


def statistics_of(figures: Any, columns: int, spec: QuantSpec | None) -> ErrorStatistics:
    """Return the statistics of a tensor with this many columns from its vector on the host.

    Args:
        spec: of an operand; None for a result.
    """
    f = dict(zip(_names(spec), map(float, figures), strict=True))
    elements = int(f["height"]) * columns
    if elements == 0:
        return ErrorStatistics() if spec is None else OperandStatistics(spec=spec)
    errors: dict[str, Any] = {
        "elements": elements,
        **{name: f[name] / 4.0 ** f["exponent"] for name in ("signal", "noise")},
        **{name: f[name] for name in ("row_error", "column_error")},
        **{name: int(f[name]) for name in ("rows", "columns", "nonfinite")},
    }
    if spec is None:
        return ErrorStatistics(**errors)
    ranges: dict[str, Any] = {**{name: f[name] for name in RANGES}, **{name: int(f[name]) for name in COUNTS}}
    return OperandStatistics(
        spec=spec,
        **errors,
        **ranges,
        outlier_row=(f["row_ratio"], int(f["row_index"])),
        outlier_column=(f["column_ratio"], int(f["column_index"])),
        exponents=Counter({e: int(count) for e in exponent_range(spec) if (count := f[f"exponent {e}"])}),
    )


def _names(spec: QuantSpec | None) -> tuple[str, ...]:
    if spec is None:
        return ERRORS
    return *ERRORS, *RANGES, *COUNTS, *OUTLIERS, *(f"exponent {e}" for e in exponent_range(spec))


def _vector(figures: dict[str, Any], spec: QuantSpec | None) -> Array:
    return jnp.stack([jnp.asarray(figures[name], jnp.float32) for name in _names(spec)])


def _exponents(magnitude: Array, scaled: Array, spec: QuantSpec) -> dict[str, Array]:
    """Count the nonzero values of |x| / scale by exponent, without blocks whose scale is not finite."""
    known = exponent_range(spec)
    exponent = (lax.bitcast_convert_type(scaled, jnp.int32) >> 23 & 255) - 127
    place = jnp.clip(exponent, known[0], known[-1]) - known[0]
    # Zeros, infinities and NaN are counted in one more place.
    place = jnp.where((magnitude > 0) & (exponent < 128), place, len(known))
    counts = jnp.bincount(place.ravel(), length=len(known) + 1)
    return {f"exponent {e}": counts[e - known[0]] for e in known}


def _errors(exact: Array, actual: Array) -> dict[str, Array]:
    """Return sums over elements, rows and columns of float32 values [rows, columns].

    Arrays are stacked so that each reduction serves several sums: their number decides how long XLA compiles.
    """
    difference = actual - exact
    pair = jnp.where(jnp.isfinite(exact) & jnp.isfinite(difference), jnp.stack([exact, difference]), 0.0)
    # Scaled so that no square of an exact value overflows, by a power of two that is a normal float32.
    amax_bits = lax.bitcast_convert_type(jnp.abs(pair[0]).max(), jnp.int32)
    exponent = jnp.clip(126 - (amax_bits >> 23), -126, 126)
    squares = jnp.square(pair * two_to_the(exponent))
    # Rows, then columns.
    signal, noise = jnp.concatenate([squares.sum(2), squares.sum(1)], axis=1)
    is_row = jnp.arange(signal.shape[0]) < exact.shape[0]
    used = (signal > 0) | (noise > 0)
    ratio = jnp.where(used, jnp.minimum(noise / jnp.maximum(signal, jnp.finfo(jnp.float32).tiny), 1.0), 0.0)
    of_rows = jnp.where(is_row, jnp.stack([signal, noise, ratio, used.astype(jnp.float32)]), 0.0)
    of_columns = jnp.where(is_row, 0.0, jnp.stack([ratio, used.astype(jnp.float32)]))
    sums = jnp.concatenate([of_rows, of_columns]).sum(1)
    names = ("signal", "noise", "row_error", "rows", "column_error", "columns")
    return {"exponent": exponent, **dict(zip(names, sums, strict=True))}


def _finite_magnitude(x: Array) -> Array:
    """Return the magnitudes, 0 for infinities and NaN."""
    return jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0)


def _count(conditions: Array) -> Array:
    """Return how often conditions [..., rows, columns] are True; in float32, because int32 overflows in the tensors of
    a large batch.
    """
    return conditions.sum(-1, dtype=jnp.int32).astype(jnp.float32).sum(-1)


def _outlier(amaxes: Array) -> tuple[Array, Array]:
    """Return the largest amax of rows or columns over their median, and its index."""
    amax, median = amaxes.max(), jnp.sort(amaxes)[(amaxes.shape[0] - 1) // 2]
    ratio = jnp.where(median > 0, amax / median, jnp.where(amax > 0, jnp.inf, 0.0))
    return ratio, jnp.argmax(amaxes).astype(jnp.int32)
