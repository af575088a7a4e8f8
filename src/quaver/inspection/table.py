"""The table of an inspection: which steps are sampled, their rows in memory and in a file, and the worst layers."""

import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quaver.inspection.rows import HEADER, cells, order_in_layer, severity
from quaver.recipes.conversion import matches
from quaver.recipes.text import html_lines, html_table, suggest

#: File of the rows in the output folder, and that of `WhatIf.save`.
FILE, WHAT_IF_FILE = "inspect.jsonl", "what_if.json"
NOTHING = "nothing was measured: no quantized layer ran in a sampled step that step() has ended"


class InspectionTable:
    """Rows of the sampled steps of a training loop.

    Attributes:
        rows: one dict per sampled step, layer, GEMM and tensor; `pandas.DataFrame(inspector.rows)` is a table.
    """

    def __init__(
        self,
        *,
        every: int,
        start: int,
        stop: int | None,
        layers: str | Iterable[str],
        out: str | Path | None,
        resume: int | None,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._every, self._first_step, self._end, self._resumed = every, start, stop, resume
        self._patterns = (layers,) if isinstance(layers, str) else tuple(layers)
        self._path = None if out is None else Path(out) / FILE
        least = {"every": (self._every, 1), "start": (self._first_step, 0)}
        if self._end is not None:
            least["stop"] = self._end, 1
        if self._resumed is not None:
            least["resume"] = self._resumed, 0
        for option, (value, smallest) in least.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise ValueError(f"inspect: {option} is {value!r}; give a whole number, {smallest} or more")
        if self._end is not None and self._end <= self._first_step:
            raise ValueError(f"inspect: stop is {self._end}, and start {self._first_step}: no step would be sampled")

    def _samples(self, step: int) -> bool:
        after = step - self._first_step
        return after >= 0 and after % self._every == 0 and (self._end is None or step < self._end)

    def _check_patterns(self, names: Iterable[str]) -> None:
        """Raise ValueError if a pattern matches none of these layers."""
        for pattern in self._patterns:
            if not any(matches(pattern, name) for name in names):
                hint = suggest(pattern.rpartition(".")[2], {part for name in names for part in name.split(".")})
                raise ValueError(f"inspect: no quantized layer matches {pattern!r}; {hint}")

    # ---- file ----

    def _create_file(self) -> str:
        """Create the output file, or remove the rows that a resumed loop will write again.

        Returns:
            Why that failed, or "".
        """
        if self._path is None:
            return ""
        try:
            kept = ""
            if self._path.exists():
                if self._resumed is None:
                    return (
                        f"{self._path} has statistics of another run; give another folder, delete the file, or give "
                        "resume=the next step of the same run"
                    )
                kept = _lines_before(self._path, self._resumed)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(".partial")
            partial.write_text(kept, encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            return f"cannot write {self._path} ({error}); give another folder"
        except (ValueError, KeyError, TypeError) as error:
            return f"{self._path} has a line that is no row of inspect ({error}); restore it, or delete the file"
        return ""

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if self._path is None:
            return
        try:
            # Unlike with "a", a file that was removed is not created again without its first rows.
            with self._path.open("r+", encoding="utf-8") as file:
                file.seek(0, os.SEEK_END)
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:
            warnings.warn(f"inspect: cannot write {self._path} ({error}); statistics stay in memory", stacklevel=4)
            self._path = None

    # ---- results ----

    def worst(self, count: int = 10) -> list[dict[str, Any]]:
        """Return one row of the last sampled step for each of the worst layers, the worst first.

        The row of a layer is the first with a value that is not finite, else a flagged operand, else a flagged result,
        else the tensor with the largest error.
        """
        by_layer: dict[str, list[dict[str, Any]]] = {}
        order: dict[str, tuple[Any, ...]] = {}
        for index, row in enumerate(self._last_step()):
            by_layer.setdefault(row["layer"], []).append(row)
            own = severity(row, index)
            order[row["layer"]] = min(own, order.get(row["layer"], own))
        worst = sorted(by_layer, key=order.__getitem__)
        return [min(by_layer[layer], key=order_in_layer) for layer in worst[:count]]

    def flagged(self) -> list[dict[str, Any]]:
        """Return the last sampled step's rows that are flagged as faults."""
        return [row for row in self._last_step() if row["flags"]]

    def summary(self) -> dict[str, float]:
        """Return the lowest `snr` and highest `error`, `flushed` and `saturated` of the last sampled step's rows, and
        the number of `flagged` ones. A figure that no row has is left out.
        """
        rows = self._last_step()
        figures = {"snr": min, "error": max, "flushed": max, "saturated": max}
        values = {name: [row[name] for row in rows if row.get(name) is not None] for name in figures}
        summary = {name: float(figures[name](own)) for name, own in values.items() if own}
        return {**summary, "flagged": len(self.flagged())} if rows else {}

    def _last_step(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["step"] == self.rows[-1]["step"]]

    def __str__(self) -> str:
        rows = self.worst()
        if not rows:
            return NOTHING
        table = [HEADER, *map(cells, rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
        return "\n".join([f"step {rows[0]['step']}, the worst layers:", *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = self.worst()
        return html_table(HEADER, map(cells, rows)) if rows else html_lines([NOTHING])


def is_measured(patterns: tuple[str, ...], *names: str) -> bool:
    """Return True if a pattern matches one of a layer's names, or there are no patterns."""
    return not patterns or any(matches(p, name) for p in patterns for name in names)


def _lines_before(path: Path, step: int) -> str:
    """Return the lines of a file whose rows are of earlier steps, without an unfinished last line."""
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return "".join(line + "\n" for line in complete.split("\n") if line and json.loads(line)["step"] < step)
