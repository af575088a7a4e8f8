import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quaver.train import files, generate
from quaver.train.compare import compare_runs
from quaver.train.config import TrainConfig, to_toml
from quaver.train.loop import run_training
from quaver.train.metrics import losses, read
from tests import forked
from tests.train.conftest import MakeConfig


def start(config: TrainConfig, tmp_path: Path) -> Any:
    """Start a training in a separate process and wait for some steps."""
    (tmp_path / "c.toml").write_text(to_toml(config), encoding="utf-8")
    command = [sys.executable, "-m", "quaver.train", "train", "--quiet", "--config", str(tmp_path / "c.toml")]
    process = forked.quick.Popen(command, stderr=forked.quick.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while len(losses(read(Path(config.out) / "metrics.jsonl"))) < 6:
        assert process.poll() is None
        time.sleep(0.02)
    return process


def test_a_second_training_names_the_first_and_changes_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(steps=5000, validate_every=0)
    process = start(config, tmp_path)
    try:
        message = rf"run is in use: training by process {process.pid} on {socket.gethostname()}, since 2\d\d\d-"
        for resume in (False, True):
            with pytest.raises(ValueError, match=message):
                run_training(config, resume=resume)
        assert generate.generate(Path(config.out), "7", tokens=2).tokens
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    steps = list(losses(read(Path(config.out) / "metrics.jsonl")))
    assert steps == list(range(1, len(steps) + 1))
    fewer = replace(config, steps=len(steps) + 2)
    with pytest.warns(UserWarning, match=r"other options: steps \d+ \(was 5000\)"):
        last = max(run_training(fewer, resume=True).losses)
    assert last == len(steps) + 2, "a dead process's lock is no obstacle"


def test_a_second_comparison_names_the_first(make_config: MakeConfig) -> None:
    config = make_config(steps=1)
    with (
        files.locked(Path(config.out), "a comparison"),
        pytest.raises(ValueError, match="in use: a comparison by process"),
    ):
        compare_runs(config, ["mxfp8"])


def test_a_folder_made_for_a_failed_run_is_removed(tmp_path: Path) -> None:
    with files.locked(tmp_path / "a" / "b", "training"):
        pass
    with files.locked(tmp_path / "c", "training"):
        (tmp_path / "c" / "other").touch()
    assert not (tmp_path / "a").exists() and (tmp_path / "c" / "other").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 5000, json.dumps({"pid": 1})])
def test_an_unreadable_lock_still_gives_a_clear_error(tmp_path: Path, content: str) -> None:
    with files.locked(tmp_path, "training"):
        (tmp_path / files.OWNER_FILE).write_text(content)
        with (
            pytest.raises(ValueError, match="is in use: another process is writing into it"),
            files.locked(tmp_path, ""),
        ):
            pass


@pytest.mark.parametrize("name", [files.LOCK_FILE, files.OWNER_FILE])
@pytest.mark.parametrize("plant", [lambda path: path.symlink_to("mine"), Path.mkdir, os.mkfifo])
def test_a_foreign_file_named_like_the_lock_gives_a_clear_error(
    tmp_path: Path, name: str, plant: Callable[[Path], None]
) -> None:
    plant(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} is not the file that quaver writes there; delete it"):
        files.locked(tmp_path, "training").__enter__()
    assert not (tmp_path / "mine").exists()


def test_a_folder_removed_before_the_first_step_gives_a_clear_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with (
        pytest.raises(ValueError, match="run was removed or renamed while it was in use"),
        files.locked(run, "training"),
    ):
        shutil.rmtree(run)
        files.write(run / "config.toml", "")
