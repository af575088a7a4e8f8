"""Rows of inspect.jsonl as arrays: a statistic of each layer and sampled step."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2, nan
from pathlib import Path
from typing import Any

import numpy as np

from quaver.inspection import rows
from quaver.inspection.table import FILE
from quaver.recipes.spec import QuantSpec

#: Title of each statistic, in the order of the report's list.
STATISTICS = {
    "error": "error",
    "snr": "SNR in dB",
    "flushed": "flushed share",
    "saturated": "saturated share",
    "amax": "log2 of amax",
    "dynamic_range": "log2 of amax / amin",
    "scale_spread": "log2 of the scales' spread",
    "nonfinite": "non-finite values",
}
#: Results of GEMMs and of attention; other tensors are operands.
RESULTS = {*rows.RESULTS.values(), *rows.ATTENTION_RESULTS}
#: Most sampled steps shown, most cells of a heat map, and fewest steps shown of a model with many layers.
STEPS, CELLS, FEWEST_STEPS = 100, 10_000, 10


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """Statistics of a run's sampled steps."""

    #: Sampled steps that are shown: all, or evenly chosen ones with the first and last.
    steps: list[int]
    #: Number of all sampled steps.
    sampled: int
    #: Names in the order of computation.
    layers: list[str]
    #: Arrays float32 [layers, steps] by (GEMM, tensor) and statistic, NaN without a value. Statistics without any value
    #: are left out.
    values: dict[tuple[str, str], dict[str, np.ndarray]]
    #: Rows of the last sampled step, the worst first.
    last: list[dict[str, Any]]
    #: Earlier sampled steps that had flagged rows.
    flagged_before: list[int]


def read_table(path: Path) -> ReportTable:
    """Read the rows of a run.

    Args:
        path: inspect.jsonl, or the folder with it.
    Raises:
        ValueError: no such file, no rows, or a line that is no row. An unfinished last line is ignored.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"there is no {file}; give the folder of a run of quaver train --inspect-every N, or of "
            "qt.inspect(model, out=folder)"
        )
    layers: dict[str, int] = {}
    found: dict[tuple[str, str], dict[tuple[int, int], list[float]]] = {}
    steps: dict[int, None] = {}
    flagged: dict[int, None] = {}
    last: list[dict[str, Any]] = []
    for number, line in _lines(file):
        try:
            row = json.loads(line)
            step, key, values = row["step"], (row["gemm"], row["tensor"]), [_value(row, name) for name in STATISTICS]
            if step not in steps:
                last = []
            last.append(row)
            steps[step] = None
            if row["flags"]:
                flagged[step] = None
            if row["expert"] is None:
                layer = layers.setdefault(row["layer"], len(layers))
                found.setdefault(key, {})[layer, step] = values
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"line {number} of {file} is no row of inspect; restore or delete it") from error
    if not layers:
        raise ValueError(f"{file} has no rows: no step was sampled yet; see --inspect-every, or qt.inspect(every=)")
    shown = _chosen(list(steps), max(FEWEST_STEPS, min(STEPS, CELLS // len(layers))))
    columns = {step: column for column, step in enumerate(shown)}
    arrays: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for key, cells in found.items():
        array = np.full((len(STATISTICS), len(layers), len(shown)), nan, np.float32)
        for (layer, step), values in cells.items():
            if step in columns:
                array[:, layer, columns[step]] = values
        arrays[key] = {name: each for name, each in zip(STATISTICS, array, strict=True) if not np.isnan(each).all()}
    order = sorted(enumerate(last), key=lambda pair: rows.severity(pair[1], pair[0]))
    return ReportTable(
        steps=shown,
        sampled=len(steps),
        layers=list(layers),
        values=arrays,
        last=[row for _, row in order],
        flagged_before=[step for step in flagged if step != shown[-1]],
    )


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith("\n") and line.strip():
                yield number, line


def _value(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    if value is None:
        return nan
    return float(value) if name != "amax" else log2(value) if value else nan


def _chosen(steps: list[int], count: int) -> list[int]:
    if len(steps) <= count:
        return steps
    return [steps[i] for i in np.linspace(0, len(steps) - 1, count).round().astype(int)]


def without_common_start(names: Sequence[str]) -> list[str]:
    """Return names without the dotted start that all share."""
    parts = [name.split(".") for name in names]
    common = 0
    while all(len(own) > common + 1 and own[common] == parts[0][common] for own in parts):
        common += 1
    return [".".join(own[common:]) for own in parts]


@dataclass(frozen=True, kw_only=True)
class OperandHistogram:
    """Values of an operand by the exponent of |x| / scale, beside the range of its format."""

    title: str
    format: str
    #: First exponent, and the share of the nonzero values of each exponent from there on.
    start: int
    shares: list[float]
    #: Exponents of the format's smallest subnormal, smallest normal and largest number.
    subnormal: int
    normal: int
    largest: int


def histograms(table: ReportTable) -> dict[str, list[OperandHistogram]]:
    """Return the histograms of the last sampled step by layer, in the order of the GEMMs."""
    found: dict[str, list[OperandHistogram]] = {}
    order = {key: place for place, key in enumerate(table.values)}
    for row in sorted(table.last, key=lambda row: order.get((row["gemm"], row["tensor"]), 0)):
        counts = row.get("histogram")
        if not counts or row["expert"] is not None:
            continue
        fmt = QuantSpec.parse(row["format"]).format
        found.setdefault(row["layer"], []).append(
            OperandHistogram(
                title=f"{row['gemm']}, {row['tensor']}",
                format=row["format"],
                start=row["histogram_start"],
                shares=[count / sum(counts) for count in counts],
                subnormal=fmt.emin - fmt.mantissa_bits,
                normal=fmt.emin,
                largest=fmt.emax,
            )
        )
    return found
