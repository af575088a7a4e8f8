"""Rows of the inspection table: one per step and tensor, with the reasons why the tensor is a fault."""

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from quaver.inspection.statistics import ErrorStatistics, OperandStatistics

#: Operands that each GEMM reads, and its result.
OPERANDS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
RESULTS = {"fprop": "output", "dgrad": "grad_input", "wgrad": "grad_weight"}
#: `gemm` of all GEMMs of a quantized attention together, and its results.
ATTENTION = "attention"
ATTENTION_RESULTS = ("output", "grad_q", "grad_k", "grad_v")
#: A tensor is flagged if its error is above 6 dB, or more of its nonzero values are flushed, or more of all saturated.
LARGE_ERROR, MANY_FLUSHED, MANY_SATURATED = 0.25, 0.5, 0.02
#: Ratio of a row's or column's amax to the median amax of all, above which a flag names it.
OUTLIER = 100.0
HEADER = (
    "layer",
    "GEMM",
    "tensor",
    "nonzero rows",
    "SNR in dB",
    "error",
    "flushed",
    "saturated",
    "non-finite",
    "flags",
)


class TensorKey(NamedTuple):
    """A tensor of a layer: an operand or the result of a GEMM."""

    layer: str
    gemm: str
    #: One of `OPERANDS` or `RESULTS`; of attention q, k, v, grad_output or one of `ATTENTION_RESULTS`.
    tensor: str
    #: Index of the expert in a layer with several, for one expert's result; None for all together.
    expert: int | None = None


def add(table: dict[TensorKey, ErrorStatistics], key: TensorKey, statistics: ErrorStatistics) -> None:
    """Pool the statistics of a tensor with those in the table."""
    if key in table:
        table[key].add(statistics)
    else:
        table[key] = copy.copy(statistics)


def row_of(
    step: int, key: TensorKey, statistics: ErrorStatistics, ranks: list[int], several_ranks: bool
) -> dict[str, Any]:
    """Return one row of the table, of built-in types.

    Args:
        step: number of the sampled step.
        key: the tensor.
        statistics: its statistics, pooled over calls and ranks.
        ranks: ranks on which the tensor had values that are not finite.
        several_ranks: True if a flag should name these ranks.
    """
    row: dict[str, Any] = {
        "step": step,
        "layer": key.layer or "(root)",
        "gemm": key.gemm,
        "tensor": key.tensor,
        "expert": key.expert,
        "nonzero_rows": statistics.rows,
        "elements": statistics.elements,
        "snr": _finite(statistics.snr),
        "error": statistics.error,
        "nonfinite": statistics.nonfinite,
        "nonfinite_ranks": ranks,
    }
    flags = []
    if statistics.nonfinite:
        flags.append(f"{statistics.nonfinite} not finite" + (f" on ranks {ranks}" if several_ranks else ""))
    if isinstance(statistics, OperandStatistics):
        flushed = statistics.flushed / max(statistics.nonzero, 1)
        saturated = statistics.saturated / max(statistics.elements, 1)
        row |= {
            "format": str(statistics.spec),
            "flushed": flushed,
            "saturated": saturated,
            "amax": statistics.amax,
            "dynamic_range": statistics.dynamic_range,
            "scale_spread": statistics.scale_spread,
            **_histogram(statistics.exponents),
        }
        if flushed > MANY_FLUSHED:
            flags.append(f"{flushed:.0%} flushed to zero")
        # A two-level scale is itself rounded, which clips the largest values of some blocks a little.
        if saturated > MANY_SATURATED and not statistics.spec.two_level:
            flags.append(f"{saturated:.0%} saturated")
    if statistics.error > LARGE_ERROR:
        flags.append(f"{statistics.error:.0%} lost")
    if isinstance(statistics, OperandStatistics):
        for name, (ratio, index) in (("row", statistics.outlier_row), ("column", statistics.outlier_column)):
            row[f"outlier_{name}"], row[f"outlier_{name}_ratio"] = index, _finite(ratio)
            if flags and ratio > OUTLIER:
                flags.append(f"the amax of {name} {index} is {ratio:.0e} times the median")
    row["flags"] = flags
    return row


def _finite(value: float) -> float | None:
    """Return a number that JSON has; None for an infinity or NaN."""
    return value if math.isfinite(value) else None


def _histogram(exponents: Mapping[int, int]) -> dict[str, Any]:
    start = min(exponents, default=0)
    counts = [exponents.get(e, 0) for e in range(start, max(exponents, default=start - 1) + 1)]
    return {"histogram_start": start, "histogram": counts}


def severity(row: dict[str, Any], index: int) -> tuple[Any, ...]:
    """Return a sort key of rows, the worst first.

    First come tensors with values that are not finite, in order of computation, because the first spoils the others.
    Then flagged ones, those of fprop before those of backward, which they spoil.
    """
    if row["nonfinite"]:
        return 0, index
    flagged = bool(row["flags"])
    lost = max(row["error"], row.get("flushed", 0.0), row.get("saturated", 0.0))
    # Rounded, so that of tensors that lost about the same the first computed comes first.
    return 1, not flagged, flagged and _is_backward(row), -round(lost, 1) if flagged else -lost, index


def order_in_layer(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return a sort key that puts the row first which stands for its layer; see `InspectionTable.worst`."""
    if row["nonfinite"]:
        return (0,)
    flagged = bool(row["flags"])
    result = row["tensor"] in (ATTENTION_RESULTS if row["gemm"] == ATTENTION else RESULTS.values())
    return 1, not flagged, flagged and result, -row["error"]


def _is_backward(row: dict[str, Any]) -> bool:
    return row["tensor"].startswith("grad_") or row["gemm"] in ("dgrad", "wgrad")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row as the printed table shows it, in the order of `HEADER`."""
    snr = "" if row["snr"] is None else f"{row['snr']:.1f}"
    shares = [f"{row[name]:.1%}" if name in row else "" for name in ("flushed", "saturated")]
    layer = row["layer"] if row["expert"] is None else f"{row['layer']}[{row['expert']}]"
    numbers = (str(row["nonzero_rows"]), snr, f"{row['error']:.1%}", *shares, str(row["nonfinite"]))
    return (layer, row["gemm"], row["tensor"], *numbers, ", ".join(row["flags"]))
