"""metrics.jsonl: one JSON object a line, appended as the run goes and readable while it does.

Training lines have step, loss, lr, grad_norm, tokens_per_second and seconds; validation lines step,
validation_loss and seconds. Floats are written in full, so that two runs can be compared bit for bit.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from quaver.train import whole_file

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """The records of a metrics file; a last line that an interrupted write left unfinished is not one."""
    if not path.exists():
        return []
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines()]


def newest(path: Path) -> list[Record]:
    """The last few records, without reading the rest of a long file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode("utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line.startswith("{") and line.endswith("}")]


def losses(records: list[Record]) -> dict[int, float]:
    """Training loss by step."""
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def validation_losses(records: list[Record]) -> dict[int, float]:
    """Validation loss by step."""
    return {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}


class Metrics:
    """Appends to a run's metrics file, after dropping what lies beyond the step that the run goes on from."""

    def __init__(self, path: Path, step: int) -> None:
        self.records = [record for record in read(path) if record["step"] <= step]
        self.seconds = max((record["seconds"] for record in self.records), default=0.0)
        whole_file.write(path, "".join(json.dumps(record) + "\n" for record in self.records))
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: Record) -> None:
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
