"""Style and types are checked by the tools that `make lint` runs."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.contracts.typed import ROOT, mypy


def ruff(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ruff", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


COMMANDS = {
    "ruff check": lambda: ruff("check", "--output-format", "concise"),
    "ruff format": lambda: ruff("format", "--check"),
    "mypy": mypy,
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_tree_is_clean(command: Callable[[], subprocess.CompletedProcess[str]]) -> None:
    done = command()
    assert done.returncode == 0, done.stdout + done.stderr
