"""Run the gate, show its figures, or write them: `python -m tests.kernels.gate --help`."""

import os
import sys

# Triton decides whether it interprets when a kernel is defined, so before any is imported.
os.environ.pop("TRITON_INTERPRET", None)

import argparse
import fnmatch
from collections.abc import Mapping

import triton

from tests.kernels.cases import CASES
from tests.kernels.gate import bad, ceilings, measured
from tests.kernels.gate.ceilings import Ceilings
from tests.kernels.gate.check import Checked, check_launches, failures
from tests.kernels.gate.keys import key
from tests.kernels.gate.measured import Entry, Measured, Place
from tests.kernels.gate.record import ARCHITECTURES, differences_from_siblings, record
from tests.kernels.gate.selection import select

#: Keys of launches, by architecture and name.
Keys = dict[int, dict[str, str]]


def main(arguments: list[str]) -> int:
    """Returns: 0 where nothing is wrong."""
    options = _parser().parse_args(arguments)
    rows = {case.name for case in CASES if fnmatch.fnmatch(case.name, options.only)}
    if not rows:
        print(f"no row of tests/kernels/cases.py matches {options.only!r}: {', '.join(c.name for c in CASES)}")
        return 2
    table, stored, whole = ceilings.load(), measured.load(), options.only == "*"
    # A launch belongs to the first row that makes it, so all rows are recorded.
    launched = {arch: record(CASES, arch) for arch in options.arch}
    launches = {arch: [r for r in records if r.case.name in rows] for arch, records in launched.items()}
    if whole and (stored.applies or options.measure or options.update):
        for arch in set(options.arch) & set(bad.ARCHITECTURES):
            launches[arch] += bad.recorded()
    keys = {arch: {r.name: key(r, arch) for r in records} for arch, records in launches.items()}
    compiled = launches
    if options.quick or options.measure:
        changed = {arch: names.keys() - stored.current(names, arch).keys() for arch, names in keys.items()}
        compiled = {arch: [r for r in records if r.name in changed[arch]] for arch, records in launches.items()}
        compiled = select(launches, changed, table.rows, stored.applies) if options.quick else compiled
    checked: dict[int, list[Checked]] = {}
    wrong, unknown = [], stored.stale(keys) if whole else []
    for arch, records in launches.items():
        checked[arch], other = check_launches(records, compiled[arch], keys[arch], arch, stored)
        unknown += [f"sm_{arch} {what}" for what in other]
        messages = differences_from_siblings(CASES, launched[arch], arch) if whole else []
        messages += judge(checked[arch], [r.name for r in launched[arch]], arch, None if options.update else table)
        wrong += [f"sm_{arch} {what}" for what in messages]
        if options.show:
            show(checked[arch], arch)
    if options.update:
        regular = {arch: without_planted(checks) for arch, checks in checked.items()}
        ceilings.save(merged(regular, table.rows, whole), triton.__version__)
    if options.update or options.measure:
        measured.save(written(stored, keys, checked, whole))
    elif unknown:
        wrong.append(measured.sentence(unknown))
    counts = [sum(map(len, by_arch.values())) for by_arch in (checked, compiled)]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{counts[0]} kernels read, {counts[1]} of them compiled, {len(wrong) or 'nothing'} wrong")
    return 1 if wrong else 0


def judge(checked: list[Checked], launched: list[str], arch: int, table: Ceilings | None) -> list[str]:
    """Failures of the launches of rows, a sentence each; without the table, only of the rules."""
    if table is None:
        return [f"{c.name}: {what}" for c in without_planted(checked) for what in c.broken]
    return failures(without_planted(checked), arch, table, launched)


def without_planted(checked: list[Checked]) -> list[Checked]:
    """Leave out the planted kernels, which break rules on purpose and have no ceilings."""
    return [c for c in checked if not c.name.startswith(f"{bad.ROW}: ")]


def written(stored: Measured, keys: Keys, checked: Mapping[int, list[Checked]], whole: bool) -> dict[Place, Entry]:
    """The entries for measured.json: the checked launches, and the others stored with this version of Triton.

    Args:
        whole: whether all launches of these architectures were checked: then other entries are removed.
    """
    before = stored.entries if stored.applies else {}
    entries = {(name, arch): one for (name, arch), one in before.items() if not whole or name in keys.get(arch, {name})}
    now = [(c, arch) for arch, checks in checked.items() for c in checks if c.figures]
    return entries | {(c.name, arch): measured.entry(keys[arch][c.name], c.figures) for c, arch in now}


def merged(measured: dict[int, list[Checked]], rows: ceilings.Table, everything: bool) -> ceilings.Table:
    """The table with the measured rows replaced, in the order of the rows and the architectures.

    Args:
        everything: whether all rows were measured: then rows that were not launched are removed.
    """
    names = dict.fromkeys(c.name for checked in measured.values() for c in checked)
    stored = {} if everything else rows
    by_case: ceilings.Table = {}
    for name in dict.fromkeys((*stored, *names)):
        row = {f"sm_{arch}": c.row for arch, checked in measured.items() for c in checked if c.name == name and c.row}
        before = {key: figures for key, figures in rows.get(name, {}).items() if key not in _keys(measured, name)}
        both = before | row
        by_case[name] = {key: both[key] for key in sorted(both, key=lambda key: int(key[3:]))}
    return by_case


def _keys(measured: dict[int, list[Checked]], name: str) -> set[str]:
    """The architectures that a launch was measured for."""
    return {f"sm_{arch}" for arch, checked in measured.items() if any(c.name == name for c in checked)}


def show(checked: list[Checked], arch: int) -> None:
    """Print one line for each launch."""
    for c in checked:
        print(f"sm_{arch} {c.name:50} " + " ".join(f"{name} {value}" for name, value in c.row.items()), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.gate", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="*", default=ARCHITECTURES, help="80 86 89 90 100 120")
    parser.add_argument("--only", default="*", help="rows of tests/kernels/cases.py, as a pattern")
    parser.add_argument("--quick", action="store_true", help="as `make test`: compile what is not in measured.json")
    parser.add_argument("--show", action="store_true", help="print the figures")
    parser.add_argument("--measure", action="store_true", help="compile what is not there, and write it there")
    parser.add_argument("--update", action="store_true", help="write the figures to ceilings.toml too, as new ceilings")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
