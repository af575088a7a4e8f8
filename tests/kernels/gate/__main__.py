"""Run the gate, show its figures, or write them: `python -m tests.kernels.gate --help`."""

import os
import sys

# Triton decides whether it interprets when a kernel is defined, so before any is imported.
os.environ.pop("TRITON_INTERPRET", None)

import argparse
import fnmatch

import triton

from tests.kernels.cases import CASES
from tests.kernels.gate import ceilings
from tests.kernels.gate.check import Checked, failures, in_turn, measure
from tests.kernels.gate.record import ARCHITECTURES, record, unlike


def main(arguments: list[str]) -> int:
    """Returns: 0 where nothing is wrong."""
    asked = _parser().parse_args(arguments)
    cases = [case for case in CASES if fnmatch.fnmatch(case.name, asked.only)]
    if not cases:
        print(f"no row of tests/kernels/cases.py matches {asked.only!r}: {', '.join(c.name for c in CASES)}")
        return 2
    everything = len(cases) == len(CASES) and not asked.in_turn
    table = ceilings.load()
    wrong: list[str] = []
    measured: dict[int, list[Checked]] = {}
    turns = in_turn(table.rows, CASES)
    for arch in asked.arch:
        # Rows before the chosen ones own what those launch too.
        launches = record(CASES, arch)
        names = [recorded.name for recorded in launches]
        wrong += [f"sm_{arch} {what}" for what in unlike(CASES, launches, arch)] if asked.only == "*" else []
        rows = {case.name for case in cases}
        # What the table does not know is compiled everywhere, and reported.
        passed = table.rows.keys() - turns[arch] if asked.in_turn else set()
        measured[arch] = measure([r for r in launches if r.case.name in rows and r.name not in passed], arch)
        if asked.show:
            show(measured[arch], arch)
        if not asked.update:
            wrong += [f"sm_{arch} {what}" for what in failures(measured[arch], arch, table, names)]
        else:
            wrong += [f"sm_{arch} {c.name}: {what}" for c in measured[arch] for what in c.broken]
    if asked.update:
        ceilings.save(merged(measured, table.rows, everything), triton.__version__)
    print("\n".join(wrong) or f"{sum(map(len, measured.values()))} kernels read, nothing wrong")
    return 1 if wrong else 0


def merged(measured: dict[int, list[Checked]], rows: ceilings.Table, everything: bool) -> ceilings.Table:
    """The table's rows with those that were measured in their places, in the order of the rows and the architectures.

    Args:
        everything: whether all rows were measured: then what was not launched leaves the table.
    """
    names = dict.fromkeys(c.name for checked in measured.values() for c in checked)
    kept = {} if everything else rows
    by_case: ceilings.Table = {}
    for name in dict.fromkeys((*kept, *names)):
        row = {f"sm_{arch}": c.row for arch, checked in measured.items() for c in checked if c.name == name and c.row}
        before = {key: figures for key, figures in rows.get(name, {}).items() if key not in _keys(measured, name)}
        both = before | row
        by_case[name] = {key: both[key] for key in sorted(both, key=lambda key: int(key[3:]))}
    return by_case


def _keys(measured: dict[int, list[Checked]], name: str) -> set[str]:
    """The architectures that a launch was measured for."""
    return {f"sm_{arch}" for arch, checked in measured.items() if any(c.name == name for c in checked)}


def show(checked: list[Checked], arch: int) -> None:
    """A line a launch."""
    for c in checked:
        print(f"sm_{arch} {c.name:50} " + " ".join(f"{name} {value}" for name, value in c.row.items()), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.gate", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="*", default=ARCHITECTURES, help="80 86 89 90 100 120")
    parser.add_argument("--only", default="*", help="rows of tests/kernels/cases.py, as a pattern")
    parser.add_argument("--in-turn", action="store_true", help="what `make test` compiles: a ninth of the launches")
    parser.add_argument("--show", action="store_true", help="print the figures")
    parser.add_argument("--update", action="store_true", help="write them to ceilings.toml as the new ceilings")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
