"""TensorBoard and W&B, read back by their own formats: they show metrics.jsonl, after a resume too."""

import importlib.util
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quaver.train import metrics
from quaver.train.compare import compare_runs
from quaver.train.config import TRACKERS, TrainConfig
from quaver.train.loop import Interrupted, run_training
from quaver.train.metrics import Record, read
from tests.train.conftest import MakeConfig

pytestmark = pytest.mark.filterwarnings("default")


def needs(library: str) -> Any:
    return pytest.importorskip(library, reason=f"{library} is not installed: make test-integrations")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """W&B without a network, with settings and caches in the folder of the test, reloaded by each test."""
    for name, value in {"MODE": "offline", "SILENT": "true", "PROJECT": "quaver-tests"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "wandb-own"))
    yield
    if library := sys.modules.get("wandb"):
        library.teardown()


def interrupted(config: TrainConfig, step: int) -> None:
    """A run that is stopped while a step is being recorded, and saved."""

    def watch(record: Record) -> None:
        if record["step"] == step and "loss" in record:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run_training(config, watch=watch)


def killed(config: TrainConfig, step: int) -> None:
    """A run that ends without saving, once a step is recorded."""

    def watch(record: Record) -> None:
        if record["step"] == step:
            raise SystemExit

    with pytest.raises(SystemExit):
        run_training(config, watch=watch)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run: (step, value) by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def recorded(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The same of metrics.jsonl, in float32."""
    by_name: dict[str, list[tuple[int, float]]] = {}
    for record in read(folder / "metrics.jsonl"):
        for name, value in record.items():
            if name not in ("step", "seconds"):
                by_name.setdefault(name, []).append((record["step"], float(np.float32(value))))
    return by_name


@pytest.mark.parametrize("end", [None, interrupted, killed], ids=["whole", "interrupted", "killed"])
def test_tensorboard_shows_the_metrics(make_config: MakeConfig, end: Any) -> None:
    needs("tensorboard")
    config = make_config(report_to=("tensorboard",))
    if end is not None:
        end(config, 8)
        if end is killed:  # the records that the writer's thread had not written are lost
            newest = max((Path(config.out) / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime)
            newest.write_bytes(newest.read_bytes()[:-100])
    result = run_training(config, resume=end is not None)
    shown = scalars(result.folder)
    assert {"loss", "lr", "grad_norm", "tokens_per_second", "validation_loss"} == set(shown)
    assert shown == recorded(result.folder) and [step for step, _ in shown["loss"]] == list(range(1, 11))


def test_a_tracker_changes_no_number(make_config: MakeConfig) -> None:
    needs("tensorboard")
    assert run_training(make_config("a")).losses == run_training(make_config("b", report_to=("tensorboard",))).losses


def wandb_runs(folder: Path) -> list[tuple[str, list[Record]]]:
    """(run's id, records) of each part of a run that W&B wrote offline, in order."""
    return [whole(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def whole(path: Path) -> tuple[str, list[Record]]:
    """What W&B's own process has written once the run's exit is there: `finish` may return before."""
    for _ in range(300):
        run, rows, ended = history(path)
        if ended:
            return run, rows
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end after 30 s")


def history(path: Path) -> tuple[str, list[Record], bool]:
    """W&B's file is LevelDB's log: blocks of 32 KiB, a CRC, a length and a kind before each piece of a record."""
    from wandb.proto.wandb_internal_pb2 import Record as Written

    data, at, piece, run, rows, ended = path.read_bytes(), 7, b"", "", [], False
    while at + 7 <= len(data):
        if (left := -at % 32768) < 7 and left:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):  # still being written
            break
        piece, at = piece + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last piece
            written = Written.FromString(piece)
            run, ended = written.run.run_id or run, ended or written.HasField("exit")
            if written.HasField("history"):
                items = ((item.key or ".".join(item.nested_key), item.value_json) for item in written.history.item)
                rows.append({name: json.loads(value) for name, value in items if not name.startswith("_")})
            piece = b""
    return run, rows, ended


def test_wandb_gets_the_metrics_and_a_resumed_run_continues(make_config: MakeConfig, offline: None) -> None:
    needs("wandb")
    config = make_config(report_to=("wandb",))
    interrupted(config, 7)
    folder = run_training(config, resume=True).folder
    (first, before), (second, after) = wandb_runs(folder)
    assert first == second == (folder / metrics.WANDB_ID).read_text()
    assert before + after == read(folder / "metrics.jsonl")


def test_wandb_added_later_gets_all_records(make_config: MakeConfig, offline: None) -> None:
    needs("wandb")
    interrupted(make_config(), 7)
    folder = run_training(make_config(report_to=("wandb",)), resume=True).folder
    ((_, rows),) = wandb_runs(folder)
    assert rows == read(folder / "metrics.jsonl") and rows[0]["step"] == 1


def test_wandb_without_a_key_gives_a_clear_error_before_anything_trains(
    make_config: MakeConfig, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setenv("NETRC", os.devnull)
    config = make_config(report_to=("wandb",))
    with pytest.raises(ValueError, match=r"report_to wandb: .*`wandb login`, or set WANDB_MODE=offline"):
        run_training(config)
    assert read(Path(config.out) / "metrics.jsonl") == []


@pytest.mark.parametrize("library", TRACKERS)
@pytest.mark.parametrize(
    "start", [run_training, lambda config: compare_runs(config, ["mxfp8"])], ids=["train", "compare"]
)
def test_a_missing_library_gives_a_clear_error_before_the_text_is_read(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, library: str, start: Any
) -> None:
    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        if name != library:
            return find_spec(name, package)
        folder = ModuleSpec(name, None, is_package=True)  # of that name, in the folder that quaver was called in
        return folder if start is run_training else None

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(metrics, "find_spec", without)
    config = make_config(report_to=(library,), text=("nowhere",))
    with pytest.raises(ValueError, match=rf"report_to {library} needs {library}, .*pip install 'quaver\[{library}\]'"):
        start(config)
    assert not (Path(config.out) / "metrics.jsonl").exists()


def test_the_tables_agree() -> None:
    assert tuple(metrics.TRACKERS) == TRACKERS
    with pytest.raises(ValueError, match="report_to 'tensorbord' is not known; did you mean 'tensorboard'"):
        TrainConfig(report_to=("tensorbord",))
