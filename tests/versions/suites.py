"""The suite under the oldest and the newest frameworks: `python -m tests.versions.suites`, some 20 minutes each.

Each row of `SUITES` gets a virtual environment in .versions, 6 GB where PyPI has torch with CUDA alone
(PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu has builds for CPUs). What passed goes into docs/install.md.
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
    """Versions of Python and of what the suite is run under."""

    python: str
    torch: str
    jax: str


SUITES = (Suite("3.11", "2.11.0", "0.10.2"), Suite("3.12", "2.15.0", "0.12.0.1"), Suite("3.13", "2.14.1", "0.12.0.1"))
#: Beside torch and jax, what the tests import.
NEEDS = (
    *("flax>=0.12", "optax>=0.2.5", "ml_dtypes>=0.5", "rich", "typer", "safetensors", "tokenizers", "matplotlib"),
    *("filelock", "pyyaml", "hatchling", "mypy", "ruff", "pytest", "pytest-timeout", "pytest-xdist"),
    *("torchao==0.18.0", "transformers==5.23.0", "qwix==0.1.8"),
)
#: The gate's ceilings are those of one triton, which `python -m tests.versions` compares.
SELECTION = [
    *(f"tests/{folder}" for folder in ("core", "recipes", "torch", "jax", "kernels", "compat")),
    *("--ignore", "tests/kernels/gate", "--ignore", "tests/kernels/test_gate.py"),
]
MARKS = "not slow and not gpu"


def prepared(suite: Suite, folder: Path) -> Path | None:
    """The Python of this row's environment, made if it was not there; None if the machine has no such Python.

    Raises: CalledProcessError.
    """
    place = folder / f"python-{suite.python}-torch-{suite.torch}-jax-{suite.jax}"
    own = place / "bin" / "python"
    if not (place / "complete").exists():
        base = python(suite.python)
        if base is None:
            return None
        new(base, place)
        pip(own, f"torch=={suite.torch}", f"jax=={suite.jax}", f"jaxlib=={suite.jax}", *NEEDS)
        (place / "complete").touch()
    return own


def run(suite: Suite, folder: Path, selection: list[str]) -> str:
    """What passed and failed, as pytest counts; its output is in the folder."""
    own = prepared(suite, folder)
    if own is None:
        return f"no Python {suite.python} here"
    command = [own, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "-m", MARKS]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    log = folder / f"suite-{suite.python}-{suite.torch}-{suite.jax}.txt"
    with log.open("w") as output:
        subprocess.run([*command, *selection], cwd=ROOT, env=environment, stdout=output, stderr=output, check=False)
    counts = re.findall(r"\d+ (?:passed|failed|error)s?", log.read_text().splitlines()[-1])
    return ", ".join(counts) or "nothing ran"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions.suites", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="where environments are made and stay")
    parser.add_argument("--only", metavar="TORCH", help="the row of this torch; the page stays as it is")
    parser.add_argument("selection", nargs="*", default=SELECTION, help="paths of tests")
    chosen = parser.parse_args(arguments)
    suites = [suite for suite in SUITES if chosen.only in (None, suite.torch)]
    cells = [run(suite, chosen.folder.resolve(), chosen.selection) for suite in suites]
    lines = ["| Python | torch | jax | tests |", "| --- | --- | --- | ---: |"]
    lines += ["| " + " | ".join((*suite, cell)) + " |" for suite, cell in zip(suites, cells, strict=True)]
    table = f"Run on {datetime.date.today()}:\n\n" + "\n".join(lines)
    if not chosen.only:
        text = PAGE.read_text()
        PAGE.write_text(f"{text.split(BEGIN)[0]}{BEGIN}\n\n{table}\n\n{END}{text.split(BEGIN)[1].split(END, 1)[1]}")
    print(table)
    ran = [cell for cell in cells if not cell.startswith("no Python")]
    return int(any("passed" not in cell or "failed" in cell or "error" in cell for cell in ran))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
