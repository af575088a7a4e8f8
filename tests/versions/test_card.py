"""A command for the card's Python: in that one where it is to be had, else in this one, and it says which."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.versions import card, installing

COMMAND = ["-c", "import sys; print('ran in', sys.version.split()[0]); sys.exit(3)"]
#: Names of a Python that is not there, as pyenv has them.
NOWHERE = "/bin/false"


def link(base: str, place: Path) -> None:
    """In place of an environment, which takes seconds to make."""
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").symlink_to(base)


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says where the card's Python may be."""
    monkeypatch.setattr(card, "new", link)
    return lambda *paths: monkeypatch.setattr(installing, "pythons", lambda version: iter(paths))


def test_without_its_python_a_command_runs_in_this_one_with_a_note(
    where: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where(NOWHERE)
    assert card.main(COMMAND, tmp_path) == 3
    said, here = capfd.readouterr().out, sys.version.split()[0]
    assert f"not in Python {card.PYTHON}" in said and f"(no Python {card.PYTHON} is here), but in Python {here}" in said
    assert f"ran in {here}" in said


def test_without_its_packages_too(
    where: Callable[..., None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(python: str, *arguments: str) -> None:
        raise subprocess.CalledProcessError(1, [python, "-m", "pip", "install", *arguments])

    where(sys.executable)
    monkeypatch.setattr(card, "pip", refused)
    assert card.main(COMMAND, tmp_path) == 3
    assert "-m pip install ended with code 1), but in Python" in capfd.readouterr().out
    assert not (tmp_path / "complete").exists()


def test_with_both_it_runs_there(
    where: Callable[..., None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This Python stands in for the other one, with two empty package folders."""
    where(NOWHERE, sys.executable)
    asked: list[str] = []
    monkeypatch.setattr(card, "pip", lambda python, *arguments: asked.extend(arguments))
    monkeypatch.setattr(card, "installed", lambda package, version, folder, python: folder / f"{package}-{version}")
    assert card.main(COMMAND, tmp_path) == 3
    assert set(card.NEEDS) < set(asked)
    assert f"in Python {card.PYTHON}, torch {card.TORCH} and triton {card.TRITON}, as" in capfd.readouterr().out
    assert card.main(COMMAND, tmp_path) == 3 and len(asked) == len(card.NEEDS) + 1, "it is installed once"


def test_a_process_finds_its_versions_before_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    chosen = installing.environment(Path("/torch-2"), Path("/triton-3"))
    assert chosen["PYTHONPATH"].split(":")[:2] == ["/torch-2", "/triton-3"]
    assert "TRITON_INTERPRET" not in chosen and "LD_PRELOAD" not in chosen


def test_the_card_has_the_first_pair_that_is_tried() -> None:
    from tests.versions.__main__ import PAIRS

    assert PAIRS[0] == (card.TORCH, card.TRITON)
