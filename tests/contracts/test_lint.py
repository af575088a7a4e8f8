"""Style and types are checked by the tools that `make lint` runs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "ruff check": ["ruff", "check", "--output-format", "concise"],
    "ruff format": ["ruff", "format", "--check"],
    "mypy": ["mypy"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_tree_is_clean(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *COMMANDS[name]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
