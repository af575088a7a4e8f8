"""Statistics of JAX arrays as two small vectors, computed in the step's own program and read on the host."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from quaver.inspection.statistics import ErrorStatistics, OperandStatistics
from quaver.jax.numerics.quantized import Quantized, scale_blocks
from quaver.jax.numerics.rounding import rotate, two_to_the
from quaver.recipes.spec import QuantSpec

#: Names of the numbers of any tensor, and of those that only operands have, in the vectors' order. Of errors, signal
#: and noise are multiplied by 4**exponent, so that they do not overflow.
ERROR_FLOATS, ERROR_COUNTS = (
    ("signal", "noise", "row_error", "column_error"),
    ("exponent", "rows", "columns", "nonfinite"),
)
OPERAND_FLOATS = ("amax", "amin", "largest_scale", "smallest_scale", "row_ratio", "column_ratio")
OPERAND_COUNTS = ("saturated", "flushed", "nonzero", "row_index", "column_index")


class Figures(NamedTuple):
    """Statistics of one tensor on the device."""

    #: float32 and int32 vectors of the numbers named above.
    floats: Array
    counts: Array


def result_figures(exact: Array, actual: Array) -> Figures:
    """Compare the result of a GEMM with the exact one, both [rows, columns]."""
    actual = actual.astype(jnp.float32)
    if actual.size == 0:
        return _stack({}, {})
    floats, counts = _errors(exact, actual)
    return _stack(floats, {**counts, "nonfinite": _count(~jnp.isfinite(actual))})


def operand_figures(x: Array, q: Quantized) -> Figures:
    """Compare an operand x [rows, k], before quantization and any Hadamard rotation, with its codes.

    Errors, saturation and flushing are those of the rotated values; outliers are rows and columns of x.
    """
    original = x.astype(jnp.float32)
    if original.size == 0:
        return _stack({}, {}, operand=True)
    spec = q.spec
    exact = rotate(original) if spec.hadamard else original
    whole, magnitude = _finite_magnitude(original), _finite_magnitude(exact)
    values, scales = q.values().astype(jnp.float32), q.scales()
    element_scales = scale_blocks(jnp.ones(q.shape, jnp.float32), scales, spec.block)
    # With a rounded scale, the largest value may exceed the representable range by its last bits.
    largest = spec.format.max * (1.0 if spec.power_of_two else 1.0 + 2.0**-22)
    usable = jnp.isfinite(scales) & (scales > 0)
    floats, counts = _errors(exact, values * element_scales)
    row_ratio, row = _outlier(whole.max(1))
    column_ratio, column = _outlier(whole.max(0))
    floats |= {
        "amax": whole.max(),
        "amin": jnp.where(whole == 0, jnp.inf, whole).min(),
        "largest_scale": jnp.where(usable, scales, 0.0).max(),
        "smallest_scale": jnp.where(usable, scales, jnp.inf).min(),
        "row_ratio": row_ratio,
        "column_ratio": column_ratio,
    }
    counts |= {
        "nonfinite": _count(~jnp.isfinite(original)),
        "saturated": _count(magnitude > jnp.float32(largest) * element_scales),
        # A NaN scale gives NaN codes, which are not flushed.
        "flushed": _count((magnitude > 0) & (values == 0)),
        "nonzero": _count(magnitude > 0),
        "row_index": row,
        "column_index": column,
    }
    return _stack(floats, counts, operand=True)


def sizes(spec: QuantSpec | None) -> tuple[int, int]:
    """Return the lengths of the two vectors of an operand with this spec, or of a result (None)."""
    floats, counts = _names(spec is not None)
    return len(floats), len(counts)


def statistics_of(floats: Any, counts: Any, elements: int, spec: QuantSpec | None) -> ErrorStatistics:
    """Return the statistics of a tensor from its two vectors on the host; spec is None for a result."""
    if elements == 0:
        return ErrorStatistics() if spec is None else OperandStatistics(spec=spec)
    float_names, count_names = _names(spec is not None)
    f = dict(zip(float_names, map(float, floats), strict=True))
    c = dict(zip(count_names, map(int, counts), strict=True))
    errors: dict[str, Any] = {
        "elements": elements,
        "signal": f["signal"] / 4.0 ** c["exponent"],
        "noise": f["noise"] / 4.0 ** c["exponent"],
        **{name: f[name] for name in ("row_error", "column_error")},
        **{name: c[name] for name in ("rows", "columns", "nonfinite")},
    }
    if spec is None:
        return ErrorStatistics(**errors)
    return OperandStatistics(
        spec=spec,
        **errors,
        **{name: f[name] for name in ("amax", "amin", "largest_scale", "smallest_scale")},
        **{name: c[name] for name in ("saturated", "flushed", "nonzero")},
        outlier_row=(f["row_ratio"], c["row_index"]),
        outlier_column=(f["column_ratio"], c["column_index"]),
    )


def _names(operand: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    more = (OPERAND_FLOATS, OPERAND_COUNTS) if operand else ((), ())
    return ERROR_FLOATS + more[0], ERROR_COUNTS + more[1]


def _stack(floats: dict[str, Array], counts: dict[str, Array], operand: bool = False) -> Figures:
    """Return the vectors of these numbers; 0 where one is missing, which only empty tensors have."""
    float_names, count_names = _names(operand)
    return Figures(
        jnp.stack([jnp.asarray(floats.get(name, 0), jnp.float32) for name in float_names]),
        jnp.stack([jnp.asarray(counts.get(name, 0), jnp.int32) for name in count_names]),
    )


def _errors(exact: Array, actual: Array) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return sums over elements, rows and columns of float32 values [rows, columns]."""
    difference = actual - exact
    finite = jnp.isfinite(exact) & jnp.isfinite(difference)
    exact, difference = jnp.where(finite, exact, 0.0), jnp.where(finite, difference, 0.0)
    # Scaled so that no square of an exact value overflows, by a power of two that is a normal float32.
    exponent = jnp.clip(-jnp.frexp(jnp.abs(exact).max())[1], -126, 126).astype(jnp.int32)
    scale = two_to_the(exponent)
    signal, noise = jnp.square(exact * scale), jnp.square(difference * scale)
    row_error, rows = _relative_errors(signal.sum(1), noise.sum(1))
    column_error, columns = _relative_errors(signal.sum(0), noise.sum(0))
    floats = {"signal": signal.sum(), "noise": noise.sum(), "row_error": row_error, "column_error": column_error}
    return floats, {"exponent": exponent, "rows": rows, "columns": columns}


def _relative_errors(signal: Array, noise: Array) -> tuple[Array, Array]:
    """Return the sum of noise / signal over rows or columns, at most 1 each, and how many are not all zero."""
    used = (signal > 0) | (noise > 0)
    ratio = jnp.minimum(noise / jnp.maximum(signal, jnp.finfo(jnp.float32).tiny), 1.0)
    return jnp.where(used, ratio, 0.0).sum(), _count(used)


def _finite_magnitude(x: Array) -> Array:
    """Return the magnitudes, 0 for infinities and NaN."""
    return jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0)


def _count(condition: Array) -> Array:
    return condition.sum(dtype=jnp.int32)


def _outlier(amaxes: Array) -> tuple[Array, Array]:
    """Return the largest amax of rows or columns over their median, and its index."""
    amax, median = amaxes.max(), jnp.sort(amaxes)[(amaxes.shape[0] - 1) // 2]
    ratio = jnp.where(median > 0, amax / median, jnp.where(amax > 0, jnp.inf, 0.0))
    return ratio, jnp.argmax(amaxes).astype(jnp.int32)
