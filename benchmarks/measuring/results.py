"""Result files: `NAME-DATE.md` to read and `NAME-DATE.json` to compute with."""

import json
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measuring.figure import Figure, Result

FOLDER = Path(__file__).resolve().parents[1] / "results"


def write(
    folder: Path, name: str, machine: Mapping[str, str], markdown: Sequence[str], data: Mapping[str, Any]
) -> list[Path]:
    """Write both files, each whole or not at all; a second run of the same day replaces the first.

    Args:
        folder: made if missing.
        name: of the benchmark; the machine's date is appended.
        machine: from `benchmarks.measuring.machine.describe`; in both files.
        markdown: lines, the first a heading.
        data: content of the JSON file in addition to the machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    heading, *body = markdown
    facts = [f"- {key}: {value}" for key, value in machine.items()]
    texts = {
        ".md": "\n".join([heading, "", *facts, *body]).rstrip() + "\n",
        ".json": compact({"machine": dict(machine), **data}) + "\n",
    }
    paths = []
    for suffix, text in texts.items():
        path = folder / f"{name}-{machine['date']}{suffix}"
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
        paths.append(path)
    return paths


def compact(data: Any) -> str:
    """JSON with a record on each line: numbers, strings and lists of them under one name or in one list."""

    def line(value: Any) -> str:
        return json.dumps(finite(value), ensure_ascii=False)

    def of(value: Any, depth: int) -> str:
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        nested = [item for item in items if isinstance(item, Mapping | list | tuple)]
        inner = [each for item in nested for each in (item.values() if isinstance(item, Mapping) else item)]
        flat = not any(isinstance(each, Mapping | list | tuple) for each in inner)
        if not nested or (flat and len(nested) < len(items)):
            return line(value)
        space = "\n" + " " * (depth + 1)
        if isinstance(value, Mapping):
            begin, end, parts = "{", "}", [f"{line(key)}: {of(item, depth + 1)}" for key, item in value.items()]
        else:
            begin, end, parts = "[", "]", [of(item, depth + 1) for item in value]
        return begin + space + f",{space}".join(parts) + space[:-1] + end

    return of(data, 0)


def finite(value: Any) -> Any:
    """Return data with infinities and NaN, which JSON does not support, as the strings "inf" and "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table, the first column aligned left, the others right."""
    lines = [columns, ("---", *["---:"] * (len(columns) - 1)), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def between(page: str, begin: str, end: str, lines: Sequence[str]) -> str:
    """Return the page with these lines between two marks, prose wrapped. Raises: ValueError without the marks."""
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise ValueError(f"the page lacks the line {begin} or {end}")
    return "\n".join([before + begin, "", *wrapped(lines), "", end + after])


def write_between(path: Path, begin: str, end: str, lines: Sequence[str]) -> None:
    """Write these lines between two marks of a page."""
    path.write_text(between(path.read_text(encoding="utf-8"), begin, end, lines), encoding="utf-8")


def wrapped(lines: Sequence[str], width: int = 110) -> list[str]:
    """Break lines of prose at `width` columns; rows of tables stay as they are."""
    return [part for line in lines for part in ([line] if line.startswith("|") else textwrap.wrap(line, width) or [""])]


def case_markdown(result: Result) -> list[str]:
    case = result.case
    lines = ["", f"## {case.title}", "", f"`{case.name}`. {case.notes}", ""]
    if result.reason:
        lines += [f"**{result.reason}**", ""]
    if not result.figures:
        return lines[:-1]
    return lines + table(("", *result.columns), cells(result))


def cells(result: Result) -> list[list[str]]:
    """Return the table's rows as text."""
    return [[subject, *("" if figure is None else str(figure) for figure in row)] for subject, row in result.rows()]


def case_data(result: Result) -> dict[str, Any]:
    figures = [_data(figure) for figure in result.figures]
    return {
        "name": result.case.name,
        "title": result.case.title,
        "seconds": round(result.seconds, 1),
        "reason": result.reason,
        "figures": figures,
    }


def _data(figure: Figure) -> dict[str, Any]:
    data = asdict(figure) | {"target": _text(figure.target), "passed": figure.passed}
    # Either a number or why there is none.
    data.pop("value" if figure.instead else "instead")
    return data


def _text(target: object | None) -> str | None:
    return None if target is None else str(target)
