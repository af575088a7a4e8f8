"""metrics.jsonl: one JSON object a line, appended as the run goes and readable while it does.

Training lines have step, loss, lr, grad_norm, tokens_per_second and seconds; validation lines step,
validation_loss and seconds. Training lines of a run whose recipe changes have part, too: the number of the part in
force, from 1. Where several ranks train there are also step_seconds, the longest of a rank;
own_seconds_min, _median and _max, without what a rank waited for others; slowest_rank, that of the most own seconds;
communication, the share of a step that ranks waited, their mean; and bytes_weights, bytes_gradients and so on, what a
rank sent to others in the step, the mean of all. Floats are written in full, so that two runs can be compared bit for
bit.

Training lines of a model with experts have balance_loss and z_loss, the means of the layers' before any weight;
dropped, the share of choices beyond an expert's capacity; busiest, what the busiest expert of any layer has over an
even share; and load_L_E, how many choices fell on expert E of layer L. Its validation lines have choices_differ, the
share of choices that the same weights do not make under bf16: where the recipe quantizes, and one process trains.
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

# ---- metrics ---------------------------------------------------------------------------------------------

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """The records of a metrics file; a last line that an interrupted write left unfinished is not one.

    Raises: ValueError for a line that is not a record, with its number.
    """
    if not path.exists():
        return []
    complete = files.read(path, longest=1 << 40).rpartition("\n")[0]
    return [record(line, f"line {number} of {path}") for number, line in enumerate(complete.split("\n"), 1) if line]


def newest(path: Path) -> list[Record]:
    """The last few records, without reading the rest of a long file."""
    if not path.exists():
        return []
    files.check_file(path)
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return [record(line, f"a line of {path}") for line in lines[:-1] if line.startswith("{") and line.endswith("}")]


def record(line: str, where: str) -> Record:
    """One line as a record. Raises: ValueError if it is none."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON; restore it, or delete that line") from error
    right = isinstance(said, dict) and type(said.get("step")) is int and "seconds" in said
    if not right or not all(map(is_number, said.values())):
        raise ValueError(f"{where} is not a record that quaver wrote; restore it, or delete that line")
    return said


def is_number(value: object) -> bool:
    """Whether it is a float, or an integer of 64 bits."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


def losses(records: list[Record]) -> dict[int, float]:
    """Training loss by step."""
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def validation_losses(records: list[Record]) -> dict[int, float]:
    """Validation loss by step."""
    return {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}


def switches(records: Iterable[Record]) -> dict[int, int]:
    """Where a run's recipe changed: by the first step of a part, the part's number, the first one left out."""
    changed, before = {}, None
    for record in records:
        part = record.get("part")
        if part is not None and before is not None and part != before:
            changed[record["step"]] = part
        before = before if part is None else part
    return changed


class Metrics:
    """Appends to a run's metrics file, after dropping what lies beyond the step that the run goes on from."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.records = [record for record in read(path) if record["step"] <= step]
        self.seconds = max((record["seconds"] for record in self.records), default=0.0)
        files.write(path, "".join(json.dumps(record) + "\n" for record in self.records))
        # Unbuffered: what a full disk did not take must not be written again when the file is closed.
        self._file = path.open("ab", buffering=0)

    def append(self, record: Record) -> None:
        """Raises: OSError if the record cannot be written whole, FileNotFoundError if the file is not in its place."""
        if not self._in_place():
            raise FileNotFoundError(f"{self.path} is not in its place any more")
        line = (json.dumps(record) + "\n").encode()
        while line:
            line = line[self._file.write(line) :]
        self.records.append(record)

    def _in_place(self) -> bool:
        """Whether the path still leads to the file that is written."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


# ---- trackers --------------------------------------------------------------------------------------------
# Trackers: TensorBoard and Weights & Biases take the records that metrics.jsonl takes, through their own libraries.
#
# metrics.jsonl stays what a run is resumed and judged by. A library is imported when a run asks for its tracker.

#: In a run's folder: the name by which W&B knows the run.
ID = "wandb-id.txt"


class Tracker(Protocol):
    """What takes a run's records, one by one."""

    def __call__(self, record: Record) -> None: ...

    def close(self, failed: bool) -> None:
        """Write what is not written yet; `failed` is True if the run ended by an error or a signal."""


class TensorBoard:
    """Scalars in the folder `tensorboard` of the run, one for each number of a record; no other library is needed.

    A run that goes on writes the records that it has once more, into a file that tells TensorBoard to drop what came
    before: what it shows is metrics.jsonl, in float32, whatever a kill left unwritten.
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
    """A run of Weights & Biases, whose project, entity and mode are those of W&B's own variables (WANDB_PROJECT, ...).

    Its files lie in the run's folder. Resuming goes on with the same run of W&B; steps between the checkpoint and the
    interruption are in its history twice, with equal numbers. Where W&B is added to a run that goes on, it gets the
    records from the first step on.
    """

    def __init__(self, folder: Path, config: TrainConfig, records: Sequence[Record]) -> None:
        import wandb

        path = folder / ID
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


#: By the names that `TrainConfig.report_to` takes; each is the name of its library and of the extra that installs it.
TRACKERS: Mapping[str, type[TensorBoard] | type[Wandb]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def check(config: TrainConfig) -> None:
    """Raise a ValueError that says what to install if a tracker's library is missing."""
    for name in config.report_to:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, such as W&B leaves behind, is no library
            raise ValueError(f"report_to {name} needs {name}, which is not installed: pip install 'quaver[{name}]'")


@contextmanager
def opened(folder: Path, config: TrainConfig, records: Sequence[Record]) -> Iterator[list[Tracker]]:
    """The trackers that a run reports to, which have `records` already; closed at the end, however that comes.

    Raises: ValueError if W&B refuses to begin.
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
