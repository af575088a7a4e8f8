"""The measured table of docs/design/parallel.md: `python -m benchmarks.pages.ranks` writes it from the newest results.

It stands between two marks; a test compares it with the stored results.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.measuring import results

PAGE = Path(__file__).parents[2] / "docs" / "design" / "parallel.md"
BEGIN, END = "<!-- python -m benchmarks.pages.ranks writes from here -->", "<!-- to here -->"
#: Text before the first full run is stored.
NONE = "No full run has been kept yet: `python -m benchmarks parallel` makes one, and writes its table here."


def newest(folder: Path = results.FOLDER) -> Path | None:
    """Return the newest results of the suite of several ranks in full sizes."""
    paths = folder.glob("parallel-2*.json")
    return max((path for path in paths if not json.loads(path.read_text(encoding="utf-8"))["quick"]), default=None)


def table(path: Path | None) -> str:
    """Return the results as Markdown: the machine, and a table for each case."""
    if path is None:
        return NONE
    data = json.loads(path.read_text(encoding="utf-8"))
    machine = data["machine"]
    of = ", ".join(str(machine[name]) for name in ("cpu", "date")) + f", torch {machine['torch']}"
    lines = [f"`python -m benchmarks parallel` on {of}, commit {machine['commit']}:"]
    for case in data["cases"]:
        lines += ["", f"{case['title']}:", "", *results.table(*rows(case["figures"]))]
    return "\n".join(lines)


def rows(figures: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns, and a row for each subject."""
    columns = list(dict.fromkeys(figure["column"] for figure in figures))
    cells: dict[str, dict[str, str]] = {}
    for figure in figures:
        cells.setdefault(figure["subject"], {})[figure["column"]] = shown(figure)
    return ["", *columns], [[name, *(own.get(column, "") for column in columns)] for name, own in cells.items()]


def shown(figure: dict[str, Any]) -> str:
    digits = {"%": 1, "ms": 0}.get(figure["unit"], 2)
    missed = " (missed)" if figure["passed"] is False else ""
    return f"{figure['value']:.{digits}f} {figure['unit'].replace('x', '')}".strip() + missed


def write(folder: Path = results.FOLDER) -> None:
    results.write_between(PAGE, BEGIN, END, table(newest(folder)).splitlines())


if __name__ == "__main__":
    write()
