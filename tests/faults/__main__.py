"""Plant each fault and see whether tests and golden cases catch it: `python -m tests.faults [--only NAME] [--tests]`.

A run of all takes about half an hour on two cores. With `--tests` the golden corpus is left out.
"""

import argparse
import fnmatch
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.faults.plant import ROOT, Fault, faults, plant
from tests.golden.__main__ import differences, run


def caught_by_tests(fault: Fault, tree: Path) -> bool:
    """Return True if one of the fault's tests fails on the tree."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tree / "src"), str(ROOT))),
        **{"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *fault.tests]
    result = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode not in (0, 1):
        raise RuntimeError(f"{fault.name}: pytest could not run {fault.tests}:\n{result.stdout.decode()[-2000:]}")
    return result.returncode == 1


def caught_by_golden(fault: Fault, tree: Path, folder: Path) -> bool:
    """Return True if a golden case differs between the sources with and without the fault."""
    for name in ("right", "there"):
        (folder / name).mkdir()
    right, wrong = run(ROOT, fault.golden, folder / "right"), run(tree, fault.golden, folder / "there")
    if right.failed or not (right.fixed or right.sums):
        raise RuntimeError(f"{fault.name}: {fault.golden!r} fails or names no case: {right.failed}")
    return bool(differences(wrong, right, []) or wrong.failed)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="faults whose name matches")
    parser.add_argument("--tests", action="store_true", help="run the tests alone, not the golden corpus")
    chosen = parser.parse_args(arguments)
    missed = 0
    for fault in faults():
        if not fnmatch.fnmatch(fault.name, chosen.only):
            continue
        with tempfile.TemporaryDirectory() as name:
            tree = Path(name) / "planted"
            plant(fault, tree)
            by = {"tests": caught_by_tests(fault, tree)}
            if fault.golden and not chosen.tests:
                by["golden corpus"] = caught_by_golden(fault, tree, Path(name))
        said = ", ".join(f"{'caught' if caught else 'MISSED'} by {who}" for who, caught in by.items())
        print(f"{fault.name}: {said}", flush=True)
        missed += not all(by.values())
    print(f"{missed or 'none'} missed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
