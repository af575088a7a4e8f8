"""Every example runs, on a CPU, and is short."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import QUICK_FLAGS

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_runs_and_says_something(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 100
    if "jax_num_cpu_devices" in text:
        # JAX counts its devices once in a process.
        environment = os.environ | {"XLA_FLAGS": QUICK_FLAGS}
        subprocess.run([sys.executable, "-W", "error", str(path)], check=True, env=environment)
    else:
        runpy.run_path(str(path), run_name="__main__")
    assert capfd.readouterr().out.strip()
