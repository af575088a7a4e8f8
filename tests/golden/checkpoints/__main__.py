"""Write the checkpoints again, or one of them: `python -m tests.golden.checkpoints --write [NAME]`."""

import argparse
import fnmatch
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from tests.golden import spawn
from tests.golden.checkpoints.cases import FOLDER, cases, pack
from tests.golden.record import Record, digest

EXPECTED = FOLDER.with_name("expected.json")


def loaded(name: str) -> dict[str, str]:
    """Digests of what loading a checkpoint, and the step after it, gives."""
    torch.manual_seed(0)
    record = Record()
    record.case = name
    cases()[name].load(FOLDER / name, record)
    assert record.fixed, f"{name} records nothing"
    return {key: digest(value) for key, value in record.fixed.items()}


def write(how: Callable[[Path], None] | str, path: Path) -> None:
    """Write a checkpoint in this process, or pack what ranks of a module save."""
    if not isinstance(how, str):
        how(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn.run(how, Path(folder))
        pack(Path(folder) / "saved", path)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.checkpoints", description=__doc__)
    parser.add_argument("--write", nargs="?", const="*", required=True, metavar="PATTERN")
    pattern = parser.parse_args(arguments).write
    FOLDER.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for name, case in cases().items():
        if fnmatch.fnmatch(name, pattern):
            torch.manual_seed(0)
            write(case.write, FOLDER / name)
            expected[name] = loaded(name)
            print(name, (FOLDER / name).stat().st_size)
    EXPECTED.write_text(json.dumps(expected, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
