"""The table of planted faults, and a copy of the sources with one of them."""

import shutil
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("faults.toml")


class Fault(NamedTuple):
    """One wrong edit of one file."""

    name: str
    #: The part of the project that it is in.
    area: str
    #: What is true without the fault, in a sentence.
    behaviour: str
    #: Relative to the project's root.
    file: str
    #: Text that occurs once in the file, and the text that takes its place.
    old: str
    new: str
    #: Arguments of pytest: the area's tests; one of them fails with the fault.
    tests: list[str]
    #: A pattern of cases of the golden corpus; some of them differ with the fault; "" where no case covers it.
    golden: str


def faults() -> list[Fault]:
    """Return all rows of the table."""
    return [Fault(**row) for row in tomllib.loads(TABLE.read_text())["fault"]]


def planted_text(fault: Fault) -> str:
    """Return the text of the fault's file with the fault.

    Raises:
        ValueError: the old text does not occur exactly once, or the edit changes nothing.
    """
    text = (ROOT / fault.file).read_text()
    if fault.old == fault.new:
        raise ValueError(f"{fault.name}: old and new are the same text")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.old!r} occurs {text.count(fault.old)} times in {fault.file}")
    return text.replace(fault.old, fault.new)


def copy_sources(tree: Path, fault: Fault | None = None) -> None:
    """Copy the sources into a folder `tree`, with the fault if one is given."""
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    if fault is not None:
        (tree / fault.file).write_text(planted_text(fault))
