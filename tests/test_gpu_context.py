"""A run of GPU tests stops where the CUDA context is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = """
import torch
from pytest import mark
pytestmark = mark.gpu

def lost(*_):
    raise RuntimeError("CUDA error: an illegal instruction was encountered\\nmore")

def test_first():
    pass

def test_that_fails_alone(monkeypatch):
    assert False

def test_that_loses_the_context():
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, lost
    lost()

def test_after():
    assert False
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_lost_context_ends_the_run_with_its_tests_name(workers: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "conftest.py").write_text("def pytest_configure(config): config.addinivalue_line('markers', 'gpu')")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.gpu_context",
        *workers,
        "--rootdir",
        tmp_path,
        tmp_path,
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path)
    assert (
        "the CUDA context was lost in test_cases.py::test_that_loses_the_context: CUDA error: an illegal" in done.stdout
    )
    assert "2 failed, 1 passed" in done.stdout, done.stdout
