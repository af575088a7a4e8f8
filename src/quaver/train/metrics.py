"""metrics.jsonl and trackers: one JSON object per line, appended during the run and readable at any time.

Training lines have step, loss, lr, grad_norm, tokens_per_second and seconds; validation lines have step,
validation_loss and seconds. If the recipe changes during the run, training lines also have part, the number of the
current phase from 1. Floats are written in full, so that runs can be compared bit for bit.

Training lines of a model with experts have balance_loss and z_loss, averaged over layers before weighting; dropped, the
share of choices beyond an expert's capacity; busiest, the load of the busiest expert of any layer relative to an even
share; and load_L_E, the number of choices of expert E in layer L. Its validation lines have choices_differ, the share
of choices that differ from those of the same weights under bf16, if the recipe quantizes and a single process trains.

Training lines of inspected steps have inspect_snr, the lowest signal-to-noise ratio in dB; inspect_error,
inspect_flushed and inspect_saturated, the highest of all tensors; and inspect_flagged, the number of flagged tensors.
"""

import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from quaver.train import files
from quaver.train.config import TrainConfig

# ---- records ----

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """Read the records of a metrics file; an unfinished last line is ignored.

    Raises: ValueError with the line number, for a line that is not a record.
    """
    if not path.exists():
        return []
    complete = files.read(path, longest=1 << 40).rpartition("\n")[0]
    return [record(line, f"line {number} of {path}") for number, line in enumerate(complete.split("\n"), 1) if line]


def newest(path: Path) -> list[Record]:
    """Read only the last few records of a file."""
    if not path.exists():
        return []
    files.check_file(path)
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return [record(line, f"a line of {path}") for line in lines[:-1] if line.startswith("{") and line.endswith("}")]


def record(line: str, where: str) -> Record:
    """Parse one line as a record. Raises: ValueError if it is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON; restore it, or delete that line") from error
    valid = isinstance(value, dict) and type(value.get("step")) is int and "seconds" in value
    if not valid or not all(map(is_number, value.values())):
        raise ValueError(f"{where} is not a record that quaver wrote; restore it, or delete that line")
    return value


def is_number(value: object) -> bool:
    """True for a float or a 64-bit integer."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


def losses(records: list[Record]) -> dict[int, float]:
    """Return training losses by step."""
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def validation_losses(records: list[Record]) -> dict[int, float]:
    """Return validation losses by step."""
    return {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}


def phase_starts(records: Iterable[Record]) -> dict[int, int]:
    """Return the phase numbers by the first step of each phase, without the first phase."""
    changed, before = {}, None
    for record in records:
        part = record.get("part")
        if part is not None and before is not None and part != before:
            changed[record["step"]] = part
        before = before if part is None else part
    return changed


class Metrics:
    """Appends to a run's metrics file, after removing records beyond the step that the run resumes from."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.records = [record for record in read(path) if record["step"] <= step]
        self.seconds = max((record["seconds"] for record in self.records), default=0.0)
        files.write(path, "".join(json.dumps(record) + "\n" for record in self.records))
        # Unbuffered, so that data which a full disk rejected is not written again on close.
        self._file = path.open("ab", buffering=0)

    def append(self, record: Record) -> None:
        """Append a record. Raises: OSError if it cannot be written completely, FileNotFoundError if the file
        was moved.
        """
        if not self._in_place():
            raise FileNotFoundError(f"{self.path} is not in its place any more")
        line = (json.dumps(record) + "\n").encode()
        while line:
            line = line[self._file.write(line) :]
        self.records.append(record)

    def _in_place(self) -> bool:
        """True if the path still refers to the open file."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


# ---- trackers ----
# TensorBoard and Weights & Biases receive the records of metrics.jsonl through their own libraries.
#
# Runs are resumed and compared from metrics.jsonl only. A library is imported when a run uses its tracker.

#: File in a run's folder with W&B's run ID.
WANDB_ID = "wandb-id.txt"


class Tracker(Protocol):
    """Interface that receives a run's records."""

    def __call__(self, record: Record) -> None: ...

    def close(self, failed: bool) -> None:
        """Flush and close; `failed` is True if the run ended by an error or a signal."""


class TensorBoard:
    """Writes each number of a record as a scalar to the run's folder `tensorboard`.

    A resumed run writes its earlier records again, into a file that tells TensorBoard to discard the previous ones. So
    it shows metrics.jsonl in float32, even after a kill.
    """

    def __init__(self, folder: Path, config: TrainConfig, records: Sequence[Record]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event, self.summary = Event, Summary
        self.begun = time.time() - max((record["seconds"] for record in records), default=0.0)
        self.writer = EventFileWriter(str(folder / "tensorboard"))
        start = SessionLog(status=SessionLog.START)
        self.writer.add_event(Event(wall_time=self.begun, step=0, session_log=start))
        for record in records:
            self(record)

    def __call__(self, record: Record) -> None:
        numbers = [
            self.summary.Value(tag=name, simple_value=value)
            for name, value in record.items()
            if name not in ("step", "seconds")
        ]
        when = self.begun + record["seconds"]
        self.writer.add_event(self.event(wall_time=when, step=record["step"], summary=self.summary(value=numbers)))

    def close(self, failed: bool) -> None:
        self.writer.close()


class Wandb:
    """A run of Weights & Biases; project, entity and mode come from W&B's environment variables (WANDB_PROJECT, ...).

    Its files are in the run's folder. Resuming continues the same W&B run; steps between the checkpoint and the
    interruption appear twice in its history, with equal numbers. If W&B is added to a resumed run, it receives all
    earlier records.
    """

    def __init__(self, folder: Path, config: TrainConfig, records: Sequence[Record]) -> None:
        import wandb

        path = folder / WANDB_ID
        new = not records or not path.exists()
        if new:
            files.write(path, secrets.token_hex(8))
        try:
            self.run = wandb.init(
                id=files.read(path),
                resume="allow",
                name=folder.name,
                dir=str(folder),
                config=asdict(config),
                allow_val_change=True,
            )
        except wandb.Error as error:
            raise ValueError(
                f"report_to wandb: {error}; run `wandb login`, or set WANDB_MODE=offline and `wandb sync` later"
            ) from error
        self.run.define_metric("*", step_metric="step")
        for record in records if new else ():
            self(record)

    def __call__(self, record: Record) -> None:
        self.run.log(record)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


#: Trackers by the names that `TrainConfig.report_to` accepts, which are also names of library and extra.
TRACKERS: Mapping[str, type[TensorBoard] | type[Wandb]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def check_trackers(config: TrainConfig) -> None:
    """Raise a ValueError with the install command if a tracker's library is missing."""
    for name in config.report_to:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, such as W&B creates, is not the library
            raise ValueError(f"report_to {name} needs {name}, which is not installed: pip install 'quaver[{name}]'")


@contextmanager
def open_trackers(folder: Path, config: TrainConfig, records: Sequence[Record]) -> Iterator[list[Tracker]]:
    """Open the trackers of a run and send them `records`; they are closed at the end, however it comes.

    Raises: ValueError if W&B cannot start.
    """
    with ExitStack() as stack:
        trackers: list[Tracker] = []
        for name in dict.fromkeys(config.report_to):
            tracker = TRACKERS[name](folder, config, records)
            stack.push(partial(_close, tracker))
            trackers.append(tracker)
        yield trackers


def _close(tracker: Tracker, kind: type[BaseException] | None, *_: object) -> None:
    tracker.close(kind is not None)
