"""Plant each fault and check that tests and golden cases catch it: `python -m tests.faults [--only NAME] [--tests]`.

Runs the tests of `make test` in the fault's files, up to the first failure; slow tests are left out. They must first
pass on an unedited copy of the sources. `--tests` leaves out the golden corpus.
"""

import argparse
import fnmatch
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.faults.plant import ROOT, Fault, copy_sources, faults
from tests.golden.__main__ import differences, run


def run_tests(tests: tuple[str, ...], tree: Path) -> bool:
    """Return True if the tests that are not slow pass with a tree's sources.

    Raises:
        RuntimeError: pytest could not run them.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tree / "src"), str(ROOT))),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    where = "import quaver; print(quaver.__file__)"
    imported = subprocess.run([sys.executable, "-c", where], env=environment, stdout=subprocess.PIPE, check=True)
    if not imported.stdout.decode().startswith(str(tree)):
        raise RuntimeError(f"{imported.stdout.decode().strip()} is imported, not the copy in {tree}")
    options = ["-q", "-x", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    result = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run {tests}:\n{result.stdout.decode()[-2000:]}")
    return result.returncode == 0


@cache
def check_without_fault(tests: tuple[str, ...]) -> None:
    """Raise a RuntimeError unless the tests pass on an unedited copy of the sources."""
    with tempfile.TemporaryDirectory() as name:
        copy_sources(Path(name))
        if not run_tests(tests, Path(name)):
            raise RuntimeError(f"{' '.join(tests)} fails without a fault")


def caught_by_golden(fault: Fault, tree: Path, folder: Path) -> bool:
    """Return True if a golden case differs between the sources with and without the fault."""
    for name in ("right", "there"):
        (folder / name).mkdir()
    right, wrong = run(ROOT, fault.golden, folder / "right"), run(tree, fault.golden, folder / "there")
    if right.failed or not (right.fixed or right.sums):
        raise RuntimeError(f"{fault.name}: {fault.golden!r} fails or names no case: {right.failed}")
    if wrong.failed:
        print(f"{fault.name}: cases fail: {', '.join(wrong.failed)}")
    return bool(differences(wrong, right, []) or wrong.failed)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="faults whose name matches")
    parser.add_argument("--tests", action="store_true", help="run the tests alone, not the golden corpus")
    options = parser.parse_args(arguments)
    chosen = [fault for fault in faults() if fnmatch.fnmatch(fault.name, options.only)]
    if not chosen:
        parser.error(f"no fault matches {options.only!r}")
    missed = 0
    for fault in chosen:
        check_without_fault(tuple(fault.tests))
        with tempfile.TemporaryDirectory() as name:
            tree = Path(name) / "planted"
            copy_sources(tree, fault)
            caught_by = {"tests": not run_tests(tuple(fault.tests), tree)}
            if fault.golden and not options.tests:
                caught_by["golden corpus"] = caught_by_golden(fault, tree, Path(name))
        summary = ", ".join(f"{'caught' if caught else 'MISSED'} by {who}" for who, caught in caught_by.items())
        all_caught = all(caught_by.values())
        print(f"{fault.name}: {summary}{'' if all_caught else f' ({fault.behaviour})'}", flush=True)
        missed += not all_caught
    print(f"{missed} of {len(chosen)} missed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
