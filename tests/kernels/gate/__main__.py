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
from tests.kernels.gate.check import Checked, failures, through
from tests.kernels.gate.keys import key
from tests.kernels.gate.measured import Entry, Measured, Place
from tests.kernels.gate.record import ARCHITECTURES, record, unlike_siblings
from tests.kernels.gate.turns import chosen

#: By architecture, the keys of launches, by their names.
Keys = dict[int, dict[str, str]]


def main(arguments: list[str]) -> int:
    """Returns: 0 where nothing is wrong."""
    asked = _parser().parse_args(arguments)
    rows = {case.name for case in CASES if fnmatch.fnmatch(case.name, asked.only)}
    if not rows:
        print(f"no row of tests/kernels/cases.py matches {asked.only!r}: {', '.join(c.name for c in CASES)}")
        return 2
    table, kept, whole = ceilings.load(), measured.load(), asked.only == "*"
    # Rows before the chosen ones own what those launch too.
    launched = {arch: record(CASES, arch) for arch in asked.arch}
    launches = {arch: [r for r in of if r.case.name in rows] for arch, of in launched.items()}
    if whole and (kept.applies or asked.measure or asked.update):
        for arch in set(asked.arch) & set(bad.ARCHITECTURES):
            launches[arch] += bad.recorded()
    keys = {arch: {r.name: key(r, arch) for r in of} for arch, of in launches.items()}
    compiled = launches
    if asked.quick or asked.measure:
        left = {arch: of.keys() - kept.holding(of, arch).keys() for arch, of in keys.items()}
        compiled = {arch: [r for r in of if r.name in left[arch]] for arch, of in launches.items()}
        compiled = chosen(launches, left, table.rows, kept.applies) if asked.quick else compiled
    checked: dict[int, list[Checked]] = {}
    wrong, unknown = [], kept.gone(keys) if whole else []
    for arch, of in launches.items():
        checked[arch], other = through(of, compiled[arch], keys[arch], arch, kept)
        unknown += [f"sm_{arch} {what}" for what in other]
        said = unlike_siblings(CASES, launched[arch], arch) if whole else []
        said += judgement(checked[arch], [r.name for r in launched[arch]], arch, None if asked.update else table)
        wrong += [f"sm_{arch} {what}" for what in said]
        if asked.show:
            show(checked[arch], arch)
    if asked.update:
        regular = {arch: of_rows(of) for arch, of in checked.items()}
        ceilings.save(merged(regular, table.rows, whole), triton.__version__)
    if asked.update or asked.measure:
        measured.save(written(kept, keys, checked, whole))
    elif unknown:
        wrong.append(measured.sentence(unknown))
    counts = [sum(map(len, of.values())) for of in (checked, compiled)]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{counts[0]} kernels read, {counts[1]} of them compiled, {len(wrong) or 'nothing'} wrong")
    return 1 if wrong else 0


def judgement(checked: list[Checked], launched: list[str], arch: int, table: Ceilings | None) -> list[str]:
    """What is wrong with the launches of rows, a sentence each; without the table, by the rules alone."""
    if table is None:
        return [f"{c.name}: {what}" for c in of_rows(checked) for what in c.broken]
    return failures(of_rows(checked), arch, table, launched)


def of_rows(checked: list[Checked]) -> list[Checked]:
    """Without the planted kernels, which are to break rules and have no ceilings."""
    return [c for c in checked if not c.name.startswith(f"{bad.ROW}: ")]


def written(kept: Measured, keys: Keys, checked: Mapping[int, list[Checked]], whole: bool) -> dict[Place, Entry]:
    """What measured.json is to have: those that were checked, and the others that it had with this version of Triton.

    Args:
        whole: whether all launches of these architectures were checked: what is not among them leaves the file.
    """
    before = kept.entries if kept.applies else {}
    entries = {(name, arch): one for (name, arch), one in before.items() if not whole or name in keys.get(arch, {name})}
    now = [(c, arch) for arch, of in checked.items() for c in of if c.figures]
    return entries | {(c.name, arch): measured.entry(keys[arch][c.name], c.figures) for c, arch in now}


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
    parser.add_argument("--quick", action="store_true", help="as `make test`: compile what is not in measured.json")
    parser.add_argument("--show", action="store_true", help="print the figures")
    parser.add_argument("--measure", action="store_true", help="compile what is not there, and write it there")
    parser.add_argument("--update", action="store_true", help="write the figures to ceilings.toml too, as new ceilings")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
