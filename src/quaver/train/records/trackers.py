"""Trackers: TensorBoard and Weights & Biases take the records that metrics.jsonl takes, through their own libraries.

metrics.jsonl stays what a run is resumed and judged by. A library is imported when a run asks for its tracker.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from quaver.train.configuration.config import TrainConfig
from quaver.train.files import whole_file
from quaver.train.records.metrics import Record

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
            whole_file.write(path, secrets.token_hex(8))
        try:
            self.run = wandb.init(
                id=whole_file.read(path),
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
