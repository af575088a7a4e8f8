"""A small text and the smallest model, so that a run takes a second."""

from pathlib import Path
from typing import Protocol

import pytest

from quaver.train.configuration.config import TrainConfig


class MakeConfig(Protocol):
    def __call__(self, name: str = "run", **options: object) -> TrainConfig: ...


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of 25 files, so that two are held out."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(25):
        words = " ".join(f"{number} times {factor} is {number * factor}." for factor in range(40))
        (folder / f"{number:02d}.txt").write_text(words, encoding="utf-8")
    return folder


@pytest.fixture
def make_config(tmp_path: Path, text: Path) -> MakeConfig:
    """Ten steps of `nano` in float32 or bfloat16, in a folder of their own."""

    def make(name: str = "run", **options: object) -> TrainConfig:
        small = {
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
            "out": str(tmp_path / name),
        }
        return TrainConfig(**(small | options))  # type: ignore[arg-type]

    return make
