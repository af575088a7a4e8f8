"""Run the tests with the oldest and the newest Python, torch and jax: `python -m tests.versions.suites`.

Each row of `SUITES` takes about 20 minutes and a virtual environment in .versions. That has 6 GB with torch's CUDA
builds from PyPI, and less with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. The table of results is
written to docs/install.md.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.versions.installing import ROOT, new, pip, python

PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- python -m tests.versions.suites writes from here -->", "<!-- to here -->"


class Suite(NamedTuple):
    """The versions of one run."""

    python: str
    torch: str
    jax: str
    #: Paths of tests; () for `SELECTION`.
    tests: tuple[str, ...] = ()


SUITES = (
    Suite("3.11", "2.11.0", "0.10.2"),
    Suite("3.12", "2.15.0", "0.12.0.1"),
    Suite("3.13", "2.14.1", "0.12.0.1"),
    Suite("3.12", "2.13.0", "0.11.2", ("tests/jax",)),
    Suite("3.13", "2.13.0", "0.12.0.1", ("tests/jax",)),
)
#: What tests import besides torch and jax.
REQUIREMENTS = (
    *("flax>=0.12", "optax>=0.2.5", "ml_dtypes>=0.5", "rich", "typer", "safetensors", "tokenizers", "matplotlib"),
    *("filelock", "pyyaml", "hatchling", "mypy", "ruff", "pytest", "pytest-timeout", "pytest-xdist"),
    *("torchao==0.18.0", "transformers==5.23.0", "qwix==0.1.8", "equinox>=0.13", "flatbuffers"),
)
#: The default tests: all of these folders but the gate's, whose ceilings hold for one version of triton.
SELECTION = [
    *(f"tests/{folder}" for folder in ("contracts", "reference", "recipes", "torch", "jax", "kernels", "compat")),
    *("--ignore", "tests/kernels/gate", "--ignore", "tests/kernels/test_gate.py"),
]
MARKS = "not slow and not gpu"


def interpreter(suite: Suite, folder: Path) -> Path | None:
    """The Python interpreter of a virtual environment with these versions, made on first use.

    Returns:
        None if the machine has no such Python.
    Raises:
        CalledProcessError: venv or pip failed.
    """
    environment = folder / f"python-{suite.python}-torch-{suite.torch}-jax-{suite.jax}"
    path = environment / "bin" / "python"
    # An environment whose installation was interrupted lacks this file.
    complete = environment / "complete"
    if not complete.exists():
        base = python(suite.python)
        if base is None:
            return None
        new(base, environment)
        pip(path, f"torch=={suite.torch}", f"jax=={suite.jax}", f"jaxlib=={suite.jax}", *REQUIREMENTS)
        complete.touch()
    return path


def run(suite: Suite, folder: Path, selection: list[str]) -> str:
    """Run pytest with these versions, on the suite's own tests or else the selection.

    Args:
        folder: where environments are, and where pytest's output is written.
        selection: arguments of pytest, such as paths of tests.
    Returns:
        The counts of passed and failed tests, such as "3 passed, 1 failed", or why nothing ran.
    """
    path = interpreter(suite, folder)
    if path is None:
        return f"not run: no Python {suite.python} here"
    command = [path, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "-m", MARKS]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    log = folder / f"suite-{suite.python}-{suite.torch}-{suite.jax}.txt"
    with log.open("w") as output:
        subprocess.run(
            [*command, *(suite.tests or selection)],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            check=False,
        )
    counts = re.findall(r"\d+ (?:passed|failed|error)s?", log.read_text().splitlines()[-1])
    tests = f" ({', '.join(f'`{path}`' for path in suite.tests)})" if suite.tests else ""
    return (", ".join(counts) or "nothing ran") + tests


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions.suites", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".versions", help="the folder of the virtual environments"
    )
    parser.add_argument(
        "--only", metavar="TORCH", help="run only the rows of this torch version, and do not write the page"
    )
    parser.add_argument("--jax", help="run only the rows of this jax version, and do not write the page")
    parser.add_argument("selection", nargs="*", default=SELECTION, help="paths of tests")
    options = parser.parse_args(arguments)
    suites = [suite for suite in SUITES if options.only in (None, suite.torch) and options.jax in (None, suite.jax)]
    results = [run(suite, options.folder.resolve(), options.selection) for suite in suites]
    lines = ["| Python | torch | jax | tests |", "| --- | --- | --- | ---: |"]
    lines += ["| " + " | ".join((*suite[:3], result)) + " |" for suite, result in zip(suites, results, strict=True)]
    table = f"Run on {datetime.date.today()}:\n\n" + "\n".join(lines)
    if not (options.only or options.jax):
        text = PAGE.read_text()
        PAGE.write_text(f"{text.split(BEGIN)[0]}{BEGIN}\n\n{table}\n\n{END}{text.split(BEGIN)[1].split(END, 1)[1]}")
    print(table)
    ran = [result for result in results if not result.startswith("not run")]
    return int(any("passed" not in result or "failed" in result or "error" in result for result in ran))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
