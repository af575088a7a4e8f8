"""Printed and written reports of a run."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu import targets
from benchmarks.gpu.child import Done
from benchmarks.gpu.measuring import card
from benchmarks.gpu.options import Options
from benchmarks.measuring import results
from benchmarks.measuring.figure import Result

#: Note on every figure of a dry run.
WORTHLESS = "dry run: no GPU was there, every figure is worthless"


def facts(machine: Mapping[str, str]) -> list[str]:
    return [f"{key:18} {value}" for key, value in machine.items()]


def case_lines(case: Done) -> list[str]:
    """Return the printed lines of a case, one for each subject."""
    subjects: dict[str, list[str]] = {}
    for figure in case.figures:
        subjects.setdefault(figure.subject, []).append(f"{figure.column} {figure}")
    lines = [f"  {subject:44} {'  '.join(cells)}" for subject, cells in subjects.items()]
    return lines + [f"  ! {failure}" for failure in case.failures]


def summary(done: Sequence[Result], machine: Mapping[str, str], dry: bool) -> list[str]:
    """Return the rows with targets, and the failures."""
    failed = [f"  ! {result.case.name}: {result.reason}" for result in done if result.reason]
    head = ["", WORTHLESS] if dry else []
    rows = targets.judge(done, machine["card"])
    width = max(len(row.what) for row in rows)
    judged = [f"  {row.what:{width}}  {row.target!s:>9}  {row.reached:>12}  {row.verdict}" for row in rows]
    return [*head, "", "Targets", *judged, "", *(["Failed or left out", *failed] if failed else ["Nothing failed"])]


def write(done: Sequence[Result], machine: Mapping[str, str], options: Options) -> list[Path]:
    """Write both files to the results' folder and to $OUT; for a dry run only to the folder, if one is given."""
    out = None if options.dry else os.environ.get("OUT")
    folders = [folder for folder in (options.folder, Path(out) if out else None) if folder is not None]
    if not folders:
        return []
    name = "-".join(["gpu", card.slug(machine["card"]), *options.words])
    rows = targets.judge(done, machine["card"])
    lines = ["# Benchmarks on an NVIDIA GPU" + (", quick" if options.quick else ""), ""]
    lines += [*([f"**{WORTHLESS}**", ""] if options.worthless else []), "## Targets", ""]
    lines += results.table(targets.COLUMNS, [row.cells for row in rows])
    lines += [line for result in done for line in results.case_markdown(result)]
    data = {
        "quick": options.quick,
        "dry": options.worthless,
        "targets": [dict(zip(targets.COLUMNS, row.cells, strict=True)) for row in rows],
        "sections": [results.case_data(result) for result in done],
    }
    return [path for folder in folders for path in results.write(folder, name, machine, lines, data)]
