"""Try pairs of torch and triton, and write their table in docs/install.md: `python -m tests.versions`.

`tests.versions.installing` installs them.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.ahead import hollow
from benchmarks.measuring import stub_driver
from tests.versions.installing import ROOT, environment, installed

PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- python -m tests.versions writes from here -->", "<!-- to here -->"
#: torch and triton, the newest of each minor version at least once; a cache of kernels is made with the first, and
#: `make test` runs 2.13.0 with 3.6.0.
PAIRS = (("2.11.0", "3.6.0"), ("2.12.1", "3.7.1"), ("2.13.0", "3.9.0"), ("2.14.1", "3.8.0"), ("2.15.0", "3.9.0"))
#: Of a check.
SECONDS = 1200


class Check(NamedTuple):
    """A column of the table."""

    title: str
    #: Of Python.
    arguments: tuple[str, ...]
    #: Whether kernels are interpreted in it.
    interprets: bool
    #: Matches the part of its output with the number of tests.
    counted: str


CHECKS = (
    Check(
        "interpreted, and GEMMs by cuBLASLt's checks",
        (
            *("-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"),
            *("tests/kernels/test_interpreter.py", "tests/kernels/test_launch.py", "tests/kernels/test_hashing.py"),
            *("tests/kernels/test_cast.py", "tests/torch/backends/gpu/test_scaled_mm.py"),
            "tests/torch/test_private_names.py",
        ),
        True,
        r"(\d+ (?:passed|failed|skipped))",
    ),
    Check(
        "compiled for sm_90 and sm_100 by the gate's rules",
        ("-m", "tests.kernels.gate", "--arch", "90", "100"),
        False,
        r"^\d+ kernels read|\d+ wrong$",
    ),
    Check(
        "launched by Triton's launcher, driver stubbed",
        ("-m", "benchmarks.gpu.ahead.walk", "layer", "90"),
        False,
        r'"kernels (?:compiled|found)": (\d+)',
    ),
)


def chosen(torch: Path, triton: Path, stub: Path) -> dict[str, str]:
    """The environment of the checks of a pair, in which a driver does nothing."""
    pair = environment(torch, triton) | hollow.ENVIRONMENT | {"TRITON_CACHE_DIR": str(triton / "cache")}
    stubbed = stub_driver.build(stub)
    stubbed["LD_LIBRARY_PATH"] = f"{stub}:{pair['LD_LIBRARY_PATH']}" if "LD_LIBRARY_PATH" in pair else str(stub)
    return pair | stubbed


def run(check: Check, pair: dict[str, str], log: Path) -> str:
    """A table cell: what passed, or that it failed; the whole output is in the log."""
    pair = pair | ({"TRITON_INTERPRET": "1"} if check.interprets else {})
    with log.open("w") as log_file:
        try:
            command = [sys.executable, *check.arguments]
            done = subprocess.run(
                command, cwd=ROOT, env=pair, stdout=log_file, stderr=log_file, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return "not finished"
    what = ", ".join(dict.fromkeys(re.findall(check.counted, log.read_text(), re.MULTILINE))) or "nothing"
    return what if done.returncode == 0 else f"fails: {what}"


def table(rows: list[list[str]]) -> str:
    head = ["torch", "triton", *(check.title for check in CHECKS)]
    lines = [head, ["---", "---", *("---:" for _ in CHECKS)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="where versions are put and stay")
    parser.add_argument("--only", nargs="*", metavar="TORCH,TRITON", help="these pairs; the table stays as it is")
    options = parser.parse_args(arguments)
    folder, rows = options.folder.resolve(), []
    pairs = [tuple(pair.split(",")) for pair in options.only] if options.only else PAIRS
    for torch, triton in pairs:
        places = installed("torch", torch, folder), installed("triton", triton, folder)
        with tempfile.TemporaryDirectory() as stub:
            pair = chosen(*places, Path(stub))
            cells = []
            for number, check in enumerate(CHECKS):
                begun = time.monotonic()
                cells.append(run(check, pair, folder / f"torch-{torch}-triton-{triton}-{number}.txt"))
                print(f"torch {torch}, triton {triton}, {check.title}: {cells[-1]}; {time.monotonic() - begun:.0f} s")
        rows.append([torch, triton, *cells])
    if not options.only:
        text = PAGE.read_text()
        PAGE.write_text(
            f"{text.split(BEGIN)[0]}{BEGIN}\n\n{table(rows)}\n\n{END}{text.split(BEGIN)[1].split(END, 1)[1]}"
        )
    print(table(rows))
    return int(any("fails" in cell or cell == "not finished" for row in rows for cell in row))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
