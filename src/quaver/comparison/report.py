"""Files of a comparison: report.md and compare.png."""

import os
import platform
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from quaver.comparison.results import Comparison

REPORT, PICTURE = "report.md", "compare.png"


def check_plotting() -> None:
    """Raise a ModuleNotFoundError with the install command if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"{PICTURE} is drawn by matplotlib, which is not installed: pip install matplotlib, or leave out `out`",
            name="matplotlib",
        )


def save(comparison: Comparison, folder: Path) -> list[Path]:
    """Write report.md and, if a run has finished, compare.png into a folder, and return their paths."""
    from quaver.comparison.plot import write_png  # needs matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    if any(run.final is not None for run in comparison.runs):
        with _replacing(folder / PICTURE) as partial:
            write_png(comparison, partial)
        paths.append(folder / PICTURE)
    with _replacing(folder / REPORT) as partial:
        partial.write_text(markdown(comparison, [path.name for path in paths]), encoding="utf-8")
    return [folder / REPORT, *paths]


def markdown(comparison: Comparison, pictures: Sequence[str]) -> str:
    """Return the report: table, notes, failures, pictures by file name, and the machine."""
    header, *rows = comparison.table()
    table = [header, ["---", *["---:"] * (len(header) - 2), "---"], *rows]
    lines = ["# Recipes compared", "", f"{comparison.title}:", "", *(f"| {' | '.join(row)} |" for row in table), ""]
    lines += [f"{note}\n" for note in comparison.notes] + [f"**{failure}**\n" for failure in comparison.failures]
    lines += [f"![{name}]({name})\n" for name in pictures]
    return "\n".join([*lines, f"Python {platform.python_version()}, {platform.machine()}.", ""])


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a new path to write to; it replaces `path` at the end, or is deleted on failure."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
