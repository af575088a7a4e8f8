"""The table of suites says what passed, what failed, and which Python is not there."""

import sys
from pathlib import Path

import pytest

from tests.versions import installing, suites

SUITE = suites.Suite("3.11", "2.11.0", "0.10.2")


@pytest.mark.parametrize(
    ("body", "cell"),
    [("assert True", "1 passed"), ("assert False", "1 failed"), ("raise SystemExit", "nothing ran")],
)
def test_a_cell_counts_tests(body: str, cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = tmp_path / "test_one.py"
    top = "import sys; sys.exit(3)\n" if body == "raise SystemExit" else ""
    test.write_text(f"{top}def test_one():\n    {body}\n")
    monkeypatch.setattr(suites, "interpreter", lambda suite, folder: Path(sys.executable))
    assert suites.run(SUITE, tmp_path, [str(test), "-n", "0", "-c", "/dev/null"]) == cell


def test_without_its_python_a_row_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "pythons", lambda version: iter(()))
    assert suites.run(SUITE, tmp_path, []) == "no Python 3.11 here"
    assert not list(tmp_path.iterdir())
