"""Every example runs, on a CPU, and is short."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_runs_and_says_something(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(path.read_text().splitlines()) < 100
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
