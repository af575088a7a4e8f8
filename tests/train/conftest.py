"""A small text and the smallest model, so that a run takes a second."""

import shutil
from pathlib import Path
from typing import Protocol

import pytest

from quaver.train import compare
from quaver.train.config import TrainConfig
from quaver.train.loop import run_training
from tests import forked


class MakeConfig(Protocol):
    def __call__(self, name: str = "run", **options: object) -> TrainConfig: ...


def write_text(folder: Path) -> Path:
    """Write a folder of 25 files, two of them for validation."""
    folder.mkdir()
    for number in range(25):
        words = " ".join(f"{number} times {factor} is {number * factor}." for factor in range(40))
        (folder / f"{number:02d}.txt").write_text(words, encoding="utf-8")
    return folder


def small(text: Path, out: Path, /, **options: object) -> TrainConfig:
    """Ten steps of `nano`."""
    few = {
        "model": "nano",
        "text": (str(text),),
        "steps": 10,
        "batch": 2,
        "sequence": 32,
        "warmup": 2,
        "validation_batches": 2,
        "validate_every": 5,
        "checkpoint_every": 5,
        "device": "cpu",
        "out": str(out),
    }
    return TrainConfig(**(few | options))  # type: ignore[arg-type]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


@pytest.fixture
def make_config(tmp_path: Path, text: Path) -> MakeConfig:
    """Configuration of ten steps of `nano` in float32 or bfloat16, in a new folder."""

    def make(name: str = "run", **options: object) -> TrainConfig:
        return small(text, tmp_path / name, **options)

    return make


@pytest.fixture
def forked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a comparison's runs are forked."""
    monkeypatch.setattr(compare, "subprocess", forked.quick)


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `nano` in PyTorch that has learnt a little; for `trained` alone, since tests write into a run."""
    folder = tmp_path_factory.mktemp("trained")
    return run_training(small(write_text(folder / "text"), folder / "run", dtype="float32", steps=20)).folder


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    """A copy of a run of `nano` that has learnt a little."""
    return Path(shutil.copytree(trained_once, tmp_path / "trained"))
